"""The table of rank faults: in each job one rank gets into trouble at one place, and what all see of it is checked.

For ranks of any framework: a `Seat` says how they call. The jobs of a table run at the same time, since nearly all of
it is waiting; in a job one kind of trouble comes after another, and in between all is well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks
from tests.background_processes import background_processes, wait_until
from tests.core.async_jobs import async_outcome, tag_in
from tests.core.fault_jobs import (
    PATIENT_SECONDS,
    Outcome,
    Seat,
    checkpoint_names,
    names_in,
    outcome_of,
    poison_of,
    state_of,
)
from tests.core.firing import (
    DIES,
    FAULTS,
    SLOW,
    Fuse,
    Scene,
    reader_over,
    writer_over,
)
from tests.core.rank_faults import FiringLoadPlanner, FiringSavePlanner, FiringState, watched_calls

DEADLINE_SECONDS = 3.0
BOUND_SECONDS = 3 * DEADLINE_SECONDS
"""By then everybody has an error: the deadline, what is granted beyond, another one in a load that shares reads."""

ASYNC_BOUND_SECONDS = 45.0
"""The same for a save in the background, on a machine that does much else; the patience of everything is longer."""

LAST_TAG = 100
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Point:
    """One place of one rank of a job.

    Attributes:
        verb: The call.
        phase: What the call is at there.
        where: The place.
        rank: Who gets into trouble.
        world: Ranks of the job.
        doubtful: Whether the others wait for the coordinator's commit then.
        harmless: Whether the others have no need of that rank any more.
        may_be_new: Whether the new checkpoint may be complete afterwards.
        faults: What happens there, in turn; where a trainer may die, that comes last.
    """

    verb: str
    phase: str
    where: str
    rank: int
    world: int
    doubtful: bool = False
    harmless: bool = False
    may_be_new: bool = False
    faults: tuple[str, ...] = FAULTS

    @property
    def name(self) -> str:
        return f"{self.verb} {self.where} {self.rank} of {self.world}".replace("/", "+")

    def scene(self, root: Path, fault: str) -> Scene:
        return Scene(root / f"{self.name} {fault}")


def points_in(phases: Mapping[str, Sequence[str]], verb: str, rank: int, world: int, **more: Any) -> list[Point]:
    """The places of a rank, by phase."""
    return [Point(verb, phase, where, rank, world, **more) for phase, places in phases.items() for where in places]


@dataclass(frozen=True)
class WatchedSeat(Seat):
    """A rank whose calls can be watched: a numpy rank, or by a subclass that of another framework."""

    @contextmanager
    def watched(self, fuse: Fuse) -> Iterator[None]:
        """Tell a fuse of the places that the calls of this process come to."""
        with watched_calls(self.adapter, fuse):
            yield


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one fault.

    Attributes:
        outcome: Of the call in which it happened; for a save in the background, of its result.
        tag: Which save a load gave afterwards; None after the death of the rank.
        lives: Whether the background process in trouble was there still, once all had their result.
    """

    outcome: Outcome
    tag: int | None
    lives: bool = False


def seat_in(kind: type[WatchedSeat], context: RankContext, points: Sequence[Point]) -> tuple[WatchedSeat, Point]:
    """The rank that a process is, and the point of its job: the jobs share the processes out, one after another."""
    first = 0
    for job, point in enumerate(points):
        if context.rank < first + point.world:
            members = tuple(range(first, first + point.world))
            return kind(context, job, context.rank - first, point.world, members), point
        first += point.world
    raise AssertionError("more processes than the jobs have ranks")


def dealt(points: Sequence[Point], found: Sequence[_Found]) -> Iterator[tuple[Point, int, list[_Found]]]:
    """Each job, its first process, and what its ranks found."""
    first = 0
    for point in points:
        yield point, first, list(found[first : first + point.world])
        first += point.world


def save_soundly(seat: Seat, verb: str, directory: Path, tag: int) -> None:
    """A sound save of the kind that the job is about."""
    state = state_of(seat.rank, seat.world, tag) | {"stateful": FiringState(Fuse())}
    if verb == "async_save":
        outcome = async_outcome(seat, state, directory)
        assert not outcome.kind, outcome
    else:
        seat.save(state, checkpoint_id=directory)


def _call(seat: Seat, verb: str, directory: Path, tag: int, fuse: Fuse, timeout_seconds: float) -> Outcome:
    """The call in which it happens."""
    stateful, options = {"stateful": FiringState(fuse)}, {"timeout_seconds": timeout_seconds}
    if verb == "load":
        target = poison_of(seat.rank, seat.world) | stateful
        reader, loads = reader_over(directory, fuse), FiringLoadPlanner(fuse)
        return outcome_of(seat.load, target, storage_reader=reader, planner=loads, **options)
    state, planner = state_of(seat.rank, seat.world, tag) | stateful, FiringSavePlanner(fuse)
    if verb == "async_save":
        return async_outcome(seat, state, directory, planner=planner, **options)
    return outcome_of(seat.save, state, storage_writer=writer_over(directory, fuse), planner=planner, **options)


# -- ranks that get into trouble --------------------------------------------------------------------------------------


def _suffer(context: RankContext, kind: type[WatchedSeat], root: Path, points: Sequence[Point]) -> list[Seen]:
    seat, point = seat_in(kind, context, points)
    with seat.joined():
        return list(_suffer_in_turn(seat, point, root))


