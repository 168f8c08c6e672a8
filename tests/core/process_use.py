"""What processes use: memory, threads, descriptors, children, and files beside the checkpoints."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Use:
    """What a process uses.

    Attributes:
        resident_nbytes: Memory.
        threads: How many.
        descriptors: How many.
    """

    resident_nbytes: int
    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Use:
        """Look at a process."""
        place = Path(f"/proc/{pid}")
        resident = int((place / "statm").read_text().split()[1]) * _PAGE_NBYTES
        return cls(resident, len(os.listdir(place / "task")), len(os.listdir(place / "fd")))


def settled_use(pid: int, usual: Use | None = None) -> Use:
    """What a process uses when nothing changes any more; threads of a save end a moment after its result is there.

    Args:
        pid: The process.
        usual: Wait a while for threads and descriptors beyond these to go.
    """
    before, deadline = Use.of(pid), time.monotonic() + (5.0 if usual is None else 40.0)
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = Use.of(pid)
        is_usual = usual is None or (now.threads <= usual.threads and now.descriptors <= usual.descriptors)
        if is_usual and (now.threads, now.descriptors) == (before.threads, before.descriptors):
            break
        before = now
    return now


def give_memory_back() -> None:
    """Free what only the allocator of this process holds: what it keeps differs from save to save."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def open_in(pid: int, directory: str) -> list[str]:
    """The files of a directory that a process has open or mapped, removed ones included."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(link))
        except OSError:  # closed meanwhile
            continue
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        found.add(line.partition("/")[1] + line.partition("/")[2])
    return sorted(name for name in found if name.startswith(f"{directory}/"))
