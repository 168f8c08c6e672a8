"""Where checkpoints lie while they are measured: kinds of storage, room, cleaning up, and dropping cached pages."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMORY_BACKED = ("tmpfs", "ramfs", "hugetlbfs")
_SPARE_NBYTES = 256 * 1024 * 1024
_LATE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Place:
    """A directory of a run, and what kind of file system it is on."""

    kind: str
    directory: str
    filesystem: str

    @property
    def label(self) -> str:
        if self.filesystem in MEMORY_BACKED:
            warning = ", NOT A DISK" if self.kind == "disk" else ""
            return f"{self.filesystem}{warning}, where fsync has no effect"
        return self.filesystem


@contextlib.contextmanager
def scratch(kind: str, parent: str) -> Iterator[Place]:
    """A directory that is gone in the end, however the end comes; a second Ctrl-C does not stop the removal."""
    directory = tempfile.mkdtemp(prefix="dcp-bench-", dir=parent)
    try:
        yield Place(kind, directory, filesystem_of(directory))
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        _remove(directory)
        signal.signal(signal.SIGINT, before)


def _remove(directory: str) -> None:
    """Remove a tree, though a process that finishes its save may still write there for a while."""
    deadline = time.monotonic() + _LATE_SECONDS
    shutil.rmtree(directory, ignore_errors=True)
    while os.path.exists(directory) and time.monotonic() < deadline:
        time.sleep(0.1)
        shutil.rmtree(directory, ignore_errors=True)


def filesystem_of(directory: str) -> str:
    """The type of the file system that a directory is on."""
    path = os.path.realpath(directory)
    best, found = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, kind = line.split()[1:3]
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, found = mount, kind
    return found


def missing_room(parent: str, files_nbytes: int, memory_nbytes: int) -> str | None:
    """Why a directory or the machine's memory is too small, or None if there is room.

    Args:
        parent: A directory.
        files_nbytes: Bytes of the files that lie there at one time.
        memory_nbytes: Bytes that the processes need at one time, beside the files.
    """
    free, wanted = shutil.disk_usage(parent).free, files_nbytes + _SPARE_NBYTES
    if free < wanted:
        return f"{parent} has {gib(free)} free, the run needs {gib(wanted)}"
    in_memory = filesystem_of(parent) in MEMORY_BACKED
    available, wanted = available_memory(), memory_nbytes + (files_nbytes if in_memory else 0) + _SPARE_NBYTES
    if available < wanted:
        return f"the machine has {gib(available)} of memory available, the run needs {gib(wanted)}"
    return None


def available_memory() -> int:
    """Bytes that processes can still get without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def gib(nbytes: int) -> str:
    """Bytes as GiB, for messages."""
    return f"{nbytes / 1024**3:.2f} GiB"


def sync(path: str) -> None:
    """Bring one file or directory to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: str) -> None:
    """Bring every file and directory of a tree to the device; what goes away meanwhile needs no sync."""
    for parent, _, files in os.walk(directory):
        for path in (*(os.path.join(parent, name) for name in files), parent):
            with contextlib.suppress(FileNotFoundError):
                sync(path)


def drop_cached_pages(directory: str) -> None:
    """Have the kernel forget the cached pages of all files of a tree; those that a process has mapped stay."""
    sync_tree(directory)
    for parent, _, files in os.walk(directory):
        for name in files:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
