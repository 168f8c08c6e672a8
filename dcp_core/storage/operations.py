"""The thin layer between us and the operating system: every operation that changes the disk is one method.

A test replaces it to fail, tear or kill at any operation (`dcp_core.testing.faults`). Methods raise plain
`OSError`; `storage.local` turns it into a `StorageError` that names file and remedy.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

BytesLike = bytes | bytearray | memoryview

_Result = TypeVar("_Result")
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe or device under the name of a file must not block the open; for regular files the flag means nothing.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY)
_INTERRUPTED_TRIES = 8
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_MEMORY_TYPES = (0x01021994, 0x858458F6)  # tmpfs, ramfs
_STATFS_NBYTES = 512  # more than the structure has anywhere


def _system_call(name: str, *arguments: type[Any]) -> Callable[..., int] | None:
    """Find a function of the C library that Python does not offer; None where there is none."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        function = getattr(library, name)
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return cast("Callable[..., int]", function)


_OFFSETS = (ctypes.c_int64, ctypes.c_int64)

# `os.posix_fallocate` writes a byte into every block where the file system cannot reserve space.
_fallocate = _system_call("fallocate64", ctypes.c_int, ctypes.c_int, *_OFFSETS) or _system_call(
    "fallocate", ctypes.c_int, ctypes.c_int, *_OFFSETS
)
_sync_file_range = _system_call("sync_file_range", ctypes.c_int, *_OFFSETS, ctypes.c_uint)
_fstatfs = _system_call("fstatfs", ctypes.c_int, ctypes.c_char_p)


class FileOperations:
    """Operations of the file system, one method each.

    Those that change the disk go through `perform`, so that a subclass sees all of them in one place.
    """

    def perform(self, operation: str, path: str, action: Callable[[], _Result]) -> _Result:
        """Run one operation that changes the disk.

        Args:
            operation: Name of the method.
            path: The file or directory that it changes.
            action: Does it.
        """
        return action()

    # --- operations that change the disk -------------------------------------------------------------

    def mkdir(self, path: str) -> None:
        """Make one directory."""
        self.perform("mkdir", path, lambda: os.mkdir(path))

    def create(self, path: str) -> int:
        """Create a file that must not exist, following no link; return a descriptor for writing."""
        return self.perform("create", path, lambda: os.open(path, _CREATE_FLAGS, 0o666))

    def preallocate(self, descriptor: int, nbytes: int, path: str) -> None:
        """Give a new file its full size and reserve the space where the file system can.

        Raises:
            OSError: ENOSPC when it cannot fit, before anything is written.
        """
        self.perform("preallocate", path, lambda: _preallocate(descriptor, nbytes))

    def pwritev(self, descriptor: int, buffers: Sequence[BytesLike], offset: int, path: str) -> int:
        """Write buffers one after another from `offset`; return how many bytes went (may be fewer)."""
        return self.perform("pwritev", path, lambda: os.pwritev(descriptor, buffers, offset))

    def fsync(self, descriptor: int, path: str) -> None:
        """Wait until the content of a file is on the disk."""
        self.perform("fsync", path, lambda: os.fsync(descriptor))

    def close_written(self, descriptor: int, path: str) -> None:
        """Close a file that was written; network file systems report late errors here."""
        self.perform("close_written", path, lambda: os.close(descriptor))

    def fsync_directory(self, path: str) -> None:
        """Wait until the names in a directory are on the disk; a no-op where the file system cannot."""
        self.perform("fsync_directory", path, lambda: _fsync_directory(path))

    def rename(self, source: str, target: str) -> None:
        """Replace `target` by `source` in one step."""
        self.perform("rename", target, lambda: os.rename(source, target))

    def symlink(self, target: str, path: str) -> None:
        """Make a link to `target` that must not exist."""
        self.perform("symlink", path, lambda: os.symlink(target, path))

    def unlink(self, path: str) -> None:
        """Remove a file or a link."""
        self.perform("unlink", path, lambda: os.unlink(path))

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        self.perform("rmdir", path, lambda: os.rmdir(path))

    def touch(self, path: str) -> None:
        """Set the modification time of an existing file to now, by the clock of the file system."""
        self.perform("touch", path, lambda: os.utime(path, None, follow_symlinks=False))

    # --- operations that change nothing --------------------------------------------------------------

    def write_back(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Let the disk begin with bytes that were written, without waiting; a hint, which may do nothing."""
        if _sync_file_range is not None:
            _sync_file_range(descriptor, offset, nbytes, _START_WRITING)

    def free_bytes(self, path: str) -> int | None:
        """Return what this process may still write on the file system of a directory; None where unknown."""
        return free_bytes(path)

    def open_read(self, path: str) -> int:
        """Open a file for reading; links are followed."""
        return os.open(path, _READ_FLAGS)

    def expect_sequential(self, descriptor: int) -> None:
        """Tell the system that a file is read from front to back, so that it reads further ahead; only a hint."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        """Read into buffers from `offset`; return how many bytes came (may be fewer, 0 at the end)."""
        return os.preadv(descriptor, buffers, offset)

    def fstat(self, descriptor: int) -> os.stat_result:
        """Describe an open file."""
        return os.fstat(descriptor)

    def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        """Describe a file."""
        return os.stat(path, follow_symlinks=follow_symlinks)

    def listdir(self, path: str) -> list[str]:
        """List the names in a directory, in no order."""
        return os.listdir(path)

    def close(self, descriptor: int) -> None:
        """Close a file that was only read."""
        os.close(descriptor)


def free_bytes(place: int | str) -> int | None:
    """Return what this process may still write on the file system of an open file or a path; None where unknown."""
    report = os.statvfs(place)
    if report.f_blocks == 0:  # file systems without a size, such as object stores behind FUSE
        return None
    blocks = report.f_bfree if os.geteuid() == 0 else report.f_bavail
    return blocks * report.f_frsize


def present_umask() -> int | None:
    """Return this process's umask, which Python tells only by changing it for all threads; None where unknown."""
    try:
        with open("/proc/self/status", "rb") as file:
            return next((int(line.split()[1], 8) for line in file if line.startswith(b"Umask:")), None)
    except (OSError, ValueError, IndexError):
        return None


def check_free(nbytes: int, available: int | None) -> None:
    """Raise what the operating system would, once the space is used up."""
    if available is not None and available < nbytes:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {nbytes} bytes needed, {available} available")


def _preallocate(descriptor: int, nbytes: int) -> None:
    if nbytes == 0:
        return
    check_free(nbytes, free_bytes(descriptor))
    if not _reserve(descriptor, nbytes):
        os.ftruncate(descriptor, nbytes)


def _reserve(descriptor: int, nbytes: int) -> bool:
    """Allocate the blocks; False where the file system cannot, or where that is no better than writing."""
    if _fallocate is None or _is_in_memory(descriptor):
        return False
    for _ in range(_INTERRUPTED_TRIES):
        if _fallocate(descriptor, 0, 0, nbytes) == 0:
            return True
        number = ctypes.get_errno()
        if number in _NOT_SUPPORTED:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return False


def _is_in_memory(descriptor: int) -> bool:
    """Whether a file lies in memory, where reserving space means to clear every page that is written right after."""
    report = ctypes.create_string_buffer(_STATFS_NBYTES)
    if _fstatfs is None or _fstatfs(descriptor, report) != 0:
        return False
    return int.from_bytes(report.raw[:4], sys.byteorder) in _MEMORY_TYPES  # the type comes first, on every platform


def _fsync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)
