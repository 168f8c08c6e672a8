"""A few threads that carry out work for one calling thread; or that thread does it all.

Goes in: work, piece after piece. Comes out: the same pieces, each when it is done, or the first error. Work may have
two steps: the second waits for something (a device), and comes after the first step of the next piece.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Generic, TypeVar

MOST_THREADS = 4
"""Two fill the memory bus of a small machine; more than four help none."""

W = TypeVar("W")
SecondStep = Callable[[], None]


def usable_threads() -> int:
    """How many threads this process may start so that all ranks of this machine together start one a core.

    `LOCAL_WORLD_SIZE`, which launchers set, says how many ranks there are.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(MOST_THREADS, cores // max(1, int(ranks) if ranks.isdecimal() else 1)))


class _Worker(Generic[W]):
    """Does work on one thread; of at most one piece the second step is open. What fails is given out like what is done.

    Args:
        carry_out: Does the first step of a piece; returns the second, if there is one.
        done: Gets each piece, and what went wrong with it.
    """

    def __init__(
        self, carry_out: Callable[[W], SecondStep | None], done: SimpleQueue[tuple[W, BaseException | None]]
    ) -> None:
        self._carry_out = carry_out
        self._done = done
        self._open: tuple[W, SecondStep] | None = None

    def begin(self, work: W) -> bool:
        """Do the first step of a piece, then the second of the one before; False if the first went wrong."""
        step, error = None, None
        try:
            step = self._carry_out(work)
        except BaseException as caught:
            error = caught
        self.finish()
        if step is not None:
            self._open = work, step
        else:
            self._done.put((work, error))
        return error is None

    def finish(self) -> None:
        """Do the second step that is open, if there is one."""
        if self._open is None:
            return
        (work, step), error = self._open, None
        try:
            step()
        except BaseException as caught:
            error = caught
        self._open = None
        self._done.put((work, error))


class Crew(Generic[W]):
    """Carries out work, begun in the order in which it is handed in; several pieces at a time where there are threads.

    Args:
        carry_out: Does the first step of a piece; returns the second, if there is one.
        threads: How many; below 2 the calling thread does a piece when it is handed in.

    Attributes:
        in_flight: Pieces that were handed in and did not come out again.
    """

    def __init__(self, carry_out: Callable[[W], SecondStep | None], threads: int) -> None:
        self.in_flight = 0
        self._carry_out = carry_out
        self._todo: SimpleQueue[W | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[W, BaseException | None]] = SimpleQueue()
        self._is_stopped = False
        self._most_threads = threads
        self._threads: list[tuple[Thread, Event]] = []
        self._own = _Worker(carry_out, self._done) if threads < 2 else None

    def hand_in(self, work: W) -> None:
        """Take a piece of work. What goes wrong with it comes out of `next_done`."""
        self.in_flight += 1
        if self._own is not None:
            self._own.begin(work)
            return
        if len(self._threads) < min(self._most_threads, self.in_flight):
            self._start()
        self._todo.put(work)

    def next_done(self, *, wait: bool) -> W | None:
        """Get a piece that is done.

        Args:
            wait: Wait for one; there must be one in flight then.

        Returns:
            A piece, or None when none is done.

        Raises:
            BaseException: What went wrong first.
        """
        if wait and self._own is not None and self._done.empty():
            self._own.finish()
        try:
            work, error = self._done.get(wait)
        except Empty:
            return None
        self.in_flight -= 1
        if error is not None:
            raise error
        return work

    def stop(self) -> list[W]:
        """Drop what was not begun, let the rest end, and end the threads, however often somebody loses patience.

        Returns:
            Pieces that are done, or failed, and did not come out.

        Raises:
            BaseException: What interrupted the wait first; no thread is left then either.
        """
        interrupt: BaseException | None = None
        has_ended = False
        while not has_ended:
            try:
                self._end()
                has_ended = True
            except BaseException as error:
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt
        if self._own is not None:
            self._own.finish()
        left = []
        while not self._done.empty():
            left.append(self._done.get()[0])
        return left

    def _end(self) -> None:
        """Tell the threads to end, and wait until they have. May be called again when it was interrupted."""
        self._is_stopped = True
        for _ in self._threads:
            self._todo.put(None)
        for thread, ended in self._threads:
            if thread.ident is not None:
                ended.wait()  # `join` takes a thread for dead when it is interrupted (Python 3.8 to 3.12, bpo-45274)
                thread.join()

    def _start(self) -> None:
        ended = Event()
        thread = Thread(target=self._work, args=(ended,), name=f"dcp-read-{len(self._threads)}", daemon=True)
        self._threads.append((thread, ended))  # first, so that an interrupt leaves none behind
        thread.start()

    def _work(self, ended: Event) -> None:
        """Work until told to stop; after an error nobody begins anything."""
        worker = _Worker(self._carry_out, self._done)
        try:
            while True:
                try:
                    work = self._todo.get(block=False)
                except Empty:
                    worker.finish()
                    work = self._todo.get()
                if work is None or self._is_stopped:
                    break
                self._is_stopped |= not worker.begin(work)
            worker.finish()
        finally:
            ended.set()
