"""How far the memory of this process rises while something is done."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

MEBIBYTE = 1 << 20
_CLEAR_REFS = Path("/proc/self/clear_refs")


def need_peak_counter() -> None:
    """Skip the test where the system does not let a process reset its peak."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError as error:
        pytest.skip(f"/proc/self/clear_refs can't be written: {error}")


def peak_rise(action: Callable[[], object]) -> float:
    """Run something; give the highest resident memory meanwhile above that at its start, in MiB.

    Pages of files that are read or written without mapping them don't count; freed memory that the allocator keeps
    counts as used from the start.
    """
    gc.collect()
    _CLEAR_REFS.write_text("5")
    before = _status_bytes("VmRSS")
    action()
    return (_status_bytes("VmHWM") - before) / MEBIBYTE


def _status_bytes(key: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024
