"""Processes that tests leave behind: every one that descends from this test run carries a mark in its environment.

Background processes outlive their trainers by design, in sessions of their own, so no process tree shows them.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dcp_core.background.service import service

MARK = "DCP_TEST_RUN"
END_SECONDS = 30.0
"""How long after the end of its trainer and of its work a background process may still be there."""

_WORDS = "dcp_core.background"


@dataclass(frozen=True)
class Found:
    """A process that is there.

    Attributes:
        pid: Its number.
        command: Its command line.
    """

    pid: int
    command: str


def mark() -> str:
    """Mark this process's environment, once; what it starts from then on inherits that."""
    own = os.environ.setdefault(MARK, secrets.token_hex(8))
    return f"{MARK}={own}"


def background_processes() -> list[Found]:
    """The background processes that descend from this test run and have not ended."""
    wanted = mark().encode()
    return [found for found in map(_look, _pids()) if found is not None and _is_ours(found, wanted)]


def children_of(pid: int) -> list[int]:
    """The background processes that a process started."""
    return [found.pid for found in map(_look, _pids()) if found is not None and _is_child(found, pid)]


def is_running(pid: int) -> bool:
    """Whether a process is there and is more than an entry that nobody has collected; its threads end one by one."""
    try:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has ended meanwhile
        return Path(f"/proc/{pid}").exists() and is_running(pid)
    return any(state not in "ZX" for state in states)


def wait_until(condition: Callable[[], object], what: str, seconds: float = END_SECONDS) -> None:
    """Wait for something to become true; fail after a while, saying what did not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds:g} s still not: {what}"
        time.sleep(0.01)


def end_own() -> None:
    """End the background processes of this very process; they would stay as long as it does."""
    current = service()
    for kind in list(current.kinds):
        current.dismiss(kind)


def check_none_left() -> None:
    """Wait until no background process is there; those that stay are ended, and named."""
    deadline = time.monotonic() + END_SECONDS
    while (left := background_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for found in left:
        with suppress(OSError):
            os.kill(found.pid, signal.SIGKILL)
    assert not left, f"still there {END_SECONDS:g} s after the tests: {left}"


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _look(pid: int) -> Found | None:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    return Found(pid, command) if _WORDS in command and is_running(pid) else None


def _is_ours(found: Found, wanted: bytes) -> bool:
    try:
        return wanted in Path(f"/proc/{found.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _is_child(found: Found, pid: int) -> bool:
    try:
        return int(Path(f"/proc/{found.pid}/stat").read_text().rpartition(")")[2].split()[1]) == pid
    except OSError:
        return False
