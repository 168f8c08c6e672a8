"""Time in the call: contestants in turn, in a new random order every round, in one job of ranks.

Every run starts at a barrier, and the next one only when the checkpoint of this one is committed, and removed. The
first run of each contestant is kept apart: it pays for imports, processes, plans and fresh memory. Right after its call
the state is overwritten, and what was saved must be what was there before.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.background.cases import AsyncCase, AsyncSettings
from benchmarks.background.contestants import AsyncContestant, make
from benchmarks.background.observe import AGREE, STAGE, StageClock, staged_bytes
from benchmarks.contestant import ContestantError
from benchmarks.counters import give_back_free_memory
from benchmarks.ranks import Rank, run_job
from benchmarks.trials import FIRST, remove

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.states import State


@dataclass(frozen=True, slots=True)
class Call:
    """One run as one rank saw it; times are of a clock that all processes of the machine share.

    Attributes:
        contestant: Who.
        round: Its number.
        began: When the call began.
        returned: When it returned.
        committed: When the checkpoint was committed.
        stages: Seconds of this library's stages in the call.
        staged_nbytes: What it staged; 0 where that is not known.
    """

    contestant: str
    round: int
    began: float
    returned: float
    committed: float
    stages: dict[str, float]
    staged_nbytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all ranks.

    Attributes:
        call_seconds: In the call without waiting for slower ranks, of the rank that took longest.
        waited_seconds: For slower ranks in the agreement, of the rank that waited longest.
        agree_seconds: Of the agreement, of the rank that came last, so that it waited for nobody.
        stage_seconds: Of staging, of the rank that took longest.
        committed_seconds: From the barrier until the last rank knew that the checkpoint is committed.
        staged_nbytes: Of the rank that staged most.
    """

    call_seconds: float
    waited_seconds: float
    agree_seconds: float
    stage_seconds: float
    committed_seconds: float
    staged_nbytes: int


@dataclass(frozen=True, slots=True)
class CallTimes:
    """All runs of one contestant: the first, and the others by round."""

    contestant: str
    first: Run
    rounds: tuple[Run, ...]

    def median(self, name: str) -> float:
        return float(statistics.median(getattr(run, name) for run in self.rounds))

    @property
    def call_seconds(self) -> float:
        return self.median("call_seconds")

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "median_call_seconds": self.call_seconds}


def measure_calls(
    case: AsyncCase, settings: AsyncSettings, names: Sequence[str], directory: str
) -> tuple[CallTimes, ...]:
    """Save into a new directory each time, and remove it."""
    by_rank = run_job(
        call_rounds, case.world_size, case, settings, list(names), directory,
        directory=directory, timeout_seconds=settings.timeout_seconds,
    )  # fmt: skip
    return merge(names, by_rank)


def merge(names: Sequence[str], by_rank: Sequence[Sequence[Call]]) -> tuple[CallTimes, ...]:
    """Put the ranks' views together; every rank ran the same in the same order."""
    runs: dict[str, dict[int, Run]] = {name: {} for name in names}
    for views in zip(*by_rank, strict=True):
        runs[views[0].contestant][views[0].round] = _together(views)
    return tuple(CallTimes(name, found.pop(FIRST), tuple(found.values())) for name, found in runs.items())


def _together(views: Sequence[Call]) -> Run:
    agree = [view.stages.get(AGREE, 0.0) for view in views]
    waited = [seconds - min(agree) for seconds in agree]
    in_call = [view.returned - view.began - lost for view, lost in zip(views, waited, strict=True)]
    return Run(
        call_seconds=max(in_call),
        waited_seconds=max(waited),
        agree_seconds=min(agree),
        stage_seconds=max(view.stages.get(STAGE, 0.0) for view in views),
        committed_seconds=max(view.committed for view in views) - min(view.began for view in views),
        staged_nbytes=max(view.staged_nbytes for view in views),
    )


# -- in the ranks -----------------------------------------------------------------------------------------------------


def state_of(case: AsyncCase, rank: Rank) -> State:
    """What a rank holds."""
    from benchmarks.states import make_state

    return make_state(case.tensors, Rank(0, 1) if case.of.is_replicated else rank)


def orders(names: Sequence[str], settings: AsyncSettings) -> Iterator[tuple[int, list[str]]]:
    """The round that is kept apart, in which ours comes first; then the others, in the same order on all ranks."""
    chance = random.Random(settings.seed)
    yield FIRST, list(names)
    for number in range(settings.rounds):
        yield number, chance.sample(list(names), len(names))


def call_rounds(rank: Rank, case: AsyncCase, settings: AsyncSettings, names: list[str], directory: str) -> list[Call]:
    """All rounds."""
    state = state_of(case, rank)
    before = {name: tensor.clone() for name, tensor in state.locals.items()}
    contestants = make(names, case, settings, rank)
    calls = []
    for number, order in orders(names, settings):
        for name in order:
            target = os.path.join(directory, f"{name}-{number}")
            with blamed_on(name):
                calls.append(_timed_call(contestants[name], number, state, target, before))
            if contestants[name].saves:
                remove(rank, target)
    return calls


def _timed_call(
    contestant: AsyncContestant, number: int, state: State, directory: str, before: dict[str, Tensor]
) -> Call:
    import torch.distributed as dist

    give_back_free_memory()
    dist.barrier()
    with StageClock() as clock, staged_bytes() as staged:
        began = time.monotonic()
        saved: Future[Any] = contestant.begin(state, directory)
        returned = time.monotonic()
    if number == FIRST and contestant.saves:
        state.zero()
    saved.result()
    committed = time.monotonic()
    if number == FIRST and contestant.saves:
        dist.barrier()  # without collectives the other ranks may not be done yet
        contestant.load(state, directory)
        _check(contestant.name, state, before)
    return Call(contestant.name, number, began, returned, committed, clock.seconds, sum(staged))


def _check(contestant: str, state: State, before: dict[str, Tensor]) -> None:
    """Compare what was saved with what the state held at the time of the call."""
    import torch

    for name, tensor in state.locals.items():
        if not torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)):
            raise ContestantError(contestant, f"saved something else than the state held when it was called: {name}")


@contextlib.contextmanager
def blamed_on(contestant: str) -> Iterator[None]:
    """What is raised says whose it is."""
    try:
        yield
    except ContestantError:
        raise
    except Exception as error:
        raise ContestantError(contestant, f"{type(error).__name__}: {error}", traceback.format_exc()) from error
