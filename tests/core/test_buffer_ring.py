"""The ring of host buffers: bounded, shared by threads, and closed without leaving anybody waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from dcp_core.errors import ArgumentError
from dcp_core.execution.buffer_ring import BufferRing, RingClosedError

_LIMIT_SECONDS = 60.0


class Allocator:
    """Counts what is asked for."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __call__(self, nbytes: int) -> npt.NDArray[np.uint8]:
        self.given.append(nbytes)
        return np.zeros(nbytes, np.uint8)


class WaitingRing(BufferRing):
    """Says when somebody is about to wait for a buffer."""

    def __init__(self, allocate: Callable[[int], npt.NDArray[np.uint8]], *, count: int) -> None:
        super().__init__(allocate, buffer_nbytes=8, count=count)
        self.waiting = threading.Semaphore(0)
        wait = self._changed.wait

        def announced_wait(timeout: float | None = None) -> bool:
            self.waiting.release()
            return wait(timeout)

        self._changed.wait = announced_wait  # type: ignore[method-assign]  # to see that a thread really waits


def test_memory_is_allocated_when_it_is_needed_and_never_more_than_the_ring_holds() -> None:
    allocator = Allocator()
    ring = BufferRing(allocator, buffer_nbytes=16, count=3)
    assert (ring.count, ring.buffer_nbytes, allocator.given) == (3, 16, [])
    for _ in range(5):
        ring.give_back(ring.take())
    assert allocator.given == [16]
    taken = [ring.take() for _ in range(3)]
    assert allocator.given == [16, 16, 16]
    assert len({buffer.ctypes.data for buffer in taken}) == 3
    assert all(buffer.shape == (16,) and buffer.dtype == np.uint8 for buffer in taken)


def test_a_buffer_that_is_given_back_wakes_one_who_waits() -> None:
    ring = WaitingRing(Allocator(), count=1)
    buffer = ring.take()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ring.take)
        assert ring.waiting.acquire(timeout=_LIMIT_SECONDS)
        assert not future.done()
        ring.give_back(buffer)
        assert future.result(_LIMIT_SECONDS) is buffer


def test_closing_wakes_all_who_wait_and_they_learn_why() -> None:
    ring = WaitingRing(Allocator(), count=1)
    buffer = ring.take()
    error = OSError("disk full")
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(ring.take) for _ in range(3)]
        for _ in futures:
            assert ring.waiting.acquire(timeout=_LIMIT_SECONDS)
        ring.close(error)
        raised = [future.exception(_LIMIT_SECONDS) for future in futures]
    assert all(isinstance(each, RingClosedError) and each.__cause__ is error for each in raised)
    ring.give_back(buffer)
    ring.close(ValueError("later"))
    with pytest.raises(RingClosedError) as excinfo:
        ring.take()
    assert excinfo.value.__cause__ is error


def test_a_with_block_closes_the_ring_by_the_error_that_ends_it() -> None:
    with BufferRing(Allocator(), buffer_nbytes=1, count=1) as quiet:
        quiet.give_back(quiet.take())
    with pytest.raises(RingClosedError) as excinfo:
        quiet.take()
    assert excinfo.value.__cause__ is None

    error = ValueError("broken")
    with pytest.raises(ValueError, match="broken"), BufferRing(Allocator(), buffer_nbytes=1, count=1) as failed:
        raise error
    with pytest.raises(RingClosedError) as excinfo:
        failed.take()
    assert excinfo.value.__cause__ is error


def test_only_a_buffer_that_is_taken_can_be_given_back() -> None:
    ring = BufferRing(Allocator(), buffer_nbytes=8, count=2)
    buffer = ring.take()
    for foreign in (np.zeros(8, np.uint8), buffer[:], buffer[:4]):
        with pytest.raises(ArgumentError, match="not a buffer that was taken"):
            ring.give_back(foreign)
    ring.give_back(buffer)
    with pytest.raises(ArgumentError, match="given back already"):
        ring.give_back(buffer)
    assert ring.take() is buffer
    assert ring.take() is not buffer


def test_a_failed_allocation_raises_and_leaves_the_slot_to_the_next() -> None:
    failures = [MemoryError("no page-locked memory left")]

    def allocate(nbytes: int) -> npt.NDArray[np.uint8]:
        if failures:
            raise failures.pop()
        return np.zeros(nbytes, np.uint8)

    ring = BufferRing(allocate, buffer_nbytes=8, count=1)
    with pytest.raises(MemoryError):
        ring.take()
    assert ring.take().nbytes == 8


@pytest.mark.parametrize("memory", [np.zeros(7, np.uint8), np.zeros(8, np.int8), np.zeros((2, 4), np.uint8)])
def test_memory_of_another_size_or_type_is_refused(memory: npt.NDArray[np.uint8]) -> None:
    ring = BufferRing(lambda nbytes: memory, buffer_nbytes=8, count=1)
    with pytest.raises(ArgumentError, match=r"expected uint8\[8\]"):
        ring.take()


@pytest.mark.parametrize(("count", "nbytes"), [(0, 8), (1, 0), (-1, 8)])
def test_a_ring_of_nothing_is_refused(count: int, nbytes: int) -> None:
    with pytest.raises(ArgumentError, match="at least one"):
        BufferRing(Allocator(), buffer_nbytes=nbytes, count=count)


def test_many_threads_never_hold_the_same_buffer_nor_more_than_there_are() -> None:
    allocator = Allocator()
    ring = BufferRing(allocator, buffer_nbytes=8, count=3)
    held: set[int] = set()
    lock = threading.Lock()

    def go_round(mark: int) -> int:
        most = 0
        for _ in range(200):
            buffer = ring.take()
            with lock:
                assert id(buffer) not in held
                held.add(id(buffer))
                most = max(most, len(held))
            buffer[:] = mark
            assert (buffer == mark).all()
            with lock:
                held.remove(id(buffer))
            ring.give_back(buffer)
        return most

    with ThreadPoolExecutor(8) as pool:
        most = list(pool.map(go_round, range(8)))
    assert max(most) <= 3
    assert len(allocator.given) <= 3
