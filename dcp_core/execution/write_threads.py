"""Shares the work of writing several files between threads.

The calling thread asks the planner, since user code may mind other threads, and runs ahead of the threads that hash
and write, by a bounded number of bytes. Whatever goes wrong in any thread stops all of them; none outlives the call.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from threading import Condition, Lock, Thread
from typing import Protocol

from dcp_core.execution.write_runs import Run

QUEUE_BYTES = 8 << 20
"""What is prepared for one file at most, and not taken up yet; a larger run is prepared when its thread is idle."""

_QUEUE_RUNS = 8


class FileWork(Protocol):
    """What writing one file consists of."""

    @property
    def next_nbytes(self) -> int:
        """Bytes that the next run has at most."""
        ...

    def prepare(self) -> Run | None:
        """The next run, None at the end; on the calling thread."""
        ...

    def write(self, run: Run) -> None:
        """Write a run; on the thread of the file."""
        ...

    def finish(self) -> None:
        """Complete the file; on the thread of the file."""
        ...


class StoppedError(RuntimeError):
    """Something failed elsewhere. Ends a thread, and never leaves the engine."""


class FirstFailure:
    """What went wrong first, in any thread.

    Attributes:
        happened: Whether anything did.
    """

    def __init__(self) -> None:
        self.happened = False
        self._error: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Keep an error, unless there was one before; the caller holds a lock."""
        if not self.happened and not isinstance(error, StoppedError):
            self.happened, self._error = True, error

    def check(self) -> None:
        """Stop this thread if another one failed.

        Raises:
            StoppedError: One did.
        """
        if self.happened:
            raise StoppedError("another thread failed")

    def raise_it(self) -> None:
        """Raise what went wrong, if anything did."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame


def threads_pay(files: int) -> bool:
    """Whether each file gets a thread: not a single one, and not where there is one processor; see decision 15."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return files > 1 and cores > 1


def write_all(files: Sequence[FileWork], failure: FirstFailure) -> None:
    """Write files, side by side where that pays.

    Args:
        files: The work.
        failure: Where the writers of these files look whether to go on.

    Raises:
        BaseException: What went wrong first, on whichever thread. No thread is left then either.
    """
    if threads_pay(len(files)):
        _Crew(files, failure).run()
        return
    for file in files:
        run = file.prepare()
        while run is not None:
            file.write(run)
            del run  # a planner's copies end here, before it makes the next one
            run = file.prepare()
        file.finish()


class _Lane:
    """The way of one file's runs from the calling thread to the thread that writes them."""

    def __init__(self, file: FileWork, lock: Lock) -> None:
        self.file = file
        self.runs: deque[Run] = deque()
        self.nbytes = 0
        self.is_complete = False
        self.is_awaited = False
        self.has_ended = False
        self.filled = Condition(lock)

    def has_room(self) -> bool:
        if self.is_complete or len(self.runs) >= _QUEUE_RUNS:
            return False
        is_idle = self.is_awaited and not self.runs
        return is_idle or self.nbytes + self.file.next_nbytes <= QUEUE_BYTES


class _Crew:
    """One thread a file, fed by the calling thread."""

    def __init__(self, files: Sequence[FileWork], failure: FirstFailure) -> None:
        self._failure = failure
        self._lock = Lock()
        self._room = Condition(self._lock)
        self._lanes = [_Lane(file, self._lock) for file in files]
        self._threads = [
            Thread(target=self._write, args=(lane,), name=f"dcp-write-{number}")
            for number, lane in enumerate(self._lanes)
        ]

    def run(self) -> None:
        error: BaseException | None = None
        try:
            for thread in self._threads:
                thread.start()
            self._feed()
        except BaseException as caught:
            error = caught
        self._end(error)
        del error  # its traceback holds this frame
        for lane in self._lanes:
            lane.runs.clear()
        self._failure.raise_it()

    # --- on the calling thread -----------------------------------------------------------------------

    def _feed(self) -> None:
        while (lane := self._next_lane()) is not None:
            run = lane.file.prepare()
            with self._lock:
                if run is None:
                    lane.is_complete = True
                else:
                    lane.runs.append(run)
                    lane.nbytes += run.nbytes
                del run
                lane.filled.notify()

    def _next_lane(self) -> _Lane | None:
        """Wait until a file wants more, and give the one that has least; None when all have everything."""
        with self._lock:
            while not self._failure.happened:
                if all(lane.is_complete for lane in self._lanes):
                    return None
                hungry = [lane for lane in self._lanes if lane.has_room()]
                if hungry:
                    return min(hungry, key=lambda lane: lane.nbytes)
                self._room.wait()
        return None

    def _end(self, error: BaseException | None) -> None:
        """Wait for all threads, however often somebody loses patience meanwhile.

        They say themselves when they have ended: `Thread.join` takes a thread for dead when it is interrupted (Python
        3.8 to 3.12, bpo-45274).
        """
        has_ended = False
        while not has_ended:
            try:
                if error is not None:
                    self._fail(error)
                with self._lock:
                    while self._is_running():
                        self._room.wait()
                has_ended = True
            except BaseException as caught:
                error = caught if error is None else error
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _is_running(self) -> bool:
        pairs = zip(self._threads, self._lanes, strict=True)
        return any(thread.ident is not None and not lane.has_ended for thread, lane in pairs)

    # --- on the threads ------------------------------------------------------------------------------

    def _write(self, lane: _Lane) -> None:
        try:
            run = self._take(lane)
            while run is not None:
                lane.file.write(run)
                del run
                run = self._take(lane)
            lane.file.finish()
        except BaseException as error:
            self._fail(error)
        with self._lock:
            lane.has_ended = True
            self._room.notify()

    def _take(self, lane: _Lane) -> Run | None:
        with self._lock:
            self._failure.check()
            while not lane.runs and not lane.is_complete:
                lane.is_awaited = True
                self._room.notify()
                lane.filled.wait()
                lane.is_awaited = False
                self._failure.check()
            if not lane.runs:
                return None
            run = lane.runs.popleft()
            lane.nbytes -= run.nbytes
            self._room.notify()
            return run

    # --- on any thread -------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Keep the first error, and let all threads look."""
        with self._lock:
            self._failure.note(error)
            self._room.notify_all()
            for lane in self._lanes:
                lane.filled.notify_all()
