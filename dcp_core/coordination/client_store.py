"""A client of a job's store, for a process beside the job: it never hosts, and every call ends in bounded time.

Clients of such stores have no deadline of their own for most calls: they wait for a host that is stopped, or whose
machine is gone, as long as that lasts, and for a listener that is no store for ever. So a thread makes the calls, and
is left behind where it gets no answer.
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoResultError
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from dcp_core.errors import CoordinationError

_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class ClientStore:
    """One connection to a store; the calls have the names that they have there.

    A connection that is lost stays lost.

    Args:
        host: Where the store is.
        port: Where the store is.
        connect: Makes the framework's client; called in the thread that makes the calls.
        timeout_seconds: How long the store may take to accept the connection, and then for each call.
        lost_by: What the client raises when the connection is gone.
        host_process: Whose process hosts the store, in a message.
        remedy: What to do about a store that is not there.

    Raises:
        CoordinationError: There is no store, or it does not answer; also from every call.
    """

    def __init__(
        self,
        host: str,
        port: int,
        connect: Callable[[], Any],
        timeout_seconds: float,
        *,
        lost_by: type[Exception],
        host_process: str,
        remedy: str,
    ) -> None:
        self.address = f"{host}:{port}"
        self._timeout_seconds = timeout_seconds
        self._lost_by = lost_by
        self._host_process = host_process
        self._remedy = remedy
        self._lost = ""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        _check_listener(host, port, timeout_seconds, remedy)
        threading.Thread(target=_make_calls, args=(self._calls,), name="dcp-store", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)
        self._store = self._call(connect)

    @property
    def is_lost(self) -> bool:
        """Whether a call got no answer, so that every later one fails at once."""
        return bool(self._lost)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._call(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        value: bytes = self._call(self._store.get, key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns what it comes to."""
        return int(self._call(self._store.add, key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._call(self._store.check, list(keys)))

    def delete_key(self, key: str) -> bool:
        """Remove a key; returns whether it was there."""
        return bool(self._call(self._store.delete_key, key))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait for keys.

        Raises:
            RuntimeError: The time was up.
        """
        self._call(self._store.wait, list(keys), timeout, extra_seconds=timeout.total_seconds())

    def _call(self, function: Callable[..., Any], *arguments: Any, extra_seconds: float = 0.0) -> Any:
        if self._lost:
            raise CoordinationError(self._lost)
        outcome: Future[Any] = Future()
        self._calls.put((outcome, function, arguments))
        try:
            return outcome.result(self._timeout_seconds + extra_seconds)
        except self._lost_by as error:
            reason = " ".join(str(error).partition("\n")[0].split())
            self._lost = (
                f"the store of the job at {self.address} is gone ({reason}): the process that hosts it, "
                f"{self._host_process}, has ended or cannot be reached. {self._remedy}"
            )
            raise CoordinationError(self._lost) from error
        except NoResultError as error:
            if outcome.done():
                raise
            self._lost = (
                f"what listens at {self.address}, where the store of the job should be, has not answered for "
                f"{self._timeout_seconds + extra_seconds:g} s: the process that hosts it is stopped, its machine or "
                f"network is down, or it is no store. {self._remedy}"
            )
            raise CoordinationError(self._lost) from error


def _check_listener(host: str, port: int, timeout_seconds: float, remedy: str) -> None:
    """Find out at once, and quietly, whether anybody listens: clients try again until their time is up."""
    try:
        socket.create_connection((host, port), timeout_seconds).close()
    except (OSError, OverflowError, UnicodeError) as error:
        nobody = "nobody listens there" if isinstance(error, ConnectionRefusedError) else f"{error}"
        raise CoordinationError(
            f"the store of the job at {host}:{port} cannot be joined ({nobody}): the job's rendezvous is not there, or "
            f"not any more. {remedy}"
        ) from error


def _make_calls(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        outcome, function, arguments = call
        try:
            outcome.set_result(function(*arguments))
        except BaseException as error:
            outcome.set_exception(error)
        del call, outcome, function, arguments
