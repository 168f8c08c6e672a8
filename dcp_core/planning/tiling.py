"""The tiling check: do the boxes of every tensor cover it exactly once?

In: the unique boxes of all tensors of a save, as columns. Out: what is wrong, by example. Exact and never quadratic,
for one tensor of millions of boxes as for millions of tensors of one box:

1. Dimensions that nobody cuts are left out.
2. Boxes that touch are merged, innermost dimension first (`tiling_rows`): tensors cut in one dimension and regular
   grids become one box, which must be the whole tensor.
3. What is left is merged with every dimension as the innermost, then checked by signed corners (`tiling_corners`).
4. Only for tensors that fail, an example is looked for (`tiling_faults`).

The work goes through in batches of whole tensors, so that columns stay in cache and memory stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dcp_core.box import Box
from dcp_core.errors import ArgumentError
from dcp_core.metadata import UInt8
from dcp_core.planning.tiling_corners import untiled_by_corners
from dcp_core.planning.tiling_faults import Suspect, TilingFault, find_faults
from dcp_core.planning.tiling_rows import (
    KEY_LIMIT,
    Bools,
    BoxRows,
    Int64,
    merged_in_every_order,
    merged_in_order,
    sorted_rows,
)

__all__ = ["TilingFault", "check_tiling"]

_BATCH_ROWS = 1 << 16


def check_tiling(
    tensor: Int64,
    offsets: Int64,
    sizes: Int64,
    shapes: Int64,
    ndims: UInt8 | Int64,
    *,
    is_sorted: bool = False,
    max_faults: int = 16,
) -> tuple[TilingFault, ...]:
    """Check that the boxes of every tensor cover it exactly once.

    Args:
        tensor: Which tensor each box belongs to. Shape (N,).
        offsets: Where it starts, elements; 0 beyond the tensor's dimensions. Shape (N, D).
        sizes: Its extent, at least 1; 1 beyond the tensor's dimensions. Shape (N, D).
        shapes: Extent of each tensor, at most 2**62 elements; 1 beyond its dimensions. Shape (T, D).
        ndims: Dimensions of each tensor. Shape (T,).
        is_sorted: The rows are sorted by (tensor, offsets). Only saves time: the result does not depend on it.
        max_faults: Stop after as many faults.

    Returns:
        Examples of what is wrong, by tensor: mostly one for a faulty tensor, two where one box was shifted. `()` when
        all is well. A tensor without elements needs no box. A box that occurs twice is an overlap.

    Raises:
        ArgumentError: Columns contradict each other; a box is empty or starts below 0; a tensor is too large.

    Complexity:
        Linear for regular cuts in sorted rows, else a sort; 2^k keys a box that cannot be merged, where k dimensions
        are cut.

    Examples:
        >>> columns = np.array([0, 0]), np.array([[0], [5]]), np.array([[4], [3]]), np.array([[8]]), np.array([1])
        >>> check_tiling(*columns)
        (TilingFault(tensor=0, kind='hole', box=Box(offsets=(4,), sizes=(1,)), rows=(0, 1)),)
    """
    table = _Table.build(tensor, offsets, sizes, shapes, ndims, is_sorted=is_sorted)
    faults: list[TilingFault] = []
    for first, last in table.batches():
        for number in _untiled(table, first, last).tolist():
            if len(faults) >= max_faults:
                return tuple(faults[:max_faults])
            faults += _faults_of(table, number)
    return tuple(faults[:max_faults])


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The columns, and how to get at the rows of a tensor.

    Attributes:
        tensor, offsets, sizes, shapes, ndims: As `check_tiling` got them.
        order: Row numbers sorted by tensor; None when the rows are. Shape (N,).
        row: First of each tensor's rows in that order. Shape (T + 1,).
        is_sorted: The rows of a tensor are sorted by offsets.
    """

    tensor: Int64
    offsets: Int64
    sizes: Int64
    shapes: Int64
    ndims: UInt8 | Int64
    order: Int64 | None
    row: Int64
    is_sorted: bool

    @classmethod
    def build(
        cls, tensor: Int64, offsets: Int64, sizes: Int64, shapes: Int64, ndims: UInt8 | Int64, *, is_sorted: bool
    ) -> _Table:
        """Check the columns against each other and group the rows."""
        ntensors, width = shapes.shape
        if not (offsets.shape == sizes.shape == (len(tensor), width) and len(ndims) == ntensors):
            found = f"offsets {offsets.shape}, sizes {sizes.shape}, shapes {shapes.shape}, ndims {ndims.shape}"
            raise ArgumentError(f"columns of {len(tensor)} boxes do not belong together: {found}")
        if len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < ntensors:
            raise ArgumentError(f"a box belongs to a tensor that is not among the {ntensors}")
        if (shapes < 0).any():
            raise ArgumentError("a tensor has a negative extent")
        if (np.prod(shapes, axis=1, dtype=np.float64) > KEY_LIMIT).any():
            raise ArgumentError(f"a tensor has more than {KEY_LIMIT} elements")
        counts = np.bincount(tensor, minlength=ntensors)
        grouped = bool((tensor[1:] >= tensor[:-1]).all())
        order = None if grouped else _order_by_tensor(tensor, ntensors)
        row = np.concatenate([[0], np.cumsum(counts)])
        return cls(tensor, offsets, sizes, shapes, ndims, order, row, is_sorted)

    def batches(self) -> Iterator[tuple[int, int]]:
        """Cut the tensors into ranges of about `_BATCH_ROWS` rows, at least one tensor each."""
        first = 0
        while first < len(self.shapes):
            room = int(np.searchsorted(self.row, self.row[first] + _BATCH_ROWS, side="right")) - 1
            last = min(max(first + 1, room), first + _BATCH_ROWS, len(self.shapes))
            yield first, last
            first = last

    def rows(self, first: int, last: int) -> Int64 | slice:
        """The rows of a range of tensors, as an index into the columns."""
        span = slice(int(self.row[first]), int(self.row[last]))
        return span if self.order is None else self.order[span]


