"""Saves and warm loads against the clock: contestants in turn, in a new random order every round, in one job of ranks.

The first run of each contestant, which pays for imports, fresh memory and plans, is kept apart. After its first load
every bit of the targets is compared.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence

from benchmarks.cases import Case, Settings
from benchmarks.contestants import make
from benchmarks.ranks import Rank, run_job
from benchmarks.trials import FIRST, Run, Timed, check_loaded, merge, remove, run_timed, save_each


def measure_saves(case: Case, settings: Settings, names: Sequence[str], directory: str) -> list[Timed]:
    """Save into a new directory each time, and remove it."""
    return _measure(save_rounds, case, settings, names, directory)


def measure_loads(case: Case, settings: Settings, names: Sequence[str], directory: str) -> list[Timed]:
    """Save once with each contestant, then load what it saved, from the page cache, into touched memory."""
    return _measure(load_rounds, case, settings, names, directory)


def _measure(
    rounds: Callable[..., list[Run]], case: Case, settings: Settings, names: Sequence[str], directory: str
) -> list[Timed]:
    by_rank = run_job(
        rounds, case.world_size, case, settings, tuple(names), directory,
        directory=directory, timeout_seconds=settings.timeout_seconds,
    )  # fmt: skip
    return merge(names, by_rank)


def orders(names: Sequence[str], settings: Settings) -> Iterator[tuple[int, list[str]]]:
    """The round that is kept apart, then the others: a number and the order of the contestants, on all ranks alike."""
    chance = random.Random(settings.seed)
    for number in range(FIRST, settings.rounds):
        yield number, chance.sample(list(names), len(names))


# -- in the ranks -----------------------------------------------------------------------------------------------------


def save_rounds(rank: Rank, case: Case, settings: Settings, names: Sequence[str], directory: str) -> list[Run]:
    """All rounds of saves."""
    from benchmarks.states import make_state

    state = make_state(case.tensors, rank)
    contestants = {name: make(name, settings, rank) for name in names}
    runs = []
    for number, order in orders(names, settings):
        for name in order:
            target = os.path.join(directory, f"{name}-{number}")
            runs.append(run_timed(name, number, contestants[name].save, state, target))
            remove(rank, target)
    return runs


def load_rounds(rank: Rank, case: Case, settings: Settings, names: Sequence[str], directory: str) -> list[Run]:
    """Save once each, then all rounds of loads."""
    from benchmarks.states import make_state

    contestants = {name: make(name, settings, rank) for name in names}
    save_each(contestants, make_state(case.tensors, rank), directory)
    state = make_state(case.tensors, rank, case.of.load_cut)
    runs = []
    for number, order in orders(names, settings):
        for name in order:
            if number == FIRST:
                state.zero()
            runs.append(run_timed(name, number, contestants[name].load, state, os.path.join(directory, name)))
            if number == FIRST:
                check_loaded(name, state)
    return runs
