"""What the operating system really refuses: as a user without rights, and beyond a real limit on the size of files.

Ranks give up their rights for the time of a call, where they have any; the rest of the tests needs them.
"""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from dcp_core.api import load, save
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.manager.manager import CheckpointManager
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.async_jobs import MODES, async_outcome
from tests.core.fault_jobs import (
    SOON_SECONDS,
    Outcome,
    Seat,
    checkpoint_names,
    is_untouched,
    loaded_tag,
    memory_directory,
    names_in,
    outcome_of,
    poison_of,
    state_of,
)

pytestmark = pytest.mark.faults

_Result = TypeVar("_Result")

WORLD = 3
_OLD, _NEW, _AFTER = 1, 2, 3
_NOBODY = 65534
_LIMIT_BYTES = 1 << 16
_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION_3 = 0x20080522


@contextmanager
def nobody() -> Iterator[None]:
    """Be a user without rights."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(_NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def give_up_powers() -> None:
    """Be a root that the rights of files hold for, to the end of this thread and of what it starts.

    Root owns what this process made, and may run an interpreter that lies in root's own home, which nobody else may.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):  # else a program that is started would have all again
            raise OSError(ctypes.get_errno(), "prctl")
    if libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset")


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        path.chmod(0o777)
        yield path


def _open_up(context: RankContext) -> Seat:
    """Let everybody use what the ranks talk through, and import now what a user without rights may not."""
    if os.geteuid() == 0:
        context.channel_directory.parent.chmod(0o755)
        context.channel_directory.chmod(0o777)
    seat = Seat.of(context)
    with memory_directory() as own:
        alone = {"use_collectives": False}
        seat.save(state_of(seat.rank, 1, 1), checkpoint_id=own, **alone)
        seat.load(poison_of(seat.rank, 1), checkpoint_id=own, **alone)
    seat.share()
    return seat


@contextmanager
def _barred(path: Path, mode: int, bars: bool) -> Iterator[None]:
    """Give a path other rights, on one rank."""
    before = stat.S_IMODE(path.stat().st_mode)
    if bars:
        path.chmod(mode)
    try:
        yield
    finally:
        if bars:
            path.chmod(before)


def _check_one_error(ranks: Sequence[Outcome], kind: str, *texts: str) -> None:
    assert {(seen.kind, seen.message) for seen in ranks} == {(kind, ranks[0].message)}, ranks
    assert all(text in ranks[0].message for text in texts), ranks[0]
    assert max(seen.seconds for seen in ranks) < SOON_SECONDS, ranks


# --- saves -------------------------------------------------------------------------------------------


def _save_where_nothing_may_be_written(context: RankContext, root: Path, mode: str) -> list[Outcome]:
    """Save over a checkpoint in a directory that is read-only, then into a new one that cannot be made."""
    seat, directory = _open_up(context), root / "step"
    with _without_rights(mode):
        seat.save(state_of(seat.rank, WORLD, _OLD), checkpoint_id=directory)
        if seat.rank == 0:
            (root / "closed").mkdir(0o555)
        seat.share()
        before = names_in(directory)
        with _barred(directory, 0o555, seat.rank == 0):
            seat.share()
            found = [_try(seat, place, mode) for place in (directory, root / "closed" / "new")]
            assert (names_in(directory), names_in(root / "closed")) == (before, [])
            assert loaded_tag(seat, directory) == _OLD
            seat.share()
        seat.share()
        seat.save(state_of(seat.rank, WORLD, _AFTER), checkpoint_id=directory)
        assert loaded_tag(seat, directory) == _AFTER
        assert names_in(directory) == checkpoint_names(directory)
    return found


def _try(seat: Seat, directory: Path, mode: str) -> Outcome:
    state = state_of(seat.rank, WORLD, _NEW)
    if mode == "save":
        outcome = outcome_of(seat.save, state, checkpoint_id=directory)
    else:
        outcome = async_outcome(seat, state, directory, **MODES["mailbox"].save)
    seat.share()
    return outcome


@contextmanager
def _without_rights(mode: str) -> Iterator[None]:
    """Be nobody, or, where nobody may run the interpreter, which a background process needs, a root without powers."""
    if mode == "save" or os.geteuid() != 0 or _others_may_run_this():
        with nobody():
            yield
    else:
        give_up_powers()
        yield


def _others_may_run_this() -> bool:
    """Whether a user without rights may run the interpreter, and read the library and its packages."""
    paths = [Path(sys.executable).resolve(), Path(sys.prefix), Path(__file__).parents[2] / "dcp_core"]
    homes = [parent for path in paths for parent in (path, *path.parents)]
    return all(path.stat().st_mode & stat.S_IXOTH for path in homes)


@pytest.mark.parametrize("mode", ["save", "async_save"])
def test_a_read_only_directory_is_one_error_on_all_ranks_and_the_old_checkpoint_stays(
    root: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "logs").mkdir()
    (root / "logs").chmod(0o777)
    monkeypatch.setenv("DCP_BACKGROUND_LOG_DIR", str(root / "logs"))
    found = run_ranks(_save_where_nothing_may_be_written, WORLD, root, mode)
    for ranks in zip(*found, strict=True):
        _check_one_error(ranks, "StorageError", "EACCES", "permissions", str(root))


