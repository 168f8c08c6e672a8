"""The same state saved and loaded by `dcp_torch` and by `dcp_mindspore`, in turn: what a framework adds to the core.

Each job is made of fresh processes, which hold rows of every tensor. Ranks of torch meet over gloo, those of MindSpore
in a TCPStore; a call takes as long as on its slowest rank.

    python -m benchmarks.both_frameworks --mib 256 --directory /dev/shm
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dcp_core.testing.ranks import RankContext, run_ranks

_TENSORS = 16
_COLUMNS = 1024
_ROUNDS = 5
_SECONDS = 120.0
FRAMEWORKS = ("torch", "mindspore")
_Array = np.ndarray[Any, Any]


def _join_torch(context: RankContext) -> Callable[[_Array], Any]:
    """Meet the other ranks; gives what makes a tensor that shares an array's memory."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if context.world_size > 1:
        file = f"file://{context.channel_directory}/gloo"
        dist.init_process_group("gloo", init_method=file, rank=context.rank, world_size=context.world_size)
    return torch.from_numpy


def _join_mindspore(context: RankContext) -> Callable[[_Array], Any]:
    """The same for MindSpore."""
    import mindspore
    from mindspore.mint.distributed import TCPStore

    import dcp_mindspore
    from dcp_mindspore.channel import host_store

    mindspore.set_device("CPU")
    if context.world_size > 1:
        file = context.channel_directory / "store"
        if context.rank == 0:
            store = host_store("127.0.0.1", context.world_size)
            file.with_suffix(".new").write_text(str(store.port))
            file.with_suffix(".new").rename(file)
        else:
            while not file.exists():
                time.sleep(0.001)
            store = TCPStore("127.0.0.1", int(file.read_text()), context.world_size, is_master=False)
        dcp_mindspore.use_store(store, context.rank, context.world_size)
    made: Callable[[_Array], Any] = mindspore.Tensor.from_numpy
    return made


_JOIN = {"torch": _join_torch, "mindspore": _join_mindspore}


def time_operations(
    context: RankContext, framework: str, mib: int, rounds: int, directory: str
) -> dict[str, list[tuple[float, float]]]:
    """Seconds, and processor seconds, of each operation on this rank, by round; the first round is not counted."""
    os.environ.setdefault("GLOG_v", "3")
    tensor = _JOIN[framework](context)
    dcp = importlib.import_module(f"dcp_{framework}")
    rows, whole = mib * (1 << 20) // 4 // _COLUMNS // _TENSORS // context.world_size, (mib << 18) // 8
    names = [f"layer.{number}.weight" for number in range(_TENSORS)]

    def state(fill: float) -> dict[str, Any]:
        found = {name: tensor(np.full((rows, _COLUMNS), fill, np.float32)) for name in names}
        shape, offsets = (rows * context.world_size, _COLUMNS), (rows * context.rank, 0)
        return {name: dcp.annotate_shard(part, offsets=offsets, global_shape=shape) for name, part in found.items()}

    source, target, replica = state(1), state(2), {"whole": tensor(np.full(whole, 3, np.float32))}
    dcp.save(replica, checkpoint_id=f"{directory}/replica", durable=False)
    operations: dict[str, Callable[[], object]] = {
        "save": lambda: dcp.save(source, checkpoint_id=f"{directory}/saved", durable=False),
        "load": lambda: dcp.load(target, checkpoint_id=f"{directory}/saved"),
        "async_save, the call": lambda: dcp.async_save(source, checkpoint_id=f"{directory}/later", durable=False),
    }
    if context.world_size > 1:
        operations["load of an eighth that all want, read once"] = lambda: dcp.load(
            replica, checkpoint_id=f"{directory}/replica"
        )
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        for name, operation in operations.items():
            began = time.perf_counter(), time.process_time()
            operation()
            ended = time.perf_counter(), time.process_time()
            if number:
                found.setdefault(name, []).append((ended[0] - began[0], ended[1] - began[1]))
            dcp.wait_all()
    return found


def measure(world_size: int, mib: int, rounds: int, directory: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Medians of seconds and of processor seconds by operation and framework, each framework in two jobs, in turn.

    A call takes as long as on its slowest rank; processor seconds are those of all ranks together.
    """
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for framework in FRAMEWORKS * 2:
        place = tempfile.mkdtemp(prefix=f"{framework}-", dir=directory)
        try:
            ranks = run_ranks(time_operations, world_size, framework, mib, rounds, place, timeout_seconds=_SECONDS)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        for name in ranks[0]:
            for of_ranks in zip(*(rank[name] for rank in ranks), strict=True):
                walls, busy = zip(*of_ranks, strict=True)
                found.setdefault(name, {}).setdefault(framework, []).append((max(walls), sum(busy)))
    return {name: {key: _medians(times) for key, times in row.items()} for name, row in found.items()}


def _medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    walls, busy = zip(*times, strict=True)
    return statistics.median(walls), statistics.median(busy)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the state of all ranks together")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="how often each is timed in a job, of two")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="how many processes")
    parser.add_argument("--directory", default=None, help="where to write; by default with temporary files")
    options = parser.parse_args(arguments)
    print(f"{options.mib} MiB in {_TENSORS} tensors; medians of {2 * options.rounds}; seconds (processor seconds)\n")
    print("| ranks | operation | dcp_torch | dcp_mindspore |\n|---|---|---|---|")
    for world_size in options.ranks:
        for name, row in measure(world_size, options.mib, options.rounds, options.directory).items():
            shown = " | ".join(f"{wall:.3f} ({busy:.3f})" for wall, busy in (row[key] for key in FRAMEWORKS))
            print(f"| {world_size} | {name} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
