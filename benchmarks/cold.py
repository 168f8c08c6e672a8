"""Loads from the device: no page of a checkpoint is in memory, and no process has one of its files mapped.

A process saves with every contestant and ends; before each load a fresh process has the kernel drop the pages, and
another fresh one loads. That one has saved and loaded a tiny state before, so that imports are not measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks.cases import Case, Settings
from benchmarks.contestants import make
from benchmarks.places import drop_cached_pages
from benchmarks.ranks import Rank, run_alone, run_job
from benchmarks.timing import orders
from benchmarks.trials import FIRST, Run, Timed, attempt, check_loaded, merge, run_timed, save_each
from benchmarks.workloads import TensorSpec
from dcp_core.testing.ranks import RankContext

WAS_COLD = 0.9
"""A load was cold if the device delivered at least this part of the needed bytes."""


def measure_cold_loads(case: Case, settings: Settings, names: Sequence[str], directory: str) -> list[Timed]:
    """Save once with each contestant, then load each time from the device."""
    limit = settings.timeout_seconds
    run_job(
        save_all, case.world_size, case, settings, tuple(names), directory, directory=directory, timeout_seconds=limit
    )
    by_rank: list[list[Run]] = [[] for _ in range(case.world_size)]
    for number, order in orders(names, settings):
        for name in order if number != FIRST else ():
            source = os.path.join(directory, name)
            run_alone(drop, source, directory=directory, timeout_seconds=limit)
            runs = run_job(
                load_once, case.world_size, case, settings, name, number, directory,
                directory=directory, timeout_seconds=limit,
            )  # fmt: skip
            for views, run in zip(by_rank, runs, strict=True):
                views.append(run)
    return merge(names, by_rank)


# -- in the ranks -----------------------------------------------------------------------------------------------------


def save_all(rank: Rank, case: Case, settings: Settings, names: Sequence[str], directory: str) -> None:
    """Have every contestant save."""
    from benchmarks.states import make_state

    save_each({name: make(name, settings, rank) for name in names}, make_state(case.tensors, rank), directory)


def drop(context: RankContext, directory: str) -> None:
    """Have the kernel drop the pages of a directory's files."""
    del context
    drop_cached_pages(directory)


def load_once(rank: Rank, case: Case, settings: Settings, name: str, number: int, directory: str) -> Run:
    """Warm up on a tiny state, then load."""
    from benchmarks.states import make_state

    contestant = make(name, settings, rank)
    state = make_state(case.tensors, rank, case.of.load_cut)
    tiny = make_state(tiny_tensors(), rank)
    rehearsal = os.path.join(directory, f"rehearsal-{name}-{number}")
    attempt(name, contestant.save, tiny, rehearsal)
    attempt(name, contestant.load, tiny, rehearsal)
    state.zero()
    run = run_timed(name, number, contestant.load, state, os.path.join(directory, name))
    check_loaded(name, state)
    return run


def tiny_tensors() -> tuple[TensorSpec, ...]:
    """A state that exercises what a contestant imports and sets up."""
    return (
        TensorSpec("tiny.weight", (64, 64), "bfloat16"),
        TensorSpec("tiny.exp_avg", (64, 64), "float32"),
        TensorSpec("tiny.bias", (64,), "float32"),
    )