class _WithoutRights(FileOperations):
    """Changes the disk as nobody; only that, since ranks talk through files too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def perform(self, operation: str, path: str, action: Callable[[], _Result]) -> _Result:
        with self._lock, nobody():  # a user is that of a whole process
            return action()


def _save_without_rights_on_one_rank(context: RankContext, root: Path, rank: int) -> Outcome:
    seat, directory = Seat.of(context), root / "step"
    seat.save(state_of(seat.rank, WORLD, _OLD), checkpoint_id=directory)
    seat.share()
    before = names_in(directory)
    storage = LocalStorage(directory, _WithoutRights() if seat.rank == rank else None)
    state = state_of(seat.rank, WORLD, _NEW)
    outcome = outcome_of(seat.save, state, storage_writer=FileSystemWriter(storage=storage))
    seat.share()
    assert names_in(directory) == before
    assert loaded_tag(seat, directory) == _OLD
    seat.save(state_of(seat.rank, WORLD, _AFTER), checkpoint_id=directory)
    assert loaded_tag(seat, directory) == _AFTER
    return outcome


@pytest.mark.skipif(os.geteuid() != 0, reason="one rank of several gives up its rights, and it has none")
@pytest.mark.parametrize("rank", [0, 2])
def test_permission_denied_on_one_rank_is_one_error_on_all(root: Path, rank: int) -> None:
    found = run_ranks(_save_without_rights_on_one_rank, WORLD, root, rank)
    _check_one_error(found, "StorageError", "EACCES", "permissions", str(root))
    assert {seen.blamed for seen in found} == {(rank,)}


def _save_beyond_a_limit(context: RankContext, root: Path, rank: int) -> Outcome:
    """One rank may write small files only, as where a quota, `ulimit -f` or the file system says so."""
    seat, directory = Seat.of(context), root / "step"
    seat.save(state_of(seat.rank, WORLD, _OLD), checkpoint_id=directory)
    seat.share()
    before = names_in(directory)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if seat.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LIMIT_BYTES, limits[1]))
    state = state_of(seat.rank, WORLD, _NEW) | {f"large{seat.rank}": np.zeros(2 * _LIMIT_BYTES, np.uint8)}
    outcome = outcome_of(seat.save, state, checkpoint_id=directory)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    seat.share()
    assert names_in(directory) == before
    assert loaded_tag(seat, directory) == _OLD
    seat.save(state_of(seat.rank, WORLD, _AFTER), checkpoint_id=directory)
    assert loaded_tag(seat, directory) == _AFTER
    return outcome


@pytest.mark.parametrize("rank", [0, 1])
def test_files_beyond_a_limit_are_one_error_on_all_ranks_and_the_old_checkpoint_stays(root: Path, rank: int) -> None:
    found = run_ranks(_save_beyond_a_limit, WORLD, root, rank)
    _check_one_error(found, "StorageError", "EFBIG", f"_rank{rank}_.", "ulimit -f")


# --- loads -------------------------------------------------------------------------------------------


def _load_what_may_not_be_read(context: RankContext, root: Path, name: str) -> tuple[Outcome, bool]:
    seat, directory = _open_up(context), root / "step"
    with nobody():
        seat.save(state_of(seat.rank, WORLD, _OLD), checkpoint_id=directory)
        seat.share()
        target = poison_of(seat.rank, WORLD)
        with _barred(directory / name, 0, seat.rank == 0):
            seat.share()
            outcome = outcome_of(seat.load, target, checkpoint_id=directory)
            seat.share()
        seat.share()
        assert loaded_tag(seat, directory) == _OLD
    return outcome, is_untouched(target, seat.rank, WORLD)


@pytest.mark.parametrize("name", [".metadata", "_rank1_.safetensors", "_rank2_.bytes", ""])
def test_what_may_not_be_read_is_one_error_on_all_ranks(root: Path, name: str) -> None:
    found = run_ranks(_load_what_may_not_be_read, WORLD, root, name)
    _check_one_error([seen for seen, _ in found], "StorageError", "EACCES", name)
    assert name.endswith("safetensors") or all(untouched for _, untouched in found)


# --- what comes after a commit -----------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user are needed")
def test_old_files_of_somebody_else_stay_and_the_save_is_good(root: Path) -> None:
    """As in a shared directory whose sticky bit lets each user remove their own files only."""
    directory = root / "step"
    save({"step": _OLD}, checkpoint_id=directory)
    old = names_in(directory)
    directory.chmod(0o1777)
    (directory / ".metadata").unlink()
    with nobody():
        save({"step": _NEW}, checkpoint_id=directory)
        state = {"step": -1}
        load(state, checkpoint_id=directory)
    assert state == {"step": _NEW}
    assert set(old) - {".metadata"} < set(names_in(directory))


def test_a_manager_that_may_neither_move_its_link_nor_remove_goes_on(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = root / "runs"
    with nobody():
        manager = CheckpointManager(runs, keep=1)
        manager.save(1, {"step": 1})
        (runs / "step_2").mkdir()
        runs.chmod(0o555)
        try:
            manager.save(2, {"step": 2})
        finally:
            runs.chmod(0o755)
        assert "could not let 'latest' lead to 'step_2'" in caplog.text and "EACCES" in caplog.text
        assert manager.latest() == str(runs / "step_2")
        manager.save(3, {"step": 3})
    assert names_in(runs) == ["latest", "step_3"]
