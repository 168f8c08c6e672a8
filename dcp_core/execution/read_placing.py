"""Decides for each row of a batch how its bytes get to their target. Runs on the calling thread.

Goes in: rows, and for each what the planner acquired. Comes out: memory to read straight into, or a `Destination` that
takes the elements out of a buffer; and which ranges of the chunk to read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from dcp_core.box import Box
from dcp_core.dtype import BY_CODE
from dcp_core.errors import ShapeMismatchError
from dcp_core.execution import read_ranges
from dcp_core.execution.read_ranges import Hulls, Ranges, element_ranges, element_strides, run_dim, run_starts
from dcp_core.execution.read_targets import (
    Array,
    Destination,
    assignable,
    contiguous_dim,
    memory_of,
    runs_of,
)
from dcp_core.formats import checksums
from dcp_core.metadata import Int64
from dcp_core.planning.leaves import DeviceTransfers, TensorAccess
from dcp_core.planning.span_columns import Mask, SpanColumns

Acquired = Sequence[tuple[Any, TensorAccess]]

_BITS = [BY_CODE[code].bits if code in BY_CODE else np.dtype(np.uint8) for code in range(max(BY_CODE) + 1)]


@dataclass(frozen=True, slots=True)
class Lane:
    """How the buffers of tasks are emptied.

    Attributes:
        transfers: By a device that copies by itself, through memory of its own; None: from ordinary memory.
        is_blocking: By the calling thread alone.
    """

    transfers: DeviceTransfers | None = None
    is_blocking: bool = False


HOST = Lane()


@dataclass(frozen=True, slots=True, eq=False)
class RowRanges:
    """The ranges of a chunk that are read for one row, all of one length; bytes from the chunk's start."""

    starts: Int64
    length: int


