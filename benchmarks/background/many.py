"""One save after another, the state changed in between: whether memory, descriptors, threads and processes stay."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.background.calls import blamed_on, state_of
from benchmarks.background.cases import AsyncCase, AsyncSettings
from benchmarks.background.contestants import AsyncContestant, make
from benchmarks.background.processes import ProcessUse, children_of, use_of
from benchmarks.counters import give_back_free_memory
from benchmarks.ranks import Rank, run_job
from benchmarks.trials import remove
from benchmarks.workloads import MIB
from dcp_core.background.service import service

if TYPE_CHECKING:
    from benchmarks.states import State

_EARLY = 10


@dataclass(frozen=True, slots=True)
class Moment:
    """What one rank has after a number of saves.

    Attributes:
        saves: How many.
        trainer: The trainer's process.
        child: Its background process.
        children: How many child processes the trainer has.
        arena_nbytes: Shared memory for staging, which belongs to none of the two.
        call_seconds: Time in the call, median of the last few.
    """

    saves: int
    trainer: ProcessUse
    child: ProcessUse
    children: int
    arena_nbytes: int
    call_seconds: float


@dataclass(frozen=True, slots=True)
class ManyFound:
    """What was found: by rank, then by number of saves."""

    by_rank: tuple[tuple[Moment, ...], ...]

    def lines(self) -> Iterator[str]:
        cells = (
            "saves",
            "MiB",
            "files",
            "threads",
            "children",
            "child MiB",
            "files",
            "threads",
            "arena MiB",
            "call ms",
        )
        yield f"  {'':20}" + "".join(f"{cell:>11}" for cell in cells)
        for rank, moments in enumerate(self.by_rank):
            yield from (f"  {f'rank {rank}':20}" + "".join(f"{cell:>11}" for cell in _cells(each)) for each in moments)

    def values(self) -> dict[str, Any]:
        return {"many": [[asdict(moment) for moment in moments] for moments in self.by_rank]}


def _cells(moment: Moment) -> Iterator[str]:
    trainer, child = moment.trainer, moment.child
    yield str(moment.saves)
    yield f"{trainer.private_nbytes / MIB:.1f}"
    yield from map(str, (trainer.descriptors, trainer.threads, moment.children))
    yield f"{child.private_nbytes / MIB:.1f}"
    yield from map(str, (child.descriptors, child.threads))
    yield f"{moment.arena_nbytes / MIB:.1f}"
    yield f"{moment.call_seconds * 1e3:.1f}"


def measure_many(case: AsyncCase, settings: AsyncSettings, names: Sequence[str], directory: str) -> ManyFound:
    """Save again and again with ours."""
    del names
    at = tuple(sorted({min(_EARLY, settings.saves), settings.saves}))
    by_rank = run_job(
        save_again_and_again, case.world_size, case, settings, directory, at,
        directory=directory, timeout_seconds=settings.timeout_seconds,
    )  # fmt: skip
    return ManyFound(tuple(map(tuple, by_rank)))


# -- in the ranks -----------------------------------------------------------------------------------------------------


def save_again_and_again(
    rank: Rank, case: AsyncCase, settings: AsyncSettings, directory: str, at: Sequence[int]
) -> list[Moment]:
    """Save into a new directory each time, change every value, and look at the processes now and then.

    Args:
        rank: Which rank.
        case: What to save.
        settings: How.
        directory: Where to; every checkpoint is removed when the next one is committed.
        at: After how many saves to look.
    """
    state, ours = state_of(case, rank), make(["ours"], case, settings, rank)["ours"]
    calls: list[float] = []
    moments = []
    for number in range(1, max(at) + 1):
        target = os.path.join(directory, f"save-{number}")
        with blamed_on("ours"):
            calls.append(_save(ours, state, target))
        remove(rank, target)
        if number in at:
            moments.append(_moment(number, statistics.median(calls[-_EARLY:])))
    return moments


def _save(ours: AsyncContestant, state: State, directory: str) -> float:
    import torch

    began = time.perf_counter()
    saved = ours.begin(state, directory)
    seconds = time.perf_counter() - began
    for tensor in state.locals.values():
        tensor.view(torch.int32).add_(1)
    saved.result()
    return seconds


def _moment(saves: int, call_seconds: float) -> Moment:
    give_back_free_memory()
    kept = service()
    child = kept.process("light").pid
    return Moment(
        saves, use_of(os.getpid()), use_of(child), children_of(os.getpid()), kept.arena.nbytes, call_seconds
    )  # fmt: skip
