"""Who waits for the disk: every rank for its own files and their names before it says that they are there; with
`durable=False` nobody, whatever is saved, converted or removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core.api import save
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.convert.to_huggingface import HuggingFaceConversion
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.manager.manager import CheckpointManager
from dcp_core.recipes.places import dcp_reader, huggingface_reader
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.faults import FaultyOperations, OperationRecord
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import Seat, memory_directory, state_of

pytestmark = pytest.mark.faults

WORLD = 3
_STATE = {"a": np.arange(6.0, dtype=np.float32), "b": np.ones((3, 2), np.float32), "step": 3}


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def _logged(context: RankContext, directory: Path, durable: bool) -> list[OperationRecord]:
    """What a rank's own save over a checkpoint does to the disk."""
    seat = Seat.of(context)
    seat.save(state_of(seat.rank, WORLD, 1), checkpoint_id=directory)
    seat.share()
    operations = FaultyOperations()
    writer = FileSystemWriter(storage=LocalStorage(directory, operations))
    seat.save(state_of(seat.rank, WORLD, 2), storage_writer=writer, durable=durable)
    seat.share()
    return operations.log


def test_every_rank_syncs_its_files_and_then_their_names_before_it_hands_in_its_result(root: Path) -> None:
    for rank, log in enumerate(run_ranks(_logged, WORLD, root / "step", True)):
        steps = [(record.operation, record.name) for record in log]
        own = [name for operation, name in steps if operation == "create" and name.startswith(f"_rank{rank}_")]
        assert len(own) == 2, steps
        closed = max(steps.index(("close_written", name)) for name in own)
        for name in own:
            written = max(place for place, step in enumerate(steps) if step == ("pwritev", name))
            assert written < steps.index(("fsync", name)) < steps.index(("close_written", name)), steps
        committed = steps.index(("rename", ".metadata")) if rank == 0 else len(steps)
        assert ("fsync_directory", "step") in steps[closed:committed], steps


def test_no_rank_waits_for_the_disk_without_durable(root: Path) -> None:
    for log in run_ranks(_logged, WORLD, root / "step", False):
        assert not [record for record in log if "sync" in record.operation], log


def _export(source: Path, target: Path, durable: bool) -> None:
    for _ in range(2):  # the second time over weights of the same names
        HuggingFaceConversion(dcp_reader(source), max_shard_size=24).run(target, overwrite=True, durable=durable)


def _import(source: Path, target: Path, durable: bool) -> None:
    HuggingFaceConversion(dcp_reader(source)).run(target.parent / "theirs", overwrite=True, durable=durable)
    convert_to_dcp(huggingface_reader(target.parent / "theirs"), target, durable=durable)


def _manage(source: Path, target: Path, durable: bool) -> None:
    manager = CheckpointManager(target, keep=1, durable=durable)
    for step in (1, 2, 3):
        manager.save(step, _STATE)


@contextmanager
def _all_logged() -> Iterator[list[OperationRecord]]:
    """Everything that this process does to a disk through storages that are made from here on."""
    log: list[OperationRecord] = []
    make = LocalStorage.__init__

    def watched(self: LocalStorage, path: Any, operations: FileOperations | None = None) -> None:
        make(self, path, operations or FaultyOperations(before=log.append))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "__init__", watched)
        yield log


@pytest.mark.parametrize("make", [_export, _import, _manage])
def test_conversions_and_managers_wait_for_the_disk_only_where_they_are_durable(
    root: Path, make: Callable[[Path, Path, bool], None]
) -> None:
    save(_STATE, checkpoint_id=root / "ours", durable=False)
    for durable in (True, False):
        with _all_logged() as log:
            make(root / "ours", root / str(durable), durable)
        assert len(log) > 20
        assert any("sync" in record.operation for record in log) == durable, log
