"""Which bytes of a chunk to read for a region of it: pure, apart from the reading.

Goes in: the chunk's sizes and the region. Comes out: flat element ranges of the chunk, ascending and disjoint, that
cover the region. Where the runs of a region lie close together one range covers them, gaps included; where gaps are
wide, each run has its own.
"""

from __future__ import annotations

from math import prod

from dcp_core.box import Box

GAP_BYTES = 1 << 16
"""A gap of this size costs about as much as another read call."""

GAP_SHARE = 32
"""Between longer runs, a gap up to 1/32 of what is read on one side is read over."""


def element_ranges(chunk_sizes: tuple[int, ...], region: Box, itemsize: int) -> list[tuple[int, int]]:
    """Plan the reads for one region.

    Args:
        chunk_sizes: Extent of the chunk in elements.
        region: What is wanted, in elements from the chunk's start; not empty, inside the chunk.
        itemsize: Bytes an element.

    Returns:
        (start, stop) pairs in row-major elements of the chunk.

    >>> element_ranges((4, 6), Box((1, 0), (2, 6)), 4)
    [(6, 18)]
    >>> element_ranges((4, 1 << 20), Box((1, 0), (2, 100)), 4)
    [(1048576, 1048676), (2097152, 2097252)]
    """
    strides = [prod(chunk_sizes[dim + 1 :]) for dim in range(len(chunk_sizes))]
    first = sum(offset * stride for offset, stride in zip(region.offsets, strides, strict=True))
    unit, dim = 1, len(chunk_sizes) - 1
    while dim >= 0 and _joins(unit, strides[dim], region.sizes[dim], itemsize):
        unit += (region.sizes[dim] - 1) * strides[dim]
        dim -= 1
    starts = [first]
    for outer in range(dim + 1):
        steps = range(0, region.sizes[outer] * strides[outer], strides[outer])
        starts = [start + step for start in starts for step in steps]
    return [(start, start + unit) for start in starts]


def _joins(unit: int, stride: int, count: int, itemsize: int) -> bool:
    """Whether `count` units that start every `stride` elements are read as one."""
    gap = stride - unit
    if count == 1 or gap * GAP_SHARE <= unit:
        return True
    return unit * itemsize < GAP_BYTES and gap * itemsize < GAP_BYTES


def widen(ranges: list[tuple[int, int]], granule: int, limit: int) -> list[tuple[int, int]]:
    """Grow ranges to whole granules, and join those that then meet.

    Args:
        ranges: Ascending, disjoint (start, stop) pairs.
        granule: Elements of a granule.
        limit: Elements of the chunk: no range grows beyond it.

    >>> widen([(1, 3), (5, 6), (17, 18)], 8, 20)
    [(0, 8), (16, 20)]
    """
    grown: list[tuple[int, int]] = []
    for start, stop in ranges:
        low, high = start // granule * granule, min(-(-stop // granule) * granule, limit)
        if grown and low <= grown[-1][1]:
            grown[-1] = (grown[-1][0], max(high, grown[-1][1]))
        else:
            grown.append((low, high))
    return grown
