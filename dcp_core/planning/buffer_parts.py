"""How a buffer is cut: into slabs, which its readers share out, and into blocks, which travel one by one.

Everything is counted in the elements of the buffer, in row-major order. Every cut runs through whole rows of some
dimension, so what lies between two cuts is a box too: it can be read, and it can be selected in a view whose memory has
holes.
"""

from __future__ import annotations

import numpy as np

from dcp_core.box import Box
from dcp_core.metadata import Int64

ALIGNMENT = 1 << 20
"""Bytes of a checksum block. Where cuts fall on its multiples, every block is read whole, and so checked, by one rank.
"""

BLOCK_BYTES = 8 << 20
"""The most bytes that travel in one block of a large buffer."""

_LEAST_ALIGNED_SLABS = 2
"""Rows are put together to slabs of aligned bytes where that leaves so many slabs to share out."""


def slabs_of(sizes: Int64, itemsize: Int64) -> tuple[Int64, Int64]:
    """Into how many slabs each buffer can be cut.

    Args:
        sizes: Extent of each buffer, padded with 1; none of them empty. Shape (N, D), elements.
        itemsize: Bytes of an element as stored. Shape (N,).

    Returns:
        The number of slabs, and the elements of a slab; the last one may be shorter. Shape (N,) each.

    >>> slabs_of(np.array([[32000, 4096], [7, 3], [1, 5]]), np.array([2, 2, 4]))
    (array([250,   7,   5]), array([524288,      3,      1]))
    """
    numel = np.prod(sizes, axis=1, dtype=np.int64)
    rows = row_count(sizes)
    row_numel = numel // rows
    aligned = ALIGNMENT // np.gcd(row_numel * itemsize, ALIGNMENT)
    together = np.where(rows >= _LEAST_ALIGNED_SLABS * aligned, aligned, 1)
    return -(-rows // together), together * row_numel


def row_count(sizes: Int64) -> Int64:
    """How many rows boxes have in the first dimension that has more than one.

    Args:
        sizes: Extents, padded with 1. Shape (N, D), elements.
    """
    rows = np.ones(len(sizes), dtype=np.int64)
    for column in sizes.T[::-1]:
        rows = np.where(column > 1, column, rows)
    return rows


def block_starts(first: int, last: int, sizes: tuple[int, ...], slab_numel: int, block_numel: int) -> Int64:
    """Cut a piece of a buffer into blocks.

    Args:
        first: Where the piece starts: at a slab.
        last: Where it ends.
        sizes: Extent of the buffer, elements.
        slab_numel: Elements of a slab.
        block_numel: The most elements of a block, at least 1.

    Returns:
        The first element of each block; blocks end where the next one starts.

    >>> block_starts(0, 12, (4, 3), 3, 6), block_starts(6, 12, (4, 3), 3, 2)
    (array([0, 6]), array([ 6,  8,  9, 11]))
    >>> block_starts(0, 30, (10, 3), 6, 16)  # blocks of whole slabs
    array([ 0, 12, 24])
    """
    if last - first <= block_numel:
        return np.array([first], dtype=np.int64)
    stride, extent = 1, 1
    for size in reversed(sizes):
        extent = stride * size
        if extent > block_numel:
            break
        stride = extent
    step = block_numel // stride * stride
    if step >= slab_numel:
        step -= step % slab_numel
    return np.concatenate([np.arange(base, min(base + extent, last), step) for base in range(first, last, extent)])


def boxes_of(first: Int64, last: Int64, sizes: Int64) -> tuple[Int64, Int64]:
    """The boxes that runs of elements are.

    Args:
        first: First element of each run. Shape (P,).
        last: One past its last element. Shape (P,).
        sizes: Extent of the buffer of each run, padded with 1. Shape (P, D), elements.

    Returns:
        Offsets in the buffer, and sizes. Shape (P, D) each.
    """
    offsets, extents = np.zeros_like(sizes), np.ones_like(sizes)
    low, high = first, last - 1
    for dim in reversed(range(sizes.shape[1])):
        size = sizes[:, dim]
        offsets[:, dim] = low % size
        extents[:, dim] = high % size - offsets[:, dim] + 1
        low, high = low // size, high // size
    return offsets, extents


def box_of_run(first: int, last: int, sizes: tuple[int, ...]) -> Box:
    """The box that a run of elements is, for one run.

    >>> box_of_run(6, 8, (4, 3))
    Box(offsets=(2, 0), sizes=(1, 2))
    """
    low, high, extent = (np.array([value], dtype=np.int64) for value in (first, last, sizes))
    offsets, extents = boxes_of(low, high, extent.reshape(1, -1))
    return Box(tuple(offsets[0].tolist()), tuple(extents[0].tolist()))
