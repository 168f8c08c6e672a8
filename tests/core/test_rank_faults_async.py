"""A trainer or a background process that is slow, stalls, is stopped, or dies, in each phase of an asynchronous save.

The result fails on all ranks in bounded time and names the rank; a background process that hangs is ended; the
checkpoint that was there stays, and the next save works.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dcp_core import api
from dcp_core.background import carriers
from dcp_core.background.carriers import ProcessCarrier
from dcp_core.background.task import PersistResult, PersistTask
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.execution.interfaces import CheckpointId, MailboxFolder, MetadataDraft, WriteContext, WriteResult
from dcp_core.metadata import Metadata
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks
from tests.background_processes import background_processes, children_of, is_running, wait_until
from tests.core.async_jobs import async_outcome, checkpoint_directory, tag_in
from tests.core.fault_jobs import PATIENT_SECONDS, Outcome, Seat, checkpoint_names, names_in, state_of
from tests.core.rank_faults import (
    DIES,
    FAULTS,
    SLOW,
    STALLS,
    FiringAdapter,
    FiringOperations,
    FiringSavePlanner,
    Fuse,
    Point,
    Scene,
    watched_exchanges,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

DEADLINE_SECONDS = 3.0
GRACE_SECONDS = 1.0
BOUND_SECONDS = 45.0
"""Two deadlines and what is granted beyond, on a machine that does much else; the patience of everything is longer."""


class FiringWriter(FileSystemWriter):
    """A writer that gets its process into trouble at one place, unless it is the trainer, which made it.

    Besides the operations of the disk: "meet", "put message", "wait message", "configure", "write", "commit".
    """

    def __init__(
        self, path: CheckpointId | None = None, *, where: str, scene: str, fault: str, spared: int = 0
    ) -> None:
        self._fate = {"where": where, "scene": scene, "fault": fault, "spared": spared or os.getpid()}
        self._fuse = Fuse()
        if os.getpid() != self._fate["spared"]:
            self._fuse.set(where, lambda: Scene(Path(scene)).suffer(fault))
        super().__init__(
            storage=LocalStorage("/nowhere" if path is None else os.fspath(path), FiringOperations(self._fuse))
        )

    def rebuild_arguments(self) -> Mapping[str, Any] | None:
        return self._fate | {"path": self._directory.storage.describe().strip("'")}

    def open_mailbox(self, save_id: str) -> MailboxFolder | None:
        folder = super().open_mailbox(save_id)
        if folder is None:
            return None
        put, wait = folder.put, folder.wait

        def firing_put(name: str, payload: bytes) -> None:
            self._fuse.reach("put message")
            put(name, payload)

        def firing_wait(name: str, timeout_seconds: float) -> bytes | None:
            self._fuse.reach("wait message")
            return wait(name, timeout_seconds)

        folder.put, folder.wait = firing_put, firing_wait  # type: ignore[method-assign]
        return folder

    def configure_writer(self, context: WriteContext) -> None:
        self._fuse.reach("configure")
        super().configure_writer(context)

    def finalize_checkpoint(self, metadata: MetadataDraft, results: Sequence[WriteResult]) -> Metadata:
        self._fuse.reach("commit")
        return super().finalize_checkpoint(metadata, results)


CHILD_POINTS = [
    *[Point("async_save", phase, where, 1, 2) for phase, where in [
        ("exchanging", "put message"), ("exchanging", "wait message"), ("writing", "configure"),
        ("writing", "create data"), ("writing", "pwritev data"), ("syncing", "fsync data"),
    ]],
    *[Point("async_save", phase, where, 0, 2) for phase, where in [
        ("announcing", "create intent"), ("exchanging", "wait message"),
    ]],
    *[Point("async_save", phase, where, 0, 3, doubtful=True) for phase, where in [
        ("writing", "pwritev data"), ("committing", "commit"), ("committing", "fsync description"),
    ]],
    *[Point("async_save", phase, where, 0, 2, doubtful=True, may_be_new=True) for phase, where in [
        ("committing", "rename description"), ("cleaning", "unlink data"),
    ]],
]  # fmt: skip
"""Of background processes. A process whose work hangs is given up by its trainer."""

TRAINER_POINTS = [
    Point("async_save", "planning", "plan", 1, 2),
    Point("async_save", "agreeing", "put save/agree", 1, 2),
    Point("async_save", "agreeing", "decide save/agree", 0, 2),
    Point("async_save", "copying", "get data", 1, 2),
    Point("async_save", "copying", "get data", 0, 2),
    Point("async_save", "handing over", "hand over", 1, 3),
    Point("async_save", "handing over", "hand over", 0, 2),
]
"""Of trainers. One that goes on, goes on with its save."""


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one fault.

    Attributes:
        outcome: Of the save, from the call to the result.
        tag: Which save a load gave afterwards; None after a death of a trainer.
        lives: Whether the process in trouble was there still, once all had their result.
    """

    outcome: Outcome
    tag: int | None
    lives: bool = False


