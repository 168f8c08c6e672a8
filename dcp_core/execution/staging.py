"""Collects chunks that cannot be written from the place where they lie: on a device, or strewn over host memory.

Goes in: their bits, in file order. Comes out: their blocks in buffers of a ring, to be hashed and written. Copies from
a device are only started here; while they run, what was copied before is hashed and written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box, flat_range_to_boxes, slices
from dcp_core.errors import DTypeMismatchError, ShapeMismatchError
from dcp_core.execution.buffer_ring import BufferRing
from dcp_core.execution.planner_answers import Bits
from dcp_core.formats.checksums import BLOCK_BYTES
from dcp_core.planning.leaves import DeviceBits, DeviceTransfers

DEVICE_BUFFER_BYTES = 4 << 20
DEVICE_BUFFERS = 4
HOST_BUFFER_BYTES = 2 << 20
_START_ALIGNMENT = 16  # of chunks in a buffer: the size of the largest element

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class _Load:
    """What one buffer holds.

    Attributes:
        buffer: The buffer.
        blocks: Blocks of chunks, one after another in the file; in the buffer they may have gaps between them.
        used: Bytes of the buffer that are taken.
        nbytes: Bytes of the blocks.
        waits: Each waits for a copy that was started.
    """

    buffer: Bytes
    blocks: list[memoryview] = field(default_factory=list)
    used: int = 0
    nbytes: int = 0
    waits: deque[Callable[[], None]] = field(default_factory=deque)

    def room(self) -> int:
        return len(self.buffer) - -(-self.used // _START_ALIGNMENT) * _START_ALIGNMENT

    def claim(self, nbytes: int) -> Bytes:
        """Take room for whole blocks of a chunk, or for its end."""
        start = -(-self.used // _START_ALIGNMENT) * _START_ALIGNMENT
        target = self.buffer[start : start + nbytes]
        view = target.data
        self.blocks += [view[at : at + BLOCK_BYTES] for at in range(0, nbytes, BLOCK_BYTES)]
        self.used = start + nbytes
        self.nbytes += nbytes
        return target


class Staging:
    """A stretch of one file on its way through the buffers of a ring. One thread uses it.

    Args:
        transfers: How parts of the device travel; None: only what the host can copy itself, or blocking copies.
        put: Takes blocks and their total length; they lie one after another in the file.
    """

    def __init__(self, transfers: DeviceTransfers | None, put: Callable[[Sequence[memoryview], int], None]) -> None:
        self.transfers = transfers
        self._put = put
        if transfers is None:
            self._ring = BufferRing(_host_memory, buffer_nbytes=HOST_BUFFER_BYTES, count=1)
        else:
            self._ring = BufferRing(transfers.host_memory, buffer_nbytes=DEVICE_BUFFER_BYTES, count=DEVICE_BUFFERS)
        self._loads: deque[_Load] = deque()  # the last one is being filled

    @property
    def is_empty(self) -> bool:
        """Whether everything has been put."""
        return not self._loads

    def add(self, bits: Bits) -> None:
        """Start copying a chunk; puts what came long before it."""
        nbytes = prod(bits.shape) * bits.dtype.itemsize
        start = 0
        while start < nbytes:
            load = self._load_with_room(min(nbytes - start, BLOCK_BYTES))
            room = load.room()
            stop = nbytes if nbytes - start <= room else start + room // BLOCK_BYTES * BLOCK_BYTES
            self._copy(bits, (start, stop), load)
            start = stop

    def flush(self) -> None:
        """Put everything."""
        while self._loads:
            self._put_first()

    def close(self) -> None:
        """Wait for the copies that still run, whatever they give, and let go of the memory."""
        for load in self._loads:
            for wait in load.waits:
                with suppress(Exception):
                    wait()
        self._loads.clear()
        self._ring.close()

    def _load_with_room(self, nbytes: int) -> _Load:
        if self._loads and self._loads[-1].room() >= nbytes:
            return self._loads[-1]
        if len(self._loads) == self._ring.count:
            self._put_first()
        self._loads.append(_Load(self._ring.take()))
        return self._loads[-1]

    def _put_first(self) -> None:
        load = self._loads[0]
        while load.waits:
            load.waits.popleft()()
        self._put(load.blocks, load.nbytes)
        self._loads.popleft()
        load.blocks.clear()
        self._ring.give_back(load.buffer)

    def _copy(self, bits: Bits, span: tuple[int, int], load: _Load) -> None:
        """Start copying the bytes [start, stop) of a chunk."""
        start, stop = span
        target = load.claim(stop - start)
        itemsize = bits.dtype.itemsize
        is_whole = stop - start == prod(bits.shape) * itemsize
        if is_whole:
            boxes: tuple[Box, ...] = (Box.whole(bits.shape),)
        else:
            boxes = flat_range_to_boxes(bits.shape, start // itemsize, stop // itemsize)
        at = 0
        for box in boxes:
            part = target[at : at + box.numel * itemsize]
            at += len(part)
            if not isinstance(bits, DeviceBits):
                _copy_bits(bits if is_whole else bits[slices(box)], part)
                continue
            view = bits.view if is_whole else bits.access.narrow(bits.view, box)
            if self.transfers is None:
                _copy_bits(_read_out(bits, view, box), part)
            else:
                load.waits.append(self.transfers.start_copy_out(view, part))


def _host_memory(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def _read_out(bits: DeviceBits, view: Any, box: Box) -> npt.NDArray[Any]:
    """The bits of a part of a region; refuses what is not that."""
    found = bits.access.read_out(view)
    if found.dtype != bits.dtype or found.shape != box.sizes:
        error = DTypeMismatchError if found.dtype != bits.dtype else ShapeMismatchError
        raise error(
            f"read_out of {type(bits.access).__qualname__} gives {found.dtype} of shape {found.shape}, "
            f"expected the raw bits as {bits.dtype} of shape {box.sizes}"
        )
    return found


def _copy_bits(bits: npt.NDArray[Any], target: Bytes) -> None:
    target.view(bits.dtype).reshape(bits.shape)[...] = bits
