"""Open files of a directory, by descriptor: one call of the system moves many buffers, a second one what is left."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress

from dcp_core.errors import ArgumentError, IncompleteError, StorageError
from dcp_core.storage.file_errors import storage_error, translated
from dcp_core.storage.handles import ReadHandle, WriteHandle
from dcp_core.storage.operations import BytesLike, FileOperations

# Linux moves at most 2 GiB less a page per call, and 1024 buffers.
_MAX_CALL_BYTES = 0x7FFFF000
_MAX_CALL_BUFFERS = 1024


class LocalReadHandle(ReadHandle):
    """A file that is open for reading."""

    def __init__(self, operations: FileOperations, where: str, name: str, descriptor: int, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._operations = operations
        self._where = where
        self._descriptor = descriptor

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from the byte at `offset`."""
        if target.nbytes:
            self.read_scattered(offset, [target.cast("B")])

    def read_scattered(self, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill targets one after another from the byte at `offset`, by one call where the system allows it."""
        wanted = sum(map(len, targets))
        if not wanted:
            return
        fits = wanted <= _MAX_CALL_BYTES and len(targets) <= _MAX_CALL_BUFFERS
        count = self._preadv(targets if fits else _batch(targets, 0), offset)
        if count < wanted:
            self._read_rest(offset, list(targets), count)

    def _read_rest(self, offset: int, views: list[memoryview], count: int) -> None:
        """Go on where a call that brought `count` bytes ended."""
        end, first = offset + sum(map(len, views)), 0
        while True:
            if count == 0:
                raise IncompleteError(
                    f"{self.name!r} in {self._where} ends at byte {offset}: expected bytes up to "
                    f"{end}; the file was cut short"
                )
            offset += count
            if offset == end:
                return
            while count >= len(views[first]):
                count -= len(views[first])
                first += 1
            views[first] = views[first][count:]
            count = self._preadv(_batch(views, first), offset)

    def _preadv(self, views: Sequence[memoryview], offset: int) -> int:
        try:
            return self._operations.preadv(self._descriptor, views, offset)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise storage_error("read", self.name, self._where, error) from error

    def close(self) -> None:
        """Close the file; twice is fine."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._operations.close(descriptor)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            self.close()


class LocalWriteHandle(WriteHandle):
    """A file that is being written."""

    def __init__(
        self, operations: FileOperations, where: str, name: str, path: str, descriptor: int, nbytes: int
    ) -> None:
        self.name = name
        self.nbytes = nbytes
        self._operations = operations
        self._where = where
        self._path = path
        self._descriptor = descriptor

    def write(self, offset: int, buffers: Sequence[BytesLike]) -> None:
        """Write buffers one after another from the byte at `offset`."""
        nbytes = sum([memoryview(buffer).nbytes for buffer in buffers])
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ArgumentError(
                f"bytes {offset} to {offset + nbytes} lie outside of {self.name!r}, made for {self.nbytes} bytes"
            )
        written = 0
        if 0 < nbytes <= _MAX_CALL_BYTES and len(buffers) <= _MAX_CALL_BUFFERS:
            written = self._write_some(buffers, offset)
        if written < nbytes:
            self._write_rest(buffers, written, offset)

    def _write_rest(self, buffers: Sequence[BytesLike], written: int, offset: int) -> None:
        """Write what one call could not take or has left, call by call."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        first = 0
        while True:
            offset += written
            while first < len(views) and written >= len(views[first]):
                written -= len(views[first])
                first += 1
            if first == len(views):
                return
            views[first] = views[first][written:]
            written = self._write_some(_batch(views, first), offset)

    def _write_some(self, buffers: Sequence[BytesLike], offset: int) -> int:
        with translated("write", self.name, self._where):
            written = self._operations.pwritev(self._descriptor, buffers, offset, self._path)
            if written == 0:
                raise OSError(errno.EIO, "the file system accepted no bytes")
        return written

    def write_back(self, offset: int, nbytes: int) -> None:
        """Let the disk begin with bytes that were written, without waiting."""
        self._operations.write_back(self._descriptor, offset, nbytes)

    def sync(self) -> None:
        """Wait until the content survives a power failure."""
        with translated("sync", self.name, self._where):
            self._operations.fsync(self._descriptor, self._path)

    def close(self) -> None:
        """Close the file; twice is fine."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            with translated("close", self.name, self._where):
                self._operations.close_written(descriptor, self._path)
        except Exception:  # the descriptor is gone even where closing it fails
            raise
        except BaseException:
            _close_after_interrupt(descriptor, self._path)
            raise

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:  # the writer failed: late errors say nothing new
            with suppress(OSError):
                os.close(self._descriptor)


def _close_after_interrupt(descriptor: int, path: str) -> None:
    """Close a file whose closing was interrupted, before or after it was done; its number may be another file's now."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            os.close(descriptor)


def _batch(views: Sequence[memoryview], first: int) -> list[memoryview]:
    """Take as many buffers as one call may move."""
    batch: list[memoryview] = []
    room = _MAX_CALL_BYTES
    for view in views[first : first + _MAX_CALL_BUFFERS]:
        batch.append(view[:room])
        room -= len(batch[-1])
        if room == 0:
            break
    return batch
