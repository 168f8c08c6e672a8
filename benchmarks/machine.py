"""What figures depend on: the machine and the versions. No names, no paths."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("hyper-dcp", "numpy", "torch", "safetensors", "xxhash")


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
