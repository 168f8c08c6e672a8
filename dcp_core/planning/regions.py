"""Which regions of stored chunks fill the wanted boxes, and whether they fill them.

In: wanted boxes with their stored tensors. Out: `ReadColumns`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dcp_core.errors import CoverageError, OverlapError
from dcp_core.metadata import ChunkColumns, Int64
from dcp_core.planning.chunk_search import Meetings, find_meetings
from dcp_core.planning.read_items import ReadColumns
from dcp_core.planning.tiling import check_tiling
from dcp_core.planning.wanted import Wanted, WantedBoxes

Mask = npt.NDArray[np.bool_]


def intersect_chunks(wanted: Sequence[Wanted], own_file: Callable[[ChunkColumns], Mask]) -> ReadColumns:
    """Find the regions that fill the wanted boxes.

    Args:
        wanted: The boxes; empty ones need nothing.
        own_file: For chunks, True where this rank wrote the chunk itself: among equal chunks those win.

    Raises:
        CoverageError: A hole in what is wanted.
        OverlapError: The checkpoint holds chunks that overlap without being equal.
    """
    boxes = WantedBoxes.of(wanted)
    reads = _one_copy_each(boxes, _joined(list(find_meetings(boxes)), boxes.offsets.shape[1]), own_file)
    _check_filled(boxes, reads)
    return reads


def _joined(parts: Sequence[Meetings], width: int) -> ReadColumns:
    """Put the parts together, sorted by (wanted, chunk)."""
    count = sum(len(part.wanted) for part in parts)
    wanted, chunk = np.empty(count, np.int64), np.empty(count, np.int64)
    offsets, sizes = np.zeros((count, width), np.int64, order="F"), np.ones((count, width), np.int64, order="F")
    stop = 0
    for part in parts:
        rows = slice(stop, stop := stop + len(part.wanted))
        wanted[rows], chunk[rows] = part.wanted, part.chunk
        for dim, (low, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            offsets[rows, dim], sizes[rows, dim] = low, size
    reads = ReadColumns(wanted, chunk, offsets, sizes, np.full(count, -1, np.int32))
    ahead = (wanted[1:] > wanted[:-1]) | ((wanted[1:] == wanted[:-1]) & (chunk[1:] > chunk[:-1]))
    return reads if ahead.all() else reads.take(np.lexsort((chunk, wanted)))


def _one_copy_each(boxes: WantedBoxes, reads: ReadColumns, own_file: Callable[[ChunkColumns], Mask]) -> ReadColumns:
    """Among equal chunks, which are neighbours, keep one: this rank's own, else the first."""
    rows = np.flatnonzero(_equal_neighbours(reads.wanted, reads.offsets, reads.sizes))
    if not len(rows):
        return reads
    rows = np.union1d(rows, rows + 1)
    stored = boxes.chunk_rows(reads.wanted[rows], reads.chunk[rows])
    same = _equal_neighbours(reads.wanted[rows], stored.offsets, stored.sizes)
    group = np.concatenate([[0], np.cumsum(~same)])
    order = np.lexsort((rows, ~own_file(stored), group))
    is_first = np.concatenate([[True], group[order][1:] != group[order][:-1]])
    is_kept = np.ones(len(reads.wanted), np.bool_)
    is_kept[rows[order][~is_first]] = False
    return reads.take(np.flatnonzero(is_kept))


def _equal_neighbours(wanted: Int64, offsets: Int64, sizes: Int64) -> Mask:
    """Mark the rows whose box and columns are those of the next row. Shape (N - 1,), or (0,)."""
    same: Mask = wanted[1:] == wanted[:-1]
    for column in (*offsets.T, *sizes.T):
        if not same.any():
            break
        same &= column[1:] == column[:-1]
    return same


def _check_filled(boxes: WantedBoxes, reads: ReadColumns) -> None:
    """Check that the regions tile every wanted box."""
    regions = np.bincount(reads.wanted, minlength=len(boxes))
    is_filled: Mask = regions == 1
    single = np.flatnonzero(is_filled)
    row = np.cumsum(regions)[single] - 1
    is_filled[single] = (reads.sizes[row] == boxes.sizes[single]).all(axis=1)
    left = np.flatnonzero(~is_filled)
    if len(left):
        _check_tiled(boxes, reads, left)


def _check_tiled(boxes: WantedBoxes, reads: ReadColumns, left: Int64) -> None:
    """Check that the regions tile some of the wanted boxes."""
    number = np.full(len(boxes), -1, np.int64)
    number[left] = np.arange(len(left))
    if len(left) < len(boxes):
        reads = reads.take(np.flatnonzero(number[reads.wanted] >= 0))
    origin = boxes.offsets[left]
    tensor = number[reads.wanted]
    faults = check_tiling(tensor, reads.offsets - origin[tensor], reads.sizes, boxes.sizes[left], boxes.ndim[left])
    if not faults:
        return
    lines = []
    for fault in faults:
        item = boxes[int(left[fault.tensor])]
        offsets = tuple(a + b for a, b in zip(item.box.offsets, fault.box.offsets, strict=True))
        problem = (
            "the checkpoint has nothing for" if fault.kind == "hole" else "the checkpoint has chunks that overlap in"
        )
        lines.append(f"{item.name!r} of shape {item.stored.shape}: {problem} offsets {offsets} sizes {fault.box.sizes}")
    error = CoverageError if all(fault.kind == "hole" for fault in faults) else OverlapError
    raise error("; ".join(lines) + " (was every rank's part saved here?)")
