"""Copies arrays of host memory, large ones by several threads.

Goes in: pairs of arrays, on one thread. Comes out: their elements, copied. numpy lets other threads run while it
copies, which pays for pieces that take much longer than handing them over.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_THREADS = 4
"""More do not copy faster: memory is the limit."""

PIECE_BYTES = 4 << 20
"""Arrays are cut into pieces of about this size for the threads; what is not larger is copied at once."""

_PIECES_WAITING = 2  # for each thread; when there are more, the calling thread copies too

Array = npt.NDArray[Any]


def copying_threads() -> int:
    """How many threads of this process copy, the calling one included: its share of the processors of its host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    neighbours = int(given) if given.isascii() and given.isdigit() else 1
    return min(max(cores // max(neighbours, 1), 1), MAX_THREADS)


class HostCopies:
    """A context in which arrays are copied; when it is left, all are. One thread uses it.

    Args:
        threads: How many copy, the calling one included.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._running: deque[Future[None]] = deque()

    def copy(self, target: Array, source: Array) -> None:
        """Copy the elements of an array, now or by the end of the context.

        Args:
            target: Same shape and dtype.
            source: Any strides; must stay as it is until the end of the context.
        """
        if self._threads <= 1 or target.nbytes <= PIECE_BYTES:
            np.copyto(target, source)
            return
        plain = np.asarray(source)  # subclasses index in ways of their own
        for part in _pieces(target.shape, target.nbytes):
            self._hand_over(target[part], plain[part])

    def wait(self) -> None:
        """Wait until all that was handed over is copied."""
        while self._running:
            self._running.popleft().result()

    def _hand_over(self, target: Array, source: Array) -> None:
        while self._running and self._running[0].done():
            self._running.popleft().result()
        if self._threads <= 1 or len(self._running) >= (1 + _PIECES_WAITING) * (self._threads - 1):
            np.copyto(target, source)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="dcp-stage")
        try:
            self._running.append(self._pool.submit(np.copyto, target, source))
        except RuntimeError:  # no thread can be started: none is left, or the interpreter ends
            self._threads = 1
            np.copyto(target, source)

    def __enter__(self) -> HostCopies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(cancel_futures=error is not None)
        if error is None:
            self.wait()
        self._running.clear()


def _pieces(shape: tuple[int, ...], nbytes: int) -> Iterator[tuple[slice | int, ...]]:
    """Cut an array of more than `PIECE_BYTES` along its outermost dimensions."""
    outer = next(dim for dim, size in enumerate(shape) if size > 1)
    row_nbytes = nbytes // shape[outer]
    ones = (0,) * outer
    if row_nbytes > PIECE_BYTES:
        for row in range(shape[outer]):
            for rest in _pieces(shape[outer + 1 :], row_nbytes):
                yield (*ones, row, *rest)
        return
    step = PIECE_BYTES // row_nbytes
    for start in range(0, shape[outer], step):
        yield (*ones, slice(start, start + step))
