"""Replica sets: which ranks hold the same box, and whether the unique boxes tile their tensors.

In: the `GlobalTable`. Out: unique boxes with their holders, sorted by (entry, offsets).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp_core.dtype import ITEMSIZE
from dcp_core.errors import CoverageError, OverlapError, PlanningError
from dcp_core.metadata import Int64
from dcp_core.planning.global_table import GlobalTable
from dcp_core.planning.local_table import TENSOR
from dcp_core.planning.tiling import TilingFault, check_tiling

_KEYS_FIT_BELOW = float(2**62)


@dataclass(frozen=True, slots=True, eq=False)
class UniqueBoxes:
    """The distinct boxes among some held rows.

    Attributes:
        row: Held rows, sorted by (entry, offsets, rank). Shape (M,).
        first: Where each unique box starts in `row`. Shape (U,).
        count: How many ranks hold it. Shape (U,).
        entry: Entry of each unique box. Shape (U,).
        offsets, sizes: The unique boxes. Shape (U, D), columns contiguous.
    """

    row: Int64
    first: Int64
    count: Int64
    entry: Int64
    offsets: Int64
    sizes: Int64

    def only(self, chosen: npt.NDArray[np.bool_]) -> UniqueBoxes:
        """The chosen unique boxes."""
        if chosen.all():
            return self
        rows = np.flatnonzero(chosen)
        return UniqueBoxes(
            self.row, self.first[rows], self.count[rows], self.entry[rows],
            gather(self.offsets, rows), gather(self.sizes, rows),
        )  # fmt: skip


def element_strides(shape: Int64) -> Int64:
    """Row-major strides in elements. Shape (T, D)."""
    ones = np.ones((len(shape), 1), dtype=np.int64)
    tail = np.concatenate([shape[:, 1:], ones], axis=1) if shape.shape[1] else shape
    strides: Int64 = np.cumprod(np.maximum(tail, 1)[:, ::-1], axis=1)[:, ::-1]
    return strides


def gather(columns: Int64, rows: Int64) -> Int64:
    """Take rows of a table whose columns are contiguous; so are the result's. Shape (len(rows), D)."""
    taken = np.empty((columns.shape[1], len(rows)), dtype=columns.dtype)
    for d in range(columns.shape[1]):
        np.take(columns[:, d], rows, out=taken[d])
    return taken.T


def find_unique_boxes(table: GlobalTable, rows: Int64) -> UniqueBoxes:
    """Group equal boxes of the same entry.

    Args:
        table: What all ranks hold.
        rows: The held rows to look at, in rank order; none of them empty.
    """
    every_row = len(rows) == len(table.entry)
    entry = table.entry if every_row else table.entry[rows]
    offsets = table.offsets if every_row else gather(table.offsets, rows)
    order, same = _order_by_start(table.shape, entry, offsets)
    laid_out = order if every_row else rows[order]
    for column in table.sizes.T:
        ties = np.flatnonzero(same)
        same[ties] = column[laid_out[ties]] == column[laid_out[ties + 1]]
    first = np.flatnonzero(np.concatenate([np.ones(min(len(order), 1), dtype=bool), ~same]))
    count = np.diff(np.append(first, len(order)))
    held = laid_out[first]
    return UniqueBoxes(
        laid_out, first, count, table.entry[held], gather(table.offsets, held), gather(table.sizes, held)
    )


def _order_by_start(shape: Int64, entry: Int64, offsets: Int64) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Sort boxes by (entry, offsets), stably; and tell which of them start where the next one does."""
    numel = np.prod(np.maximum(shape, 1), axis=1, dtype=np.float64)
    if float(numel.sum()) < _KEYS_FIT_BELOW and _start_inside(shape, entry, offsets):
        base = np.cumsum(numel.astype(np.int64)) - numel.astype(np.int64)
        strides = element_strides(shape)
        key = base[entry]
        for d in range(offsets.shape[1]):
            key += offsets[:, d] * strides[:, d][entry]
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        return order, ordered[1:] == ordered[:-1]
    order = np.lexsort((*reversed(list(offsets.T)), entry))
    same = entry[order][1:] == entry[order][:-1]
    for column in offsets.T:
        same &= column[order][1:] == column[order][:-1]
    return order, same


def _start_inside(shape: Int64, entry: Int64, offsets: Int64) -> bool:
    """Whether all boxes start inside their tensors; a start outside of one would have the key of another."""
    return all(bool((offsets[:, d] < shape[:, d][entry]).all()) for d in range(offsets.shape[1]))


def check_coverage(table: GlobalTable, boxes: UniqueBoxes, exempt: npt.NDArray[np.bool_]) -> None:
    """Check that the unique boxes of every tensor tile its global shape exactly.

    Args:
        table: What all ranks hold.
        boxes: The distinct boxes.
        exempt: Entries that are not checked. Shape (T,).

    Raises:
        CoverageError: A hole.
        OverlapError: Boxes that overlap without being equal.
        PlanningError: Boxes that leave the tensor.
    """
    checked = np.flatnonzero((table.kind == TENSOR) & ~exempt)
    position = np.full(len(table.names), -1, dtype=np.int64)
    position[checked] = np.arange(len(checked))
    known = boxes.only(~exempt[boxes.entry])
    faults = check_tiling(
        position[known.entry], known.offsets, known.sizes, table.shape[checked], table.ndim[checked], is_sorted=True
    )
    if faults:
        raise _tiling_error(table, known, checked, faults)


def _tiling_error(
    table: GlobalTable, boxes: UniqueBoxes, checked: Int64, faults: Sequence[TilingFault]
) -> PlanningError:
    lines = []
    for fault in faults:
        entry = int(checked[fault.tensor])
        shape = tuple(table.shape[entry, : table.ndim[entry]].tolist())
        holders = [_describe_unique(table, boxes, row) for row in fault.rows[:4]]
        lines.append(fault.told(table.names[entry], shape, holders))
    kinds = {fault.kind for fault in faults}
    error = PlanningError if "outside" in kinds else OverlapError if "overlap" in kinds else CoverageError
    remedy = "every element must be held once, or by ranks that hold equal boxes; check the layout of these tensors"
    return error("; ".join(lines) + f" ({remedy})")


def _describe_unique(table: GlobalTable, boxes: UniqueBoxes, unique: int) -> str:
    start = int(boxes.first[unique])
    rows = boxes.row[start : start + int(boxes.count[unique])]
    ndim = int(table.ndim[table.entry[rows[0]]])
    offsets, sizes = (tuple(column[rows[0], :ndim].tolist()) for column in (table.offsets, table.sizes))
    ranks = ", ".join(str(rank) for rank in table.rank[rows[:8]].tolist())
    return f"offsets {offsets} sizes {sizes} on rank {ranks}" + (" and more" if len(rows) > 8 else "")


def box_nbytes(table: GlobalTable, boxes: UniqueBoxes) -> Int64:
    """Bytes of each unique box. Shape (U,)."""
    nbytes: Int64 = ITEMSIZE[table.dtype[boxes.entry]]
    for column in boxes.sizes.T:
        nbytes = nbytes * column
    return nbytes
