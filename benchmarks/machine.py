"""What figures depend on: the machine and the versions. No names, no paths."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("hyper-dcp", "numpy", "torch", "safetensors", "xxhash")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of all cores of the machine since it started.

    Attributes:
        busy: Of all processes.
        stolen: That the host gave to other machines.
    """

    busy: float
    stolen: float

    def __sub__(self, other: CpuTimes) -> CpuTimes:
        return CpuTimes(self.busy - other.busy, self.stolen - other.stolen)


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """What else the machine did during a measurement.

    Attributes:
        before: Processes that ran or wanted to, averaged over the minute before.
        after: The same at the end, with those of the measurement.
        others: How many cores other processes kept busy.
        stolen: How many cores the host gave to other machines.
    """

    before: float
    after: float
    others: float
    stolen: float

    def __str__(self) -> str:
        return (
            f"load average {self.before:.2f} before, {self.after:.2f} after; others kept {self.others:.2f} of "
            f"{len(os.sched_getaffinity(0))} cores busy, the host took {self.stolen:.2f}"
        )


def cpu_times() -> CpuTimes:
    """The machine's counters."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    tick = os.sysconf("SC_CLK_TCK")
    return CpuTimes((user + nice + system + irq + softirq) / tick, steal / tick)


def machine_facts(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Cores, memory, kernel, Python, and the versions of packages as far as they are installed."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _first_value("/proc/cpuinfo", "model name") or platform.machine(),
        "memory_gib": round(int((_first_value("/proc/meminfo", "MemTotal") or "0").split()[0]) / 1024**2, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": dict(_versions([*PACKAGES, *packages])),
    }


def write_json(path: str, packages: Sequence[str] = (), **content: Any) -> None:
    """Write figures to a file, with the machine's facts."""
    Path(path).write_text(json.dumps({"machine": machine_facts(packages), **content}, indent=1) + "\n")


def _versions(packages: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for package in sorted(set(packages)):
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return found


def _first_value(file: str, name: str) -> str | None:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
