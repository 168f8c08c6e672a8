"""What a trainer keeps between its asynchronous saves: the arena, the background processes, the save in flight."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dcp_core.arguments import check_wait
from dcp_core.background.arena import Arena
from dcp_core.background.process import BackgroundProcess
from dcp_core.background.response import SaveFuture
from dcp_core.errors import CoordinationError

OnPending = Literal["wait", "raise"]


@dataclass(slots=True)
class InFlight:
    """A save that was handed over.

    Attributes:
        future: Its outcome.
        thread: Waits for it, and runs the callback.
        may_be_committed: Whether the background process has said that the save may be committed from now on.
        agreed_id: The save's id, where the ranks found each other only in the background.
    """

    future: SaveFuture
    thread: threading.Thread | None = None
    may_be_committed: bool = False
    agreed_id: str = ""

    @property
    def save_id(self) -> str:
        """The id by which all ranks know the save."""
        return self.agreed_id or self.future.save_id


class BackgroundService:
    """One for a process.

    Attributes:
        lock: Held by a call from its start to its return.
        arena: Where saves are staged.
        latest: The save that was handed over last.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.arena = Arena()
        self.latest: InFlight | None = None
        self._processes: dict[str, BackgroundProcess] = {}
        self._calls: Counter[str] = Counter()

    def count_call(self, group: str) -> int:
        """Number the calls of a group, from 0; at call entry, whatever becomes of them."""
        self._calls[group] += 1
        return self._calls[group] - 1

    def take_turn(self, on_pending: OnPending) -> BaseException | None:
        """Wait until no save is in flight.

        Args:
            on_pending: "raise": don't wait.

        Returns:
            Why the next save must not begin: one is in flight, or the one before failed and nobody has seen it; or the
            wait was interrupted. The other ranks hear of that, too: they wait for this one.
        """
        latest = self.latest
        if latest is None:
            return None
        if not latest.future.done():
            if threading.current_thread() is latest.thread:
                return CoordinationError(
                    "a callback runs while its save is in flight still, so it cannot begin another; let it tell the "
                    "thread that trains"
                )
            if on_pending == "raise":
                return CoordinationError(
                    f"save {latest.future.save_id} is in flight still, and on_pending is 'raise'; save less often, or "
                    "pass on_pending='wait'"
                )
            try:
                concurrent.futures.wait([latest.future])
            except BaseException as interrupt:
                return interrupt
        return latest.future.unseen_failure()

    def process(self, kind: str) -> BackgroundProcess:
        """The background process of a kind, started when there is none that lives.

        Args:
            kind: "light", or the name of what it has loaded.

        Raises:
            CoordinationError: It cannot be started.
        """
        found = self._processes.get(kind)
        if found is None or not found.is_alive:
            found = self._processes[kind] = BackgroundProcess(notify=self._hear)
        return found

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of background processes that were started and not dismissed."""
        return self._processes.keys()

    def dismiss(self, kind: str) -> None:
        """End a process; the next save that wants one gets another."""
        found = self._processes.pop(kind, None)
        if found is not None:
            found.close(0.0)

    def _hear(self, message: Mapping[str, Any]) -> None:
        latest = self.latest
        if latest is None:
            return
        if message.get("handed_in") == latest.future.save_id:
            latest.may_be_committed = True
        if message.get("named") == latest.future.save_id:
            latest.agreed_id = message["save_id"]


_current: list[BackgroundService] = []


def service() -> BackgroundService:
    """That of this process; a forked one starts with nothing."""
    if not _current or _current[0].pid != os.getpid():
        _current[:] = [BackgroundService()]
    return _current[0]


def take_turn() -> BaseException | None:
    """Wait, for a synchronous save, until no asynchronous one is in flight; `BackgroundService.take_turn`."""
    if not _current or _current[0].pid != os.getpid():
        return None
    return _current[0].take_turn("wait")


def wait_all(timeout: float | None = None) -> None:
    """Wait until no asynchronous save of this process is in flight.

    Args:
        timeout: Seconds to wait at most; None: as long as it takes.

    Raises:
        TimeoutError: One takes longer; it goes on.
        ArgumentError: `timeout` is no number of seconds.
        CoordinationError: Called in a callback.
        DcpError: The last one failed, and nobody has seen it yet.
    """
    check_wait(timeout)
    latest = service().latest
    if latest is None:
        return
    if threading.current_thread() is latest.thread and not latest.future.done():
        raise CoordinationError("a callback runs while its save is in flight still, so it cannot wait for it")
    done, _ = concurrent.futures.wait([latest.future], timeout)
    if not done:
        raise TimeoutError(f"save {latest.future.save_id} still goes on after {timeout} s")
    failure = latest.future.unseen_failure("")
    if failure is not None:
        raise failure
