"""File operations that tear, fail or count what engines do with data files; engines may call them from any thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import BytesLike, FileOperations

DATA_SUFFIX = ".safetensors"


def path_of(descriptor: int) -> str:
    """The path of an open file."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


def writer_over(operations: FileOperations) -> FileSystemWriter:
    """A writer that keeps these operations when it turns to the `checkpoint_id` of a save."""
    return FileSystemWriter(storage=LocalStorage("/nowhere", operations))


def reader_over(operations: FileOperations) -> FileSystemReader:
    return FileSystemReader(storage=LocalStorage("/nowhere", operations))


class TornOperations(FileOperations):
    """Every read and write moves some of its bytes: a random number of them, at least one.

    Attributes:
        torn: How many calls moved less than they were asked to.
    """

    def __init__(self, seed: int) -> None:
        self.torn = 0
        self._rng = Random(seed)
        self._lock = threading.Lock()

    def pwritev(self, descriptor: int, buffers: Sequence[BytesLike], offset: int, path: str) -> int:
        return super().pwritev(descriptor, self._some_of(buffers), offset, path)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        return super().preadv(descriptor, self._some_of(buffers), offset)

    def _some_of(self, buffers: Sequence[BytesLike]) -> list[memoryview]:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        total = sum(map(len, views))
        with self._lock:
            room = self._rng.choice([1, 8, total // 2, total - 1, self._rng.randint(1, max(total, 1)), total])
            self.torn += room < total
        kept = []
        for view in views:
            kept.append(view[: max(room, 1)])
            room -= len(kept[-1])
            if room <= 0:
                break
        return kept


class FailingOperations(FileOperations):
    """One call of one method raises.

    Attributes:
        calls: How many calls there were, and failed ones among them.
        has_failed: Whether the call came.

    Args:
        method: Name of the method.
        number: Which of its calls fails, from 1; 0: none.
        error: Makes what it raises, from the path; or does something else, and the call goes on.
        suffix: Count only files whose names end so.
        forever: All later calls fail too.
    """

    def __init__(
        self,
        method: str,
        number: int = 0,
        error: Callable[[str], BaseException | None] | None = None,
        suffix: str = DATA_SUFFIX,
        *,
        forever: bool = False,
    ) -> None:
        self.calls = 0
        self.has_failed = False
        self._forever = forever
        self._method, self._number, self._error, self._suffix = method, number, error, suffix
        self._lock = threading.Lock()

    def create(self, path: str) -> int:
        self._count("create", path)
        return super().create(path)

    def preallocate(self, descriptor: int, nbytes: int, path: str) -> None:
        self._count("preallocate", path)
        super().preallocate(descriptor, nbytes, path)

    def pwritev(self, descriptor: int, buffers: Sequence[BytesLike], offset: int, path: str) -> int:
        self._count("pwritev", path)
        return super().pwritev(descriptor, buffers, offset, path)

    def fsync(self, descriptor: int, path: str) -> None:
        self._count("fsync", path)
        super().fsync(descriptor, path)

    def close_written(self, descriptor: int, path: str) -> None:
        try:
            self._count("close_written", path)
        finally:  # the descriptor is gone even when the close reports an error
            super().close_written(descriptor, path)

    def open_read(self, path: str) -> int:
        self._count("open_read", path)
        return super().open_read(path)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        self._count("preadv", path_of(descriptor))
        return super().preadv(descriptor, buffers, offset)

    def _count(self, method: str, path: str) -> None:
        if method != self._method or not path.endswith(self._suffix):
            return
        with self._lock:
            self.calls += 1
            fails = self.calls == self._number or (self._forever and self.calls > self._number)
            self.has_failed |= fails
        error = self._error(path) if fails and self._error is not None else None
        if error is not None:
            raise error


def calls_of(method: str, call: Callable[[FailingOperations], object], suffix: str = DATA_SUFFIX) -> int:
    """How many calls of one method there are when all goes well."""
    operations = FailingOperations(method, suffix=suffix)
    call(operations)
    assert operations.calls > 0
    return operations.calls


def refusal(number: int) -> Callable[[str], BaseException]:
    """What the system says, by `errno` number."""
    return lambda path: OSError(number, os.strerror(number), path)


@dataclass(frozen=True)
class Extent:
    """Bytes that one call read."""

    name: str
    start: int
    stop: int


class MeteredOperations(FileOperations):
    """Notes which bytes of data files are read, and by which threads.

    Attributes:
        extents: What was read, call by call.
        threads: Who read.
    """

    def __init__(self) -> None:
        self.extents: list[Extent] = []
        self.threads: set[int] = set()
        self._lock = threading.Lock()

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        moved = super().preadv(descriptor, buffers, offset)
        name = Path(path_of(descriptor)).name
        if name.endswith(DATA_SUFFIX):
            with self._lock:
                self.extents.append(Extent(name, offset, offset + moved))
                self.threads.add(threading.get_ident())
        return moved
