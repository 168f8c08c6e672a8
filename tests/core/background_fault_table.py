"""The part of the table of rank faults that is about background processes: one of each job gets into trouble."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from dcp_core.background import carriers
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.background_processes import children_of, is_running, wait_until
from tests.core.async_jobs import async_outcome, tag_in
from tests.core.fault_jobs import PATIENT_SECONDS, checkpoint_names, names_in, state_of
from tests.core.firing import SLOW, STALLS, FiringWriter, Fuse
from tests.core.rank_fault_table import (
    ASYNC_BOUND_SECONDS,
    DEADLINE_SECONDS,
    LAST_TAG,
    Point,
    Seen,
    WatchedSeat,
    dealt,
    save_soundly,
    seat_in,
)
from tests.core.rank_faults import FiringSavePlanner

_GRACE_SECONDS = 1.0


def _suffer_in_the_background(
    context: RankContext, kind: type[WatchedSeat], root: Path, points: Sequence[Point]
) -> list[Seen]:
    seat, point = seat_in(kind, context, points)
    directory, seen = root / point.name, []
    with pytest.MonkeyPatch.context() as patch, seat.joined():
        patch.setattr(carriers, "GRACE_SECONDS", _GRACE_SECONDS)
        for number, fault in enumerate(point.faults):
            assert not async_outcome(seat, state_of(seat.rank, seat.world, 2 * number + 1), directory).kind
            scene, here = point.scene(root, fault), seat.rank == point.rank
            seat.share()
            writer = FiringWriter(where=point.where if here else "", scene=str(scene.directory), fault=fault)
            outcome = async_outcome(
                seat, state_of(seat.rank, seat.world, 2 * number + 2), directory, storage_writer=writer,
                planner=FiringSavePlanner(Fuse()), durable=True,
                timeout_seconds=PATIENT_SECONDS if fault == SLOW else DEADLINE_SECONDS,
            )  # fmt: skip
            seat.share()
            lives = scene.heard("fired") and fault == SLOW and is_running(scene.victim)
            if scene.heard("fired") and fault != SLOW:
                wait_until(lambda scene=scene: not is_running(scene.victim), "the end of it")  # type: ignore[misc]
            seen.append(Seen(outcome, tag_in(seat, directory), lives))
            seat.share()
        save_soundly(seat, "async_save", directory, LAST_TAG)
        assert tag_in(seat, directory) == LAST_TAG
        assert len(children_of(os.getpid())) == 1
        seat.share()
    assert (left := set(names_in(directory)) - set(checkpoint_names(directory))) == set(), (point, left)
    return seen


def check_background_processes_in_trouble(
    root: Path, points: Sequence[Point], kind: type[WatchedSeat] = WatchedSeat
) -> None:
    """Let a background process of each job suffer; check that all name its rank in time, and that the next save works.

    Args:
        root: Where the checkpoints go, each in a directory of its own.
        points: One a job.
        kind: How its ranks call.
    """
    processes = sum(point.world for point in points)
    found = run_ranks(_suffer_in_the_background, processes, kind, root, points, timeout_seconds=150)
    for point, _, ranks in dealt(points, found):
        for number, fault in enumerate(point.faults):
            assert point.scene(root, fault).heard("fired"), f"{point} was not reached: {fault}"
            _check_background(point, number, [seen[number] for seen in ranks])


def _check_background(point: Point, number: int, ranks: Sequence[Seen]) -> None:
    fault = point.faults[number]
    old, new = 2 * number + 1, 2 * number + 2
    context = (point, fault, ranks)
    tags = {seen.tag for seen in ranks}
    assert {seen.lives for seen in ranks} == {fault == SLOW}, context
    if fault == SLOW:
        assert {seen.outcome.kind for seen in ranks} == {""} and tags == {new}, context
        return
    assert tags <= ({old, new} if point.may_be_new else {old}) and len(tags) == 1, context
    allowed = {"RankFailedError", "CoordinationTimeoutError", "CoordinationError"}
    allowed |= {"InDoubtError"} if point.doubtful else set()
    allowed |= {""} if tags == {new} else set()
    for rank, seen in enumerate(ranks):
        assert seen.outcome.kind in allowed, context
        assert seen.outcome.seconds < ASYNC_BOUND_SECONDS, context
        words = [f"rank {point.rank}", *(["the background process"] if rank == point.rank else [])]
        assert not seen.outcome.kind or any(word in seen.outcome.message for word in words), context
    if fault == STALLS and point.phase in ("writing", "committing"):
        assert f"while {point.phase}" in ranks[point.rank].outcome.message, context
