"""A manager saves, keeps the last checkpoints, and goes on from the newest one that is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.errors import (
    ArgumentError,
    CorruptError,
    DcpError,
    MissingKeysError,
    NotFoundError,
    ReplicasDifferError,
    StorageError,
)
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.manager.manager import CheckpointManager
from dcp_core.manager.retention import Retention, after_commit
from dcp_core.storage.base import Storage
from dcp_core.storage.intent import post_intent
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.faults import FaultyOperations, OperationRecord
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import Outcome, Seat, outcome_of
from tests.core.manager_jobs import DiskManager, names, newest_step, put, state_at, step_in

pytestmark = pytest.mark.timeout(120)


def steps(root: Path) -> list[int]:
    """The steps that lie in a directory, as numbers."""
    return sorted(int(name.partition("_")[2]) for name in names(root) if name.startswith("step_"))


# -- what stays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({}, [10, 20, 30, 40, 50, 60]),
        ({"keep": 1}, [60]),
        ({"keep": 3}, [40, 50, 60]),
        ({"keep": 1, "keep_every": 20}, [20, 40, 60]),
        ({"keep": 2, "keep_every": 30}, [30, 50, 60]),
        ({"keep": 9}, [10, 20, 30, 40, 50, 60]),
        ({"keep_every": 20}, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_the_newest_stay_and_milestones_besides(tmp_path: Path, how: dict[str, int], kept: list[int]) -> None:
    manager = CheckpointManager(tmp_path / "run", durable=False, **how)  # type: ignore[arg-type]  # numbers, all of them
    for step in range(10, 61, 10):
        manager.save(step, state_at(step))
        assert os.readlink(tmp_path / "run" / "latest") == f"step_{step}"
    assert steps(tmp_path / "run") == kept and newest_step(tmp_path / "run") == 60
    assert all(step_in(tmp_path / "run" / f"step_{step}") == step for step in kept)
    assert step_in(tmp_path / "run" / "latest") == 60


def test_saves_in_the_background_keep_as_many(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    with CheckpointManager(tmp_path, keep=2, durable=False) as manager:
        for step in range(1, 6):
            state = state_at(step)
            manager.async_save(step, state, callback=lambda: seen.append(steps(tmp_path)))
            state["w"][...] = -1
    assert seen == [[1], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert names(tmp_path) == ["latest -> step_5", "step_4", "step_5"] and newest_step(tmp_path) == 5


def test_what_was_committed_stays_though_higher_steps_lie_there(tmp_path: Path) -> None:
    put(tmp_path, 200, 300)
    CheckpointManager(tmp_path, keep=1, durable=False).save(100, state_at(100))
    assert steps(tmp_path) == [100]
    put(tmp_path, 200, 300)
    CheckpointManager(tmp_path, keep=2, durable=False).save(150, state_at(150))
    assert steps(tmp_path) == [150, 300]


def test_what_another_manager_committed_later_stays(tmp_path: Path) -> None:
    put(tmp_path, 1, 2, 3)
    for step in (1, 3):  # by the clock of the storage, another job commits them just after ours
        os.utime(tmp_path / f"step_{step}" / ".metadata", (4e9, 4e9))
    manager = CheckpointManager(tmp_path, keep=1, durable=False)
    manager.save(5, state_at(5))
    assert steps(tmp_path) == [1, 3, 5]
    os.utime(tmp_path / "step_5" / ".metadata", (4e9, 4e9))
    after_commit(LocalStorage(tmp_path), "step_3", Retention(1), is_ours=lambda name: True)
    assert steps(tmp_path) == [3, 5]  # at one moment, the higher number is the later one
    after_commit(LocalStorage(tmp_path), "step_5", Retention(1), is_ours=lambda name: True)
    assert steps(tmp_path) == [5]


class _Late(LocalStorage):
    """A directory in which another job commits a step once it has been looked at."""

    def folder(self, name: str) -> Storage:
        found = super().folder(name)
        if name == "step_2":
            self.looks = getattr(self, "looks", 0) + 1
            if self.looks == 2:
                put(Path(self.path), 2)
        return found


def test_what_another_manager_commits_while_we_look_stays(tmp_path: Path) -> None:
    put(tmp_path, 1, 5)
    (tmp_path / "step_2").mkdir()
    after_commit(_Late(tmp_path), "step_5", Retention(1), is_ours=lambda name: True)
    assert steps(tmp_path) == [2, 5] and step_in(tmp_path / "step_2") == 2


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=2, durable=False)
    for step in (1, 2, 2, 2):
        manager.save(step, state_at(step))
    assert steps(tmp_path) == [1, 2]


def test_a_torn_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    put(tmp_path, 1, 2, 3)
    (tmp_path / "step_3" / "_rank0_.safetensors").unlink()
    CheckpointManager(tmp_path, keep=2, durable=False).save(4, state_at(4))
    assert steps(tmp_path) == [2, 3, 4]  # the damaged one is the newest but one: it stays to be looked at


# -- what is nobody's business -----------------------------------------------------------------------------------------


def test_nothing_is_removed_that_is_no_checkpoint_of_the_manager(tmp_path: Path) -> None:
    put(tmp_path, 1, 2, 3)
    put(tmp_path / "elsewhere", 4)
    for name in ("best", "step_final", "old_step_1"):
        shutil.copytree(tmp_path / "step_1", tmp_path / name)
    (tmp_path / "step_0").symlink_to(tmp_path / "elsewhere" / "step_4")
    (tmp_path / "step_7.txt").write_text("mine")
    (tmp_path / "step_9").mkdir()
    (tmp_path / "step_9" / "_rank0_.safetensors").write_bytes(b"somebody copies this right now")
    (tmp_path / "step_2" / "notes.md").write_text("mine")
    (tmp_path / "step_2" / "_rank0_.backup.safetensors").write_text("mine")
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5" / ".metadata").write_bytes(b"\x80\x04 of another program" + bytes(99))
    (tmp_path / "step_5" / "__0_0.distcp").write_bytes(b"another program's")
    before = {name for name in names(tmp_path) if name not in ("step_1", "step_3")}
    CheckpointManager(tmp_path, keep=1, durable=False).save(10, state_at(10))
    assert set(names(tmp_path)) == before | {"step_10", "latest -> step_10"}
    assert names(tmp_path / "step_2") == ["_rank0_.backup.safetensors", "notes.md"]
    assert names(tmp_path / "step_5") == [".metadata", "__0_0.distcp"]
    assert names(tmp_path / "step_9") == ["_rank0_.safetensors"]
    assert step_in(tmp_path / "best") == 1 and step_in(tmp_path / "elsewhere" / "step_4") == 4


def test_what_has_a_damaged_description_stays_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, 1, 2)
    description = tmp_path / "step_1" / ".metadata"
    content = bytearray(description.read_bytes())
    content[-1] ^= 1  # in the last block, which names the files: the header is sound
    description.write_bytes(content)
    before = names(tmp_path / "step_1")
    CheckpointManager(tmp_path, keep=1, durable=False).save(3, state_at(3))
    assert steps(tmp_path) == [1, 3] and names(tmp_path / "step_1") == before
    assert "cannot be read, so the checkpoint stays" in caplog.text


def test_a_checkpoint_that_is_being_saved_over_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, 1)
    post_intent(LocalStorage(tmp_path / "step_1"), "ab" * 16, None)  # of this process, which lives
    CheckpointManager(tmp_path, keep=1, durable=False).save(2, state_at(2))
    assert step_in(tmp_path / "step_1") == 1 and "is under way" in caplog.text
    (tmp_path / "step_1" / f".intent-{'ab' * 16}").unlink()
    CheckpointManager(tmp_path, keep=1, durable=False).save(3, state_at(3))
    assert steps(tmp_path) == [3]


def test_a_name_latest_that_is_no_link_stays_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").mkdir()
    manager = CheckpointManager(tmp_path, keep=1, durable=False)
    manager.save(1, state_at(1))
    manager.save(2, state_at(2))
    assert names(tmp_path) == ["latest", "step_2"] and "is no link" in caplog.text


# -- the order of it ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_only_after_the_commit_and_its_description_first(tmp_path: Path) -> None:
    put(tmp_path, 1)
    log: list[OperationRecord] = []
    CheckpointManager.save(DiskManager(tmp_path, FaultyOperations(before=log.append), keep=1), 2, state_at(2))
    deeds = [(record.operation, record.name) for record in log]
    commit = deeds.index(("rename", ".metadata"))
    link = deeds.index(("rename", "latest"))
    description = deeds.index(("unlink", ".metadata"))
    data = min(deeds.index(("unlink", f"_rank0_.{kind}")) for kind in ("safetensors", "bytes"))
    assert commit < link < description < data < deeds.index(("rmdir", "step_1"))
    assert ("fsync_directory", tmp_path.name) in deeds[link:description]
    assert ("fsync_directory", "step_1") in deeds[description:data]


def _save_in_the_background(manager: CheckpointManager, step: int) -> None:
    manager.async_save(step, state_at(step)).get_result(60)


def _save_plainly(manager: CheckpointManager, step: int) -> None:
    manager.save(step, state_at(step))


@pytest.mark.parametrize("save", [_save_plainly, _save_in_the_background])
def test_a_save_that_fails_removes_nothing(tmp_path: Path, save: Callable[[CheckpointManager, int], None]) -> None:
    put(tmp_path, 1, 2)
    broken = FaultyOperations(fail_at=1, operations=["rename"], name_pattern=".metadata")
    manager = DiskManager(tmp_path, FileOperations(), broken, keep=1)
    with pytest.raises(StorageError):
        save(manager, 3)
    assert newest_step(tmp_path) == 2 and {1, 2} <= set(steps(tmp_path)) and not os.path.lexists(tmp_path / "latest")
    save(manager, 3)
    assert steps(tmp_path) == [3]


def test_what_the_link_leads_to_stays_where_the_link_cannot_be_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, 1, 2)
    (tmp_path / "latest").symlink_to("step_1")
    stuck = FaultyOperations(fail_at=1, operations=["rename"], name_pattern="latest")
    DiskManager(tmp_path, stuck, FileOperations(), keep=1).save(3, state_at(3))
    assert "could not let 'latest'" in caplog.text
    assert [name for name in names(tmp_path) if name[0] != "."] == ["latest -> step_1", "step_1", "step_3"]
    CheckpointManager(tmp_path, keep=1, durable=False).save(4, state_at(4))
    assert names(tmp_path) == ["latest -> step_4", "step_4"]


@pytest.mark.faults
def test_whatever_fails_after_a_commit_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counted = FaultyOperations()
    put(tmp_path / "counted", 1, 2)
    DiskManager(tmp_path / "counted", counted, FileOperations(), keep=1).save(3, state_at(3))
    assert len(counted.log) > 15
    for number in range(1, len(counted.log) + 1):
        root = tmp_path / f"at {number}"
        put(root, 1, 2)
        caplog.clear()
        DiskManager(root, FaultyOperations(fail_at=number), FileOperations(), keep=1).save(3, state_at(3))
        assert newest_step(root) == 3 and "could not" in caplog.text, counted.log[number - 1]
        CheckpointManager(root, keep=1).save(4, state_at(4))
        assert names(root) == ["latest -> step_4", "step_4"], number


def test_what_is_no_error_of_ours_is_a_warning_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "list_directories", lambda storage: 1 / 0)
    CheckpointManager(tmp_path, keep=1, durable=False).save(1, state_at(1))
    assert "ZeroDivisionError" in caplog.text and step_in(tmp_path / "step_1") == 1


# -- going on ----------------------------------------------------------------------------------------------------------


def test_resume_loads_the_newest_or_leaves_the_state_alone(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep=2, durable=False)
    state = state_at(-1)
    assert manager.resume(state) is None and manager.latest() is None and state["step"] == -1
    for step in (8, 9, 10):
        manager.save(step, state_at(step))
    put(tmp_path / "run" / "best", 99)
    assert manager.resume(state) == 10 and state["step"] == 10 and np.all(state["w"] == 10)
    assert manager.latest() == str(tmp_path / "run" / "step_10")


def test_resume_goes_back_to_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, 1, 2, 3)
    (tmp_path / "step_3" / ".metadata").unlink()
    file = tmp_path / "step_2" / "_rank0_.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    for verify in (False, True):
        state = state_at(-1)
        caplog.clear()
        assert CheckpointManager(tmp_path).resume(state, verify=verify) == 1 and state["seen"] == {1}
        assert "'step_3'" in caplog.text and "'step_2'" in caplog.text and "checksum" in caplog.text
    shutil.rmtree(tmp_path / "step_1")
    with pytest.raises(CorruptError, match="_rank0_"):
        CheckpointManager(tmp_path).resume(state_at(-1))


def test_a_state_that_does_not_fit_is_an_error_not_a_reason_to_go_back(tmp_path: Path) -> None:
    put(tmp_path, 1, 2)
    with pytest.raises(MissingKeysError):
        CheckpointManager(tmp_path).resume(state_at(-1) | {"new": np.ones(2)})
    assert CheckpointManager(tmp_path).resume({"step": 0}, planner=None) == 2


def test_resume_waits_for_what_is_in_flight(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, durable=False)
    manager.async_save(4, state_at(4))
    assert manager.resume(state_at(-1)) == 4


# -- errors and the end ------------------------------------------------------------------------------------------------


def _failing(tmp_path: Path) -> tuple[CheckpointManager, Any]:
    """A manager whose saves cannot commit, and the disk that it saves to."""
    broken = FaultyOperations(fail_at=1, forever=True, operations=["rename"], name_pattern=".metadata")
    return DiskManager(tmp_path, FileOperations(), broken, keep=1, durable=False), broken


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("call", ["wait", "close", "save", "async_save", "resume"])
def test_a_failure_in_the_background_surfaces_at_the_next_call(tmp_path: Path, call: str) -> None:
    put(tmp_path, 1, 2)
    manager, _ = _failing(tmp_path)
    manager.async_save(3, state_at(3))
    arguments: tuple[Any, ...] = {"save": (4, state_at(4)), "async_save": (4, state_at(4))}.get(call, ())
    arguments = (state_at(-1),) if call == "resume" else arguments
    with pytest.raises(DcpError, match="rename"):
        getattr(manager, call)(*arguments)
    assert newest_step(tmp_path) == 2 and {1, 2} <= set(steps(tmp_path))
    manager.close()  # once is enough


def test_the_end_of_a_block_raises_what_failed_unless_the_block_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DcpError, match="rename"), _failing(tmp_path)[0] as manager:
        manager.async_save(3, state_at(3))
    with pytest.raises(KeyError, match="of the block"), _failing(tmp_path)[0] as manager:  # noqa: PT012
        manager.async_save(3, state_at(3))
        raise KeyError("of the block")
    assert "a save into" in caplog.text


def test_the_end_of_a_block_waits_though_the_block_failed(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="block"), CheckpointManager(tmp_path, durable=False) as manager:  # noqa: PT012
        manager.async_save(3, state_at(3))
        raise KeyError("block")
    assert newest_step(tmp_path) == 3


def test_saves_go_by_every(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every=5)
    assert [step for step in range(21) if manager.should_save(step)] == [5, 10, 15, 20]
    assert [step for step in range(3) if CheckpointManager(tmp_path).should_save(step)] == [1, 2]


@pytest.mark.parametrize(
    "how",
    [
        {"keep": 0}, {"keep": True}, {"keep": 1.0}, {"every": 0}, {"every": None}, {"keep_every": -1},
        {"durable": None}, {"check_replicas": 1}, {"timeout_seconds": 0}, {"storage_options": "key"},
    ],
)  # fmt: skip
def test_a_manager_refuses_what_makes_no_sense_before_the_first_step(tmp_path: Path, how: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(how))):
        CheckpointManager(tmp_path, **how)


def test_a_root_that_nobody_knows_is_told_before_the_first_step() -> None:
    for root in ("nope://bucket/run", "s3:/bucket/run", "s3://", Path("s3://bucket/run")):
        with pytest.raises(ArgumentError, match=r"nope|s3:"):
            CheckpointManager(root)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=np.int64(1), every=np.int32(5), durable=False)  # type: ignore[arg-type]  # that is the point
    for step in (5, 10):
        assert manager.should_save(np.int64(step))  # type: ignore[arg-type]  # so is that
        manager.save(step, state_at(step))
    assert steps(tmp_path) == [10]
    for bad in (1.0, True, "5", None, -5):
        with pytest.raises(ArgumentError, match="step"):
            manager.should_save(bad)  # type: ignore[arg-type]  # and that


# -- going back --------------------------------------------------------------------------------------------------------


def test_resume_goes_back_to_the_step_that_is_asked_for(tmp_path: Path) -> None:
    put(tmp_path, 10, 20, 30)
    manager = CheckpointManager(tmp_path)
    state = state_at(0)
    assert manager.resume(state, step=20) == 20
    assert state["step"] == 20 and (state["w"] == 20.0).all()
    with pytest.raises(NotFoundError, match="no whole checkpoint of step 25"):
        manager.resume(state, step=25)
    with pytest.raises(ArgumentError, match="step"):
        manager.resume(state, step=-1)
    assert state["step"] == 20


@pytest.mark.parametrize("verify", [False, True])
def test_a_damaged_step_that_is_asked_for_is_an_error_not_a_reason_to_go_back(tmp_path: Path, verify: bool) -> None:
    put(tmp_path, 10, 20)
    path = tmp_path / "step_20" / "_rank0_.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(NotFoundError if verify else CorruptError, match="_rank0_.safetensors"):
        CheckpointManager(tmp_path).resume(state_at(0), step=20, verify=verify)


def test_a_higher_step_that_lies_beside_a_new_one_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, 10, 20, 30)
    os.truncate(tmp_path / "step_30" / "_rank0_.safetensors", 5)  # nobody would go on from this one
    manager = CheckpointManager(tmp_path, durable=False)
    assert manager.resume(state_at(0), step=10) == 10
    for step in (11, 12):
        manager.save(step, state_at(step))
    manager.save(40, state_at(40))
    warned = [record.getMessage() for record in caplog.records if "higher step" in record.getMessage()]
    assert len(warned) == 1
    assert "'step_11' was saved while 'step_20' of a higher step" in warned[0] and "step_30" not in warned[0]


def test_resume_refuses_what_the_manager_decides(tmp_path: Path) -> None:
    put(tmp_path, 10)
    state = state_at(0)
    for options in ({"checkpoint_id": tmp_path / "step_9"}, {"no_dist": True}, {"use_collectives": False}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            CheckpointManager(tmp_path).resume(state, **options)
    assert state["step"] == 0


def test_a_save_refuses_what_the_manager_decides(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for options in ({"checkpoint_id": "x"}, {"storage_writer": FileSystemWriter()}, {"use_collectives": False}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            manager.save(1, {}, **options)
    for step in (-1, 1.5, True, "3", 10**18, None):
        with pytest.raises(ArgumentError, match="step"):
            manager.save(step, {})  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ArgumentError, match="callback"):
        manager.async_save(1, {}, callback=3)  # type: ignore[arg-type]  # so is that
    assert not (tmp_path / "latest").exists() and names(tmp_path) == []
    manager.save(np.int64(7), {"a": 1})  # type: ignore[arg-type]  # a whole number all the same
    assert steps(tmp_path) == [7]


# -- ranks -------------------------------------------------------------------------------------------------------------


def _matrix(step: int) -> Any:
    return np.arange(24.0).reshape(6, 4) + step


def _on_ranks(context: RankContext, root: Path) -> tuple[list[int | None], Outcome, str | None]:
    seat = Seat.of(context)

    def state(step: int) -> dict[str, Any]:
        return {
            "w": ShardedArray.cut(_matrix(step), even_boxes((6, 4), seat.world, seat.rank), "float64"),
            "same": np.full(3, float(step)),
        }

    how = {"adapter": NumpyRankAdapter(), "timeout_seconds": 30.0}
    resumed: list[int | None] = []
    with CheckpointManager(root, keep=2, durable=False, check_replicas=True, **how) as manager:  # type: ignore[arg-type]  # two kinds in one dict
        resumed.append(manager.resume(state(0)))
        for step in (1, 2, 3):
            manager.save(step, state(step))
        for step in (4, 5):
            manager.async_save(step, state(step))
        target = state(-1)
        resumed.append(manager.resume(target))
        assert np.array_equal(target["w"].arrays[0], state(5)["w"].arrays[0])
        off = state(6) | {"same": np.full(3, 6.0 + seat.rank)}
        differs = outcome_of(manager.save, 6, off)
        latest = manager.latest()
    seat.share()
    return resumed, differs, latest


def _differ(context: RankContext, root: Path) -> list[Outcome]:
    """What is wrong on rank 1 only, or differs between ranks; then a save that is right."""
    seat, rank = Seat.of(context), context.rank
    how: Any = {"adapter": NumpyRankAdapter(), "timeout_seconds": 30.0, "durable": False}
    manager = CheckpointManager(root, **how)
    ends = [
        outcome_of(manager.save, -1 if rank == 1 else 1, {"a": 1}),
        outcome_of(manager.async_save, "1" if rank == 1 else 1, {"a": 1}),
        outcome_of(manager.save, 1, {"a": 1}, **({"no_dist": True} if rank == 1 else {})),
        outcome_of(manager.async_save, 1, {"a": 1}, callback=3 if rank == 1 else None),
        outcome_of(manager.resume, {"a": 1}, step=-1 if rank == 1 else None),
        outcome_of(manager.resume, {"a": 1}, step=rank),
        outcome_of(CheckpointManager(root, every=1 + rank, **how).resume, {"a": 1}),
        outcome_of(CheckpointManager(root, keep=1 + rank, **how).resume, {"a": 1}),
        outcome_of(CheckpointManager(root, keep_every=1 + rank, **how).resume, {"a": 1}),
        outcome_of(CheckpointManager(root / f"of {rank}", **how).resume, {"a": 1}),
        outcome_of(manager.resume, {"a": 1}, verify=rank == 1),
        outcome_of(manager.resume, {"a": 1}, **({"checkpoint_id": root} if rank == 1 else {})),
    ]
    manager.save(1, {"a": 1})
    seat.share()
    return ends


def test_what_is_wrong_on_one_rank_is_told_to_all_ranks(tmp_path: Path) -> None:
    expected = [
        ("ArgumentError", "rank 1: step must be"),
        ("ArgumentError", "rank 1: step must be"),
        ("ArgumentError", "rank 1: no_dist: a CheckpointManager"),
        ("ArgumentError", "rank 1: callback must be"),
        ("ArgumentError", "rank 1: step must be"),
        ("ArgumentsDifferError", "step is 0 on rank 0"),
        ("ArgumentsDifferError", "every is 1 on rank 0"),
        ("ArgumentsDifferError", "keep is 1 on rank 0"),
        ("ArgumentsDifferError", "keep_every is 1 on rank 0"),
        ("ArgumentsDifferError", "root is "),
        ("ArgumentsDifferError", "verify is False on rank 0"),
        ("ArgumentError", "rank 1: checkpoint_id: a CheckpointManager"),
    ]
    for ends in run_ranks(_differ, 3, tmp_path, timeout_seconds=60.0):
        for end, (kind, text) in zip(ends, expected, strict=True):
            assert (end.kind, text in end.message) == (kind, True), (end, text)
    assert names(tmp_path) == ["latest -> step_1", "step_1"]


def test_ranks_save_together_and_rank_0_removes(tmp_path: Path) -> None:
    for resumed, differs, latest in run_ranks(_on_ranks, 3, tmp_path, timeout_seconds=60.0):
        assert resumed == [None, 5] and latest == str(tmp_path / "step_5")
        assert differs.kind == ReplicasDifferError.__name__
    assert names(tmp_path) == ["latest -> step_5", "step_4", "step_5"]  # the save that was refused left nothing
    assert np.array_equal(api.read(tmp_path / "latest", "w"), _matrix(5))
