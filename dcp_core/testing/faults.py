"""Make the disk fail, tear or vanish at any operation.

`FaultyOperations` counts every operation that changes the disk. A test runs a save once to count them, then once
for each number N with a fault at N::

    >>> counted = FaultyOperations()
    >>> _ = counted.perform("create", "/somewhere/a", lambda: 3)
    >>> [(record.number, record.operation, record.name) for record in counted.log]
    [(1, 'create', 'a')]
    >>> full_disk = FaultyOperations(fail_at=1, error_number=errno.ENOSPC)
    >>> full_disk.perform("create", "/somewhere/a", lambda: 3)
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device: '/somewhere/a'
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

from dcp_core.storage.operations import BytesLike, FileOperations

_Result = TypeVar("_Result")
KillMoment = Literal["before", "after"]


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """One operation that changed, or would have changed, the disk.

    Attributes:
        number: Its place in the sequence, from 1.
        operation: Name of the method of `FileOperations`.
        name: Last component of the path that it changes.
    """

    number: int
    operation: str
    name: str


class FaultyOperations(FileOperations):
    """File operations that fail where they are told to.

    Attributes:
        log: The counted operations so far, those that failed included.

    Args:
        fail_at: The counted operation that raises, from 1; None: none does.
        error_number: What it raises, by `errno` number.
        forever: Whether all later ones raise too.
        kill_at: The counted operation at which this process kills itself, as SIGKILL does; None: at none.
        kill_moment: Whether it dies before or after it is done.
        operations: Count only these methods; None: all.
        name_pattern: Count only paths whose last component matches, in the manner of a shell.
        max_io_bytes: Read and write at most so many bytes per call, as an interrupted call does.
        before: Called with the record of each counted operation before it is done.
    """

    def __init__(
        self,
        *,
        fail_at: int | None = None,
        error_number: int = errno.EIO,
        forever: bool = False,
        kill_at: int | None = None,
        kill_moment: KillMoment = "before",
        operations: Collection[str] | None = None,
        name_pattern: str = "*",
        max_io_bytes: int | None = None,
        before: Callable[[OperationRecord], None] | None = None,
    ) -> None:
        self.log: list[OperationRecord] = []
        self._fail_at = fail_at
        self._error_number = error_number
        self._forever = forever
        self._kill_at = kill_at
        self._kill_moment = kill_moment
        self._operations = operations
        self._name_pattern = name_pattern
        self._max_io_bytes = max_io_bytes
        self._before = before
        self._lock = threading.Lock()

    def perform(self, operation: str, path: str, action: Callable[[], _Result]) -> _Result:
        """Count one operation, and do it, fail it or die at it."""
        name = os.path.basename(path)
        if (self._operations is not None and operation not in self._operations) or not fnmatchcase(
            name, self._name_pattern
        ):
            return action()
        with self._lock:
            record = OperationRecord(len(self.log) + 1, operation, name)
            self.log.append(record)
        if self._before is not None:
            self._before(record)
        if self._fails(record.number):
            if operation == "close_written":  # the descriptor is gone even when the close reports an error
                action()
            raise OSError(self._error_number, os.strerror(self._error_number), path)
        if record.number == self._kill_at and self._kill_moment == "before":
            _die()
        result = action()
        if record.number == self._kill_at:
            _die()
        return result

    def pwritev(self, descriptor: int, buffers: Sequence[BytesLike], offset: int, path: str) -> int:
        """Write, at most `max_io_bytes`."""
        return super().pwritev(descriptor, self._shortened(buffers), offset, path)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        """Read, at most `max_io_bytes`."""
        return super().preadv(descriptor, self._shortened(buffers), offset)

    def _shortened(self, buffers: Sequence[BytesLike]) -> list[memoryview]:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if self._max_io_bytes is None:
            return views
        room = self._max_io_bytes
        shortened = []
        for view in views:
            shortened.append(view[:room])
            room -= len(shortened[-1])
        return [view for view in shortened if len(view)]

    def _fails(self, number: int) -> bool:
        if self._fail_at is None:
            return False
        return number >= self._fail_at if self._forever else number == self._fail_at


def _die() -> None:
    """End this process at once: no handler runs, nothing is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # the signal may take a moment
