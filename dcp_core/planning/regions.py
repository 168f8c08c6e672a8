"""Which stored chunks meet the wanted boxes, and whether they fill them.

In: wanted boxes with their stored tensors. Out: `ReadColumns`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dcp_core.errors import CoverageError, OverlapError
from dcp_core.metadata import ChunkColumns, Int64
from dcp_core.planning.load_plan import Mask, ReadColumns, Wanted
from dcp_core.planning.tiling import check_tiling


def intersect_chunks(wanted: Sequence[Wanted], own_file: Callable[[ChunkColumns], Mask]) -> ReadColumns:
    """Find the regions that fill the wanted boxes.

    Args:
        wanted: The boxes; empty ones need nothing.
        own_file: For a tensor's chunks, True where this rank wrote the chunk itself: among equal chunks those win.

    Raises:
        CoverageError: A hole in what is wanted.
        OverlapError: The checkpoint holds chunks that overlap without being equal.
    """
    width = max((len(item.stored.shape) for item in wanted), default=0)
    parts = [_meet(index, item, own_file, width) for index, item in enumerate(wanted)]
    index = np.concatenate([np.full(len(chunk), i) for i, (chunk, _, _) in enumerate(parts)] or [np.zeros(0)])
    empty = np.zeros((0, width), dtype=np.int64)
    reads = ReadColumns(
        index.astype(np.int64),
        np.concatenate([chunk for chunk, _, _ in parts] or [np.zeros(0, dtype=np.int64)]),
        np.concatenate([offsets for _, offsets, _ in parts] or [empty]),
        np.concatenate([sizes for _, _, sizes in parts] or [empty]),
        np.full(len(index), -1, dtype=np.int32),
    )
    _check_filled(wanted, reads, width)
    return reads


def _meet(index: int, item: Wanted, own_file: Callable[[ChunkColumns], Mask], width: int) -> tuple[Int64, Int64, Int64]:
    """The chunks that one wanted box meets, and the regions in common."""
    chunks, ndim = item.stored.chunks, len(item.stored.shape)
    start = np.array(item.box.offsets, dtype=np.int64)
    stop = start + np.array(item.box.sizes, dtype=np.int64)
    low = np.maximum(chunks.offsets[:, :ndim], start)
    sizes = np.minimum(chunks.offsets[:, :ndim] + chunks.sizes[:, :ndim], stop) - low
    rows = np.flatnonzero((sizes > 0).all(axis=1))
    rows = _one_copy_each(chunks, rows, own_file)
    offsets_wide = np.zeros((len(rows), width), dtype=np.int64)
    sizes_wide = np.ones((len(rows), width), dtype=np.int64)
    offsets_wide[:, :ndim], sizes_wide[:, :ndim] = low[rows], sizes[rows]
    return rows, offsets_wide, sizes_wide


def _one_copy_each(chunks: ChunkColumns, rows: Int64, own_file: Callable[[ChunkColumns], Mask]) -> Int64:
    """Among equal chunks keep one: this rank's own, else the first."""
    if len(rows) < 2:
        return rows
    offsets, sizes = chunks.offsets[rows], chunks.sizes[rows]
    same = (offsets[1:] == offsets[:-1]).all(axis=1) & (sizes[1:] == sizes[:-1]).all(axis=1)
    if not same.any():
        return rows
    group = np.concatenate([[0], np.cumsum(~same)])
    order = np.lexsort((np.arange(len(rows)), ~own_file(chunks)[rows], group))
    first = np.concatenate([[True], group[order][1:] != group[order][:-1]])
    kept: Int64 = rows[order][first]
    return kept


def _check_filled(wanted: Sequence[Wanted], reads: ReadColumns, width: int) -> None:
    """Check that the regions tile every wanted box."""
    shapes = np.ones((len(wanted), width), dtype=np.int64)
    origin = np.zeros((len(wanted), width), dtype=np.int64)
    ndims = np.zeros(len(wanted), dtype=np.uint8)
    for index, item in enumerate(wanted):
        ndims[index] = item.box.ndim
        shapes[index, : item.box.ndim], origin[index, : item.box.ndim] = item.box.sizes, item.box.offsets
    faults = check_tiling(reads.wanted, reads.offsets - origin[reads.wanted], reads.sizes, shapes, ndims)
    if not faults:
        return
    lines = []
    for fault in faults:
        item = wanted[fault.tensor]
        offsets = tuple(a + b for a, b in zip(item.box.offsets, fault.box.offsets, strict=True))
        problem = (
            "the checkpoint has nothing for" if fault.kind == "hole" else "the checkpoint has chunks that overlap in"
        )
        lines.append(f"{item.name!r} of shape {item.stored.shape}: {problem} offsets {offsets} sizes {fault.box.sizes}")
    error = CoverageError if all(fault.kind == "hole" for fault in faults) else OverlapError
    raise error("; ".join(lines) + " (was every rank's part saved here?)")
