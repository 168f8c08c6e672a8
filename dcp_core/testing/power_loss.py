"""What a disk may hold after the power failed, at any moment of what was done to it.

`RecordedOperations` does everything and writes it down. `disk_after` then plays the first N operations and makes a
directory as a disk may show it afterwards. What was synced is there. What was not may be there or not, name by name
and page by page: a file system promises no order between them::

    >>> recorded = RecordedOperations("/somewhere")
    >>> recorded.log
    []

A name is on the disk once its directory was synced; the content of a file once the file was. Neither implies the
other, as POSIX has it.

Several processes may write down what they do in one file, in the order in which it happened: `RecordedOperations` with
a `log_file` does one operation at a time, among all of them, and `read_log` gives the records.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dcp_core.storage.operations import BytesLike, FileOperations

PAGE_BYTES = 4096
"""So much of a file reaches the disk in one piece."""

Chance = Callable[[], bool]
"""Asked once for every unsynced name and page: whether it reached the disk."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One operation that changed the disk.

    Attributes:
        operation: Name of the method of `FileOperations`.
        path: What it changed; for a rename the new name.
        file: Number of the file that it is about, no other file's; -1: none, or one that was there before.
        offset: Where bytes were written.
        data: Bytes that were written.
        nbytes: Size that the file was given.
        source: The old name, of a rename; where it leads, of a link.
    """

    operation: str
    path: str
    file: int = -1
    offset: int = 0
    data: bytes = b""
    nbytes: int = 0
    source: str = ""


class RecordedOperations(FileOperations):
    """File operations that write down all that they change.

    Attributes:
        log: What was done through this object, in order.

    Args:
        root: Only what lies in this directory is written down.
        log_file: Where to write it down besides, after what other processes did; outside of `root`.
    """

    def __init__(self, root: str | os.PathLike[str], log_file: str | os.PathLike[str] | None = None) -> None:
        self.log: list[Recorded] = []
        self._root = os.path.realpath(root)
        self._log_file = None if log_file is None else os.fspath(log_file)
        self._lock = threading.RLock()
        self._files: dict[int, int] = {}
        self._count = 0

    def mkdir(self, path: str) -> None:
        """Make one directory."""
        with self._alone():
            super().mkdir(path)
            self._record(Recorded("mkdir", path))

    def create(self, path: str) -> int:
        """Create a file."""
        with self._alone():
            descriptor = super().create(path)
            number = os.getpid() << 32 | self._count
            self._files[descriptor] = number
            self._record(Recorded("create", path, number))
            self._count += 1
        return descriptor

    def preallocate(self, descriptor: int, nbytes: int, path: str) -> None:
        """Give a new file its size."""
        with self._alone():
            super().preallocate(descriptor, nbytes, path)
            self._record(Recorded("preallocate", path, self._files[descriptor], nbytes=nbytes))

    def pwritev(self, descriptor: int, buffers: Sequence[BytesLike], offset: int, path: str) -> int:
        """Write buffers."""
        with self._alone():
            written = super().pwritev(descriptor, buffers, offset, path)
            data = b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)[:written]
            self._record(Recorded("pwritev", path, self._files[descriptor], offset=offset, data=data))
        return written

    def fsync(self, descriptor: int, path: str) -> None:
        """Wait for the content of a file."""
        with self._alone():
            super().fsync(descriptor, path)
            self._record(Recorded("fsync", path, self._files[descriptor]))

    def fsync_directory(self, path: str) -> None:
        """Wait for the names in a directory."""
        with self._alone():
            super().fsync_directory(path)
            self._record(Recorded("fsync_directory", path))

    def rename(self, source: str, target: str) -> None:
        """Replace `target` by `source`."""
        with self._alone():
            super().rename(source, target)
            self._record(Recorded("rename", target, source=source))

    def symlink(self, target: str, path: str) -> None:
        """Make a link."""
        with self._alone():
            super().symlink(target, path)
            self._record(Recorded("symlink", path, source=target))

    def unlink(self, path: str) -> None:
        """Remove a file or a link."""
        with self._alone():
            super().unlink(path)
            self._record(Recorded("unlink", path))

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        with self._alone():
            super().rmdir(path)
            self._record(Recorded("rmdir", path))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no process or thread that writes into the same log do an operation meanwhile."""
        with self._lock:
            if self._log_file is None:
                yield
                return
            with open(self._log_file, "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
                yield

    def _record(self, record: Recorded) -> None:
        if record.path != self._root and not record.path.startswith(f"{self._root}/"):
            return
        self.log.append(record)
        if self._log_file is not None:
            with open(self._log_file, "ab") as file:
                pickle.dump(record, file)


def read_log(log_file: str | os.PathLike[str]) -> list[Recorded]:
    """Read what processes did, in the order in which they did it.

    Args:
        log_file: What `RecordedOperations` wrote; only what it wrote itself may be in it.
    """
    records: list[Recorded] = []
    with open(log_file, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        while file.tell() < end:
            records.append(pickle.load(file))
    return records


def everything() -> bool:
    """Say that all reached the disk."""
    return True


def nothing() -> bool:
    """Say that only what was synced reached the disk."""
    return False


def at_random(seed: int) -> Chance:
    """Let each name and page reach the disk or not, by chance."""
    generator = random.Random(seed)
    return lambda: generator.random() < 0.5


def disk_after(
    log: Sequence[Recorded],
    before: str | os.PathLike[str],
    root: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    names: Chance,
    pages: Chance,
) -> None:
    """Make what the disk holds when the power fails right after the operations of `log`.

    Args:
        log: What was done in `root`, from `RecordedOperations.log`.
        before: A directory that holds what `root` held before, all of it synced.
        root: The directory that the records name.
        target: Where to make the result; it must not exist.
        names: Asked about every unsynced change of a name.
        pages: Asked about every unsynced page of a file.
    """
    disk = _Disk(os.path.realpath(root), _read_tree(Path(before)))
    for record in log:
        disk.play(record)
    disk.settle(Path(target), names, pages)


@dataclass(slots=True)
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    def after_loss(self, pages: Chance) -> bytes:
        """The content once what was not synced may be lost; a size that was not synced is lost with its last page."""
        found = bytearray(self.synced)
        for start in range(0, len(self.content), PAGE_BYTES):
            page = self.content[start : start + PAGE_BYTES]
            if found[start : start + PAGE_BYTES] != page and pages():
                found.extend(bytes(max(0, start + len(page) - len(found))))
                found[start : start + len(page)] = page
        return bytes(found)


_Entry = _File | str | None  # a file, where a link leads, or None: a directory


@dataclass(slots=True)
class _Change:
    """A change of names that its directory has not been synced for: these entries, or the lack of one."""

    parent: str
    names: dict[str, _Entry]
    gone: list[str] = field(default_factory=list)

    def apply(self, tree: dict[str, _Entry]) -> None:
        for name in self.gone:
            tree.pop(name, None)
        tree.update(self.names)


class _Disk:
    """The names and files that are seen, those that are on the disk, and what lies between."""

    def __init__(self, root: str, before: dict[str, _Entry]) -> None:
        self._root = root
        self._seen = dict(before)
        self._synced = dict(before)
        self._pending: list[_Change] = []
        self._files: dict[int, _File] = {}

    def play(self, record: Recorded) -> None:
        name = self._name_of(record.path)
        if record.operation == "create":
            self._files[record.file] = _File()
            self._change({name: self._files[record.file]})
        elif record.operation == "mkdir":
            self._change({name: None})
        elif record.operation == "symlink":
            self._change({name: record.source})
        elif record.operation in ("unlink", "rmdir"):
            self._change({}, [name])
        elif record.operation == "rename":
            source = self._name_of(record.source)
            self._change({name: self._seen[source]}, [source])
        elif record.operation == "fsync_directory":
            self._sync_names(name)
        else:
            self._write(self._files[record.file], record)

    def _write(self, file: _File, record: Recorded) -> None:
        if record.operation == "fsync":
            file.synced = bytes(file.content)
            return
        size = max(len(file.content), record.nbytes, record.offset + len(record.data))
        file.content.extend(bytes(size - len(file.content)))
        file.content[record.offset : record.offset + len(record.data)] = record.data

    def _change(self, names: dict[str, _Entry], gone: Sequence[str] = ()) -> None:
        change = _Change(os.path.dirname(next(iter([*names, *gone]))), names, list(gone))
        change.apply(self._seen)
        self._pending.append(change)

    def _sync_names(self, directory: str) -> None:
        for change in self._pending:
            if change.parent == directory:
                change.apply(self._synced)
        self._pending = [change for change in self._pending if change.parent != directory]

    def settle(self, target: Path, names: Chance, pages: Chance) -> None:
        for change in self._pending:
            if names():
                change.apply(self._synced)
        target.mkdir()
        for name, entry in sorted(self._synced.items()):
            if entry is None and self._is_reachable(name):
                (target / name).mkdir()
        contents: dict[int, bytes] = {}
        for name, entry in sorted(self._synced.items()):
            if isinstance(entry, str) and self._is_reachable(name):
                (target / name).symlink_to(entry)
            elif isinstance(entry, _File) and self._is_reachable(name):
                (target / name).write_bytes(contents.setdefault(id(entry), entry.after_loss(pages)))

    def _is_reachable(self, name: str) -> bool:
        """Whether every directory above a name is on the disk too."""
        parent = os.path.dirname(name)
        return not parent or (self._synced.get(parent, self) is None and self._is_reachable(parent))

    def _name_of(self, path: str) -> str:
        name = os.path.relpath(path, self._root)
        return "" if name == "." else name


def _read_tree(root: Path) -> dict[str, _Entry]:
    tree: dict[str, _Entry] = {}
    for path in sorted(root.rglob("*")):
        tree[str(path.relative_to(root))] = _read_entry(path)
    return tree


def _read_entry(path: Path) -> _Entry:
    if path.is_symlink():
        return os.readlink(path)
    if path.is_dir():
        return None
    content = path.read_bytes()
    return _File(bytearray(content), content)
