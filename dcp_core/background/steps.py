"""How far a save in the background is, and how its trainer tells a slow process from one that hangs.

In the background process: a count that grows with everything that is done. In the trainer: who waits for the outcome
asks for that count now and then, and gives a process up that has done nothing for too long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Protocol

from dcp_core.background.task import Seat
from dcp_core.errors import CoordinationTimeoutError, DcpError, RankCause, RankFailedError

GRACE_SECONDS = 10.0
"""How much longer than `timeout_seconds` a process may do nothing: the other ranks give up first, and say why."""

_LONGEST_SLICE_SECONDS = 5.0


class Steps:
    """What a save does now, and how often it has done something: one that goes on is seen to.

    Attributes:
        phase: What it does, in words.
        count: Grows with every step; how fast means nothing.
    """

    def __init__(self) -> None:
        self.phase = "waiting"
        self.count = 0

    def step(self) -> None:
        """Something was done."""
        self.count += 1

    def enter(self, phase: str) -> None:
        """Begin with something else."""
        self.phase = phase
        self.count += 1


class Watched(Protocol):
    """What a watch needs of a background process."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether it has begun to take requests; how long that may take is not for a watch to say."""
        ...

    def request(self, message: dict[str, Any], /) -> Future[Any]:
        """Ask it something."""
        ...

    def give_up(self, why: str, /) -> None:
        """End it, whatever it does."""
        ...


class Watch:
    """Waits for what a background process does, for as long as it does anything.

    Only time that passes here counts: where this process was stopped as well, its background process has had no time
    either.

    Args:
        process: It.
        rank: Whose it is, for the error.
        timeout_seconds: How long it may do nothing.
    """

    def __init__(self, process: Watched, rank: int, timeout_seconds: float) -> None:
        self._process = process
        self._rank = rank
        self._limit = timeout_seconds
        self._silent_seconds = 0.0
        self._question: Future[Any] | None = None
        self._count = -1
        self._phase = ""
        self._unheard_seconds = 0.0

    def wait(self, answer: Future[Any]) -> Any:
        """Wait for an answer.

        Raises:
            CoordinationTimeoutError: The process did nothing for too long. It is killed.
            DcpError: What it answered.
        """
        longest = min(self._limit / 4, _LONGEST_SLICE_SECONDS)
        while True:
            started = time.monotonic()
            if wait([answer], longest).done:
                return answer.result()
            self._look(min(time.monotonic() - started, 2 * longest))
            if self._silent_seconds > self._limit and not answer.done():
                raise self._given_up()

    def _look(self, waited_seconds: float) -> None:
        if self._process.is_ready:
            self._silent_seconds += waited_seconds
            self._unheard_seconds += waited_seconds
        if self._question is not None and self._question.done():
            self._hear(self._question)
            self._question = None
        if self._question is None:
            self._question = self._process.request({"do": "progress"})

    def _hear(self, question: Future[Any]) -> None:
        try:
            told = question.result()
        except DcpError:  # it has died, and who waits hears so
            return
        self._unheard_seconds = 0.0
        if told["count"] != self._count:
            self._silent_seconds = 0.0
        self._count, self._phase = told["count"], told["phase"]

    def _given_up(self) -> CoordinationTimeoutError:
        answers = self._unheard_seconds < self._limit / 2
        how = "has done nothing" if answers else "has not answered"
        doing = f" while {self._phase}" if self._phase else ""
        why = "its storage hangs" if answers else "it is stopped, or its machine is out of breath"
        text = (
            f"the background process {self._process.pid} of rank {self._rank} {how} for {self._limit:g} s{doing}: {why}"
        )
        self._process.give_up(f"{how} for {self._limit:g} s{doing}, and was given up")
        return CoordinationTimeoutError(
            f"{text}. It was killed, and the next save starts another; if the storage is only slow, pass a larger "
            "timeout_seconds",
            [RankCause(self._rank, CoordinationTimeoutError.__name__, text)],
        )


def answered(process: Watched, message: dict[str, Any], what: str, seat: Seat) -> Any:
    """Ask a background process something that it must answer soon.

    Args:
        process: It.
        message: What it is asked.
        what: The same, in words, after "which".
        seat: Whose process it is, and how long to wait.

    Raises:
        CoordinationTimeoutError: It gave no answer. It is killed.
        DcpError: What it answered.
    """
    answer, seconds = process.request(message), seat.timeout_seconds
    if wait([answer], seconds).done:
        try:
            return answer.result()
        except RankFailedError as death:
            if process.is_alive:
                raise
            raise RankFailedError(f"rank {seat.rank}: {death.message}", death.causes) from death
    process.give_up(f"gave no answer within {seconds:g} s, and was given up")
    raise mute(process.pid, what, seat.rank, seconds)


def mute(pid: int, what: str, rank: int, seconds: float) -> CoordinationTimeoutError:
    """The error about a process that gives no answer."""
    return CoordinationTimeoutError(
        f"the background process {pid} of rank {rank}, which {what}, has given no answer within {seconds:g} s: it is "
        "stopped, or its storage hangs"
    )


def within(call: Callable[[], None], seconds: float, late: Callable[[], DcpError]) -> None:
    """Make a call on storage that may hang, and wait so long for it.

    Args:
        call: What to do; it goes on, unheard, where it takes longer, and keeps no process from ending.
        seconds: How long to wait.
        late: Makes what is raised then.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="dcp-settle", daemon=True).start()
    if not wait([done], seconds).done:
        raise late()
    done.result()
