"""Copies regions of device tensors into the arena.

Goes in: regions whose bits no host memory holds as they are, and where they shall lie. Comes out: copies that are under
way, and one wait for all of them at the end. Where the device cannot be told of the arena's memory, and where it has
blocking copies only, the bits pass through a few small buffers instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import prod
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from dcp_core.background.arena import Bytes, Register
from dcp_core.box import flat_range_to_boxes
from dcp_core.execution.staging import Staging
from dcp_core.planning.leaves import DeviceBits, DeviceTransfers

PART_BYTES = 64 << 20
"""Larger regions are copied in parts: a device makes a second copy of what is not contiguous there."""


class KnownMemory(Protocol):
    """Memory that devices can be told of: the `Arena`."""

    def pinned_by(self, register: Register) -> None:
        """Offer the memory to a device."""
        ...

    def is_pinned(self, segment: int, register: Register) -> bool:
        """Whether a device knows a segment."""
        ...


class DeviceCopies:
    """A context in which copies are started; when it is left, all are done, on an error too. One thread uses it.

    Args:
        memory: Where the targets lie.
    """

    def __init__(self, memory: KnownMemory) -> None:
        self._memory = memory
        self._waits: list[Callable[[], None]] = []
        self._offered: set[int] = set()
        self._detours: dict[int, _Detour] = {}
        self._alive: list[DeviceTransfers] = []

    def copy(self, bits: DeviceBits, target: Bytes, segment: int) -> None:
        """Start copying a region.

        Args:
            bits: The region.
            target: As many bytes, in use until the context is left.
            segment: Where the target lies.
        """
        if not len(target):
            return
        transfers = bits.access.transfers(bits.view)
        if transfers is None or not self._reaches(transfers, segment):
            self._detour(transfers).add(bits, target)
            return
        for view, part in _parts(bits, target):
            self._waits.append(transfers.start_copy_out(view, part))

    def _reaches(self, transfers: DeviceTransfers, segment: int) -> bool:
        """Whether the device copies to a segment at full speed."""
        register: Register | None = getattr(transfers, "register_memory", None)  # adapters from before it lack it
        if register is None:
            return False
        if id(transfers) not in self._offered:
            self._memory.pinned_by(register)
            self._offered.add(id(transfers))
            self._alive.append(transfers)
        return self._memory.is_pinned(segment, register)

    def _detour(self, transfers: DeviceTransfers | None) -> _Detour:
        known = self._detours.get(id(transfers))
        if known is None:
            known = self._detours[id(transfers)] = _Detour(transfers)
        return known

    def __enter__(self) -> DeviceCopies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        first: BaseException | None = error
        ends = [detour.flush for detour in self._detours.values()] if error is None else []
        for end in [*ends, *self._waits, *[detour.close for detour in self._detours.values()]]:
            try:
                end()
            except BaseException as caught:  # the other copies are awaited all the same
                first = first or caught
        self._waits.clear()
        self._detours.clear()
        try:
            if error is None and first is not None:
                raise first
        finally:
            del first, error  # their tracebacks hold this frame, and so the arena


class _Detour:
    """The way of some regions through a few buffers into the arena."""

    def __init__(self, transfers: DeviceTransfers | None) -> None:
        self._staging = Staging(transfers, self._put)
        self._targets: deque[Bytes] = deque()

    def add(self, bits: DeviceBits, target: Bytes) -> None:
        self._targets.append(target)
        self._staging.add(bits)

    def flush(self) -> None:
        self._staging.flush()

    def close(self) -> None:
        self._staging.close()

    def _put(self, blocks: Sequence[memoryview], nbytes: int) -> None:
        for block in blocks:  # none holds bytes of two regions
            target = self._targets.popleft()
            np.copyto(target[: len(block)], np.frombuffer(block, np.uint8))
            if len(block) < len(target):
                self._targets.appendleft(target[len(block) :])


def _parts(bits: DeviceBits, target: Bytes) -> Iterator[tuple[Any, Bytes]]:
    """Views of a region of at most `PART_BYTES`, and their places."""
    itemsize = bits.dtype.itemsize
    if len(target) <= PART_BYTES:
        yield bits.view, target
        return
    step, numel, at = PART_BYTES // itemsize, prod(bits.shape), 0
    for start in range(0, numel, step):
        for box in flat_range_to_boxes(bits.shape, start, min(start + step, numel)):
            nbytes = box.numel * itemsize
            yield bits.access.narrow(bits.view, box), target[at : at + nbytes]
            at += nbytes