class Placing:
    """How the rows of a batch get to their targets. Lists and arrays have one entry a row.

    Attributes:
        memory: What is read into: the whole target, or its runs of memory; None: nothing straight.
        destinations: For the rows of which pieces go through a buffer.
        ranges: For the rows that are not read as one range.
        is_through: Whether all pieces go through a buffer.
        takes_chunk: Whether what goes through a buffer is counted in the chunk, else in the region.
        lane: Number of the lane of what goes through a buffer.
        lanes: The lanes.

    Args:
        columns: The rows.
        hulls: The bytes that they reach over.
        is_full: Whether every block that is touched is read whole.
        name_of: The name of a row's target, for errors.
    """

    def __init__(self, columns: SpanColumns, hulls: Hulls, *, is_full: bool, name_of: Callable[[int], str]) -> None:
        rows = len(columns)
        self.memory: list[memoryview | list[memoryview] | None] = []
        self.destinations: dict[int, Destination] = {}
        self.ranges: dict[int, RowRanges] = {}
        self.is_through = np.zeros(rows, np.bool_)
        self.takes_chunk = np.zeros(rows, np.bool_)
        self.lane = np.zeros(rows, np.int64)
        self.lanes = [HOST]
        self._columns = columns
        self._hulls = hulls
        self._is_full = is_full
        self._name_of = name_of

    def place(self, acquired: Acquired) -> None:
        """Decide.

        Args:
            acquired: View and access of each row's target.

        Raises:
            ShapeMismatchError: A view is not shaped as its region.
        """
        columns, memory = self._columns, self.memory
        sizes = _tuples(columns.sizes, columns.ndim)
        is_plain = self._is_plain().tolist()
        is_empty = (self._hulls.nbytes == 0).tolist()
        code = columns.dtype.tolist()
        for row, (view, access) in enumerate(acquired):
            if is_plain[row]:
                host = access.host_array(view)
                if host is not None and host.dtype == _BITS[code[row]] and host.shape == sizes[row]:
                    flags = host.flags
                    if flags.c_contiguous and flags.writeable:
                        memory.append(host.data.cast("B"))
                        continue
            memory.append(None if is_empty[row] else self._place_other(row, view, access))

    def _is_plain(self) -> Mask:
        """Rows that are read as one range, straight into a target that is one run of memory."""
        hulls = self._hulls
        is_plain = self._columns.same_dtype & hulls.is_run & (hulls.nbytes > 0)
        if self._is_full:
            block = checksums.BLOCK_BYTES
            is_plain &= (hulls.start % block == 0) & ((hulls.stop % block == 0) | (hulls.stop == hulls.chunk_nbytes))
        return is_plain

    def _place_other(self, row: int, view: Any, access: TensorAccess) -> memoryview | list[memoryview] | None:
        """Decide for a row that is not plain, or whose target is not."""
        columns, hulls, ndim = self._columns, self._hulls, int(self._columns.ndim[row])
        region = Box(tuple(columns.offsets[row, :ndim].tolist()), tuple(columns.sizes[row, :ndim].tolist()))
        chunk_sizes = tuple(columns.chunk_sizes[row, :ndim].tolist())
        dtype = BY_CODE[int(columns.dtype[row])]
        host = None
        if columns.same_dtype[row]:
            host = assignable(view, access, dtype.bits)
        if host is not None and host.shape != region.sizes:
            raise ShapeMismatchError(
                f"{self._name_of(row)}: the planner's acquire_tensor gives the shape {host.shape}, expected "
                f"{region.sizes}"
            )
        if host is not None and self._is_full and hulls.is_run[row] and contiguous_dim(host) == 0:
            self._take(row, Destination(view, access, region, chunk_sizes, dtype, host, None, takes_chunk=True))
            self.is_through[row] = False  # only the blocks at its ends are
            return memory_of(host)
        found = element_ranges(chunk_sizes, region, dtype.itemsize)
        memory = None if host is None or self._is_full else self._straight(row, host, region, chunk_sizes, found)
        if memory is None:
            self.ranges[row] = RowRanges(found.starts * dtype.itemsize, found.length * dtype.itemsize)
            transfers, lane = self._way(view, access, host)
            takes_chunk = self._is_full or not found.is_exact
            self.lane[row] = lane
            self._take(row, Destination(view, access, region, chunk_sizes, dtype, host, transfers, takes_chunk))
        return memory

    def _straight(
        self, row: int, host: Array, region: Box, chunk_sizes: tuple[int, ...], found: Ranges
    ) -> memoryview | list[memoryview] | None:
        """The memory of a target in whose runs bytes can be read; None where they are too short for that."""
        own = contiguous_dim(host)
        if own == 0 and found.is_exact:
            self.ranges[row] = RowRanges(found.starts * host.itemsize, found.length * host.itemsize)
            return memory_of(host)
        dim = max(own, run_dim(chunk_sizes, region.sizes))
        length = prod(region.sizes[dim:]) * host.itemsize
        if length < read_ranges.LONG_BYTES:
            return None
        strides = element_strides(chunk_sizes)[:dim]
        starts = run_starts(strides, region.sizes[:dim]) * host.itemsize + self._hulls.start[row]
        self.ranges[row] = RowRanges(starts, length)
        return memory_of(host) if own == 0 else runs_of(host, dim)

    def _way(self, view: Any, access: TensorAccess, host: Array | None) -> tuple[DeviceTransfers | None, int]:
        """How elements that come through a buffer get into a target, and the number of the lane for that."""
        if host is not None or access.host_array(view) is not None:
            return None, 0
        transfers = access.transfers(view)
        for number, lane in enumerate(self.lanes):
            if number and lane.transfers is transfers:
                return transfers, number
        self.lanes.append(Lane(transfers, is_blocking=transfers is None))
        return transfers, len(self.lanes) - 1

    def _take(self, row: int, destination: Destination) -> None:
        self.destinations[row] = destination
        self.is_through[row] = True
        self.takes_chunk[row] = destination.takes_chunk


def _tuples(sizes: Int64, ndim: Int64) -> list[tuple[int, ...]]:
    """Rows without their padding."""
    rows = list(map(tuple, sizes.tolist()))
    if not rows or int(ndim.min()) == sizes.shape[1]:
        return rows
    return [row[:length] for row, length in zip(rows, ndim.tolist(), strict=True)]