def _order_by_tensor(tensor: Int64, ntensors: int) -> Int64:
    """Sort stably by tensor: numpy's radix sort, 16 bits a pass."""
    order: Int64 = np.argsort(tensor.astype(np.uint16), kind="stable")
    for shift in range(16, (ntensors - 1).bit_length(), 16):
        digits = (tensor[order] >> shift).astype(np.uint16)
        order = order[np.argsort(digits, kind="stable")]
    return order


def _untiled(table: _Table, first: int, last: int) -> Int64:
    """Find the tensors of a range that are not tiled, ascending."""
    shapes = table.shapes[first:last]
    counts = np.diff(table.row[first : last + 1])
    faulty: Bools = (counts == 0) & (shapes != 0).all(axis=1)
    rows, outside = _cut_rows(table, first, last)
    if outside.any():
        faulty[rows.tensor[outside]] = True
        rows = rows.take(~faulty[rows.tensor])
    axes = tuple(range(rows.naxes))
    rows = merged_in_order(rows if table.is_sorted else sorted_rows(rows, axes), axes)
    rows = _without_settled(rows, faulty)
    if len(rows):
        rows = _without_settled(merged_in_every_order(rows), faulty)
        faulty[untiled_by_corners(rows)] = True
    return np.flatnonzero(faulty) + first


def _cut_rows(table: _Table, first: int, last: int) -> tuple[BoxRows, Bools]:
    """Take the rows of a range of tensors, numbered from 0, along the dimensions that are cut; and who is outside."""
    index = table.rows(first, last)
    tensor = table.tensor[index] - first
    outside = np.zeros(len(tensor), np.bool_)
    kept: list[tuple[Int64, Int64, Int64]] = []
    for dim in range(table.shapes.shape[1]):
        offset, size = table.offsets[index, dim], table.sizes[index, dim]
        shape = table.shapes[first:last, dim]
        if len(tensor) and (int(offset.min()) < 0 or int(size.min()) < 1):
            raise ArgumentError(f"a box of tensors {first} to {last - 1} is empty or starts below 0")
        extent = shape[tensor]
        is_cut = size != extent
        is_cut |= offset != 0
        if is_cut.any():
            outside |= size > extent - offset
            kept.append((np.ascontiguousarray(offset), np.ascontiguousarray(size), np.ascontiguousarray(shape)))
    offsets, sizes, shapes = zip(*kept, strict=True) if kept else ((), (), ())
    return BoxRows(tensor, tuple(offsets), tuple(sizes), tuple(shapes)), outside


def _without_settled(rows: BoxRows, faulty: Bools) -> BoxRows:
    """Drop the tensors of which one box is left; mark those of them that it does not fill."""
    is_single = np.bincount(rows.tensor, minlength=len(faulty))[rows.tensor] == 1
    is_whole = np.ones(len(rows), np.bool_)
    for axis in range(rows.naxes):
        is_whole &= ~rows.cuts(axis)
    faulty[rows.tensor[is_single & ~is_whole]] = True
    return rows.take(~is_single)


def _faults_of(table: _Table, number: int) -> Iterator[TilingFault]:
    """Find examples of what is wrong with a tensor that is not tiled."""
    ndim = int(table.ndims[number])
    shape = table.shapes[number, :ndim]
    index = table.rows(number, number + 1)
    rows = np.arange(index.start, index.stop) if isinstance(index, slice) else index
    if not len(rows):
        yield TilingFault(number, "hole", Box.whole(shape.tolist()), ())
        return
    suspect = Suspect(number, table.offsets[rows, :ndim], table.sizes[rows, :ndim], rows, shape)
    yield from find_faults(suspect, _is_tiled)


def _is_tiled(offsets: Int64, sizes: Int64, shape: Int64) -> bool:
    """Check one tensor."""
    tensor = np.zeros(len(offsets), np.int64)
    table = _Table.build(tensor, offsets, sizes, shape[None], np.array([len(shape)]), is_sorted=False)
    return not len(_untiled(table, 0, 1))
