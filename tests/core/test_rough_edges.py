"""What saves and searches meet where others are at work: what may not be read, what vanishes, what is left."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.box import Box
from dcp_core.errors import CoverageError, DcpError, NotFoundError, StorageError, UnsupportedValueError
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.manager.latest import latest_checkpoint, survey_checkpoints
from dcp_core.manager.manager import CheckpointManager
from dcp_core.manager.retention import Retention, after_commit
from dcp_core.manager.steps import is_step_name
from dcp_core.manager.survey import RootSurvey
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.storage.base import Storage
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import memory_directory

pytestmark = pytest.mark.timeout(60)


def put(root: Path, *names: str) -> None:
    for name in names:
        api.save({"w": np.arange(10.0), "step": name}, checkpoint_id=root / name, durable=False)


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


# -- what may not be read ---------------------------------------------------------------------------------------------


class Unreadable(FileOperations):
    """Refuses whatever lies in some directories, or some files, as the system does to a user without rights."""

    def __init__(self, *paths: Path) -> None:
        self.paths = tuple(map(str, paths))

    def _check(self, path: str, *, inside: bool = False) -> None:
        for refused in self.paths:
            if path.startswith(f"{refused}/") or (path == refused and not inside):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def listdir(self, path: str) -> list[str]:
        self._check(path)
        return super().listdir(path)

    def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        self._check(path, inside=True)
        return super().stat(path, follow_symlinks=follow_symlinks)

    def open_read(self, path: str) -> int:
        self._check(path)
        return super().open_read(path)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes every storage refuse some paths."""

    def set_up(*paths: Path) -> None:
        original = LocalStorage.__init__

        def made(self: LocalStorage, path: Any, operations: FileOperations | None = None) -> None:
            original(self, path, operations or Unreadable(*paths))

        monkeypatch.setattr(LocalStorage, "__init__", made)

    return set_up


@pytest.mark.parametrize("unreadable", ["step_3", "step_3/.metadata"])
def test_what_may_not_be_read_is_passed_over_with_a_reason(
    tmp_path: Path, refuse: Callable[..., None], unreadable: str
) -> None:
    put(tmp_path, "step_2", "step_3")
    refuse(tmp_path / unreadable)
    found = survey_checkpoints(tmp_path)
    assert found.path == str(tmp_path / "step_2")
    assert [each.name for each in found.skipped] == ["step_3"]
    assert "EACCES" in found.skipped[0].reason
    assert str(tmp_path / "step_3") in found.skipped[0].reason


def test_a_directory_of_another_kind_that_may_not_be_read_hides_nothing(
    tmp_path: Path, refuse: Callable[..., None]
) -> None:
    (tmp_path / "lost+found").mkdir()
    refuse(tmp_path / "lost+found")
    assert latest_checkpoint(tmp_path) is None
    put(tmp_path, "step_2")
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step_2")


def test_a_root_that_may_not_be_read_is_an_error(tmp_path: Path, refuse: Callable[..., None]) -> None:
    put(tmp_path, "step_2")
    refuse(tmp_path)
    with pytest.raises(StorageError, match="EACCES"):
        latest_checkpoint(tmp_path)


def test_a_manager_goes_on_from_what_it_may_read_and_removes_the_rest_as_ever(
    tmp_path: Path, refuse: Callable[..., None]
) -> None:
    put(tmp_path, "step_1", "step_2", "step_3")
    refuse(tmp_path / "step_3")
    manager, state = CheckpointManager(tmp_path, keep=2), {"w": np.zeros(10), "step": None}
    assert manager.resume(state) == 2
    assert state["step"] == "step_2"
    manager.save(4, state)
    assert {name for name in tree(tmp_path) if is_step_name(name)} == {"step_2", "step_3", "step_4"}


def survey_as_nobody(context: RankContext, root: Path) -> tuple[RootSurvey, int | None, str]:
    adapter, is_root = NumpyRankAdapter(), os.geteuid() == 0
    if is_root:
        warm: dict[str, Any] = {"w": np.zeros(10), "step": None}
        assert CheckpointManager(root, adapter=adapter, timeout_seconds=50).resume(warm) == 3  # who may read all
        context.channel_directory.parent.chmod(0o755)
        context.channel_directory.chmod(0o777)
        os.seteuid(65534)  # what is imported from here on may lie where this user cannot look: so all was above
    try:
        state: dict[str, Any] = {"w": np.zeros(10), "step": None}
        step = CheckpointManager(root, adapter=adapter, timeout_seconds=50).resume(state)
        return survey_checkpoints(root, adapter=adapter, timeout_seconds=50), step, str(state["step"])
    finally:
        if is_root:
            os.seteuid(0)


