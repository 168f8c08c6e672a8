"""Offline conversions beside copying the files: seconds, and memory above the interpreter with its imports.

    python -m benchmarks.conversions --mib 4096 --json conversions.json
    python -m benchmarks.conversions --quick

Every round runs each contestant once, in a new order, in a process of its own. Copying is `shutil.copyfile`, and fsync;
conversions wait for the disk, too. Checksums are computed where a checkpoint of this project is written, and checked
where one is read.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from benchmarks.counters import MemoryMeter
from benchmarks.machine import write_json
from benchmarks.workloads import MIB

FILES = 4
TENSOR_BYTES = 32 * MIB
COLUMNS = 4096
COPIES = {"hf-to-dcp": "copy-hf", "dcp-to-hf": "copy-dcp", "torch-dcp-to-dcp": "copy-torch-dcp"}


@dataclass
class Outcome:
    """What one contestant took.

    Attributes:
        name: The contestant.
        seconds: One number a round.
        memory_mib: The most resident memory above what was there after the imports, in any round.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    memory_mib: float = 0.0

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)


def hf_to_dcp(source: str, target: str) -> None:
    from dcp_core.convert.to_dcp import convert_to_dcp
    from dcp_core.execution.huggingface import HuggingFaceReader

    convert_to_dcp(HuggingFaceReader(f"{source}/hf"), target)


def dcp_to_hf(source: str, target: str) -> None:
    from dcp_core.convert.to_huggingface import HuggingFaceConversion
    from dcp_core.execution.filesystem import FileSystemReader

    HuggingFaceConversion(FileSystemReader(f"{source}/dcp")).run(target)


def torch_dcp_to_dcp(source: str, target: str) -> None:
    from dcp_torch.offline_transform import convert_torch_dcp_to_dcp

    convert_torch_dcp_to_dcp(f"{source}/torch-dcp", target)


def copy(format_name: str, source: str, target: str) -> None:
    os.mkdir(target)
    for entry in os.scandir(f"{source}/{format_name}"):
        copied = os.path.join(target, entry.name)
        shutil.copyfile(entry.path, copied)
        with open(copied, "rb+") as file:
            os.fsync(file.fileno())


CONTESTANTS: dict[str, Callable[[str, str], None]] = {
    "hf-to-dcp": hf_to_dcp,
    "dcp-to-hf": dcp_to_hf,
    "torch-dcp-to-dcp": torch_dcp_to_dcp,
    **{name: partial(copy, name.removeprefix("copy-")) for name in COPIES.values()},
}


def make_sources(directory: str, mib: int) -> None:
    """Write the same tensors in three formats."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict_saver import save

    count = max(FILES, mib * MIB // TENSOR_BYTES)
    nbytes = mib * MIB // count // (2 * COLUMNS) * (2 * COLUMNS)
    raw = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    block = torch.from_numpy(raw).view(torch.bfloat16).reshape(-1, COLUMNS)
    names = [f"layers.{number}.weight" for number in range(count)]
    os.mkdir(f"{directory}/hf")
    weight_map: dict[str, str] = {}
    for part in range(FILES):
        file = f"model-{part + 1:05}-of-{FILES:05}.safetensors"
        save_file({name: block.clone() for name in names[part::FILES]}, f"{directory}/hf/{file}")
        weight_map |= dict.fromkeys(names[part::FILES], file)
    with open(f"{directory}/hf/model.safetensors.index.json", "w", encoding="utf-8") as index:
        json.dump({"metadata": {}, "weight_map": weight_map}, index)
    hf_to_dcp(directory, f"{directory}/dcp")
    save(dict.fromkeys(names, block), checkpoint_id=f"{directory}/torch-dcp", no_dist=True)


def run_once(name: str, source: str, target: str) -> tuple[float, float]:
    """Seconds and MiB of one run, in this process; what it imports is imported before, by a run on a tiny source."""
    CONTESTANTS[name](f"{source}/tiny", f"{target}-tiny")
    gc.collect()
    meter, started = MemoryMeter(), time.perf_counter()
    CONTESTANTS[name](source, target)
    seconds = time.perf_counter() - started
    return seconds, meter.use().peak / MIB


def measure(source: str, names: Sequence[str], rounds: int, seed: int) -> list[Outcome]:
    """Let contestants take turns."""
    outcomes = {name: Outcome(name) for name in names}
    order, context = random.Random(seed), multiprocessing.get_context("spawn")
    for number in range(rounds):
        for name in order.sample(list(names), len(names)):
            target = f"{source}/target-{number}-{name}"
            with context.Pool(1) as pool:
                seconds, mib = pool.apply(run_once, (name, source, target))
            outcomes[name].seconds.append(seconds)
            outcomes[name].memory_mib = max(outcomes[name].memory_mib, mib)
            shutil.rmtree(target)
            shutil.rmtree(f"{target}-tiny")
            os.sync()
    return list(outcomes.values())


def report(outcomes: Sequence[Outcome], mib: int) -> str:
    """A Markdown table; ratios are of speeds, against copying what is converted."""
    known = {outcome.name: outcome for outcome in outcomes}
    lines = [f"| {mib} MiB | seconds | GiB/s | speed of a copy | memory, MiB |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        base = known.get(COPIES.get(outcome.name, ""))
        ratio = f"{base.median / outcome.median:.2f}x" if base else ""
        speed = mib / 1024 / outcome.median
        lines.append(f"| `{outcome.name}` | {outcome.median:.2f} | {speed:.2f} | {ratio} | {outcome.memory_mib:.0f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", default=None, help="where; the directory for temporary files by default")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--quick", action="store_true", help="16 MiB, one round")
    parser.add_argument("--json", default=None, help="write the numbers to this file")
    options = parser.parse_args(arguments)
    mib, rounds = (16, 1) if options.quick else (options.mib, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        os.mkdir(f"{directory}/tiny")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(make_sources, (directory, mib))
            pool.apply(make_sources, (f"{directory}/tiny", 1))
        outcomes = measure(directory, options.only, rounds, options.seed)
    sys.stdout.write(report(outcomes, mib))
    if options.json:
        numbers: list[dict[str, Any]] = [asdict(outcome) for outcome in outcomes]
        write_json(options.json, ("torch", "numpy", "safetensors"), mib=mib, outcomes=numbers)


if __name__ == "__main__":
    main()
