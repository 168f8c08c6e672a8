"""What a storage is: a flat directory of named files, few primitives, defaults over them.

In: names and bytes. Out: bytes, or a `StorageError` that names operation, file and remedy. No tensor, no plan.
`storage.local` implements it over files; another backend implements the same primitives. What an implementation needs
besides is importable from here: `ReadHandle`, `WriteHandle`, `check_name`, `storage_error`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress

from dcp_core.errors import ArgumentError, IncompleteError, StorageError
from dcp_core.storage.file_errors import check_name, storage_error
from dcp_core.storage.handles import ReadHandle, WriteHandle
from dcp_core.storage.operations import BytesLike

__all__ = ["Names", "ReadHandle", "Storage", "WriteHandle", "check_name", "storage_error"]

Names = list[str]  # `Storage.list` hides the built-in inside the class

_LONGEST_TARGET = 1024


class Storage(ABC):
    """A flat directory of named files.

    Names are plain components (`check_name`). What another process wrote and synced is seen by all.

    Attributes:
        is_object_store: Whether `create` is exclusive only among those who do not create at the same moment, and a
            directory without files is as good as none. Data files carry the id of their save then, all of them.
        requests_at_once: How many reads are made at a time at least, since each waits for the storage; 0: as many as
            there are cores.
        gap_bytes: Reading over so many bytes that nobody wants is cheaper than another request; 0: as in files.
    """

    is_object_store = False
    requests_at_once = 0
    gap_bytes = 0

    @abstractmethod
    def describe(self) -> str:
        """Return where this is, for messages."""

    @abstractmethod
    def prepare(self) -> None:
        """Create the directory; it may exist."""

    def keep_directories(self) -> None:
        """Let the directories that `prepare` made stay from now on: something is complete there."""
        return

    def remove_new_directories(self) -> None:
        """Remove the directories that `prepare` made, unless something is in them: what they were for has failed.

        Raises:
            StorageError: The storage refuses.
        """
        return

    @abstractmethod
    def list(self) -> Names:
        """List all names, sorted.

        Raises:
            NotFoundError: If the directory does not exist.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, None when there is none.

        Raises:
            CorruptError: If the name belongs to something that is no file.
        """

    @abstractmethod
    def modified_seconds(self, name: str) -> float | None:
        """Return when a name was last written or touched, by the storage's clock; None when there is none."""

    @abstractmethod
    def open_read(self, name: str) -> ReadHandle:
        """Open a file to read. Links are followed.

        Raises:
            NotFoundError: If there is none.
            CorruptError: If the name belongs to something that is no file.
        """

    @abstractmethod
    def create(self, name: str, nbytes: int) -> WriteHandle:
        """Create a file of known size, exclusively and without following links.

        Args:
            name: A name that must not exist.
            nbytes: Its full size; the space is reserved where that is possible.

        Raises:
            StorageError: With `errno` EEXIST when the name exists, ENOSPC when the file cannot fit; nothing stays.
        """

    @abstractmethod
    def publish(self, temporary: str, name: str) -> None:
        """Give a finished file its final name in one step, replacing what has it."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; a missing one is fine."""

    @abstractmethod
    def touch(self, name: str) -> None:
        """Set a file's time to now.

        Raises:
            NotFoundError: If there is none.
        """

    @abstractmethod
    def sync(self) -> None:
        """Wait until all names survive a power failure."""

    # --- defaults ------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Be told that what follows only cleans up after a failure; who tries again for long may leave that now."""
        return

    def check_space(self, nbytes: int) -> None:
        """See that files of so many bytes together fit, before any is created. Storages that cannot tell do nothing.

        Raises:
            StorageError: With `errno` ENOSPC, when they do not.
        """
        return

    def remove_directory(self, name: str) -> None:
        """Remove a directory and what it holds; a missing one is fine. Storages without directories do nothing."""
        check_name(name)

    def list_directories(self) -> Names:
        """List the directories in this one, sorted; links to directories are none.

        Raises:
            NotFoundError: If this directory does not exist.
            StorageError: The storage cannot tell, as those that do not override this.
        """
        raise StorageError(f"{self.describe()}: this storage has no directories that can be listed")

    def folder(self, name: str) -> Storage:
        """Return the storage of a directory in this one, which need not exist. Follows no link.

        Raises:
            StorageError: There is a link of this name; or the storage has no directories.
        """
        raise StorageError(f"{self.describe()}: this storage has no directories in it, so there is no {name!r}")

    def remove_empty_directory(self, name: str) -> bool:
        """Remove a directory in this one if nothing is left in it.

        Returns:
            Whether it is gone. Storages without directories have nothing to remove.
        """
        check_name(name)
        return True

    def point(self, name: str, target: str) -> None:
        """Let a name lead to a directory in this one, in one step; `sync` makes it durable.

        A file system makes a link; the default is a small file that holds the target's name.

        Args:
            name: Has led to another directory before, or is free.
            target: A directory in this one.

        Raises:
            StorageError: If something else has the name, which stays.
        """
        temporary = f".{name}.tmp"
        self.remove(temporary)
        self.write_file(temporary, check_name(target).encode())
        self.publish(temporary, name)

    def target_of(self, name: str) -> str | None:
        """Return the directory in this one that `point` let a name lead to; None where it leads to none."""
        if (self.size(name) or _LONGEST_TARGET) >= _LONGEST_TARGET:
            return None
        try:
            return check_name(self.read(name).decode())
        except (UnicodeDecodeError, ArgumentError):
            return None

    def put(
        self,
        name: str,
        content: BytesLike,
        *,
        temporary: str,
        durable: bool = True,
        ready: Callable[[], None] | None = None,
    ) -> None:
        """Give a name a content in one step, replacing what has it.

        Args:
            name: The name.
            content: What it shall have.
            temporary: Name of a file that is made on the way, where there is one; it stays when this fails.
            durable: Whether to wait until the content is on the disk before the step (the name needs `sync`).
            ready: Called right before the step; what it raises prevents it.

        Raises:
            StorageError: It cannot be done; what had the name still has it.
        """
        self.write_file(temporary, content, durable=durable)
        if durable:
            self.sync()
        if ready is not None:
            ready()
        self.publish(temporary, name)

    def sizes(self, names: Sequence[str]) -> Sequence[int | None]:
        """Return the sizes of many files, in their order; None for each that is missing."""
        return [self.size(name) for name in names]

    def remove_unfinished(self, is_removable: Callable[[str], bool]) -> None:
        """Remove what is left of files that were never completed, where that is not seen by `list`.

        Args:
            is_removable: Tells by a file's name whether nobody works on it any more.
        """
        return

    def exists(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        return self.size(name) is not None

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Read a file or a part of it.

        Args:
            name: Name of the file.
            offset: First byte.
            nbytes: How many; None: up to the end.

        Raises:
            IncompleteError: If the file ends before; nothing is allocated then.
        """
        with self.open_read(name) as handle:
            wanted = handle.nbytes - offset if nbytes is None else nbytes
            if offset < 0 or wanted < 0 or offset + wanted > handle.nbytes:
                raise IncompleteError(
                    f"{name!r} in {self.describe()} holds {handle.nbytes} bytes: bytes {offset} to {offset + wanted} "
                    "are not all there"
                )
            content = bytearray(wanted)
            handle.read_into(offset, memoryview(content))
        return bytes(content)

    def write_file(self, name: str, content: BytesLike, *, durable: bool = True) -> None:
        """Create a file with this content.

        Args:
            name: A name that must not exist.
            content: What goes in.
            durable: Whether to wait until the content is on the disk (the name needs `sync`).

        Raises:
            StorageError: If it cannot; the file is removed again then.
        """
        handle = self.create(name, len(memoryview(content).cast("B")))
        try:
            with handle:
                handle.write(0, [content])
                if durable:
                    handle.sync()
        except BaseException:
            with suppress(StorageError):
                self.remove(name)
            raise