def test_all_ranks_pass_over_the_same_directory() -> None:
    with memory_directory() as root:
        root.chmod(0o755)
        put(root, "step_2", "step_3")
        (root / "step_3").chmod(0)
        try:
            found = run_ranks(survey_as_nobody, 2, root)
        finally:
            (root / "step_3").chmod(0o755)
    assert found[0] == found[1]
    survey, step, loaded = found[0]
    assert survey.path == str(root / "step_2")
    assert [each.name for each in survey.skipped] == ["step_3"]
    assert (step, loaded) == (2, "step_2")


# -- what vanishes ----------------------------------------------------------------------------------------------------


class Vanishing(FileOperations):
    """Another job removes the directory, empty as it is, a few times just before the first file is made in it."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.made = 0

    def create(self, path: str) -> int:
        directory = os.path.dirname(path)
        if self.left and not os.listdir(directory):
            self.left -= 1
            os.rmdir(directory)
        return super().create(path)

    def mkdir(self, path: str) -> None:
        self.made += 1
        super().mkdir(path)


def writer_on(path: Path, operations: FileOperations) -> FileSystemWriter:
    return FileSystemWriter(storage=LocalStorage(path, operations))


@pytest.mark.parametrize("times", [1, 3])
def test_a_directory_that_another_job_removes_while_it_is_empty_is_made_again(tmp_path: Path, times: int) -> None:
    operations = Vanishing(times)
    api.save({"w": np.ones(3)}, storage_writer=writer_on(tmp_path / "step_1", operations))
    assert (api.read(tmp_path / "step_1", "w") == 1).all()
    assert (operations.left, operations.made) == (0, times + 1)


def test_a_directory_that_is_removed_for_ever_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the directory is gone") as raised:
        api.save({"w": np.ones(3)}, storage_writer=writer_on(tmp_path / "step_1", Vanishing(10**9)))
    assert str(tmp_path / "step_1") in str(raised.value)
    assert tree(tmp_path) == set()


def test_a_directory_that_is_made_and_removed_by_another_job_at_once_is_made_again(tmp_path: Path) -> None:
    class Raced(FileOperations):
        races = 2

        def mkdir(self, path: str) -> None:
            if self.races:
                self.races -= 1
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            super().mkdir(path)

    api.save({"w": np.ones(3)}, storage_writer=writer_on(tmp_path / "step_1", Raced()))
    assert (api.read(tmp_path / "step_1", "w") == 1).all()


class _Gone(LocalStorage):
    """Directories that another manager removes once they have been listed."""

    def list_directories(self) -> list[str]:
        names = list(super().list_directories())
        for name in names:
            if not os.listdir(os.path.join(self.path, name)):
                os.rmdir(os.path.join(self.path, name))
        return names


def test_a_step_that_another_manager_removes_is_no_reason_to_keep_old_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, "step_1", "step_2", "step_4")
    (tmp_path / "step_3").mkdir()
    after_commit(_Gone(tmp_path), "step_4", Retention(keep=2), is_ours=is_step_name, durable=False)
    assert sorted(filter(is_step_name, os.listdir(tmp_path))) == ["step_2", "step_4"]
    assert caplog.text == ""


def test_managers_that_clear_up_while_others_begin_lose_no_save(tmp_path: Path) -> None:
    over, times = threading.Event(), Counter[str]()

    def clear() -> None:
        while not over.is_set():
            for name in os.listdir(tmp_path):
                if is_step_name(name) and times[name] < 4:
                    with suppress(OSError):
                        os.rmdir(tmp_path / name)
                        times[name] += 1

    others = threading.Thread(target=clear)
    others.start()
    try:
        for step in range(1, 20):
            CheckpointManager(tmp_path).save(step, {"w": np.full(3, step)}, durable=False)
    finally:
        over.set()
        others.join()
    assert all((api.read(tmp_path / f"step_{step}", "w") == step).all() for step in range(1, 20))


# -- what is left -----------------------------------------------------------------------------------------------------


def holes() -> dict[str, Any]:
    return {"w": ShardedArray((6,), [Box((0,), (3,))], [np.zeros(3)])}


CALLS: tuple[Callable[..., Any], ...] = (api.save, api.async_save)
REFUSED: list[tuple[str, Callable[[], dict[str, Any]], type[DcpError]]] = [
    ("a value that is no state", lambda: {"w": np.zeros(3), "bad": lambda: 0}, DcpError),
    ("holes", holes, CoverageError),
]


@pytest.mark.parametrize(("what", "state", "error"), REFUSED, ids=[what for what, *_ in REFUSED])
@pytest.mark.parametrize("call", CALLS, ids=["save", "async_save"])
def test_a_save_that_is_refused_leaves_nothing(
    tmp_path: Path, what: str, state: Callable[[], dict[str, Any]], error: type[DcpError], call: Callable[..., Any]
) -> None:
    adapter = NumpyRankAdapter() if what == "holes" else None

    def save() -> None:
        result = call(state(), checkpoint_id=tmp_path / "runs" / "a" / "step_1", adapter=adapter)
        if call is api.async_save:
            result.get_result(50)

    with pytest.raises(error):
        save()
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("there", [[], ["runs"], ["runs", "runs/step_1"], ["runs", "runs/step_1", "runs/step_1/notes"]])
def test_what_was_there_before_stays(tmp_path: Path, there: list[str]) -> None:
    for name in there:
        (tmp_path / name).mkdir()
    with pytest.raises(CoverageError):
        api.save(holes(), checkpoint_id=tmp_path / "runs" / "step_1", adapter=NumpyRankAdapter())
    assert tree(tmp_path) == set(there)


def test_what_another_job_has_put_there_meanwhile_stays(tmp_path: Path) -> None:
    class Watched(StandardSavePlanner):
        def build_global_plan(self, all_plans: Any) -> Any:
            (tmp_path / "runs" / "step_1" / "notes").write_text("of another job")
            return super().build_global_plan(all_plans)

    with pytest.raises(CoverageError):
        api.save(holes(), checkpoint_id=tmp_path / "runs" / "step_1", adapter=NumpyRankAdapter(), planner=Watched())
    assert tree(tmp_path) == {"runs", "runs/step_1", "runs/step_1/notes"}


def test_a_directory_in_which_a_checkpoint_was_completed_is_no_new_one_any_more(tmp_path: Path) -> None:
    writer = writer_on(tmp_path / "step_1", FileOperations())
    api.save({"w": np.ones(3)}, storage_writer=writer)
    shutil.rmtree(tmp_path / "step_1")
    (tmp_path / "step_1").mkdir()  # whoever made this wants it
    with pytest.raises(CoverageError):
        api.save(holes(), storage_writer=writer, adapter=NumpyRankAdapter())
    assert tree(tmp_path) == {"step_1"}


def test_a_storage_of_somebody_else_keeps_its_directories() -> None:
    assert Storage.remove_new_directories is not LocalStorage.remove_new_directories
    assert Storage.keep_directories is not LocalStorage.keep_directories


def refused_on_ranks(context: RankContext, root: Path) -> list[str]:
    """Rank 1 brings what the others do not know of: a shard of another shape, then nothing that can be saved."""
    adapter, said = NumpyRankAdapter(), []
    shape = (6,) if context.rank == 0 else (7,)
    states: list[dict[str, Any]] = [
        {"w": ShardedArray(shape, [Box((3 * context.rank,), (3,))], [np.zeros(3)])},
        {"w": np.zeros(3), "bad": (lambda: 0) if context.rank else 0},
    ]
    for number, state in enumerate(states):
        for call in CALLS:
            try:
                found: Any = call(state, checkpoint_id=root / f"step_{number}", adapter=adapter, timeout_seconds=50)
                if call is api.async_save:
                    found.get_result(50)
            except (DcpError, UnsupportedValueError) as error:
                said.append(type(error).__name__)
    api.wait_all()
    return said


def test_a_save_that_ranks_disagree_about_leaves_nothing(tmp_path: Path) -> None:
    said = run_ranks(refused_on_ranks, 2, tmp_path)
    assert said[0] == said[1]
    assert len(said[0]) == 4
    assert tree(tmp_path) == set()


def test_not_found_is_still_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        api.load({"w": np.zeros(3)}, checkpoint_id=tmp_path / "nowhere")
    assert tree(tmp_path) == set()
