"""What `dcp inspect`, `dcp verify --quick` and `dcp diff --no-values` cost where a checkpoint has millions of boxes.

    python -m benchmarks.inspect_scale --ranks 512 8192 --json inspect_scale.json

The checkpoint is that of `plan_scale`: thousands of simulated ranks with 300 tensors each. Its `.metadata` is real; its
data files have the right size and id, and no data. Each case and measure runs in a process of its own, as a command
would: seconds of the call, imports left out, and how far peak memory is above what was there before.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.counters import resident_peak
from benchmarks.machine import write_json
from benchmarks.plan_scale import CUTS, SAVE_ID, Case, body_of, median_of, metadata_of, rank_table, run_apart
from benchmarks.workloads import MIB

MEASURES = ("inspect", "picture", "verify --quick", "diff --no-values")


def build(directory: Path, ranks: int, cut: str) -> None:
    """Write the checkpoint of so many ranks, without its data."""
    from dcp_core.formats.metadata_file import open_bytes
    from dcp_core.formats.safetensors_file import SAVE_ID_START
    from dcp_core.planning.global_plan import PlanOptions, plan_globally
    from dcp_core.planning.global_table import merge_tables
    from dcp_core.planning.local_table import encode_table

    payloads = [encode_table(rank_table(cut, ranks, 1, rank)).payload for rank in range(ranks)]
    plan = plan_globally(merge_tables(payloads), PlanOptions())
    blob = metadata_of(plan, body_of(plan), ranks)
    described = open_bytes(blob)
    directory.mkdir()
    for name, nbytes in zip(described.file_names(), described.files.nbytes.tolist(), strict=True):
        with open(directory / name, "wb") as file:
            os.pwrite(file.fileno(), SAVE_ID.encode(), SAVE_ID_START)
            file.truncate(nbytes)
    (directory / ".metadata").write_bytes(blob)


def measure(ranks: int, cut: str, name: str, directory: str) -> Case:
    """Run one command."""
    from dcp_core.cli import diff, inspect, verify  # noqa: F401  # as loaded as they are when a command runs
    from dcp_core.cli.main import main

    case = Case(ranks, cut, 1, name)
    command, *options = name.split() if name != "picture" else ("inspect", "--tensor", "model.layers.007.weight")
    before = resident_peak()
    with case.timed("command"), contextlib.redirect_stdout(io.StringIO()):
        code = main([command, *[directory] * (2 if command == "diff" else 1), *options])
    assert code == 0, f"{name} ended with {code}"
    case.sizes["above_mib"] = (resident_peak() - before) / MIB
    return case


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases that were asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--cuts", nargs="+", default=["tall", "cube"], choices=CUTS)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, taken in turn; medians are shown")
    parser.add_argument("--directory", help="where to put the checkpoints; sparse files, no data")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    root = Path(tempfile.mkdtemp(prefix="dcp-inspect-", dir=options.directory))
    try:
        for ranks in options.ranks:
            for cut in options.cuts:
                build(root / "checkpoint", ranks, cut)
                results += _case(ranks, cut, str(root / "checkpoint"), options.repeats, measure)
                shutil.rmtree(root / "checkpoint")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if options.json:
        write_json(options.json, cases=results)


def _case(ranks: int, cut: str, directory: str, repeats: int, run: Callable[..., Case]) -> list[dict[str, Any]]:
    runs = [[run_apart(run, ranks, cut, name, directory) for name in MEASURES] for _ in range(repeats)]
    medians = [median_of([run[number] for run in runs]) for number in range(len(MEASURES))]
    for each in medians:
        seconds, above = each["seconds"]["command"], each["sizes"]["above_mib"]
        boxes = 300 * ranks
        print(f"{ranks:5} ranks  {cut:4}  {boxes:9,} boxes  {each['planner']:14}  {seconds:6.2f} s  {above:6.0f} MiB")
    return medians


if __name__ == "__main__":
    main()
