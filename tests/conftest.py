"""What holds for every test: how hypothesis runs, and that no process stays behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_SECONDS_TO_END = 5.0

settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.register_profile(
    "fuzz", deadline=None, print_blob=True, max_examples=3000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("DCP_HYPOTHESIS", "ci" if os.environ.get("CI") else "default"))


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found.update(int(child) for child in task.read_text().split())
        except OSError:  # the thread or process ended meanwhile
            continue
    return found


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop()) - found
        found |= children
        waiting += children
    return found


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() or "?"
    except OSError:
        return "ended"


def _servers() -> set[int]:
    """Processes that multiprocessing keeps for the whole run: they are no leak."""
    server = getattr(forkserver, "_forkserver", None)
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    kept = (getattr(server, "_forkserver_pid", None), getattr(tracker, "_pid", None))
    return {pid for pid in kept if pid is not None}


@pytest.fixture(autouse=True)
def no_process_stays_behind() -> Iterator[None]:
    """Fail a test that leaves a running process behind, however deep; multiprocessing's own servers may stay."""
    before = _descendants(os.getpid())
    yield
    deadline = time.monotonic() + _SECONDS_TO_END
    while True:
        left = _descendants(os.getpid()) - before - _servers()
        left = {pid for pid in left if not _is_zombie(pid)}
        if not left:
            return
        if time.monotonic() > deadline:
            listed = "\n".join(f"  {pid}: {_command(pid)}" for pid in sorted(left))
            pytest.fail(f"processes still run {_SECONDS_TO_END:g} s after the test:\n{listed}")
        time.sleep(0.02)
