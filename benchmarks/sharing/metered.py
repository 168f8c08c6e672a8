"""Storage that counts what a process reads from it, and that can be slow."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class ReadMeter:
    """Counts the bytes that a process reads, all its threads together, and lets them through at a rate.

    Whoever has read waits until its bytes may be there. By no time more have come than the rate allows since the
    first read began, and time without a read is lost: there are no bursts.

    Args:
        bytes_per_second: The rate; None: no waiting.

    Attributes:
        nbytes: How many were read so far.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.nbytes = 0
        self._rate = bytes_per_second
        self._free_from = 0.0
        self._lock = threading.Lock()

    def passed(self, nbytes: int, began: float) -> None:
        """Count bytes, and wait until they may be there.

        Args:
            nbytes: How many were read.
            began: When their read began, by `time.monotonic`.
        """
        with self._lock:
            self.nbytes += nbytes
            if self._rate is None:
                return
            self._free_from = arrived = max(self._free_from, began) + nbytes / self._rate
        while (remaining := arrived - time.monotonic()) > 0:
            time.sleep(remaining)


class MeteredOperations(FileOperations):
    """File operations whose reads go through a meter."""

    def __init__(self, meter: ReadMeter) -> None:
        self._meter = meter

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        """Read, as fast as the meter allows."""
        began = time.monotonic()
        count = super().preadv(descriptor, buffers, offset)
        self._meter.passed(count, began)
        return count


class MeteredStorage(LocalStorage):
    """A directory of files whose reads go through a meter.

    Args:
        path: The directory.
        meter: Shared by all storages of a process that are one device.
    """

    def __init__(self, path: str, meter: ReadMeter) -> None:
        super().__init__(path, MeteredOperations(meter))


class MeteredFile(io.FileIO):
    """A file whose reads go through a meter, for readers that take file objects."""

    def __init__(self, path: str, meter: ReadMeter) -> None:
        super().__init__(path, "rb")
        self._meter = meter

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        """Read into memory."""
        began = time.monotonic()
        count = super().readinto(buffer)
        self._meter.passed(count or 0, began)
        return count

    def readall(self) -> bytes:
        """Read up to the end."""
        began = time.monotonic()
        content = super().readall()
        self._meter.passed(len(content), began)
        return content
