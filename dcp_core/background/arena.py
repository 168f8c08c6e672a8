"""Host memory that the trainer fills and the background process reads: a few large anonymous segments, reused.

In: the byte sizes of one save's buffers. Out: arrays in shared memory, and where each lies. The memory is made once
(`memfd`, no name in any file system) and kept, so that from the second save on no page is fresh. The trainer passes
each segment's descriptor to the background process, which maps it read-only (`SegmentViews`).
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dcp_core.background import forks
from dcp_core.errors import ArgumentError, CoordinationError, StorageError

ALIGNMENT = 64
"""Buffers start at multiples of this: a cache line, and every dtype's alignment."""

SEGMENT_GRANULE = 1 << 21
"""Segments are multiples of this: a huge page."""

MAX_SEGMENTS = 4
"""More are never held: before there would be, one of the whole size takes the place of all."""

Bytes = npt.NDArray[np.uint8]
Register = Callable[[Bytes], "Callable[[], None] | None"]

_LOGGER = logging.getLogger("dcp.background")
_MAX_NBYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer lies.

    Attributes:
        segment: Number of its segment.
        offset: First byte in it.
        nbytes: Its length.
    """

    segment: int
    offset: int
    nbytes: int


class Buffers(Protocol):
    """Gives the bytes of places: the trainer's `Arena`, the background process's `SegmentViews`."""

    def buffer(self, place: Place) -> Bytes:
        """The memory of a place."""


class _Segment:
    """One piece of shared memory, mapped here."""

    def __init__(self, nbytes: int) -> None:
        self.descriptor = os.memfd_create("dcp-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, nbytes)
            self._mapping: mmap.mmap | None = mmap.mmap(self.descriptor, nbytes)
            self.memory: Bytes = np.frombuffer(self._mapping, np.uint8)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.nbytes = nbytes
        self._registrar: Register | None = None
        self._unregister: Callable[[], None] | None = None

    def register(self, register: Register) -> None:
        """Offer the memory to a device, once."""
        if self._registrar is None:
            self._registrar = register
            self._unregister = register(self.memory)

    def is_known_by(self, register: Register) -> bool:
        return self._unregister is not None and self._registrar == register

    def close(self, *, is_used_up: bool) -> None:
        """Let go of the memory; `is_used_up`: also where the other process maps it and old arrays of it live."""
        unregister, self._unregister = self._unregister, None
        if unregister is not None:
            try:
                unregister()
            except Exception as error:  # as text: a traceback would keep the memory
                reason = f"{type(error).__name__}: {error}"
                _LOGGER.warning("memory of the arena could not be unregistered from its device: %s", reason)
        if is_used_up and self._mapping is not None:
            with suppress(OSError):
                self._mapping.madvise(mmap.MADV_REMOVE)
        self.forget()

    def forget(self) -> None:
        """Close this process's descriptor, and its mapping as soon as no array of it lives."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._mapping = None
        self.memory = np.empty(0, np.uint8)


