"""What the kernel counts for this process: bytes that were read and written, and resident memory."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class IoCounts:
    """Bytes, all threads of a process together.

    Attributes:
        rchar: Handed out by calls that read; nothing that was read through a mapping.
        wchar: Taken by calls that write.
        read_bytes: Fetched from a device; from the page cache or a memory-backed file system nothing.
        write_bytes: To be written to a device.
    """

    rchar: int = 0
    wchar: int = 0
    read_bytes: int = 0
    write_bytes: int = 0

    def __sub__(self, other: IoCounts) -> IoCounts:
        return IoCounts(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))

    def __add__(self, other: IoCounts) -> IoCounts:
        return IoCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def io_counts() -> IoCounts:
    """The counters of /proc/self/io; reading them adds about a hundred bytes to `rchar`."""
    lines = Path("/proc/self/io").read_text().splitlines()
    found = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return IoCounts(**{each.name: found[each.name] for each in fields(IoCounts)})


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Resident bytes of one process above what it had before an operation.

    Pages of files count while they are mapped. Pages of memory-backed files do not count otherwise.

    Attributes:
        peak: The most that was there at any time.
        kept: What is still there when the operation is over and free memory has gone back.
    """

    peak: int
    kept: int


class MemoryMeter:
    """Measures what an operation needs: made right before it, asked right after it."""

    def __init__(self) -> None:
        give_back_free_memory()
        self._before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident now

    def use(self) -> MemoryUse:
        peak = _resident("VmHWM") - self._before
        give_back_free_memory()
        return MemoryUse(max(peak, 0), _resident("VmRSS") - self._before)


def resident_peak() -> int:
    """The most bytes that this process ever had resident, or had since the peak was last reset."""
    return _resident("VmHWM")


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}: peak memory can't be measured on this system")


def give_back_free_memory() -> None:
    """Collect garbage and return freed memory to the system, so that no operation profits from the one before."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