def _suffer_in_turn(seat: WatchedSeat, point: Point, root: Path) -> Iterator[Seen]:
    directory, fuse = root / point.name, Fuse()
    others = [rank for rank in range(seat.world) if rank != point.rank]
    for number, fault in enumerate(point.faults):
        save_soundly(seat, point.verb, directory, 2 * number + 1)
        scene = point.scene(root, fault)
        seat.share()
        with seat.watched(fuse):
            if seat.rank == point.rank:
                fuse.set(point.where, lambda fault=fault, scene=scene: scene.suffer(fault))  # type: ignore[misc]
            patience = PATIENT_SECONDS if fault == SLOW else DEADLINE_SECONDS
            outcome = _call(seat, point.verb, directory, 2 * number + 2, fuse, patience)
        if seat.rank == point.rank:
            scene.say("own", outcome.kind)
        elif fault != SLOW:
            scene.say(f"done {seat.rank}")
            scene.await_all(*[f"done {rank}" for rank in others])
            if seat.rank == others[0] and fault != DIES:
                scene.release()
        if fault == DIES:
            yield Seen(outcome, None)
            return
        seat.share()
        yield Seen(outcome, tag_in(seat, directory))
        seat.share()


def _go_on(
    context: RankContext, kind: type[WatchedSeat], root: Path, points: Sequence[Point]
) -> tuple[int, list[str], list[str]]:
    """Other processes load what is there, and save over it."""
    seat, point = seat_in(kind, context, points)
    directory = root / point.name
    with seat.joined():
        tag = tag_in(seat, directory)
        seat.share()
        save_soundly(seat, point.verb, directory, LAST_TAG)
        assert tag_in(seat, directory) == LAST_TAG
        seat.share()
    names = names_in(directory)
    if point.verb == "save":
        names = [name for name in names if not fnmatch(name, ".intent-*.tmp")]  # it must wait for its time
    return tag, names, checkpoint_names(directory)


def check_ranks_in_trouble(
    root: Path, points: Sequence[Point], kind: type[WatchedSeat] = WatchedSeat, bound_seconds: float = BOUND_SECONDS
) -> None:
    """Let a rank of each job suffer; check that the others name it in time, and that the next calls work.

    Args:
        root: Where the checkpoints go, each in a directory of its own.
        points: One a job.
        kind: How its ranks call.
        bound_seconds: By when everybody must have an error, unless the save is in the background.
    """
    processes = sum(point.world for point in points)
    found = run_ranks(_suffer, processes, kind, root, points, timeout_seconds=120, return_exceptions=True)
    wait_until(lambda: not background_processes(), "the end of the background processes")
    for point, first, ranks in dealt(points, found):
        end = ranks.pop(point.rank)
        assert isinstance(end, RankProcessError) and "SIGKILL" in str(end), (point, end)
        assert all(isinstance(seen, list) for seen in ranks), (point, ranks)
        for number, fault in enumerate(point.faults):
            scene = point.scene(root, fault)
            assert scene.heard("fired"), f"{point} was not reached: {fault}"
            own = None if fault == DIES else (scene.directory / "own").read_text()
            _check(point, first + point.rank, number, own, [seen[number] for seen in ranks], bound_seconds)
    later = run_ranks(_go_on, processes, kind, root, points, timeout_seconds=60)
    for point, _, ends in dealt(points, later):
        before = 2 * len(point.faults) - 1
        for tag, names, expected in ends:
            assert tag in ((before, before + 1) if point.may_be_new else (before,)), (point, tag)
            assert names == expected, (point, names)


def _check(
    point: Point, process: int, number: int, own: str | None, others: Sequence[Seen], bound_seconds: float
) -> None:
    """Every rank but that one names it in time; a load gives the checkpoint that was there, or a new one, on all.

    Args:
        process: Its number among all processes: by it broadcasts of numpy ranks name their members.
        number: Of the fault.
        own: Class of what the rank itself raised, empty where it returned; None for one that died.
        others: What the others saw.
    """
    fault = point.faults[number]
    old, new = 2 * number + 1, 2 * number + 2
    context = (point, fault, own, others)
    if fault == SLOW or point.harmless:
        assert {seen.outcome.kind for seen in others} == {""}, context
    else:
        for outcome in [seen.outcome for seen in others]:
            assert outcome.kind in _kinds(point), context
            names = f"rank {point.rank}", f"ranks {point.rank} did not", f"[{process}]", f"rank {process}"
            assert point.rank in outcome.blamed or any(name in outcome.message for name in names), context
            assert outcome.seconds < (ASYNC_BOUND_SECONDS if point.verb == "async_save" else bound_seconds), context
    if own is not None:
        is_new = point.verb != "load" and (fault == SLOW or point.harmless or (point.may_be_new and not own))
        assert {seen.tag for seen in others} == {new if is_new else old}, context


def _kinds(point: Point) -> set[str]:
    """What the others may raise: one that hears of it first tells the rest, by the more general error."""
    if point.verb != "async_save":
        return {"InDoubtError" if point.doubtful else "CoordinationTimeoutError", "CoordinationError"}
    in_doubt = {"InDoubtError"} if point.rank == 0 else set()
    return {"CoordinationTimeoutError", "CoordinationError", "RankFailedError"} | in_doubt
