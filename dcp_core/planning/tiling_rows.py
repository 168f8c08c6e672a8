"""Box rows of many tensors as columns, and the merging of neighbours: the fast part of the tiling check.

Two boxes that touch and agree in every dimension but one are the same elements as their union, so merging them
changes nothing about holes and overlaps. Rows sorted by offsets have such neighbours side by side: one pass along
the innermost dimension turns cells into rows, the next rows into slabs, until a tensor that is cut regularly is one
box. Nothing here relies on the order: a pass over unsorted rows only finds less to merge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

KEY_LIMIT = 1 << 62
"""Keys are packed into int64 when they stay below this."""

_SHRINK_NUMERATOR, _SHRINK_DENOMINATOR = 3, 4


@dataclass(frozen=True, slots=True, eq=False)
class BoxRows:
    """Boxes of several tensors, along the dimensions that somebody cuts; along the others every box is whole.

    Attributes:
        tensor: Which tensor each box belongs to, 0 <= tensor < T. Shape (N,).
        offsets: A column a dimension, elements. Each of shape (N,).
        sizes: Likewise, at least 1, inside the tensor.
        shapes: A column a dimension: extent of each tensor. Each of shape (T,).
    """

    tensor: Int64
    offsets: tuple[Int64, ...]
    sizes: tuple[Int64, ...]
    shapes: tuple[Int64, ...]

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def naxes(self) -> int:
        """Number of dimensions that are kept."""
        return len(self.offsets)

    def take(self, selection: Int64 | Bools) -> BoxRows:
        """Select rows, by position or by mask."""
        offsets = tuple(column[selection] for column in self.offsets)
        sizes = tuple(column[selection] for column in self.sizes)
        return BoxRows(self.tensor[selection], offsets, sizes, self.shapes)

    def cuts(self, axis: int) -> Bools:
        """Mark the boxes that are not whole along a dimension. Shape (N,)."""
        marked: Bools = (self.offsets[axis] != 0) | (self.sizes[axis] != self.shapes[axis][self.tensor])
        return marked


def sorted_rows(rows: BoxRows, axes: tuple[int, ...]) -> BoxRows:
    """Sort by (tensor, offsets along `axes`, the first one most significant).

    Args:
        rows: Any rows.
        axes: A permutation of `range(rows.naxes)`.

    Returns:
        The rows in order; `rows` itself when they already are.

    Complexity:
        One sort of packed keys, or a lexsort where the keys do not fit into int64.
    """
    bases = packed_bases([rows.shapes[axis] for axis in axes])
    if bases is None:
        return rows.take(np.lexsort([*(rows.offsets[axis] for axis in reversed(axes)), rows.tensor]))
    key = np.zeros(len(rows), np.int64)
    for axis in axes:
        key *= rows.shapes[axis][rows.tensor]
        key += rows.offsets[axis]
    key += bases[rows.tensor]
    if bool((key[1:] >= key[:-1]).all()):
        return rows
    return rows.take(np.argsort(key))


def packed_bases(extents: list[Int64]) -> Int64 | None:
    """Place the index ranges of all tensors one after the other.

    Args:
        extents: A column a dimension: how many values the coordinate has in each tensor. Each of shape (T,).

    Returns:
        Where each tensor's range starts, shape (T,); None when the end does not fit into int64 with room to spare.
    """
    if not extents:
        return None
    floats = np.ones(len(extents[0]))
    for extent in extents:
        floats *= extent
    if float(floats.sum()) > KEY_LIMIT:
        return None
    counts = np.ones(len(extents[0]), np.int64)
    for extent in extents:
        counts *= extent
    bases: Int64 = np.cumsum(counts)
    return bases - counts


def merge_along(rows: BoxRows, axis: int) -> BoxRows:
    """Merge runs of consecutive rows that touch along a dimension and agree along all others."""
    if len(rows) < 2:
        return rows
    offset, size = rows.offsets[axis], rows.sizes[axis]
    joined: Bools = rows.tensor[1:] == rows.tensor[:-1]
    joined &= offset[1:] - size[:-1] == offset[:-1]
    for other in range(rows.naxes):
        if other != axis and joined.any():
            joined &= rows.offsets[other][1:] == rows.offsets[other][:-1]
            joined &= rows.sizes[other][1:] == rows.sizes[other][:-1]
    if not joined.any():
        return rows
    is_first = np.ones(len(rows), np.bool_)
    np.logical_not(joined, out=is_first[1:])
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(rows)) - 1
    merged = rows.take(first)
    sizes = list(merged.sizes)
    sizes[axis] = offset[last] - offset[first] + size[last]
    return replace(merged, sizes=tuple(sizes))


def merged_in_order(rows: BoxRows, axes: tuple[int, ...]) -> BoxRows:
    """Merge along every dimension, innermost first, rows that are sorted by `axes`."""
    for axis in reversed(axes):
        rows = merge_along(rows, axis)
    return rows


def merged_in_every_order(rows: BoxRows) -> BoxRows:
    """Merge with each dimension as the innermost in turn, as long as that gets rid of a quarter of the rows.

    Complexity:
        Linear in rows times the cost of a sort an axis: what is left shrinks geometrically.
    """
    axes = tuple(range(rows.naxes))
    while len(rows) > 1:
        before = len(rows)
        for axis in axes:
            order = (*axes[:axis], *axes[axis + 1 :], axis)
            rows = merged_in_order(sorted_rows(rows, order), order)
        if len(rows) * _SHRINK_DENOMINATOR > before * _SHRINK_NUMERATOR:
            break
    return rows
