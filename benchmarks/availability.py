"""Which contestants can take part here: what is not installed or does not work is left out, with the reason."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from benchmarks.cases import Case, Settings
from benchmarks.contestant import ContestantError
from benchmarks.contestants import CONTESTANTS, make, optional_ones, why_not_installed
from benchmarks.places import Place
from benchmarks.ranks import Rank, run_job
from benchmarks.trials import attempt, check_loaded
from dcp_core.testing.ranks import RankProcessError

_PROBE_MIB = 2
_PROBE_SECONDS = 120.0

_Found = TypeVar("_Found")


def left_out(names: Iterable[str]) -> dict[str, str]:
    """Contestants that are not installed, with the reason."""
    reasons = {name: why_not_installed(name) for name in names}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def failing(case: Case, settings: Settings, names: Iterable[str], directory: str) -> dict[str, str]:
    """Optional contestants that can't save and load a tiny state of a case's kind, with the reason."""
    reasons = {}
    tiny = replace(case, mib=_PROBE_MIB)
    for name in (name for name in names if name in optional_ones() and CONTESTANTS[name].refuses(case) is None):
        try:
            run_job(
                _try, case.world_size, tiny, settings, name, directory,
                directory=directory, timeout_seconds=_PROBE_SECONDS,
            )  # fmt: skip
        except (ContestantError, RankProcessError) as error:
            reasons[name] = f"fails on a tiny state: {reason_of(error, directory)}"
    return reasons


def reason_of(error: ContestantError | RankProcessError, directory: str) -> str:
    """What went wrong, in one line without the paths of this machine."""
    text = error.reason if isinstance(error, ContestantError) else str(error)
    return text.replace(directory, "DIR").partition("\n")[0][:300]


def leaving_out_failing(
    running: Sequence[str], place: Place, measure: Callable[[Sequence[str], str], _Found]
) -> tuple[_Found | None, dict[str, str], str | None]:
    """Measure; a contestant that fails is left out, and the others run again without it.

    Args:
        running: Who takes part.
        place: Where; every try gets a directory of its own, which `scratch` removes in the end.
        measure: Is given who takes part, and a directory.

    Returns:
        What was found, or None; who failed, and why; why the case failed, or None: one of ours failed, or a rank did.
    """
    left_out: dict[str, str] = {}
    failure = None
    while True:
        try:
            found = measure(
                [name for name in running if name not in left_out],
                tempfile.mkdtemp(prefix="case-", dir=place.directory),
            )
        except ContestantError as error:
            print(error.details, file=sys.stderr)
            name, reason = error.contestant, f"failed: {reason_of(error, place.directory)}"
            left_out[name] = reason
            failure = failure or (f"{name} {reason}" if name.startswith("ours") else None)
        except RankProcessError as error:
            print(error, file=sys.stderr)
            return None, left_out, reason_of(error, place.directory)
        else:
            return found, left_out, failure


def _try(rank: Rank, case: Case, settings: Settings, name: str, directory: str) -> None:
    from benchmarks.states import make_state

    contestant = make(name, settings, rank)
    target = os.path.join(directory, f"{name}-probe-{case.workload}-{case.world_size}")
    attempt(name, contestant.save, make_state(case.tensors, rank), target)
    state = make_state(case.tensors, rank, case.of.load_cut)
    state.zero()
    attempt(name, contestant.load, state, target)
    check_loaded(name, state)