@pytest.fixture
def root() -> Iterator[Path]:
    with checkpoint_directory() as path:
        path.mkdir()
        yield path


def _seat_in(context: RankContext, points: list[Point]) -> tuple[Seat, Point]:
    first = 0
    for job, point in enumerate(points):
        if context.rank < first + point.world:
            members = tuple(range(first, first + point.world))
            return Seat(context, job, context.rank - first, point.world, members), point
        first += point.world
    raise AssertionError("more processes than the jobs have ranks")


def _pid_in(scene: Scene) -> int:
    return int((scene.directory / "fired").read_text())


def _suffer_in_the_background(context: RankContext, root: Path, points: list[Point]) -> list[Seen]:
    """One fault after another of one background process; in between, all is well."""
    seat, point = _seat_in(context, points)
    directory, seen = root / point.name, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carriers, "GRACE_SECONDS", GRACE_SECONDS)
        for number, fault in enumerate(FAULTS):
            assert not async_outcome(seat, state_of(seat.rank, seat.world, 2 * number + 1), directory).kind
            scene = Scene(root / f"{point.name} {fault}")
            here = seat.rank == point.rank
            seat.share()
            outcome = async_outcome(
                seat, state_of(seat.rank, seat.world, 2 * number + 2), directory,
                timeout_seconds=PATIENT_SECONDS if fault == SLOW else DEADLINE_SECONDS,
                storage_writer=FiringWriter(
                    where=point.where if here else "", scene=str(scene.directory), fault=fault
                ),
                planner=FiringSavePlanner(Fuse()), durable=True,
            )  # fmt: skip
            seat.share()
            lives = scene.heard("fired") and fault == SLOW and is_running(_pid_in(scene))
            if scene.heard("fired") and fault != SLOW:
                wait_until(lambda scene=scene: not is_running(_pid_in(scene)), "the end of it")  # type: ignore[misc]
            seen.append(Seen(outcome, tag_in(seat, directory), lives))
            seat.share()
        assert not async_outcome(seat, state_of(seat.rank, seat.world, 100), directory).kind
        assert tag_in(seat, directory) == 100
        assert len(children_of(os.getpid())) == 1
    seat.share()
    assert (left := set(names_in(directory)) - set(checkpoint_names(directory))) == set(), (point, left)
    return seen


def test_a_background_process_in_trouble_is_named_and_ended_and_the_next_save_works(root: Path) -> None:
    points = CHILD_POINTS
    found = run_ranks(
        _suffer_in_the_background, sum(point.world for point in points), root, points, timeout_seconds=150
    )
    for point in points:
        ranks, found = found[: point.world], found[point.world :]
        for number, fault in enumerate(FAULTS):
            assert Scene(root / f"{point.name} {fault}").heard("fired"), f"{point} was not reached: {fault}"
            _check_child(point, fault, number, [seen[number] for seen in ranks])


def _check_child(point: Point, fault: str, number: int, ranks: list[Seen]) -> None:
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
        assert seen.outcome.seconds < BOUND_SECONDS, context
        words = [f"rank {point.rank}", *(["the background process"] if rank == point.rank else [])]
        assert not seen.outcome.kind or any(word in seen.outcome.message for word in words), context
    if fault == STALLS and point.phase in ("writing", "committing"):
        assert f"while {point.phase}" in ranks[point.rank].outcome.message, context


def _suffer_as_trainer(context: RankContext, root: Path, points: list[Point]) -> list[Seen]:
    """One fault after another of one trainer; the last one is deadly."""
    seat, point = _seat_in(context, points)
    directory, fuse = root / point.name, Fuse()
    seen: list[Seen] = []
    adapter = FiringAdapter(fuse)
    others = [rank for rank in range(seat.world) if rank != point.rank]
    for number, fault in enumerate(FAULTS):
        _save(seat, directory, 2 * number + 1)
        scene = Scene(root / f"{point.name} {fault}")
        seat.share()
        with _watched_trainer(fuse):
            if seat.rank == point.rank:
                fuse.set(point.where, lambda fault=fault, scene=scene: scene.suffer(fault))  # type: ignore[misc]
            outcome = async_outcome(
                seat, state_of(seat.rank, seat.world, 2 * number + 2), directory, adapter=adapter,
                timeout_seconds=PATIENT_SECONDS if fault == SLOW else DEADLINE_SECONDS,
                planner=FiringSavePlanner(fuse),
            )  # fmt: skip
        if seat.rank in others and fault != SLOW:
            scene.say(f"done {seat.rank}")
            scene.await_all(*[f"done {rank}" for rank in others])
            if seat.rank == others[0] and fault != DIES:
                scene.release()
        if fault == DIES:
            return [*seen, Seen(outcome, None)]
        seat.share()
        seen.append(Seen(outcome, tag_in(seat, directory)))
        seat.share()
    raise AssertionError("the last fault is deadly")


