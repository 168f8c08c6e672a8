"""Saves and loads of this project beside torch DCP, safetensors, plain reads and writes, and peers from PyPI.

    python -m benchmarks.engines --json engines.json              # everything that fits, about half an hour
    python -m benchmarks.engines --workloads transformer --ranks 2 --places memory --measures save load
    python -m benchmarks.engines --quick                          # does it run? tiny states, one round

Contestants run in turn, in a new random order in every round, on the same bytes, ranks and kind of storage. Peers that
are not installed are left out, and named. docs/reference/benchmarks.md says how to read the table.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.availability import failing, left_out, reason_of
from benchmarks.budgets import judge_memory, judge_times
from benchmarks.cases import MEASURES, PLACES, Case, Settings, cases_of
from benchmarks.cold import measure_cold_loads
from benchmarks.command import Preset, interruptible, some_of
from benchmarks.contestant import ContestantError
from benchmarks.contestants import CONTESTANTS, optional_ones, packages_of, taking_part
from benchmarks.machine import write_json
from benchmarks.memory import measure_memory
from benchmarks.places import Place, missing_room, scratch
from benchmarks.ranks import preload
from benchmarks.report import legend_of, plain_values, summary_of, table_of
from benchmarks.results import CaseResult
from benchmarks.timing import measure_loads, measure_saves
from benchmarks.workloads import WORKLOADS
from dcp_core.testing.ranks import RankProcessError

QUICK_MIB = 2
"""The size of every state with `--quick`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; give the exit status: 0, or 1 if a case failed, 2 if nothing could start."""
    options = _parser().parse_args(arguments)
    settings = Settings(not options.no_verify, not options.no_fsync, options.repeats, options.seed, options.timeout)
    cases = list(cases_of(options.workloads, options.ranks, options.places, options.measures, options.mib))
    parents = {"memory": options.memory_dir, "disk": options.disk_dir}
    if not cases:
        print("nothing to measure: no workload has this number of ranks, place and measure", file=sys.stderr)
        return 2
    not_here = left_out(options.contestants)
    if refusal := _no_room(cases, options.contestants, not_here, parents):
        print(refusal, file=sys.stderr)
        return 2
    results: list[CaseResult] = []
    try:
        with interruptible():
            preload()
            for result in _results(cases, settings, options.contestants, not_here, parents):
                print(table_of(result), end="\n\n", flush=True)
                results.append(result)
    finally:
        _finish(results, settings, options)
    return 1 if any(result.failure for result in results) else 0


def _finish(results: list[CaseResult], settings: Settings, options: argparse.Namespace) -> None:
    print(f"{legend_of(results)}\n\n{summary_of(results)}", flush=True)
    if options.json:
        content = {"settings": asdict(settings), "cases": [plain_values(result) for result in results]}
        write_json(options.json, packages_of(options.contestants), **content)


def _results(
    cases: Sequence[Case], settings: Settings, wanted: Sequence[str], not_here: dict[str, str], parents: dict[str, str]
) -> Iterator[CaseResult]:
    """Measure case by case, in directories that are gone in the end."""
    broken: dict[tuple[int, int], dict[str, str]] = {}
    with contextlib.ExitStack() as stack:
        places = {kind: stack.enter_context(scratch(kind, parents[kind])) for kind in {case.place for case in cases}}
        for case in cases:
            place, kind_of_job = places[case.place], (case.world_size, case.of.load_cut)
            if kind_of_job not in broken:
                here = [name for name in wanted if name not in not_here]
                broken[kind_of_job] = failing(case, settings, here, place.directory)
            running, reasons = taking_part(case, wanted, not_here | broken[kind_of_job])
            yield _result_of(case, settings, running, reasons, place)


def _result_of(
    case: Case, settings: Settings, running: Sequence[str], reasons: dict[str, str], place: Place
) -> CaseResult:
    """Measure a case; one that fails is left out, and the others run again without it."""
    failure = None
    while True:
        try:
            with tempfile.TemporaryDirectory(prefix="case-", dir=place.directory) as directory:
                result = _measure(case, settings, running, directory)
            break
        except ContestantError as error:
            print(error.details, file=sys.stderr)
            reason = f"failed: {reason_of(error, place.directory)}"
            reasons = reasons | {error.contestant: reason}
            running = [name for name in running if name != error.contestant]
            failure = failure or (None if error.contestant in optional_ones() else f"{error.contestant} {reason}")
        except RankProcessError as error:
            print(error, file=sys.stderr)
            result, failure = CaseResult(case), reason_of(error, place.directory)
            break
    return replace(result, storage=place.label, left_out=reasons, failure=failure)


def _measure(case: Case, settings: Settings, running: Sequence[str], directory: str) -> CaseResult:
    if not running:
        return CaseResult(case)
    if case.measure == "memory":
        footprints = measure_memory(case, settings, running, directory)
        return CaseResult(case, footprints=tuple(footprints), verdicts=tuple(judge_memory(case, footprints)))
    measure = {"save": measure_saves, "load": measure_loads, "cold": measure_cold_loads}[case.measure]
    timed = measure(case, settings, running, directory)
    return CaseResult(case, timed=tuple(timed), verdicts=tuple(judge_times(case, settings, timed)))


def _no_room(
    cases: Sequence[Case], wanted: Sequence[str], not_here: dict[str, str], parents: dict[str, str]
) -> str | None:
    """Why the run would not fit, or None; every case has to fit alone, as none leaves anything behind.

    Peers need up to twice the state's bytes beside it.
    """
    for case in cases:
        running, _ = taking_part(case, wanted, not_here)
        checkpoints = len(running) if case.measure in ("load", "cold") else 1
        reason = missing_room(parents[case.place], checkpoints * _with_margin(case.nbytes), 3 * case.nbytes)
        if reason is not None:
            advice = "choose another directory (--memory-dir, --disk-dir), fewer contestants, or a smaller --mib"
            return f"{case.title}: {reason}; {advice}"
    return None


def _with_margin(nbytes: int) -> int:
    return nbytes + nbytes // 16


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--workloads", default=list(WORKLOADS), choices=WORKLOADS, help=some_of(WORKLOADS), **several)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="only on these numbers of ranks")
    parser.add_argument("--places", default=list(PLACES), choices=PLACES, help=some_of(PLACES), **several)
    parser.add_argument("--measures", default=list(MEASURES), choices=MEASURES, help=some_of(MEASURES), **several)
    parser.add_argument(
        "--contestants", default=list(CONTESTANTS), choices=CONTESTANTS, help=some_of(CONTESTANTS), **several
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds after the first one (default: 5)")
    parser.add_argument("--mib", type=int, help="size of every state (default: about a GiB, a workload's own)")
    parser.add_argument("--memory-dir", default="/dev/shm", help="a directory in memory (default: /dev/shm)")
    parser.add_argument("--disk-dir", default=tempfile.gettempdir(), help="a directory on disk (default: the system's)")
    parser.add_argument("--no-verify", action="store_true", help="loads of ours check no checksums")
    parser.add_argument("--no-fsync", action="store_true", help="no fsync where it can be left out")
    parser.add_argument("--seed", type=int, default=0, help="of the order within rounds")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one job of ranks")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    quick = {"mib": QUICK_MIB, "repeats": 1}
    parser.add_argument(
        "--quick", action=Preset, nargs=0, const=quick, help="tiny states, one round: shows that it runs"
    )
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
