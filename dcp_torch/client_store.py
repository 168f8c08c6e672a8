"""A client of a job's store, for a process beside the job: it never hosts, and every call ends in bounded time.

A c10d client has no deadline of its own for most calls: it waits for a host that is stopped, or whose machine is gone,
as long as that lasts, and for a listener that is no store for ever. So a thread makes the calls, and is left behind
where it gets no answer.
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

from torch.distributed import DistNetworkError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # no list of exports

from dcp_core.errors import CoordinationError

_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]

_REMEDY = (
    "Start the job with torchrun, or by init_process_group with init_method env://, so that its store is there and "
    "outlives the save; or save with use_gloo=False, which talks through files in the checkpoint's directory"
)


class ClientStore:
    """One connection to a TCPStore; the calls have the names that they have there.

    A connection that is lost stays lost.

    Args:
        host: Where the store is.
        port: Where the store is.
        prefix: Goes before every name, with a slash.
        timeout_seconds: How long the store may take to accept the connection, and then for each call.

    Raises:
        CoordinationError: There is no store, or it does not answer; also from every call.
    """

    def __init__(self, host: str, port: int, prefix: str, timeout_seconds: float) -> None:
        self.address = f"{host}:{port}"
        self._timeout_seconds = timeout_seconds
        self._lost = ""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        _check_listener(host, port, timeout_seconds)
        threading.Thread(target=_make_calls, args=(self._calls,), name="dcp-store", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)
        self._store = self._call(_connect, host, port, prefix, timeout_seconds)

    @property
    def is_lost(self) -> bool:
        """Whether a call got no answer, so that every later one fails at once."""
        return bool(self._lost)

    def set(self, key: str, value: bytes) -> None:
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
        except DistNetworkError as error:
            reason = " ".join(str(error).split())
            self._lost = (
                f"the store of the job at {self.address} is gone ({reason}): the process that hosts it, rank 0's or "
                f"torchrun's, has ended or cannot be reached. {_REMEDY}"
            )
            raise CoordinationError(self._lost) from error
        except NoResultError as error:
            if outcome.done():
                raise
            self._lost = (
                f"what listens at {self.address}, where the store of the job should be, has not answered for "
                f"{self._timeout_seconds + extra_seconds:g} s: the process that hosts it is stopped, its machine or "
                f"network is down, or it is no store. {_REMEDY}"
            )
            raise CoordinationError(self._lost) from error


def _check_listener(host: str, port: int, timeout_seconds: float) -> None:
    """Find out at once, and quietly, whether anybody listens: a c10d client tries again until its time is up."""
    try:
        socket.create_connection((host, port), timeout_seconds).close()
    except (OSError, OverflowError, UnicodeError) as error:
        nobody = "nobody listens there" if isinstance(error, ConnectionRefusedError) else f"{error}"
        raise CoordinationError(
            f"the store of the job at {host}:{port} cannot be joined ({nobody}): the job's rendezvous is not there, or "
            f"not any more. {_REMEDY}"
        ) from error


def _connect(host: str, port: int, prefix: str, timeout_seconds: float) -> Any:
    timeout = timedelta(seconds=timeout_seconds)
    return PrefixStore(prefix, TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))


def _make_calls(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        outcome, function, arguments = call
        try:
            outcome.set_result(function(*arguments))
        except BaseException as error:
            outcome.set_exception(error)
        del call, outcome, function, arguments