def _save(seat: Seat, directory: Path, tag: int) -> None:
    outcome = async_outcome(seat, state_of(seat.rank, seat.world, tag), directory)
    assert not outcome.kind, outcome


@contextmanager
def _watched_trainer(fuse: Fuse) -> Iterator[None]:
    """Tell a fuse of exchanges in this process, and of the hand-over."""
    plain = ProcessCarrier.hand_over

    def hand_over(carrier: ProcessCarrier, task: PersistTask) -> Callable[[], PersistResult]:
        fuse.reach("hand over")
        return plain(carrier, task)

    with watched_exchanges(fuse), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessCarrier, "hand_over", hand_over)
        yield


def _go_on(context: RankContext, root: Path, points: list[Point]) -> tuple[int, list[str], list[str]]:
    """Other processes load what is there, and save over it."""
    seat, point = _seat_in(context, points)
    directory = root / point.name
    tag = tag_in(seat, directory)
    seat.share()
    _save(seat, directory, 100)
    assert tag_in(seat, directory) == 100
    seat.share()
    return tag, names_in(directory), checkpoint_names(directory)


def test_a_trainer_in_trouble_is_named_by_the_results_of_the_others_and_the_next_save_works(root: Path) -> None:
    points = TRAINER_POINTS
    found = run_ranks(
        _suffer_as_trainer, sum(point.world for point in points), root, points, timeout_seconds=150,
        return_exceptions=True,
    )  # fmt: skip
    wait_until(lambda: not background_processes(), "the end of the background processes")
    later = run_ranks(_go_on, len(found), root, points, timeout_seconds=60)
    for point in points:
        ranks, found = found[: point.world], found[point.world :]
        end = ranks.pop(point.rank)
        assert isinstance(end, RankProcessError) and "SIGKILL" in str(end), (point, end)
        for number, fault in enumerate(FAULTS):
            assert Scene(root / f"{point.name} {fault}").heard("fired"), f"{point} was not reached: {fault}"
            _check_trainer(point, fault, number, [seen[number] for seen in ranks])
        for tag, names, expected in later[: point.world]:
            assert tag == 2 * FAULTS.index(DIES) + 1, (point, tag)
            assert names == expected, point
        later = later[point.world :]


def _check_trainer(point: Point, fault: str, number: int, others: list[Seen]) -> None:
    context = (point, fault, others)
    if fault != DIES:
        assert {seen.tag for seen in others} == {2 * number + (2 if fault == SLOW else 1)}, context
    for outcome in [seen.outcome for seen in others]:
        if fault == SLOW:
            assert not outcome.kind, context
            continue
        doubt = {"InDoubtError"} if point.rank == 0 else set()
        assert outcome.kind in {"CoordinationTimeoutError", "CoordinationError", "RankFailedError"} | doubt, context
        assert f"rank {point.rank}" in outcome.message or point.rank in outcome.blamed, context
        assert outcome.seconds < BOUND_SECONDS, context


# -- a script whose background process hangs --------------------------------------------------------------------------

_SCRIPT = """
import os, signal, sys
import numpy as np
from dcp_core import api
from dcp_core import api
from dcp_core.background import carriers
from dcp_core.background.service import service
carriers.GRACE_SECONDS = 0.5
api.async_save({"w": np.ones(3)}, checkpoint_id=sys.argv[1], durable=False).get_result(60)
process = service().process("light")
print(process.pid, flush=True)
os.kill(process.pid, signal.SIGSTOP)
api.async_save({"w": np.zeros(3)}, checkpoint_id=sys.argv[1], durable=False, timeout_seconds=2.0)
"""


def test_a_script_ends_although_its_background_process_is_stopped(root: Path) -> None:
    """It has no peers, whose deadlines would end this."""
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(root / "step")], timeout=100, capture_output=True, text=True, check=False
    )
    pid = int(ended.stdout)
    assert "no answer within 2 s" in ended.stderr, ended
    wait_until(lambda: not is_running(pid), "the end of the background process")
    assert api.read(root / "step", "w").tolist() == [1.0] * 3
