"""Killed at any operation on the disk, of a save or of what follows it, a manager leaves a checkpoint that is whole.

The newest one loads, nothing that is half removed looks complete, and the next save cleans up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dcp_core.manager.manager import CheckpointManager
from dcp_core.manager.survey import check_candidate
from dcp_core.storage.commit import HEARTBEAT_EXPIRY_SECONDS
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.faults import FaultyOperations, OperationRecord
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks
from tests.core.fault_jobs import memory_directory
from tests.core.manager_jobs import DiskManager, names, newest_step, put, state_at, step_in

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

_AT_ONCE = 12
_OLD, _NEW, _NEXT = (1, 2), 3, 4


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def _place(root: Path, number: int) -> Path:
    return root / f"at {number}"


def _save(context: RankContext, root: Path, numbers: Sequence[int], durable: bool) -> None:
    """Each process is a job of its own, and dies before another operation."""
    number = numbers[context.rank]
    manager = DiskManager(_place(root, number), FaultyOperations(kill_at=number), keep=1, durable=durable)
    manager.save(_NEW, state_at(_NEW))


def _counted(root: Path, durable: bool) -> list[OperationRecord]:
    put(root, *_OLD)
    counted = FaultyOperations()
    DiskManager(root, counted, keep=1, durable=durable).save(_NEW, state_at(_NEW))
    return counted.log


@pytest.mark.parametrize("durable", [True, False])
def test_a_manager_that_is_killed_anywhere_leaves_a_whole_checkpoint(root: Path, durable: bool) -> None:
    log = _counted(root / "counted", durable)
    commit = next(record.number for record in log if (record.operation, record.name) == ("rename", ".metadata"))
    removals = [record for record in log if (record.operation, record.name) == ("unlink", ".metadata")]
    assert len(removals) == len(_OLD) and all(record.number > commit for record in removals)
    for number in range(1, len(log) + 1):
        put(_place(root, number), *_OLD)
    for first in range(1, len(log) + 1, _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, len(log) + 1))
        ended = run_ranks(_save, len(numbers), root, list(numbers), durable, return_exceptions=True)
        assert all(isinstance(each, RankProcessError) and "SIGKILL" in str(each) for each in ended)
    for record in log:
        _check(_place(root, record.number), committed=record.number > commit, where=record)


def _check(run: Path, *, committed: bool, where: OperationRecord) -> None:
    expected = _NEW if committed else _OLD[-1]
    assert newest_step(run) == expected, where
    storage = LocalStorage(run)
    for name in storage.list_directories():
        if (run / name / ".metadata").exists():
            check_candidate(storage, name, verify=True)
            assert f"step_{step_in(run / name)}" == name, where
    if (run / "latest").is_symlink():
        assert step_in(run / "latest") == expected, where
    _check_that_the_next_save_cleans_up(run, _NEXT, where)


def _check_that_the_next_save_cleans_up(run: Path, step: int, where: object) -> None:
    """All that was killed goes; half a record, which does not tell whose it is, once it is old."""
    for record in run.glob("step_*/.intent-*.tmp"):
        os.utime(record, (0, 0))
    CheckpointManager(run, keep=1, durable=False).save(step, state_at(step))
    assert names(run) == [f"latest -> step_{step}", f"step_{step}"], where


def _remove(context: RankContext, root: Path, numbers: Sequence[int]) -> None:
    """A second death, while the third manager finishes what the second one left."""
    number = numbers[context.rank]
    run = _place(root, number)
    DiskManager(run, FaultyOperations(kill_at=number), FileOperations(), keep=1).save(_NEXT, state_at(_NEXT))


def _die_in_removal(context: RankContext, root: Path, numbers: Sequence[int]) -> None:
    run = _place(root, numbers[context.rank])
    shim = FaultyOperations(kill_at=1, operations=["unlink"], name_pattern="_rank0_.bytes")
    DiskManager(run, shim, FileOperations(), keep=1).save(_NEW, state_at(_NEW))


def test_a_removal_that_is_killed_while_it_finishes_another_one_is_finished_later(root: Path) -> None:
    numbers = list(range(1, 25))
    for number in numbers:
        put(_place(root, number), *_OLD)
    for first in range(0, len(numbers), _AT_ONCE):
        some = numbers[first : first + _AT_ONCE]
        run_ranks(_die_in_removal, len(some), root, some, return_exceptions=True)
        assert all("_rank0_.bytes" in names(_place(root, number) / "step_1") for number in some)
        run_ranks(_remove, len(some), root, some, return_exceptions=True)
    for number in numbers:
        run = _place(root, number)
        assert newest_step(run) == _NEXT, number
        _check_that_the_next_save_cleans_up(run, _NEXT + 1, number)


def test_a_mailbox_that_outlived_its_killed_save_goes_with_its_directory_once_it_is_old(root: Path) -> None:
    """Processes wait there a while, after their save has failed, for others to read of that; one is killed then."""
    put(root, *_OLD)
    for step, age_seconds in ((1000, 0.0), (1001, HEARTBEAT_EXPIRY_SECONDS + 60)):
        mailbox = root / f"step_{step}" / f".mailbox-{'a' * 32}"
        mailbox.mkdir(parents=True)
        (mailbox / "message").write_bytes(b"left")
        then = time.time() - age_seconds
        os.utime(mailbox, (then, then))
    CheckpointManager(root, keep=1, durable=False).save(_NEW, state_at(_NEW))
    assert names(root) == ["latest -> step_3", "step_1000", "step_3"]
