"""One group of ranks that broadcast to each other, and its broadcasts under way.

Goes in: what carries them, and where its members meet. Comes out: a `dcp_core.adapter.BroadcastGroup` whose every wait
is bounded, and which is given up as a whole with the first broadcast that fails. Only what wires and views are is left
to the framework.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from dcp_core.coordination.meeting import Meeting
from dcp_core.errors import ArgumentError, CoordinationError, CoordinationTimeoutError

REMEDY = "see the logs of these ranks; or load with broadcast_replicated_tensors=False: every rank reads for itself"

_FIRST_PAUSE_SECONDS = 0.00005
_LONGEST_PAUSE_SECONDS = 0.001
_GRACE_SECONDS = 1.0
_END_SECONDS = 1.0
_END_PAUSE_SECONDS = 0.01


class CommunicatorWork(Protocol):
    """One broadcast of a communicator."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        ...

    def wait(self) -> object:
        """Raise what went wrong; let later operations of the device wait for the bytes. Called once it has ended."""
        ...


class Communicator(Protocol):
    """What carries the broadcasts of one group.

    Attributes:
        is_made: Whether it was made for this group, and is to be destroyed with it.
        gives_up_itself: Whether its works end at their timeout, and say more than that.
    """

    @property
    def is_made(self) -> bool:  # noqa: D102
        ...

    @property
    def gives_up_itself(self) -> bool:  # noqa: D102
        ...

    def start(self, wire: Any, source: int, timeout_seconds: float) -> CommunicatorWork:
        """Start a broadcast of a wire that is not empty; the source is a global rank.

        Raises:
            RuntimeError: The communicator cannot be used any more.
        """
        ...

    def abort(self) -> None:
        """End what is under way, where that can be done. Never raises."""
        ...

    def end(self) -> None:
        """Destroy it if it was made. Never raises; may block while broadcasts are under way."""
        ...


class BroadcastGroup(ABC):
    """`dcp_core.adapter.BroadcastGroup` over a communicator.

    Args:
        communicator: What carries it.
        meeting: Where its members meet.
        timeout_seconds: How long a broadcast may take, since the one before it.
    """

    def __init__(self, communicator: Communicator, meeting: Meeting, timeout_seconds: float) -> None:
        self.ranks = meeting.ranks
        self.rank = meeting.rank
        self.timeout_seconds = timeout_seconds
        self.failure: CoordinationError | None = None
        self._communicator = communicator
        self._meeting = meeting
        self._pending: list[BroadcastWork] = []
        self._moved_at = time.monotonic()
        self._looked_at = self._moved_at
        self._ending: threading.Thread | None = None

    @abstractmethod
    def wire(self, view: Any) -> Any | None:
        """The view's own memory as bytes; None where it is not plain bytes."""

    @abstractmethod
    def temporary(self, nbytes: int, view: Any) -> Any:
        """Bytes on the device of a view, of undefined content."""

    @abstractmethod
    def pack(self, views: Sequence[Any], wire: Any) -> None:
        """Copy the raw bits of views, one after the other, row-major, to a wire."""

    @abstractmethod
    def unpack(self, wire: Any, views: Sequence[Any]) -> None:
        """Undo `pack`."""

    def broadcast(self, wire: Any, source: int) -> BroadcastWork:
        """Start to send a wire, or to receive into it."""
        if source not in self.ranks:
            raise ArgumentError(f"rank {source} is not in the group of ranks {shown(self.ranks)}")
        work = BroadcastWork(self, source, wire.nbytes)
        if self.failure is not None:
            work.finish(self.failure)
        elif wire.nbytes == 0:
            work.finish(None)
        else:
            self._start(work, wire)
        return work

    def close(self) -> None:
        """Destroy the group if it was made, in bounded time whatever has happened."""
        if self._pending and self.failure is None:
            work = self._pending[0]
            self.fail(CoordinationError(f"{work.described}: the group was closed before"))
        if self.failure is None:
            self.failure = CoordinationError(f"the group of ranks {shown(self.ranks)} is closed on rank {self.rank}")
            if self._communicator.is_made:
                with contextlib.suppress(RuntimeError):
                    self._meeting.await_ready(self.timeout_seconds)
            self._communicator.end()
        elif self._ending is not None:
            self._ending.join(_END_SECONDS)

    def look(self, work: BroadcastWork) -> None:
        """See whether there is still hope for a broadcast that is not done; `fail` if not."""
        now = time.monotonic()
        grace = _GRACE_SECONDS if self._communicator.gives_up_itself else 0.0
        if now - max(work.started_at, self._moved_at) > self.timeout_seconds + grace:
            self.fail(
                CoordinationTimeoutError(
                    f"{work.described}: it did not come within {self.timeout_seconds:g} s; {REMEDY}"
                )
            )
        elif now - self._looked_at >= self._meeting.look_seconds:
            self._looked_at = now
            reason = self._meeting.failure()
            if reason:
                self.fail(CoordinationError(f"{work.described}: {reason}; {REMEDY}"))

    def moved(self, work: BroadcastWork) -> None:
        """Note that a broadcast has ended well."""
        self._pending.remove(work)
        self._moved_at = time.monotonic()

    def blame(self, work: BroadcastWork, error: Exception) -> None:
        """Give the group up for what a broadcast ended with."""
        reason = reason_of(error)
        kind = CoordinationTimeoutError if re.search("timed out|timeout", reason, re.I) else CoordinationError
        told = self._meeting.failure()  # whoever failed first has told before it cut its connections
        failure = kind(f"{work.described}: {reason}{told and f' ({told})'}; {REMEDY}")
        failure.__cause__ = error
        self.fail(failure)

    def fail(self, error: CoordinationError) -> None:
        """Give the group up: end what is under way, tell the others, and destroy it if it was made."""
        self.failure = error
        left: list[Any] = []
        for work in self._pending:
            left.append(work.give_up(error))
        self._pending = []
        with contextlib.suppress(RuntimeError):
            self._meeting.fail(f"rank {self.rank} had failed before: {first_clause(error)}")
        most_seconds = 2 * self.timeout_seconds + _END_SECONDS
        self._ending = threading.Thread(
            target=_end, args=(self._communicator, left, most_seconds), name="dcp-broadcast-end", daemon=True
        )
        self._ending.start()

    def _start(self, work: BroadcastWork, wire: Any) -> None:
        self._pending.append(work)
        try:
            work.work = self._communicator.start(wire, work.source, self.timeout_seconds)
        except RuntimeError as error:
            self.blame(work, error)


