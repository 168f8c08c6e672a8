"""A storage over the files of one directory: local disks, memory-backed and network file systems."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import AbstractContextManager, suppress

from dcp_core.errors import ArgumentError, CorruptError, StorageError
from dcp_core.storage.base import Names, ReadHandle, Storage, WriteHandle, check_name
from dcp_core.storage.file_errors import translated
from dcp_core.storage.local_handles import LocalReadHandle, LocalWriteHandle
from dcp_core.storage.operations import FileOperations, check_free

_ABSENT = (errno.ENOENT, errno.ENOTDIR)


class LocalStorage(Storage):
    """A directory of files.

    The path is made absolute and its links are resolved once, here: `latest -> step_1` is step_1 for as long as
    this object lives, even when somebody turns the link meanwhile.

    Args:
        path: The directory; it need not exist yet.
        operations: How the disk is reached.
    """

    def __init__(self, path: str | os.PathLike[str], operations: FileOperations | None = None) -> None:
        shown = os.fspath(path)
        if not shown or "\0" in shown:
            raise ArgumentError(f"{shown!r} is no path of a directory")
        self.path = os.path.realpath(shown)
        self._shown = os.path.abspath(shown)
        self._operations = operations or FileOperations()
        self._changed_parents: list[str] = []
        self._made: list[str] = []

    def describe(self) -> str:
        """Return the path, as it was given and made absolute."""
        return repr(self._shown)

    def prepare(self) -> None:
        """Create the directory and those above it; `sync` later makes them durable too."""
        missing = []
        path = self.path
        while not os.path.isdir(path) and os.path.dirname(path) != path:
            missing.append(path)
            path = os.path.dirname(path)
        for directory in reversed(missing):
            with self._translated("make the directory", ""):
                self._make(directory)

    def keep_directories(self) -> None:
        """Let the directories that `prepare` made stay from now on."""
        self._made.clear()

    def remove_new_directories(self) -> None:
        """Remove the directories that `prepare` made, the innermost first, up to one in which something is."""
        while self._made:
            with self._translated("remove the directory", ""), suppress(FileNotFoundError):
                try:
                    self._operations.rmdir(self._made[-1])
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                        return
                    raise
            self._made.pop()

    def list(self) -> Names:
        """List all names, sorted."""
        with self._translated("list", ""):
            return sorted(self._operations.listdir(self.path))

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, None when there is none."""
        found = self._stat("look up", name, follow_symlinks=True)
        if found is None:
            return None
        self._check_regular(name, found)
        return found.st_size

    def modified_seconds(self, name: str) -> float | None:
        """Return when a name was last written or touched; None when there is none."""
        found = self._stat("look up", name, follow_symlinks=False)
        return None if found is None else found.st_mtime

    def open_read(self, name: str) -> ReadHandle:
        """Open a file to read; links are followed."""
        path = self._path_of(name)
        with self._translated("open", name):
            descriptor = self._operations.open_read(path)
        try:
            with self._translated("look up", name):
                found = self._operations.fstat(descriptor)
            self._check_regular(name, found)
            self._operations.expect_sequential(descriptor)
        except BaseException:
            self._operations.close(descriptor)
            raise
        return LocalReadHandle(self._operations, self.describe(), name, descriptor, found.st_size)

    def create(self, name: str, nbytes: int) -> WriteHandle:
        """Create a file of known size, exclusively and without following links."""
        path = self._path_of(name)
        if nbytes < 0:
            raise ArgumentError(f"a file of {nbytes} bytes cannot be created: {name!r}")
        with self._translated("create", name):
            descriptor = self._operations.create(path)
        try:
            with self._translated(f"reserve {nbytes} bytes for", name):
                self._operations.preallocate(descriptor, nbytes, path)
        except BaseException:
            os.close(descriptor)
            with suppress(OSError):
                self._operations.unlink(path)
            raise
        return LocalWriteHandle(self._operations, self.describe(), name, path, descriptor, nbytes)

    def check_space(self, nbytes: int) -> None:
        """See that files of so many bytes together fit, before any is created."""
        try:
            available = self._operations.free_bytes(self.path)
        except OSError:
            return  # whatever it is, creating the files says it better
        with self._translated(f"reserve {nbytes} bytes in", ""):
            check_free(nbytes, available)

    def publish(self, temporary: str, name: str) -> None:
        """Give a finished file its final name in one step, replacing what has it."""
        source, target = self._path_of(temporary), self._path_of(name)
        with self._translated(f"rename {temporary!r} to", name):
            self._operations.rename(source, target)

    def remove(self, name: str) -> None:
        """Remove a file or a link; a missing one is fine."""
        with self._translated("remove", name), suppress(FileNotFoundError):
            self._operations.unlink(self._path_of(name))

    def remove_directory(self, name: str) -> None:
        """Remove a directory and what it holds; a missing one is fine, links are not followed."""
        path = self._path_of(name)
        with self._translated("remove the directory", name), suppress(FileNotFoundError):
            if os.path.islink(path):
                self._operations.unlink(path)
            else:
                self._remove_tree(path)

    def list_directories(self) -> Names:
        """List the directories in this one, sorted; links are none."""
        found = []
        for name in self.list():
            entry = self._stat("look up", name, follow_symlinks=False)
            if entry is not None and stat.S_ISDIR(entry.st_mode):
                found.append(name)
        return found

    def folder(self, name: str) -> Storage:
        """Return the storage of a directory in this one, which need not exist; a link is refused."""
        path = self._path_of(name)
        made = LocalStorage(path, self._operations)
        if made.path != path:
            raise StorageError(f"{name!r} in {self.describe()} is a link, which is not followed")
        return made

    def remove_empty_directory(self, name: str) -> bool:
        """Remove a directory in this one if nothing is left in it; says whether it is gone."""
        path = self._path_of(name)
        with self._translated("remove the directory", name):
            try:
                self._operations.rmdir(path)
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return False
        return True

    def point(self, name: str, target: str) -> None:
        """Let a name be a link to a directory in this one, in one step; what is no link stays."""
        path, temporary = self._path_of(name), self._path_of(f".{name}.tmp")
        found = self._stat("look up", name, follow_symlinks=False)
        if found is not None and not stat.S_ISLNK(found.st_mode):
            raise StorageError(f"{name!r} in {self.describe()} is there and is no link: it stays as it is")
        with self._translated("make the link", name):
            with suppress(FileNotFoundError):
                self._operations.unlink(temporary)
            self._operations.symlink(check_name(target), temporary)
            self._operations.rename(temporary, path)

    def target_of(self, name: str) -> str | None:
        """Return the directory in this one that a name is a link to; None where it is none."""
        try:
            target = os.readlink(self._path_of(name))
        except OSError:
            return None
        return target if os.path.basename(target) == target else None

    def touch(self, name: str) -> None:
        """Set a file's time to now."""
        with self._translated("touch", name):
            self._operations.touch(self._path_of(name))

    def sync(self) -> None:
        """Wait until all names survive a power failure, those of directories that `prepare` made too."""
        with self._translated("sync", ""):
            self._operations.fsync_directory(self.path)
            while self._changed_parents:
                self._operations.fsync_directory(self._changed_parents[-1])
                self._changed_parents.pop()

    # --- how -----------------------------------------------------------------------------------------

    @property
    def operations(self) -> FileOperations:
        """How the disk is reached."""
        return self._operations

    def _translated(self, operation: str, name: str) -> AbstractContextManager[None]:
        return translated(operation, name, self.describe())

    def _path_of(self, name: str) -> str:
        return os.path.join(self.path, check_name(name))

    def _stat(self, operation: str, name: str, *, follow_symlinks: bool) -> os.stat_result | None:
        path = self._path_of(name)
        with self._translated(operation, name):
            try:
                return self._operations.stat(path, follow_symlinks=follow_symlinks)
            except OSError as error:
                if error.errno in _ABSENT:
                    return None
                raise

    def _check_regular(self, name: str, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise CorruptError(f"{name!r} in {self.describe()} is no regular file")

    def _make(self, directory: str) -> None:
        try:
            self._operations.mkdir(directory)
            self._made.append(directory)
        except FileExistsError:
            if not os.path.lexists(directory):  # another job has made it, and has removed it since
                raise OSError(errno.ENOENT, f"{directory} was removed a moment ago") from None
            if not os.path.isdir(directory):
                raise OSError(errno.ENOTDIR, f"{directory} is there and is no directory") from None
        self._changed_parents.append(os.path.dirname(directory))

    def _remove_tree(self, path: str) -> None:
        with os.scandir(path) as entries:
            found = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for inner, is_directory in found:
            with suppress(FileNotFoundError):
                if is_directory:
                    self._remove_tree(inner)
                else:
                    self._operations.unlink(inner)
        self._operations.rmdir(path)
