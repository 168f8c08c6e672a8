"""What the kernel says of a process: memory of its own, descriptors, threads, children."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

FRAMEWORKS = ("torch", "torch_npu", "mindspore", "jax", "tensorflow")


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process has at one time.

    Attributes:
        private_nbytes: Memory that no other process has mapped.
        descriptors: Open files.
        threads: Threads.
    """

    private_nbytes: int
    descriptors: int
    threads: int


def use_of(pid: int) -> ProcessUse:
    """Look at a process."""
    place = Path("/proc", str(pid))
    return ProcessUse(private_nbytes(pid), _entries(place / "fd"), _entries(place / "task"))


def private_nbytes(pid: int) -> int:
    """Bytes of pages that only this process has mapped, clean and dirty ones."""
    total = 0
    for line in Path("/proc", str(pid), "smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1]) * 1024
    return total


def children_of(pid: int) -> int:
    """How many processes have this one as their parent."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            count += int(stat.read_text().rpartition(")")[2].split()[1]) == pid
        except OSError:
            continue  # it has ended meanwhile
    return count


def mapped_frameworks(pid: int) -> list[str]:
    """Frameworks of which a process has a file mapped."""
    maps = Path("/proc", str(pid), "maps").read_text()
    return [name for name in FRAMEWORKS if f"{os.sep}{name}{os.sep}" in maps]


def _entries(directory: Path) -> int:
    return len(os.listdir(directory))