class BroadcastWork:
    """`dcp_core.adapter.BroadcastWork` over a communicator.

    Args:
        group: Where it runs.
        source: Global rank.
        nbytes: What is sent.
    """

    def __init__(self, group: BroadcastGroup, source: int, nbytes: int) -> None:
        self.source = source
        self.nbytes = nbytes
        self.started_at = time.monotonic()
        self.work: Any = None
        self._group = group
        self._is_done = False
        self._error: CoordinationError | None = None

    @property
    def described(self) -> str:
        """What it comes to when it fails."""
        group = self._group
        done = "send" if self.source == group.rank else f"get from rank {self.source}"
        return (
            f"rank {group.rank} could not {done} {self.nbytes} bytes by a broadcast within the group of ranks "
            f"{shown(group.ranks)}"
        )

    def is_done(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        if not self._is_done:
            if self.work.is_completed():
                self._settle()
            else:
                self._group.look(self)
        return self._is_done

    def wait(self) -> None:
        """Wait for the bytes to be here, or on the source, with the others.

        Raises:
            CoordinationError: They will not come.
        """
        began = time.monotonic()
        while not self.is_done():
            waited = time.monotonic() - began
            time.sleep(min(max(waited / 10, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS))
        if self._error is not None:
            raise self._error

    def finish(self, error: CoordinationError | None) -> None:
        """Be done."""
        self._is_done = True
        self._error = error

    def give_up(self, error: CoordinationError) -> Any:
        """Be done, with an error; returns what was under way. No other reference to that is kept: it holds sockets."""
        work, self.work = self.work, None
        self.finish(error)
        return work

    def _settle(self) -> None:
        try:
            self.work.wait()
        except Exception as error:
            self._group.blame(self, error)
        else:
            self.work = None
            self.finish(None)
            self._group.moved(self)


def _end(communicator: Communicator, left: list[Any], most_seconds: float) -> None:
    """Destroy a group that has failed; runs in a thread.

    To destroy a group of gloo, say, would block until the broadcasts that run have ended, at the latest when their time
    is up, and a thread that is in there when the process ends brings it down. So they are waited for here.
    """
    communicator.abort()
    deadline = time.monotonic() + most_seconds
    while left and time.monotonic() < deadline:
        left[:] = [work for work in left if work is not None and not work.is_completed()]
        if left:
            time.sleep(_END_PAUSE_SECONDS)
    left.clear()
    communicator.end()


def first_clause(error: CoordinationError) -> str:
    """An error without what to do about it."""
    return error.message.partition(";")[0]


def shown(ranks: Sequence[int]) -> str:
    """Ranks as a message names them."""
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def reason_of(error: BaseException) -> str:
    """What a backend says, without where in its code, and without its advice."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"\[/[^]]*\] ", "", text).split(". This is typically", 1)[0]
