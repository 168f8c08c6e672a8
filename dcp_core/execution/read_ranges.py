"""Which bytes of a chunk to read for a region of it: pure.

Goes in: the extents of chunks and regions. Comes out: byte ranges of the chunk, ascending and disjoint, that cover the
region. Where the runs of a region lie close together one range covers them, gaps included; where gaps are wide, each
run has its own. `docs/decisions/0016-how-bytes-are-read.md` has the measurements behind the limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from dcp_core.box import Box
from dcp_core.metadata import Int64
from dcp_core.planning.block_edges import span_in
from dcp_core.planning.span_columns import Mask, SpanColumns

GAP_BYTES = 1 << 14
"""Reading over a gap of this size costs about as much as another read call."""

LONG_BYTES = 1 << 16
"""Runs of this length are read straight into their places, and gaps between them are read over only if small."""

GAP_SHARE = 12
"""Between long runs, at most this fraction of what is wanted is read in vain."""


@dataclass(frozen=True, slots=True, eq=False)
class Hulls:
    """For each region the range of its chunk's bytes from its first to its last. N regions.

    Attributes:
        start: First byte, from the chunk's start; 0 for an empty region. Shape (N,).
        stop: One past the last byte; `start` for an empty region. Shape (N,).
        nbytes: Bytes of the region itself. Shape (N,).
        chunk_nbytes: Bytes of the chunk. Shape (N,).
        is_run: Whether the range holds nothing but the region. Shape (N,).
    """

    start: Int64
    stop: Int64
    nbytes: Int64
    chunk_nbytes: Int64
    is_run: Mask

    def part(self, start: int, stop: int) -> Hulls:
        """Some neighbouring rows, sharing memory."""
        rows = slice(start, stop)
        return Hulls(self.start[rows], self.stop[rows], self.nbytes[rows], self.chunk_nbytes[rows], self.is_run[rows])


def hulls_of(columns: SpanColumns) -> Hulls:
    """Find the ranges of bytes that regions reach over.

    Args:
        columns: Regions inside their chunks.
    """
    low, reach, numel = span_in(columns.offsets, columns.sizes, columns.chunk_sizes)
    start = np.where(numel == 0, 0, low * columns.itemsize)
    stop = np.where(numel == 0, 0, start + reach * columns.itemsize)
    nbytes = numel * columns.itemsize
    chunk_nbytes = np.prod(columns.chunk_sizes, axis=1, dtype=np.int64) * columns.itemsize
    return Hulls(start, stop, nbytes, chunk_nbytes, stop - start == nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Ranges of one length that cover a region of a chunk.

    Attributes:
        starts: First element of each, ascending. Shape (R,).
        length: Their length, elements.
        is_exact: Whether they hold nothing but the region; one after the other, they are its elements in order then.
    """

    starts: Int64
    length: int
    is_exact: bool


def element_ranges(chunk_sizes: tuple[int, ...], region: Box, itemsize: int) -> Ranges:
    """Plan the reads for one region.

    Args:
        chunk_sizes: Extent of the chunk in elements.
        region: What is wanted, in elements from the chunk's start; not empty, inside the chunk.
        itemsize: Bytes an element.

    >>> found = element_ranges((4, 6), Box((1, 0), (2, 6)), 4)
    >>> found.starts.tolist(), found.length, found.is_exact
    ([6], 12, True)
    >>> found = element_ranges((4, 1 << 20), Box((1, 0), (2, 100)), 4)
    >>> found.starts.tolist(), found.length
    ([1048576, 2097152], 100)
    """
    strides = element_strides(chunk_sizes)
    unit, wanted, dim = 1, 1, len(chunk_sizes) - 1
    while dim >= 0 and _is_read_over(unit, wanted, strides[dim], region.sizes[dim], itemsize):
        unit += (region.sizes[dim] - 1) * strides[dim]
        wanted *= region.sizes[dim]
        dim -= 1
    starts = run_starts(strides[: dim + 1], region.sizes[: dim + 1])
    first = sum(offset * stride for offset, stride in zip(region.offsets, strides, strict=True))
    return Ranges(starts + first, unit, unit == wanted)


def run_dim(chunk_sizes: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """From which dimension on a region is one run of its chunk.

    >>> run_dim((4, 5, 6), (4, 5, 6)), run_dim((4, 5, 6), (2, 3, 6)), run_dim((4, 5, 6), (1, 1, 2))
    (0, 1, 0)
    """
    dim = len(sizes)
    while dim and (dim == len(sizes) or sizes[dim] == chunk_sizes[dim]):
        dim -= 1
    while dim and sizes[dim - 1] == 1:
        dim -= 1
    return dim


def _is_read_over(unit: int, wanted: int, stride: int, count: int, itemsize: int) -> bool:
    """Whether `count` units that start every `stride` elements are read as one, `wanted` elements of each needed."""
    gap = stride - unit
    if count == 1 or gap == 0:
        return True
    if gap * itemsize > GAP_BYTES:
        return False
    return unit * itemsize < LONG_BYTES or (stride - wanted) * GAP_SHARE <= wanted


def element_strides(sizes: tuple[int, ...]) -> list[int]:
    """Elements from one index to the next in each dimension, in row-major order.

    >>> element_strides((4, 3, 2))
    [6, 2, 1]
    """
    return [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def run_starts(strides: list[int], sizes: tuple[int, ...]) -> Int64:
    """Where the runs of a box start, in row-major order of the box.

    >>> run_starts([100, 10], (2, 3)).tolist()
    [0, 10, 20, 100, 110, 120]
    """
    starts = np.zeros(1, np.int64)
    for stride, size in zip(strides, sizes, strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts


def cut_at_blocks(start: Int64, stop: Int64, block: int) -> tuple[Int64, Int64, Int64]:
    """Cut byte ranges at the multiples of a block's size.

    Args:
        start: First bytes, from the chunk's start. Shape (R,).
        stop: One past the last; no range is empty. Shape (R,).
        block: Bytes of a block.

    Returns:
        Start and stop of the pieces, and which range each comes from.

    >>> [column.tolist() for column in cut_at_blocks(np.array([3, 8]), np.array([9, 16]), 8)]
    [[3, 8, 8], [8, 9, 16], [0, 0, 1]]
    """
    first = start // block
    count = -(-stop // block) - first
    if not len(count) or int(count.max()) == 1:
        return start, stop, np.arange(len(start))
    source = np.repeat(np.arange(len(start)), count)
    index = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count) + first[source]
    return np.maximum(start[source], index * block), np.minimum(stop[source], (index + 1) * block), source
