"""Open files of a storage: what is read from, and what is written to. Bytes at places in, or out; no names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from dcp_core.errors import StorageError
from dcp_core.storage.operations import BytesLike


class ReadHandle(ABC):
    """An open file to read. Several threads may read from one at a time.

    Attributes:
        name: Name of the file.
        nbytes: Its size when it was opened.
    """

    name: str
    nbytes: int

    @abstractmethod
    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from the byte at `offset`.

        Args:
            offset: Byte position in the file.
            target: Contiguous, writable memory of any size.

        Raises:
            IncompleteError: If the file ends before.
            StorageError: If the storage refuses.
        """

    def read_scattered(self, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill targets one after another from the byte at `offset`.

        A storage that can fill several places in one request does so; the default reads into memory of its own first.

        Args:
            offset: Byte position in the file.
            targets: Contiguous, writable bytes (format "B"), any number.

        Raises:
            IncompleteError: If the file ends before.
            StorageError: If the storage refuses.
        """
        if len(targets) == 1:
            self.read_into(offset, targets[0])
            return
        joined = memoryview(bytearray(sum(map(len, targets))))
        self.read_into(offset, joined)
        position = 0
        for target in targets:
            target[:] = joined[position : position + len(target)]
            position += len(target)

    @abstractmethod
    def close(self) -> None:
        """Close the file; twice is fine."""

    def __enter__(self) -> ReadHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WriteHandle(ABC):
    """A new file to write. Several threads may write to one at a time, at different places.

    Attributes:
        name: Name of the file.
        nbytes: Its full size, given when it was created.
    """

    name: str
    nbytes: int

    @abstractmethod
    def write(self, offset: int, buffers: Sequence[BytesLike]) -> None:
        """Write buffers one after another from the byte at `offset`.

        Args:
            offset: Byte position in the file.
            buffers: Contiguous memory, any number and any sizes; must end inside `nbytes`.

        Raises:
            StorageError: If the storage refuses.
        """

    def write_back(self, offset: int, nbytes: int) -> None:
        """Let the storage begin to make bytes durable that were written, without waiting: `sync` then waits less.

        Args:
            offset: First byte.
            nbytes: How many.
        """
        return

    @abstractmethod
    def sync(self) -> None:
        """Wait until the content survives a power failure."""

    @abstractmethod
    def close(self) -> None:
        """Close the file; twice is fine.

        Raises:
            StorageError: If the storage reports a late error.
        """

    def __enter__(self) -> WriteHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(StorageError):  # the first error says more than a late one
            self.close()
