"""Which contestants can take part here: what is not installed or does not work is left out, with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from benchmarks.cases import Case, Settings
from benchmarks.contestant import ContestantError
from benchmarks.contestants import CONTESTANTS, make, optional_ones, why_not_installed
from benchmarks.ranks import Rank, run_job
from benchmarks.trials import attempt, check_loaded
from dcp_core.testing.ranks import RankProcessError

_PROBE_MIB = 2
_PROBE_SECONDS = 120.0


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


def _try(rank: Rank, case: Case, settings: Settings, name: str, directory: str) -> None:
    from benchmarks.states import make_state

    contestant = make(name, settings, rank)
    target = os.path.join(directory, f"{name}-probe-{case.workload}-{case.world_size}")
    attempt(name, contestant.save, make_state(case.tensors, rank), target)
    state = make_state(case.tensors, rank, case.of.load_cut)
    state.zero()
    attempt(name, contestant.load, state, target)
    check_loaded(name, state)