class Arena:
    """The trainer's side.

    One save uses the whole arena: `place` forgets the buffers of the save before.

    Attributes:
        generation: Counts up whenever segments are dropped; whoever mapped them must then map all anew.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._segments: list[_Segment] = []
        self._register: Register | None = None
        forks.stays_here(self)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory held."""
        return sum([segment.nbytes for segment in self._segments])

    def place(self, sizes: Sequence[int]) -> list[Place]:
        """Give every buffer of a save its place: `place_columns`, as values."""
        segments, offsets = self.place_columns(sizes)
        return list(map(Place, segments.tolist(), offsets.tolist(), map(int, sizes)))

    def place_columns(self, sizes: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Give every buffer of a save its place.

        Grows the arena by one segment at most. When there would be more than `MAX_SEGMENTS`, all are dropped and one
        of the whole size is made; arrays of dropped segments must not be used any more.

        Args:
            sizes: Byte length of each buffer.

        Returns:
            Segment of each, and the first byte in it; the same for the same sizes as long as the arena does not grow.

        Raises:
            ArgumentError: A size is negative or absurd.
            StorageError: There is no memory.
        """
        lengths = np.asarray(sizes, np.int64).reshape(-1)
        if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= _MAX_NBYTES // len(lengths):
            raise ArgumentError(f"{len(lengths)} buffers of {lengths.min()} to {lengths.max()} bytes cannot be placed")
        ends = np.cumsum(-(-lengths // ALIGNMENT) * ALIGNMENT)
        segments, offsets, placed = self._filled(ends)
        if placed < len(ends):
            if len(self._segments) >= MAX_SEGMENTS:
                self._drop(is_used_up=True)
                placed = 0
            start = int(ends[placed - 1]) if placed else 0
            self._grow(int(ends[-1]) - start)
            segments[placed:] = len(self._segments) - 1
            offsets[placed + 1 :] = ends[placed:-1] - start
            offsets[placed] = 0
        return segments, offsets

    def buffer(self, place: Place) -> Bytes:
        """The memory of a place."""
        return self._segments[place.segment].memory[place.offset : place.offset + place.nbytes]

    def descriptors(self) -> list[tuple[int, int]]:
        """(descriptor, bytes) of every segment, in order."""
        return [(segment.descriptor, segment.nbytes) for segment in self._segments]

    def pinned_by(self, register: Register) -> None:
        """Offer every segment, those to come too, to a device, which copies faster to memory that it knows.

        Args:
            register: Makes memory known (page-locked) and returns what undoes that, None where it cannot. Asked once
                for a segment; undone before the segment is unmapped.
        """
        self._register = register
        for segment in self._segments:
            segment.register(register)

    def is_pinned(self, segment: int, register: Register) -> bool:
        """Whether the device of `register` knows a segment."""
        return self._segments[segment].is_known_by(register)

    def close(self) -> None:
        """Let go of all memory; a save that the background process still has in hand keeps what it maps."""
        self._drop(is_used_up=False)

    def leave_behind(self) -> None:
        """Let go, in a forked process, of its copies of descriptors and mappings."""
        for segment in self._segments:
            segment.forget()
        self._segments.clear()
        self.generation += 1

    def _filled(self, ends: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """Segment and offset of as many first rows as fit into what there is, and how many they are.

        Each run of rows goes to the first segment that has room for its first row, as far as it has room.
        """
        segments, offsets = np.zeros(len(ends), np.int64), np.zeros(len(ends), np.int64)
        used = [0] * len(self._segments)
        row, start = 0, 0  # the next row, and where it starts if all lay back to back
        while row < len(ends):
            for number, segment in enumerate(self._segments):
                stop = int(np.searchsorted(ends, start + segment.nbytes - used[number], side="right"))
                if stop > row:
                    break
            else:
                break
            segments[row:stop] = number
            offsets[row] = used[number]
            offsets[row + 1 : stop] = ends[row : stop - 1] - start + used[number]
            used[number] += int(ends[stop - 1]) - start
            row, start = stop, int(ends[stop - 1])
        return segments, offsets, row

    def _drop(self, *, is_used_up: bool) -> None:
        if self._segments:
            self.generation += 1
        while self._segments:
            self._segments.pop().close(is_used_up=is_used_up)

    def _grow(self, nbytes: int) -> None:
        wanted = -(-max(nbytes, 1) // SEGMENT_GRANULE) * SEGMENT_GRANULE
        try:
            with forks.NO_FORK:
                self._segments.append(_Segment(wanted))
        except (OSError, MemoryError, ValueError, OverflowError) as error:
            raise StorageError(
                f"no shared memory of {wanted} bytes for staging ({error}); save less at once, use save(), or give the "
                "process more: memory, room in /dev/shm, larger files (ulimit -f)"
            ) from error
        if self._register is not None:
            self._segments[-1].register(self._register)


class SegmentViews:
    """The background process's side: the same segments, read-only."""

    def __init__(self) -> None:
        self._memories: list[Bytes] = []

    def __len__(self) -> int:
        return len(self._memories)

    def add(self, descriptor: int, nbytes: int) -> None:
        """Map the next segment; the descriptor is closed."""
        self.replace([(descriptor, nbytes)], first=len(self._memories))

    def replace(self, segments: Iterable[tuple[int, int]], *, first: int = 0) -> None:
        """Map segments in place of those that are mapped from number `first` on.

        Args:
            segments: (descriptor, bytes) of each; all descriptors are closed, whatever happens.
            first: Number of the first of them; those before it stay.

        Raises:
            CoordinationError: They cannot be mapped, or do not follow the ones that stay; nothing has changed.
        """
        given = list(segments)
        try:
            if not 0 <= first <= len(self._memories):
                raise CoordinationError(f"segments from number {first} on do not follow the {len(self._memories)} here")
            mappings = [mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ) for descriptor, nbytes in given]
        except (OSError, ValueError, OverflowError) as error:
            raise CoordinationError(f"shared memory of {[size for _, size in given]} bytes: {error}") from error
        finally:
            for descriptor, _ in given:
                os.close(descriptor)
        self._memories[first:] = [np.frombuffer(mapping, np.uint8) for mapping in mappings]

    def buffer(self, place: Place) -> Bytes:
        """The memory of a place.

        Raises:
            CoordinationError: There is no such place.
        """
        if not 0 <= place.segment < len(self._memories):
            raise CoordinationError(f"no segment {place.segment} among {len(self._memories)} of the arena")
        memory = self._memories[place.segment]
        if place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > len(memory):
            raise CoordinationError(f"{place} lies outside of a segment of {len(memory)} bytes")
        return memory[place.offset : place.offset + place.nbytes]
