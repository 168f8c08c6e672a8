"""A rank that is slow, stalls, is stopped, or dies, in each phase of a save and of a load.

The others end with an error that names it within the deadline, the checkpoint that was there stays, and the next call
works: with that rank, where it is alive.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks
from tests.core.fault_jobs import (
    PATIENT_SECONDS,
    Outcome,
    Seat,
    checkpoint_names,
    loaded_tag,
    memory_directory,
    names_in,
    outcome_of,
    poison_of,
    state_of,
)
from tests.core.rank_faults import (
    DIES,
    FAULTS,
    SLOW,
    FiringAdapter,
    FiringLoadPlanner,
    FiringSavePlanner,
    FiringState,
    Fuse,
    Point,
    Scene,
    reader_over,
    watched_exchanges,
    writer_over,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

DEADLINE_SECONDS = 3.0
BOUND_SECONDS = 3 * DEADLINE_SECONDS
"""By then everybody has an error: the deadline, what is granted beyond, another one in a load that shares reads."""


def _on(verb: str, rank: int, world: int, phases: dict[str, list[str]], **more: Any) -> list[Point]:
    return [Point(verb, phase, where, rank, world, **more) for phase, places in phases.items() for where in places]


_ANYBODY_SAVES = {
    "planning": ["state_dict", "plan"],
    "agreeing": ["put save/agree", "wait save/agree"],
    "exchanging plans": ["put save/plan", "wait save/plan"],
    "staging": ["get data"],
    "writing": ["create data", "pwritev data", "fsync objects"],
    "handing in": ["put save/commit"],
}
_ANYBODY_LOADS = {
    "finding the description": ["put load/metadata", "wait load/metadata"],
    "planning": ["plan", "put load/plan", "wait load/plan"],
    "reading": ["preadv data"],
    "broadcasting": ["put broadcast", "wait broadcast"],
    "ending": ["put load/done", "wait load/done"],
    "load_state_dict": ["load_state_dict", "put load/stateful"],
}
POINTS = {
    "save, a rank": [
        *_on("save", 2, 3, _ANYBODY_SAVES),
        *_on("save", 1, 2, {"hearing of the commit": ["wait save/commit"]}, harmless=True, may_be_new=True),
    ],
    "save, the coordinator": [
        *_on("save", 0, 2, {
            "planning": ["plan"],
            "agreeing": ["wait save/agree"],
            "announcing": ["decide save/agree", "create intent", "rename intent"],
            "exchanging plans": ["decide save/plan", "put save/plan"],
        }),
        *_on("save", 0, 2, {"writing": ["pwritev data"], "gathering": ["wait save/commit"]}, doubtful=True),
        *_on("save", 0, 2, {
            "committing": ["create description", "rename description"],
            "cleaning": ["unlink data", "put save/commit"],
        }, doubtful=True, may_be_new=True),
    ],
    "load, a rank": [
        *_on("load", 1, 3, _ANYBODY_LOADS),
        *_on("load", 1, 2, {"ending": ["wait load/stateful"]}, harmless=True),
    ],
    "load, the coordinator": _on("load", 0, 2, {
        "finding the description": ["wait load/metadata", "preadv description", "put load/metadata"],
        "planning": ["plan", "decide load/plan", "preadv objects", "put load/plan"],
        "reading": ["preadv data"],
        "broadcasting": ["put broadcast", "wait broadcast"],
        "ending": ["wait load/done", "put load/done"],
        "load_state_dict": ["load_state_dict", "wait load/stateful", "put load/stateful"],
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one fault.

    Attributes:
        outcome: Of the call in which it happened.
        tag: Which save a load gave afterwards; None after a death.
    """

    outcome: Outcome
    tag: int | None


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def _seat_in(context: RankContext, points: list[Point]) -> tuple[Seat, Point]:
    """The jobs share the processes out, one after another."""
    first = 0
    for job, point in enumerate(points):
        if context.rank < first + point.world:
            members = tuple(range(first, first + point.world))
            return Seat(context, job, context.rank - first, point.world, members), point
        first += point.world
    raise AssertionError("more processes than the jobs have ranks")


def _call(seat: Seat, point: Point, directory: Path, tag: int, fuse: Fuse, adapter: FiringAdapter, fault: str) -> None:
    options: dict[str, Any] = {
        "timeout_seconds": PATIENT_SECONDS if fault == SLOW else DEADLINE_SECONDS, "adapter": adapter,
    }  # fmt: skip
    stateful = {"stateful": FiringState(fuse)}
    if point.verb == "save":
        state = state_of(seat.rank, seat.world, tag) | stateful
        seat.save(state, storage_writer=writer_over(directory, fuse), planner=FiringSavePlanner(fuse), **options)
    else:
        target = poison_of(seat.rank, seat.world) | stateful
        seat.load(target, storage_reader=reader_over(directory, fuse), planner=FiringLoadPlanner(fuse), **options)


