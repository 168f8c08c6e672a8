"""What loads gain when each tensor that every rank wants is read once and broadcast: time, and bytes from storage.

    python -m benchmarks.shared_reads --json shared.json                 # everything, in about six minutes
    python -m benchmarks.shared_reads --measures warm --replicas 2 4
    python -m benchmarks.shared_reads --quick                            # does it run? tiny states, one round

Contestants run in turn, in a new random order in every round, on the same bytes, ranks and kind of storage; every load
starts from overwritten tensors, and every bit is compared after it.
docs/reference/benchmarks.md says how to read the tables.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.availability import leaving_out_failing
from benchmarks.cases import PLACES, Settings
from benchmarks.command import Preset, interruptible, some_of
from benchmarks.findings import summary_of
from benchmarks.machine import write_json
from benchmarks.places import Place, missing_room, scratch
from benchmarks.ranks import preload
from benchmarks.sharing.cases import MEASURES, MEGABYTE, SharedCase, cases_of
from benchmarks.sharing.contestants import SHARED_CONTESTANTS
from benchmarks.sharing.judge import judge_loads
from benchmarks.sharing.loads import measure_shared_loads
from benchmarks.sharing.report import LoadsFound, SharedResult, legend_of
from benchmarks.workloads import MIB

QUICK_MIB = 2
"""The size of every state with `--quick`."""

_PROCESS_NBYTES = 256 * MIB
"""What a rank needs beside its targets: the framework, and buffers in flight."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; give the exit status: 0, or 1 if a case failed, 2 if nothing could start."""
    options = _parser().parse_args(arguments)
    settings = Settings(rounds=options.repeats, seed=options.seed, timeout_seconds=options.timeout)
    rate = options.mb_per_second * MEGABYTE
    cases = list(cases_of(options.measures, options.replicas, options.places, options.mib, rate))
    parents = {"memory": options.memory_dir, "disk": options.disk_dir}
    if refusal := _no_room(cases, parents):
        print(refusal, file=sys.stderr)
        return 2
    results: list[SharedResult] = []
    try:
        with interruptible():
            preload()
            for result in _results(cases, settings, options.contestants, parents):
                print(result.text(), end="\n\n", flush=True)
                results.append(result)
    finally:
        print(f"{legend_of(results)}\n\n{summary_of(results)}", flush=True)
        if options.json:
            write_json(options.json, settings=asdict(settings), cases=[result.values() for result in results])
    return 1 if any(result.failure for result in results) else 0


def _results(
    cases: Sequence[SharedCase], settings: Settings, wanted: Sequence[str], parents: dict[str, str]
) -> Iterator[SharedResult]:
    """Measure case by case, in directories that are gone as soon as the case is done."""
    for case in cases:
        with scratch(case.place, parents[case.place]) as place:
            yield _result_of(case, settings, [name for name in case.of.contestants if name in wanted], place)


def _result_of(case: SharedCase, settings: Settings, running: Sequence[str], place: Place) -> SharedResult:
    result, left_out, failure = leaving_out_failing(
        running, place, lambda names, directory: _measure(case, settings, names, directory)
    )
    return replace(result or SharedResult(case), storage=place.label, left_out=left_out, failure=failure)


def _measure(case: SharedCase, settings: Settings, running: Sequence[str], directory: str) -> SharedResult:
    if not running:
        return SharedResult(case)
    rows, load = measure_shared_loads(case, settings, running, directory)
    return SharedResult(case, found=LoadsFound(case.nbytes, rows, load), verdicts=tuple(judge_loads(case, rows)))


def _no_room(cases: Sequence[SharedCase], parents: dict[str, str]) -> str | None:
    """Why the run would not fit, or None; every case has to fit alone, as none leaves anything behind."""
    for case in cases:
        checkpoints = 2 * (case.nbytes + case.nbytes // 16)  # ours and torch's
        reason = missing_room(parents[case.place], checkpoints, case.world_size * (case.nbytes + _PROCESS_NBYTES))
        if reason is not None:
            return f"{case.title}: {reason}; choose other directories (--memory-dir, --disk-dir) or a smaller --mib"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shared_reads", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    names = list(SHARED_CONTESTANTS)
    parser.add_argument("--measures", default=list(MEASURES), choices=MEASURES, help=some_of(MEASURES), **several)
    parser.add_argument(
        "--replicas", type=_replicas, nargs="+", default=[4], metavar="N", help="ranks that hold the state (default: 4)"
    )
    parser.add_argument("--places", default=["memory"], choices=PLACES, help=some_of(PLACES), **several)
    parser.add_argument("--contestants", default=names, choices=names, help=some_of(names), **several)
    parser.add_argument("--repeats", type=int, default=7, help="rounds after the first one (default: 7)")
    parser.add_argument("--mib", type=int, help="size of every state (default: a measure's own, 32 or 1,024)")
    parser.add_argument(
        "--mb-per-second", type=float, default=100.0, help="of slow storage, for each rank (default: 100)"
    )
    parser.add_argument("--memory-dir", default="/dev/shm", help="a directory in memory (default: /dev/shm)")
    parser.add_argument("--disk-dir", default=tempfile.gettempdir(), help="a directory on disk (default: the system's)")
    parser.add_argument("--seed", type=int, default=0, help="of the order within rounds")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one job of ranks")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    quick = {"mib": QUICK_MIB, "repeats": 1}
    parser.add_argument(
        "--quick", action=Preset, nargs=0, const=quick, help="tiny states, one round: shows that it runs"
    )
    return parser


def _replicas(text: str) -> int:
    if (count := int(text)) < 2:
        raise ValueError("one rank has nobody to share with")
    return count


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
