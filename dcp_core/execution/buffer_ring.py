"""A few equal host buffers that go round between whoever fills them and whoever empties them.

Bounds the memory of what cannot be written from, or read into, the place where it lies: parts of tensors on a device
above all. Goes in: how to get memory, how much at a time, how often. Comes out: one buffer at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition
from types import TracebackType

import numpy as np
import numpy.typing as npt

from dcp_core.errors import ArgumentError

BUFFER_BYTES = 8 << 20
BUFFER_COUNT = 4


class RingClosedError(RuntimeError):
    """There will be no more buffers: the work is over, or failed elsewhere.

    Tells a thread to stop and never leaves the engine: what failed elsewhere is its `__cause__`.
    """


class BufferRing:
    """A few equal host buffers that go round: taken, filled, emptied, given back. Any thread may do any of it.

    Memory is allocated when a buffer is needed that is not there yet, so a little work allocates little. At most
    `count * buffer_nbytes` bytes exist at a time. As a context manager it is closed at the end, by the error if one
    ends it.

    Attributes:
        count: How many buffers there are at most.
        buffer_nbytes: Size of each.
    """

    def __init__(
        self,
        allocate: Callable[[int], npt.NDArray[np.uint8]],
        *,
        buffer_nbytes: int = BUFFER_BYTES,
        count: int = BUFFER_COUNT,
    ) -> None:
        """Make a ring without memory.

        Args:
            allocate: Gives so many bytes of host memory, as `DeviceTransfers.host_memory` does.
            buffer_nbytes: Size of a buffer, at least one byte.
            count: How many buffers, at least one.

        Raises:
            ArgumentError: Less than one buffer, or than one byte.
        """
        if count < 1 or buffer_nbytes < 1:
            raise ArgumentError(f"a ring of {count} buffers of {buffer_nbytes} bytes: expected at least one of each")
        self.count = count
        self.buffer_nbytes = buffer_nbytes
        self._allocate = allocate
        self._allocated = 0
        self._free: list[npt.NDArray[np.uint8]] = []
        self._taken: dict[int, npt.NDArray[np.uint8]] = {}
        self._changed = Condition()
        self._closed = False
        self._error: BaseException | None = None

    def take(self) -> npt.NDArray[np.uint8]:
        """Take a buffer, and wait until one is free. Its bytes are what the last user left.

        Returns:
            `buffer_nbytes` bytes.

        Raises:
            RingClosedError: The ring is closed, or was while waiting.
            ArgumentError: `allocate` gave something else than it was asked for.
        """
        with self._changed:
            while not (self._closed or self._free or self._allocated < self.count):
                self._changed.wait()
            if self._closed:
                raise RingClosedError("the ring of buffers is closed") from self._error
            if self._free:
                return self._lend(self._free.pop())
            self._allocated += 1
        return self._new_buffer()

    def give_back(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Give back a buffer for the next who takes one.

        Args:
            buffer: What `take` returned: the array itself, not a part of it.

        Raises:
            ArgumentError: It is not a buffer of this ring that is taken at present.
        """
        with self._changed:
            if self._taken.get(id(buffer)) is not buffer:
                raise ArgumentError("not a buffer that was taken from this ring, or given back already")
            del self._taken[id(buffer)]
            if not self._closed:
                self._free.append(buffer)
                self._changed.notify()

    def close(self, error: BaseException | None = None) -> None:
        """Let go of the memory, and stop all who wait for a buffer or ask for one later.

        Buffers that are taken may still be given back. Closing again changes nothing.

        Args:
            error: Why, where something failed.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._error = error
            self._free.clear()
            self._changed.notify_all()

    def _lend(self, buffer: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        self._taken[id(buffer)] = buffer
        return buffer

    def _new_buffer(self) -> npt.NDArray[np.uint8]:
        """Allocate without holding the lock: page-locking memory takes its time."""
        try:
            buffer = self._allocate(self.buffer_nbytes)
            if buffer.shape != (self.buffer_nbytes,) or buffer.dtype != np.uint8:
                raise ArgumentError(
                    f"memory for a ring is {buffer.dtype}{list(buffer.shape)}, expected uint8[{self.buffer_nbytes}]"
                )
        except BaseException:
            with self._changed:
                self._allocated -= 1
                self._changed.notify()
            raise
        with self._changed:
            return self._lend(buffer)

    def __enter__(self) -> BufferRing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)
