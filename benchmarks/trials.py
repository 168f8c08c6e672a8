"""One run of one contestant, as a rank sees it, and all ranks' views of all runs put together.

Every run starts at a barrier, and lasts until the last rank is done.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from benchmarks.contestant import Contestant, ContestantError
from benchmarks.counters import IoCounts, give_back_free_memory, io_counts
from benchmarks.places import sync_tree
from benchmarks.ranks import Rank

if TYPE_CHECKING:
    from benchmarks.states import State

FIRST = -1
"""The number of the round that is kept apart."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run as one rank saw it; times are of a clock that all processes of the machine share."""

    contestant: str
    round: int
    began_seconds: float
    ended_seconds: float
    moved: IoCounts


@dataclass(frozen=True, slots=True)
class Timed:
    """All runs of one contestant.

    Attributes:
        contestant: Which one.
        seconds: From the barrier until the last rank was done, by round.
        first_seconds: The same for its first run in a process; None where that was not measured.
        moved: Bytes by the kernel's counters, all ranks together; medians over the rounds.
    """

    contestant: str
    seconds: tuple[float, ...]
    first_seconds: float | None
    moved: IoCounts

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


def run_timed(
    contestant: str, number: int, operation: Callable[[State, str], None], state: State, directory: str
) -> Run:
    """Run a save or a load; every rank calls."""
    import torch.distributed as dist

    give_back_free_memory()
    dist.barrier()
    before, began = io_counts(), time.monotonic()
    attempt(contestant, operation, state, directory)
    ended = time.monotonic()
    return Run(contestant, number, began, ended, io_counts() - before)


def attempt(contestant: str, operation: Callable[[State, str], None], state: State, directory: str) -> None:
    """Run a save or a load; what it raises then says whose it is."""
    try:
        operation(state, directory)
    except Exception as error:
        raise ContestantError(contestant, f"{type(error).__name__}: {error}", traceback.format_exc()) from error


def check_loaded(contestant: str, state: State) -> None:
    """Compare every bit of the targets; every value is made anew."""
    if (wrong := state.first_difference()) is not None:
        raise ContestantError(contestant, f"loaded other bits than were saved: {wrong}")


def save_each(contestants: dict[str, Contestant], state: State, directory: str) -> None:
    """Have every contestant save into a directory with its name; every rank calls."""
    for name, contestant in contestants.items():
        attempt(name, contestant.save, state, os.path.join(directory, name))
    settle(state.rank, directory)


def remove(rank: Rank, directory: str) -> None:
    """Remove what was saved, and leave no work to the next run; every rank calls."""
    import torch.distributed as dist

    dist.barrier()
    if rank.is_first:
        shutil.rmtree(directory)
    settle(rank, os.path.dirname(directory))


def settle(rank: Rank, directory: str) -> None:
    """Wait until nothing of a directory is left to be written or freed; every rank calls."""
    import torch.distributed as dist

    dist.barrier()
    if rank.is_first:
        sync_tree(directory)
    dist.barrier()


def merge(names: Sequence[str], by_rank: Sequence[Sequence[Run]]) -> list[Timed]:
    """Put the ranks' views together; every rank ran the same in the same order."""
    timed = []
    for name in names:
        runs = [views for views in zip(*by_rank, strict=True) if views[0].contestant == name]
        seconds = {views[0].round: _duration(views) for views in runs}
        first = seconds.pop(FIRST, None)
        moved = [sum((view.moved for view in views), IoCounts()) for views in runs if views[0].round != FIRST]
        timed.append(Timed(name, tuple(seconds.values()), first, _medians(moved)))
    return timed


def _duration(views: Sequence[Run]) -> float:
    return max(view.ended_seconds for view in views) - min(view.began_seconds for view in views)


def _medians(counts: Sequence[IoCounts]) -> IoCounts:
    names = [each.name for each in fields(IoCounts)]
    return IoCounts(*(int(statistics.median(getattr(count, name) for count in counts)) for name in names))
