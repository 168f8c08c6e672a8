"""Work that is queued now and done later, in order: what a device's stream does, without a device.

Goes in: pieces of work. Comes out: for each a function that waits for it. The pace says when it is done; "late" and
"steps" make the worst moment certain instead of rare.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from dcp_core.errors import ArgumentError

Pace = Literal["at once", "late", "thread", "steps"]


class _Piece:
    """One piece of work, and what became of it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # whoever waits for the piece gets it
            self._error = error
        self.done.set()

    def result(self) -> None:
        self.done.wait()
        if self._error is not None:
            raise self._error


class WorkStream:
    """Does what is queued, in order, one piece at a time. Any thread may queue and wait.

    Args:
        pace: When work is done. "at once": while it is queued. "late": when somebody waits for it or for a later
            piece, not before. "thread": by a thread of the stream's own, as soon as it can. "steps": by that thread,
            as many pieces as `step` allowed.
        delay_seconds: Pause before each piece, for the paces with a thread.

    >>> done = []
    >>> with WorkStream("late") as stream:
    ...     first, second = stream.queue(lambda: done.append(1)), stream.queue(lambda: done.append(2))
    ...     before = list(done)
    ...     second()
    >>> before, done
    ([], [1, 2])
    """

    def __init__(self, pace: Pace = "late", delay_seconds: float = 0.0) -> None:
        self.pace = pace
        self._delay_seconds = delay_seconds
        self._pieces: deque[_Piece] = deque()
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._queued = 0
        self._steps = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        if pace in ("thread", "steps"):
            self._thread = threading.Thread(target=self._run_all, name="work-stream", daemon=True)
            self._thread.start()

    def queue(self, work: Callable[[], None]) -> Callable[[], None]:
        """Queue a piece of work.

        Returns:
            Waits until it is done; raises what it raised.

        Raises:
            ArgumentError: The stream is closed.
        """
        piece = _Piece(work)
        with self._changed:
            if self._closed:
                raise ArgumentError("the stream is closed")
            self._pieces.append(piece)
            self._queued += 1
            self._changed.notify_all()
        if self.pace == "at once":
            self._run_through(piece)
        return lambda: self._wait(piece)

    def step(self, count: int = 1) -> None:
        """Let the thread do this many more pieces, of those queued now or later. Does not wait for them."""
        with self._changed:
            self._steps += count
            self._changed.notify_all()

    def wait_queued(self, count: int, timeout_seconds: float = 60.0) -> None:
        """Wait until this many pieces have been queued since the beginning.

        Raises:
            TimeoutError: They were not.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._queued >= count, timeout_seconds):
                raise TimeoutError(f"{self._queued} pieces of work were queued in {timeout_seconds} s, not {count}")

    def close(self) -> None:
        """Let the thread do what is left, and end it. With the pace "late", what nobody waited for is left out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _wait(self, piece: _Piece) -> None:
        if self.pace == "late":
            self._run_through(piece)
        piece.result()

    def _run_through(self, piece: _Piece) -> None:
        """Do all that was queued before a piece, and the piece."""
        with self._turn:
            while not piece.done.is_set():
                self._pieces.popleft().run()

    def _run_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._pieces and self._may_run()))
                if not self._pieces:
                    return
                self._steps -= 1
                piece = self._pieces.popleft()
            time.sleep(self._delay_seconds)
            piece.run()
            del piece  # and with it the memory that its work uses

    def _may_run(self) -> bool:
        return self.pace == "thread" or self._steps > 0

    def __enter__(self) -> WorkStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
