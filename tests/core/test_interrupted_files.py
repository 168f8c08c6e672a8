"""Ctrl-C at any operation of a save leaves no file open: a removed one would take space until the process ends."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from dcp_core import api
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
from tests.core.interrupts import interrupted_at
from tests.core.process_use import open_in

STATE = {"w": np.arange(5000.0), "names": ["a", "b"]}


def _save(directory: Path, operations: FaultyOperations) -> None:
    api.save(STATE, storage_writer=FileSystemWriter(storage=LocalStorage(directory, operations)))


def test_a_save_that_is_interrupted_at_any_operation_leaves_no_file_open(tmp_path: Path) -> None:
    counted = FaultyOperations()
    _save(tmp_path / "counted", counted)
    assert {"create", "pwritev", "close_written", "rename"} <= {record.operation for record in counted.log}
    for record in counted.log:
        directory = tmp_path / str(record.number)
        with suppress(KeyboardInterrupt):  # one that comes with the last operation may be heard after the save
            _save(directory, interrupted_at(record.number))
            time.sleep(0)
        assert open_in(os.getpid(), str(tmp_path)) == [], record


def test_a_descriptor_that_another_file_has_by_now_stays_open(tmp_path: Path) -> None:
    class ClosedThenInterrupted(FaultyOperations):
        other = -1

        def close_written(self, descriptor: int, path: str) -> None:
            os.close(descriptor)
            self.other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
            assert self.other == descriptor
            raise KeyboardInterrupt

    operations = ClosedThenInterrupted()
    handle = LocalStorage(tmp_path, operations).create("file", 4)
    with pytest.raises(KeyboardInterrupt):
        handle.close()
    os.close(operations.other)
