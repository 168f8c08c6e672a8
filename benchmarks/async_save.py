"""What saves in the background take from the training: time in the call, slower steps, memory, processes.

    python -m benchmarks.async_save --json async.json             # everything, in about six minutes
    python -m benchmarks.async_save --measures call --ranks 2 --places memory
    python -m benchmarks.async_save --quick                       # does it run? tiny states, one round

Contestants run in turn, in a new random order in every round, on the same bytes, ranks and kind of storage.
docs/reference/benchmarks.md says how to read the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.availability import leaving_out_failing
from benchmarks.background.calls import measure_calls
from benchmarks.background.cases import MEASURES, AsyncCase, AsyncSettings, cases_of
from benchmarks.background.child import judge_child, measure_child
from benchmarks.background.contestants import ASYNC_CONTESTANTS, taking_part
from benchmarks.background.judge import judge_calls
from benchmarks.background.many import measure_many
from benchmarks.background.report import AsyncResult, CallsFound, legend_of
from benchmarks.background.training import measure_training
from benchmarks.cases import PLACES
from benchmarks.command import Preset, interruptible, some_of
from benchmarks.findings import summary_of
from benchmarks.machine import write_json
from benchmarks.places import Place, missing_room, scratch
from benchmarks.ranks import preload

QUICK_MIB = 2
"""The size of every state with `--quick`."""

_QUICK = {"mib": QUICK_MIB, "repeats": 1, "starts": 1, "steps": 4, "every": 2, "saves": 3}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; give the exit status: 0, or 1 if a case failed, 2 if nothing could start."""
    options = _parser().parse_args(arguments)
    settings = AsyncSettings(
        durable=not options.no_fsync, rounds=options.repeats, seed=options.seed, timeout_seconds=options.timeout,
        steps=options.steps, every=options.every, saves=options.saves, starts=options.starts,
    )  # fmt: skip
    cases = list(cases_of(options.measures, options.ranks, options.places, options.mib))
    parents = {"memory": options.memory_dir, "disk": options.disk_dir}
    if not cases:
        print("nothing to measure: no measure has this number of ranks", file=sys.stderr)
        return 2
    if refusal := _no_room(cases, parents):
        print(refusal, file=sys.stderr)
        return 2
    results: list[AsyncResult] = []
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
    cases: Sequence[AsyncCase], settings: AsyncSettings, wanted: Sequence[str], parents: dict[str, str]
) -> Iterator[AsyncResult]:
    """Measure case by case, in directories that are gone in the end."""
    with contextlib.ExitStack() as stack:
        places = {kind: stack.enter_context(scratch(kind, parents[kind])) for kind in {case.place for case in cases}}
        for case in cases:
            running, reasons = taking_part(case, wanted)
            yield _result_of(case, settings, running, reasons, places[case.place])


def _result_of(
    case: AsyncCase, settings: AsyncSettings, running: Sequence[str], reasons: dict[str, str], place: Place
) -> AsyncResult:
    """Measure a case; one that fails is left out, and the others run again without it."""
    result, failed, failure = leaving_out_failing(
        running, place, lambda names, directory: _measure(case, settings, names, directory)
    )
    return replace(result or AsyncResult(case), storage=place.label, left_out=reasons | failed, failure=failure)


def _measure(case: AsyncCase, settings: AsyncSettings, running: Sequence[str], directory: str) -> AsyncResult:
    if not running:
        return AsyncResult(case)
    if case.measure == "child":
        child = measure_child(case, settings, running, directory)
        return AsyncResult(case, found=child, verdicts=tuple(judge_child(child)))
    if case.measure == "training":
        return AsyncResult(case, found=measure_training(case, settings, running, directory))
    if case.measure == "many":
        return AsyncResult(case, found=measure_many(case, settings, running, directory))
    times = measure_calls(case, settings, running, directory)
    return AsyncResult(case, found=CallsFound(times), verdicts=tuple(judge_calls(case, times)))


def _no_room(cases: Sequence[AsyncCase], parents: dict[str, str]) -> str | None:
    """Why the run would not fit, or None; every case has to fit alone, as none leaves anything behind.

    At most there are the state, a copy to compare with, the floor's, two staged ones, and one in shared memory.
    """
    for case in cases:
        reason = missing_room(parents[case.place], case.nbytes + case.nbytes // 16, 6 * case.held_nbytes)
        if reason is not None:
            return f"{case.title}: {reason}; choose other directories (--memory-dir, --disk-dir) or a smaller --mib"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.async_save", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    names = list(ASYNC_CONTESTANTS)
    parser.add_argument("--measures", default=list(MEASURES), choices=MEASURES, help=some_of(MEASURES), **several)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="only on these numbers of ranks")
    parser.add_argument("--places", default=list(PLACES), choices=PLACES, help=some_of(PLACES), **several)
    parser.add_argument("--contestants", default=names, choices=names, help=some_of(names), **several)
    parser.add_argument("--repeats", type=int, default=5, help="rounds after the first one (default: 5)")
    parser.add_argument("--mib", type=int, help="size of every state (default: a measure's own, at most 1,250)")
    parser.add_argument("--steps", type=int, default=30, help="training steps of a turn (default: 30)")
    parser.add_argument("--every", type=int, default=15, help="training steps from save to save (default: 15)")
    parser.add_argument("--saves", type=int, default=100, help="saves in a row (default: 100)")
    parser.add_argument("--starts", type=int, default=7, help="starts of the background process (default: 7)")
    parser.add_argument("--memory-dir", default="/dev/shm", help="a directory in memory (default: /dev/shm)")
    parser.add_argument("--disk-dir", default=tempfile.gettempdir(), help="a directory on disk (default: the system's)")
    parser.add_argument("--no-fsync", action="store_true", help="no fsync where it can be left out")
    parser.add_argument("--seed", type=int, default=0, help="of the order within rounds")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one job of ranks")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    parser.add_argument(
        "--quick", action=Preset, nargs=0, const=_QUICK, help="tiny states, one round: shows that it runs"
    )
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