def _save(seat: Seat, directory: Path, tag: int) -> None:
    state = state_of(seat.rank, seat.world, tag) | {"stateful": FiringState(Fuse())}
    seat.save(state, checkpoint_id=directory)


def _suffer(context: RankContext, root: Path, points: list[Point]) -> list[Seen]:
    """One fault after another at one place; in between, all is well. The last one is deadly."""
    seat, point = _seat_in(context, points)
    directory, tags = root / point.name, itertools.count(1)
    seen: list[Seen] = []
    fuse = Fuse()
    adapter = FiringAdapter(fuse)
    others = [rank for rank in range(seat.world) if rank != point.rank]
    for fault in FAULTS:
        _save(seat, directory, next(tags))
        scene = Scene(root / f"{point.name} {fault}")
        seat.share()
        with watched_exchanges(fuse):
            if seat.rank == point.rank:
                fuse.set(point.where, lambda fault=fault, scene=scene: scene.suffer(fault))  # type: ignore[misc]
            outcome = outcome_of(_call, seat, point, directory, next(tags), fuse, adapter, fault)
        if seat.rank == point.rank:
            scene.say("own", outcome.kind)
        elif fault != SLOW:
            scene.say(f"done {seat.rank}")
            scene.await_all(*[f"done {rank}" for rank in others])
            if seat.rank == others[0] and fault != DIES:
                scene.release()
        if fault == DIES:
            return [*seen, Seen(outcome, None)]
        seat.share()
        seen.append(Seen(outcome, loaded_tag(seat, directory)))
        seat.share()
    raise AssertionError("the last fault is deadly")


def _go_on(context: RankContext, root: Path, points: list[Point]) -> tuple[int, list[str], list[str]]:
    """Other processes load what is there, and save over it."""
    seat, point = _seat_in(context, points)
    directory = root / point.name
    tag = loaded_tag(seat, directory)
    seat.share()
    _save(seat, directory, 100)
    assert loaded_tag(seat, directory) == 100
    names = [name for name in names_in(directory) if not fnmatch(name, ".intent-*.tmp")]  # it must wait for its time
    return tag, names, checkpoint_names(directory)


def _check(point: Point, process: int, fault: str, number: int, own: str | None, others: list[Seen]) -> None:
    """Every rank but that one names it in time; a load gives the checkpoint that was there, or a new one, on all.

    Args:
        process: Its number among all processes: by it broadcasts name their members.
        number: Of the fault.
        own: Class of what the rank itself raised, empty where it returned; None for one that died.
        others: What the others saw.
    """
    old, new = 2 * number + 1, 2 * number + 2
    context = (point, fault, own, others)
    if fault == SLOW or point.harmless:
        assert {seen.outcome.kind for seen in others} == {""}, context
    else:
        wanted = "InDoubtError" if point.doubtful else "CoordinationTimeoutError"
        for outcome in [seen.outcome for seen in others]:
            assert outcome.kind in (wanted, "CoordinationError"), context
            names = f"rank {point.rank}", f"[{process}]", f"rank {process}"
            assert point.rank in outcome.blamed or any(name in outcome.message for name in names), context
            assert outcome.seconds < BOUND_SECONDS, context
    if own is not None:
        is_new = point.verb == "save" and (fault == SLOW or point.harmless or (point.may_be_new and not own))
        assert {seen.tag for seen in others} == {new if is_new else old}, context


@pytest.mark.parametrize("group", POINTS)
def test_the_others_name_a_rank_in_trouble_in_time_and_the_next_call_works(root: Path, group: str) -> None:
    points = POINTS[group]
    found = run_ranks(
        _suffer, sum(point.world for point in points), root, points, timeout_seconds=120, return_exceptions=True
    )
    later = run_ranks(_go_on, len(found), root, points, timeout_seconds=60)
    first = 0
    for point in points:
        ranks = found[first : first + point.world]
        end = ranks.pop(point.rank)
        assert isinstance(end, RankProcessError) and "SIGKILL" in str(end), (point, end)
        for number, fault in enumerate(FAULTS):
            scene = Scene(root / f"{point.name} {fault}")
            assert scene.heard("fired"), f"{point} was not reached: {fault}"
            own = None if fault == DIES else (scene.directory / "own").read_text()
            _check(point, first + point.rank, fault, number, own, [seen[number] for seen in ranks])
        for tag, names, expected in later[first : first + point.world]:
            assert tag in ((7, 8) if point.may_be_new else (7,)), (point, tag)
            assert names == expected, point
        first += point.world
