"""The power fails while several processes save: ranks, background processes, a manager that removes what is old."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.errors import DcpError, NotFoundError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.manager.manager import CheckpointManager
from dcp_core.manager.survey import check_candidate
from dcp_core.storage.base import Storage
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.power_loss import Recorded, RecordedOperations, read_log
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.background_processes import check_none_left, mark
from tests.core.async_jobs import RESULT_SECONDS, async_save
from tests.core.fault_jobs import Seat, memory_directory, poison_of, state_of, whole_tag
from tests.core.manager_jobs import state_at, step_in
from tests.core.power_jobs import RecordingWriter, outcomes, record

pytestmark = [pytest.mark.faults, pytest.mark.timeout(170)]

OLD, NEW = 1, 2


@pytest.fixture
def root() -> Iterator[Path]:
    mark()
    with memory_directory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCP_BACKGROUND_LOG_DIR", str(path))
        yield path.resolve()
    check_none_left()


def _save(context: RankContext, directory: Path, tag: int) -> None:
    seat = Seat.of(context)
    seat.save(state_of(seat.rank, seat.world, tag), checkpoint_id=directory)


def _save_recorded(context: RankContext, place: Path, log_file: Path, in_background: bool) -> None:
    seat = Seat.of(context)
    state = state_of(seat.rank, seat.world, NEW)
    writer = RecordingWriter(place, str(place), str(log_file))
    if in_background:
        async_save(seat, state, None, storage_writer=writer, durable=True).get_result(RESULT_SECONDS)
    else:
        seat.save(state, storage_writer=writer)


def _loaded(directory: Path) -> str:
    """Load all in one process: the number of a save; empty where there is no checkpoint."""
    target = poison_of(0, 1, 1, own=False)
    try:
        api.load(target, checkpoint_id=directory, adapter=NumpyRankAdapter())
    except NotFoundError:
        return ""
    return str(whole_tag(target, 0, 1, 1))


def _check(root: Path, before: Path, log: list[Recorded], old: str) -> None:
    """The old one or the new one, whole, and at the end the new one."""
    seen = set()
    for count, manner, found in outcomes(root, before, log, _loaded):
        assert found in (old, str(NEW)), (count, manner, log[max(0, count - 1)])
        assert found == str(NEW) or count < len(log), manner
        seen.add(found)
    assert seen == {old, str(NEW)}


@pytest.mark.parametrize("in_background", [False, True], ids=["waiting", "in the background"])
@pytest.mark.parametrize("over", [False, True], ids=["first", "over that of a larger world"])
def test_a_save_of_several_ranks_is_whole_or_not_there(root: Path, in_background: bool, over: bool) -> None:
    place, before, log_file = root / "work", root / "before", root / "log"
    place.mkdir()
    if over:
        run_ranks(_save, 4, place, OLD)
    shutil.copytree(place, before)
    run_ranks(_save_recorded, 2, place, log_file, in_background)
    log = read_log(log_file)
    assert len({entry.file >> 32 for entry in log if entry.file >= 0}) == 2, "both processes have written"
    _check(root, before, log, str(OLD) if over else "")


def test_an_offline_reshard_is_whole_or_not_there(root: Path) -> None:
    run_ranks(_save, 4, root / "source", NEW)
    run_ranks(_save, 3, root / "work", OLD)

    def convert(place: Path, operations: RecordedOperations) -> None:
        writer = FileSystemWriter(storage=LocalStorage(place, operations))
        convert_to_dcp(FileSystemReader(root / "source"), place, storage_writer=writer)

    before, log = record(root, convert)
    _check(root, before, log, str(OLD))


# --- a manager -------------------------------------------------------------------------------------------------------

FIRST, STEPS = 1, (2, 3)


class RecordingManager(CheckpointManager):
    """A manager that writes down what it does, its background process as well."""

    log_file: Path

    def _open_root(self) -> Storage:
        return LocalStorage(self.root, RecordedOperations(self.root, self.log_file))

    def _place(self, name: str) -> dict[str, Any]:
        return {"storage_writer": RecordingWriter(Path(self.root) / name, self.root, str(self.log_file))}


def _save_steps(context: RankContext, place: Path, log_file: Path, in_background: bool) -> list[int]:
    """Save all steps; how many operations had been done when each save was complete for its caller."""
    manager, done = RecordingManager(place, keep=1), []
    manager.log_file = log_file
    for step in STEPS:
        if in_background:
            manager.async_save(step, state_at(step)).get_result(RESULT_SECONDS)
        else:
            manager.save(step, state_at(step))
        done.append(len(read_log(log_file)))
    return done


def _resumed(run: Path) -> str:
    """What a new job goes on from, and where the link leads."""
    state = state_at(-1)
    step = CheckpointManager(run).resume(state) or 0
    assert not step or (state["step"] == step and np.array_equal(state["w"], state_at(step)["w"])), state
    storage = LocalStorage(run)
    for name in storage.list_directories():
        if _is_whole(lambda name=name: check_candidate(storage, name)):  # type: ignore[misc]
            assert f"step_{step_in(run / name)}" == name, name
    linked = step_in(run / "latest") if (run / "latest").is_symlink() else 0
    return f"{step} {linked}"


def _is_whole(check: Callable[[], object]) -> bool:
    try:
        check()
    except DcpError:
        return False
    return True


@pytest.mark.parametrize("in_background", [False, True], ids=["waiting", "in the background"])
def test_a_manager_never_loses_the_old_checkpoint_before_the_new_one_is_safe(root: Path, in_background: bool) -> None:
    place, before, log_file = root / "work", root / "before", root / "log"
    CheckpointManager(place).save(FIRST, state_at(FIRST))
    shutil.copytree(place, before, symlinks=True)
    [done] = run_ranks(_save_steps, 1, place, log_file, in_background)
    log = read_log(log_file)
    assert sorted(os.listdir(place)) == ["latest", f"step_{STEPS[-1]}"] and len(log) == done[-1]
    for count, manner, found in outcomes(root, before, log, _resumed):
        step, linked = map(int, found.split())
        returned = FIRST + sum(each <= count for each in done)
        where = (count, manner, log[max(0, count - 1)])
        assert returned <= step <= returned + 1, where
        assert returned <= linked <= step, where
