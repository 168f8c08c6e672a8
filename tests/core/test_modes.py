"""The rights of what is made: those that the umask gives, of the process that saves and at that moment; and the group
that a directory hands on.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core.api import save
from dcp_core.background import service
from dcp_core.cli.main import main
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.convert.to_huggingface import HuggingFaceConversion
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.manager.manager import CheckpointManager
from dcp_core.recipes.places import dcp_reader, huggingface_reader
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import present_umask
from dcp_core.testing.faults import FaultyOperations, OperationRecord
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.async_jobs import MODES, async_outcome, checkpoint_directory
from tests.core.fault_jobs import Seat, memory_directory, state_of

pytestmark = pytest.mark.faults

WORLD = 2
UMASKS = [0o000, 0o022, 0o027, 0o077]
_STATE = {"a": np.arange(6.0, dtype=np.float32), "b": np.ones((3, 2), np.float32), "step": 3}


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes_in(directory: Path) -> dict[str, int]:
    """The rights of a directory and of all in it; links have none."""
    paths = [directory, *directory.rglob("*")]
    return {str(path.relative_to(directory)): _mode(path) for path in paths if not path.is_symlink()}


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def check_modes(directory: Path, mask: int, extra: int = 0) -> None:
    """See that all has the rights that a umask gives, directories `extra` bits besides."""
    found = modes_in(directory)
    expected = {
        name: (0o777 & ~mask) | extra if (directory / name).is_dir() else 0o666 & ~mask for name in found
    }  # fmt: skip
    assert found == expected, {name: oct(mode) for name, mode in found.items()}


# --- saves -------------------------------------------------------------------------------------------


def _save(context: RankContext, directory: Path, mask: int) -> dict[str, int]:
    """Save twice; gives the rights of what was there in the middle, too."""
    seat = Seat.of(context)
    seen: dict[str, int] = {}

    def look(record: OperationRecord) -> None:
        seen.update({name: _mode(directory / name) for name in os.listdir(directory)})

    watched = FaultyOperations(operations=["rename"], name_pattern=".metadata", before=look)
    with umask(mask):
        for tag in (1, 2):
            writer = FileSystemWriter(storage=LocalStorage(directory, watched if seat.rank == 0 else None))
            seat.save(state_of(seat.rank, seat.world, tag), storage_writer=writer)
    return seen


@pytest.mark.parametrize("mask", UMASKS, ids=oct)
def test_a_save_gives_files_and_directories_the_rights_of_the_umask(root: Path, mask: int) -> None:
    seen = run_ranks(_save, WORLD, root / "runs" / "one" / "step", mask)[0]
    assert {name.partition(".")[0] or name[:8] for name in seen} >= {".intent-", ".metadat", "_rank0_", "_rank1_"}
    assert set(seen.values()) == {0o666 & ~mask}, seen
    check_modes(root / "runs", mask)


def test_the_rights_of_the_file_that_is_replaced_and_of_strangers_files_are_left_alone(root: Path) -> None:
    directory = root / "step"
    with umask(0o022):
        save(_STATE, checkpoint_id=directory)
        (directory / "notes").write_text("mine")
    (directory / "notes").chmod(0o600)
    directory.chmod(0o750)
    with umask(0o027):
        save(_STATE, checkpoint_id=directory)
    found = modes_in(directory)
    assert (found.pop("."), found.pop("notes")) == (0o750, 0o600)
    assert set(found.values()) == {0o640}


def test_a_directory_that_hands_on_its_group_goes_on_to_do_so(root: Path) -> None:
    root.chmod(0o2770)
    if os.geteuid() == 0:
        os.chown(root, -1, 12345)
        root.chmod(0o2770)
    group = root.stat().st_gid
    with umask(0o007):
        save(_STATE, checkpoint_id=root / "deep" / "step")
        CheckpointManager(root / "runs", keep=1).save(1, _STATE)
    assert {path.lstat().st_gid for path in root.rglob("*")} == {group}
    assert all(_mode(path) & stat.S_ISGID for path in root.rglob("*") if path.is_dir() and not path.is_symlink())
    check_modes(root / "deep", 0o007, stat.S_ISGID)


# --- in the background -------------------------------------------------------------------------------


def _save_in_the_background(context: RankContext, root: Path, mode: str) -> list[int]:
    """Save under one umask after the other, in one background process."""
    seat = Seat.of(context)
    for mask in UMASKS[::-1] + UMASKS:
        with umask(mask):
            for tag in (1, 2):
                state = state_of(seat.rank, seat.world, tag)
                outcome = async_outcome(seat, state, root / oct(mask), **MODES[mode].save)
                assert outcome.kind == "", outcome
                seat.share()
        check_modes(root / oct(mask), mask)
        seat.share()
        _clear(seat, root / oct(mask))
    return [process.pid for process in service.service()._processes.values()]


def _clear(seat: Seat, directory: Path) -> None:
    if seat.rank == 0:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
    seat.share()


@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_background_process_gives_the_rights_of_its_trainers_umask_at_the_moment_of_the_call(mode: str) -> None:
    with checkpoint_directory() as place:
        assert all(len(found) == 1 for found in run_ranks(_save_in_the_background, WORLD, place, mode))


def test_a_umask_that_changes_right_after_the_call_comes_too_late(root: Path) -> None:
    with umask(0o077):
        save(_STATE, checkpoint_id=root / "before")
        manager = CheckpointManager(root / "runs")
        response = manager.async_save(1, _STATE)
        os.umask(0o000)
        response.get_result(60)
        assert modes_in(root / "runs" / "step_1") == dict.fromkeys(modes_in(root / "runs" / "step_1"), 0o600) | {
            ".": 0o700
        }


def test_the_umask_is_seen_without_being_changed() -> None:
    for mask in UMASKS:
        with umask(mask):
            assert present_umask() == mask
            assert os.umask(mask) == mask


# --- managers and conversions ------------------------------------------------------------------------


def _export(source: Path, target: Path) -> None:
    HuggingFaceConversion(dcp_reader(source), max_shard_size=24).run(target, overwrite=True)


def _import(source: Path, target: Path) -> None:
    _export(source, source.parent / "theirs")
    convert_to_dcp(huggingface_reader(source.parent / "theirs"), target)


def _by_command(source: Path, target: Path) -> None:
    assert main(["convert", str(source), str(target), "--to", "hf"]) == 0


def _manage(source: Path, target: Path) -> None:
    manager = CheckpointManager(target, keep=1)
    for step in (1, 2):
        manager.save(step, _STATE)


@pytest.mark.parametrize("mask", UMASKS, ids=oct)
@pytest.mark.parametrize("make", [_export, _import, _by_command, _manage])
def test_conversions_and_managers_give_the_rights_of_the_umask(
    root: Path, make: Callable[[Path, Path], Any], mask: int
) -> None:
    save(_STATE, checkpoint_id=root / "ours")
    with umask(mask):
        make(root / "ours", root / "made" / "there")
        make(root / "ours", root / "made" / "there") if make is not _by_command else None
    check_modes(root / "made", mask)
