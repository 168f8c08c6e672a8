"""Training steps while a save goes on, against steps without: a small model, one thread a rank, in lockstep.

Contestants take turns, round by round. A turn is a number of steps with a save every so many; the model is part of what
is saved. A step counts as one beside a save if the save was in flight on some rank from its start to its end.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.background.calls import blamed_on, orders, state_of
from benchmarks.background.cases import AsyncCase, AsyncSettings
from benchmarks.background.contestants import NOTHING, AsyncContestant, make
from benchmarks.counters import give_back_free_memory
from benchmarks.ranks import Rank, run_job
from benchmarks.trials import FIRST, remove

if TYPE_CHECKING:
    from benchmarks.states import State

_WIDTH = 1024
_LAYERS = 3
_BATCH = 320


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one contestant, as one rank saw it.

    Attributes:
        contestant: Who.
        step_seconds: Of each step, without the calls that save.
        is_beside: Whether a save was in flight during the whole step.
        call_seconds: Of each call that saves, with what it waited for the save before.
        seconds: All of it, until the last step was done.
    """

    contestant: str
    step_seconds: tuple[float, ...]
    is_beside: tuple[bool, ...]
    call_seconds: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Training:
    """All turns of one contestant.

    Attributes:
        contestant: Who.
        beside_seconds: Of the steps beside a save, of the slowest rank each; of all steps where nothing was saved.
        call_seconds: Of the calls, of the slowest rank each.
        steps_per_second: Of each turn.
    """

    contestant: str
    beside_seconds: tuple[float, ...]
    call_seconds: tuple[float, ...]
    steps_per_second: tuple[float, ...]

    @property
    def median_step(self) -> float | None:
        """None where every save was over before a step was."""
        return statistics.median(self.beside_seconds) if self.beside_seconds else None

    @property
    def throughput(self) -> float:
        return statistics.median(self.steps_per_second)


@dataclass(frozen=True, slots=True)
class TrainingFound:
    """What was found."""

    rows: tuple[Training, ...]

    def lines(self) -> Iterator[str]:
        cells = ("step ms", "/ none", "steps", "call ms", "steps/s", "/ none")
        yield f"  {'':20}" + "".join(f"{cell:>11}" for cell in cells)
        idle = next((row for row in self.rows if row.contestant == NOTHING), None)
        for row in self.rows:
            yield f"  {row.contestant:20}" + "".join(f"{cell:>11}" for cell in _cells(row, idle))

    def values(self) -> dict[str, Any]:
        medians = [
            {"median_step_seconds": row.median_step, "median_steps_per_second": row.throughput} for row in self.rows
        ]
        return {"training": [asdict(row) | more for row, more in zip(self.rows, medians, strict=True)]}


def _cells(row: Training, idle: Training | None) -> Iterator[str]:
    step, idle_step = row.median_step, None if idle is None else idle.median_step
    yield "-" if step is None else f"{step * 1e3:.1f}"
    yield "-" if step is None or idle_step is None else f"{step / idle_step:.2f}"
    yield str(len(row.beside_seconds))
    yield f"{statistics.median(row.call_seconds) * 1e3:.1f}" if row.call_seconds else "-"
    yield f"{row.throughput:.2f}"
    yield "-" if idle is None else f"{row.throughput / idle.throughput:.3f}"


def measure_training(case: AsyncCase, settings: AsyncSettings, names: Sequence[str], directory: str) -> TrainingFound:
    """Train by turns."""
    by_rank = run_job(
        train, case.world_size, case, settings, list(names), directory,
        directory=directory, timeout_seconds=settings.timeout_seconds,
    )  # fmt: skip
    return together(names, by_rank)


def together(names: Sequence[str], by_rank: Sequence[Sequence[Turn]]) -> TrainingFound:
    """Put the ranks' views together; every rank took the same turns in the same order."""
    turns = [_slowest(views) for views in zip(*by_rank, strict=True)]
    return TrainingFound(tuple(_row(name, [turn for turn in turns if turn.contestant == name]) for name in names))


def _slowest(views: Sequence[Turn]) -> Turn:
    return Turn(
        views[0].contestant,
        tuple(map(max, zip(*(view.step_seconds for view in views), strict=True))),
        tuple(map(any, zip(*(view.is_beside for view in views), strict=True))),
        tuple(map(max, zip(*(view.call_seconds for view in views), strict=True))),
        max(view.seconds for view in views),
    )


def _row(name: str, turns: Sequence[Turn]) -> Training:
    beside = [
        seconds
        for turn in turns
        for seconds, is_beside in zip(turn.step_seconds, turn.is_beside, strict=True)
        if is_beside or name == NOTHING
    ]
    calls = [seconds for turn in turns for seconds in turn.call_seconds]
    speeds = [len(turn.step_seconds) / turn.seconds for turn in turns]
    return Training(name, tuple(beside), tuple(calls), tuple(speeds))


# -- in the ranks -----------------------------------------------------------------------------------------------------


class Trainer:
    """A model of some linear layers; every rank trains the same one on the same numbers."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        layers = [layer for _ in range(_LAYERS) for layer in (torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU())]
        self.model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self._inputs = torch.randn(_BATCH, _WIDTH)

    def step(self) -> None:
        """One step; no rank is ahead of another by more than that."""
        import torch.distributed as dist

        self._optimizer.zero_grad()
        loss = self.model(self._inputs).square().mean()
        loss.backward()
        self._optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)

    def joined_to(self, state: State) -> State:
        """A state that has the model too."""
        weights = {f"net.{name}": tensor for name, tensor in self.model.state_dict().items()}
        return replace(state, tensors=state.tensors | weights)


def train(rank: Rank, case: AsyncCase, settings: AsyncSettings, names: list[str], directory: str) -> list[Turn]:
    """All turns, after a save and a few steps that are not measured."""
    trainer = Trainer()
    state = trainer.joined_to(state_of(case, rank))
    contestants = make(names, case, settings, rank)
    turns = []
    for number, order in orders(names, settings):
        for name in order:
            place = os.path.join(directory, f"{name}-{number}")
            if rank.is_first:
                os.mkdir(place)
            give_back_free_memory()
            count = min(settings.every, settings.steps) // 2 if number == FIRST else settings.steps
            with blamed_on(name):
                turn = _turn(trainer, name, contestants.get(name), state, place, count, settings.every)
            remove(rank, place)
            if number != FIRST:
                turns.append(turn)
    return turns


def _turn(
    trainer: Trainer, name: str, contestant: AsyncContestant | None, state: State, place: str, count: int, every: int
) -> Turn:
    import torch.distributed as dist

    saved: Future[Any] | None = None
    steps, beside, calls = [], [], []
    dist.barrier()
    began = time.perf_counter()
    for step in range(count):
        at = time.perf_counter()
        if contestant is not None and step % every == 0:
            if saved is not None:
                saved.result()
            saved = contestant.begin(state, os.path.join(place, f"step-{step}"))
            calls.append(time.perf_counter() - at)
            at = time.perf_counter()
        trainer.step()
        steps.append(time.perf_counter() - at)
        beside.append(saved is not None and not saved.done())
    seconds = time.perf_counter() - began
    if saved is not None:
        saved.result()
    return Turn(name, tuple(steps), tuple(beside), tuple(calls), seconds)
