"""What goes wrong in a soak: a fault at one operation, by a writer that another process can make, too.

No framework is imported here: background processes import this module.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.manager.manager import CheckpointManager
from dcp_core.storage.base import Storage
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.faults import FaultyOperations, OperationRecord

FateKind = Literal["", "fail", "slow", "interrupt", "kill"]
ERROR_NUMBERS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ESTALE)
SLOW_SECONDS = 0.2


@dataclass(frozen=True)
class Fate:
    """What happens at one operation of the disk.

    Attributes:
        kind: It fails, takes long, comes with a Ctrl-C, or is the last one of its process; empty: nothing happens.
        at: Which operation, from 1, of those that change the disk; when it is for reading: which read.
        error_number: How it fails.
        spared: A process that is not killed.
    """

    kind: FateKind = ""
    at: int = 0
    error_number: int = errno.EIO
    spared: int = 0

    def writing(self) -> FileOperations:
        """Operations with this fate among those that change the disk."""
        if self.kind == "fail":
            return FaultyOperations(fail_at=self.at, error_number=self.error_number)
        if self.kind == "kill":
            return FaultyOperations(kill_at=None if os.getpid() == self.spared else self.at, kill_moment="after")
        return FaultyOperations(before=self._strike)

    def reading(self) -> FileOperations:
        """Operations with this fate among the reads."""
        return _FatefulReads(self)

    def _strike(self, record: OperationRecord) -> None:
        if record.number == self.at:
            self.strike()

    def strike(self) -> None:
        """Let it happen, but for a death."""
        if self.kind == "fail":
            raise OSError(self.error_number, os.strerror(self.error_number))
        if self.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif self.kind == "slow":
            time.sleep(SLOW_SECONDS)


class _FatefulReads(FileOperations):
    def __init__(self, fate: Fate) -> None:
        self._fate, self._count, self._lock = fate, 0, threading.Lock()

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        with self._lock:
            self._count += 1
            is_it = self._count == self._fate.at
        if is_it:
            self._fate.strike()
        return super().preadv(descriptor, buffers, offset)


class FatefulWriter(FileSystemWriter):
    """A writer with a fate, which goes with it into a background process.

    Args:
        path: The checkpoint's directory.
        fate: The fields of its `Fate`.
    """

    def __init__(self, path: CheckpointId, fate: Mapping[str, Any]) -> None:
        self._fate = Fate(**fate)
        super().__init__(storage=LocalStorage(os.fspath(path), self._fate.writing()))

    def rebuild_arguments(self) -> Mapping[str, Any] | None:
        storage = self._directory.storage
        assert isinstance(storage, LocalStorage)
        return {"path": storage.path, "fate": asdict(self._fate)}


def reader_of(directory: Path, fate: Fate) -> FileSystemReader:
    """A reader with a fate."""
    return FileSystemReader(storage=LocalStorage(directory, fate.reading()))


class Fateful(CheckpointManager):
    """A manager whose saves, or what comes after their commits, have a fate; to be derived from together with one.

    Attributes:
        fate: Of the next save; None on all ranks: none has one.
        fate_after: Of what comes after its commit.
    """

    fate: Fate | None = None
    fate_after = Fate()

    def _open_root(self) -> Storage:
        return LocalStorage(self.root, self.fate_after.writing())

    def _place(self, name: str) -> dict[str, Any]:
        if self.fate is None:
            return super()._place(name)
        return {"storage_writer": FatefulWriter(Path(self.root) / name, asdict(self.fate))}
