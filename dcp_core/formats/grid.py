"""Regular grids: find the tensors whose chunks are the cells of one, and rebuild the chunks from the cells' sizes.

Most tensors are cut by one cut per dimension, so their chunks, sorted by offsets, are the cells of a grid in row-major
order, each perhaps several times over (copies). Such boxes follow from the shape and the cut positions alone. Many
tensors are handled at once; there is no loop over tensors or chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp_core.formats.column_codec import LARGEST, exclusive_sums
from dcp_core.metadata import Int64

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class GridCells:
    """The grids among T tensors.

    Attributes:
        is_grid: Which tensors are grids. Shape (T,).
        cells: Cells along each dimension, 1 where a tensor is no grid. Shape (T, D).
        extents: Sizes of the cells but the last along each dimension, tensor by tensor, dimension by dimension.
            Shape (sum of cells - 1 over grids,), elements.
    """

    is_grid: Bools
    cells: Int64
    extents: Int64


def find_grids(counts: Int64, offsets: Int64, sizes: Int64, shapes: Int64) -> GridCells:
    """Find the tensors whose chunks form a regular grid.

    Args:
        counts: Chunks of each tensor. Shape (T,).
        offsets: Starts of the chunks, sorted lexicographically within a tensor. Shape (N, D), elements.
        sizes: Their extents. Shape (N, D), elements.
        shapes: Global shapes. Shape (T, D), elements.

    Returns:
        The grids; `expand_grids` gives their chunks back.

    Complexity: O(N D).
    """
    filled = np.flatnonzero(counts > 0)
    is_grid = np.zeros(len(counts), dtype=np.bool_)
    cells = np.ones_like(shapes)
    if len(filled) == 0:
        return GridCells(is_grid, cells, np.empty(0, dtype=np.int64))
    rows = _Rows.of(counts[filled])
    runs = _leading_runs(rows, offsets)
    found = runs[:, :-1] // runs[:, 1:]
    is_regular = np.all(found * runs[:, 1:] == runs[:, :-1], axis=1)
    is_regular &= ~rows.any(_misfits(rows, offsets, sizes, shapes[filled], found, runs))
    is_grid[filled] = is_regular
    cells[is_grid] = found[is_regular]
    return GridCells(is_grid, cells, _inner_extents(rows, sizes, found, runs, is_regular))


def expand_grids(counts: Int64, cells: Int64, extents: Int64, shapes: Int64) -> tuple[Int64, Int64] | None:
    """Undo `find_grids` for tensors that are all grids.

    Args:
        counts: Chunks of each tensor, a multiple of the product of its cells. Shape (T,).
        cells: Cells along each dimension, at least 1. Shape (T, D).
        extents: As in `GridCells`, at least 1 each.
        shapes: Global shapes. Shape (T, D), elements.

    Returns:
        (offsets, sizes), each of shape (N, D) in column-major memory, or None if some cells do not fit the shape.
    """
    cell_start = exclusive_sums(cells.reshape(-1))
    cell_sizes = _all_extents(cell_start, extents, shapes.reshape(-1))
    if cell_sizes is None:
        return None
    cell_offsets = exclusive_sums(cell_sizes)[:-1]
    first_cell = cell_start[:-1].reshape(cells.shape)
    rows = _Rows.of(counts)
    offsets = np.empty((cells.shape[1], rows.total), dtype=np.int64)
    sizes = np.empty_like(offsets)
    run = counts
    for dimension in range(cells.shape[1]):
        along = cells[:, dimension]
        run = run // along
        start = first_cell[:, dimension]
        positions = rows.spread(start)
        if np.any(along > 1):
            positions += rows.cell_index(run, along)
        np.take(cell_offsets, positions, out=offsets[dimension], mode="clip")
        if cells.size:
            offsets[dimension] -= rows.spread(cell_offsets[start])
        np.take(cell_sizes, positions, out=sizes[dimension], mode="clip")
    return offsets.T, sizes.T


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of consecutive tensors: where each tensor starts, and the tensor and local position of each row."""

    counts: Int64
    starts: Int64
    owner: npt.NDArray[np.int32]
    local: npt.NDArray[np.int32]
    total: int

    @classmethod
    def of(cls, counts: Int64) -> _Rows:
        bounds = exclusive_sums(counts)
        total = int(bounds[-1])
        owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        local = np.arange(total, dtype=np.int32) - bounds[:-1].astype(np.int32)[owner]
        return cls(counts, bounds[:-1], owner, local, total)

    def spread(self, per_tensor: Int64) -> Int64:
        return np.take(per_tensor, self.owner, mode="clip")

    def any(self, per_row: Bools) -> Bools:
        """Which tensors have a true row."""
        return np.bincount(self.owner[per_row], minlength=len(self.counts)) > 0

    def cell_index(self, run: Int64, along: Int64) -> npt.NDArray[np.int32]:
        """Which cell of one dimension each row is in: `run` rows share a cell, then the next, `along` in all."""
        index = self.local // run.astype(np.int32)[self.owner]
        index %= along.astype(np.int32)[self.owner]
        return index


def _leading_runs(rows: _Rows, offsets: Int64) -> Int64:
    """For each tensor and each k, how many rows share the first row's offsets in dimensions before k."""
    dimensions = offsets.shape[1]
    runs = np.empty((len(rows.counts), dimensions + 1), dtype=np.int64)
    runs[:, 0] = rows.counts
    shared = np.ones(rows.total, dtype=np.bool_)
    for dimension in range(dimensions):
        column = offsets[:, dimension]
        if not column.any():
            runs[:, dimension + 1] = runs[:, dimension]
            continue
        shared &= column == rows.spread(column[rows.starts])
        runs[:, dimension + 1] = np.add.reduceat(shared, rows.starts, dtype=np.int64)
    return runs


def _misfits(rows: _Rows, offsets: Int64, sizes: Int64, shapes: Int64, cells: Int64, runs: Int64) -> Bools:
    """Rows that are not the cell that their position says."""
    misfit = np.zeros(rows.total, dtype=np.bool_)
    first = rows.spread(rows.starts)
    for dimension in range(offsets.shape[1]):
        column, extent = offsets[:, dimension], sizes[:, dimension]
        whole = rows.spread(shapes[:, dimension])
        if not column.any():
            misfit |= extent != whole
            continue
        along, run = cells[:, dimension], runs[:, dimension + 1]
        index = rows.cell_index(run, along)
        here = first + index * rows.spread(run)
        after = np.minimum(here + rows.spread(run), rows.total - 1)
        is_last = index == rows.spread(along) - 1
        misfit |= column != column[here]
        misfit |= extent != np.where(is_last, whole, column[after]) - column
        misfit |= (index == 0) & (column != 0)
    misfit |= (sizes < 1).any(axis=1)
    return misfit


def _inner_extents(rows: _Rows, sizes: Int64, cells: Int64, runs: Int64, chosen: Bools) -> Int64:
    """Sizes of all cells but the last, of the chosen tensors, in the order of (tensor, dimension, cell)."""
    inner = cells[chosen] - 1
    per_cut = inner.reshape(-1)
    starts = np.broadcast_to(rows.starts[chosen, None], inner.shape).reshape(-1)
    steps = runs[chosen, 1:].reshape(-1)
    dimensions = np.broadcast_to(np.arange(inner.shape[1]), inner.shape).reshape(-1)
    cut = np.repeat(np.arange(len(per_cut)), per_cut)
    position = np.arange(len(cut)) - exclusive_sums(per_cut)[:-1][cut]
    return np.ascontiguousarray(sizes[starts[cut] + position * steps[cut], dimensions[cut]])


def _all_extents(cell_start: Int64, extents: Int64, shapes: Int64) -> Int64 | None:
    """Put the last cell, what the others leave of the shape, behind the others of each dimension of each tensor."""
    every = np.zeros(int(cell_start[-1]), dtype=np.int64)
    if len(shapes) == 0:
        return every
    is_inner = np.ones(len(every), dtype=np.bool_)
    is_inner[cell_start[1:] - 1] = False
    every[is_inner] = extents
    if np.any(np.add.reduceat(every, cell_start[:-1], dtype=np.float64) > LARGEST):
        return None
    every[~is_inner] = shapes - np.add.reduceat(every, cell_start[:-1])
    return every if int(every.min()) >= 1 else None
