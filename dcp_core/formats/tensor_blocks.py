"""The blocks of `.metadata` that describe tensors and their chunks, a group of tensors at a time.

Reading checks every value, so what comes out is consistent in itself; nothing is trusted, not even with a right digest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp_core.dtype import BY_CODE
from dcp_core.formats.chunk_checks import (
    boxes_fault,
    chunk_nbytes,
    depth_fault,
    raise_for,
    refuse,
    shapes_fault,
    spans_fault,
)
from dcp_core.formats.column_codec import ColumnReader, ColumnWriter, exclusive_sums
from dcp_core.formats.grid import expand_grids, find_grids
from dcp_core.formats.name_table import NameTable, read_name_table, repeated_fault, write_name_table
from dcp_core.metadata import EVERY_RANK, ChunkColumns, FileColumns, Int32, Int64, UInt8

_LARGEST_INT32 = 2**31 - 1
_MAX_NDIM = 64
_KNOWN_DTYPE = np.zeros(256, dtype=np.bool_)
_KNOWN_DTYPE[list(BY_CODE)] = True


@dataclass(frozen=True, slots=True, eq=False)
class TensorGroup:
    """Consecutive tensors of `.metadata`.

    Attributes:
        names: Their names and paths.
        rank: As in `TensorColumns`. Shape (T,).
        dtype: Shape (T,).
        ndim: Shape (T,).
        shape: Padded on the right with 1. Shape (T, D), D the largest ndim of the group.
        row: First chunk of each tensor within the group's chunks, and their number. Shape (T + 1,).
    """

    names: NameTable
    rank: Int32
    dtype: UInt8
    ndim: UInt8
    shape: Int64
    row: Int64


def encode_tensors(group: TensorGroup) -> bytes:
    """Write a block `tensors.<group>`.

    Raises:
        PlanningError: A name occurs twice, or a shape is beyond the format's limits.
    """
    counts = np.diff(group.row)
    refuse(depth_fault(max(len(counts), int(group.row[-1])), group.shape.shape[1]))
    refuse(shapes_fault(group.shape, group.dtype, counts))
    refuse(repeated_fault(group.names, group.rank))
    writer = ColumnWriter()
    write_name_table(writer, group.names)
    writer.integers(group.rank)
    writer.integers(group.dtype)
    writer.integers(group.ndim)
    writer.integers(group.shape[_within(group.ndim, group.shape.shape[1])])
    writer.integers(counts)
    return writer.to_bytes()


def decode_tensors(block: bytes, name: str, runs: int, entries: int, rows: int) -> TensorGroup:
    """Read a block `tensors.<group>`.

    Args:
        block: Its bytes.
        name: What to call it in errors.
        runs: Runs of names, entries (tensors) and rows (chunks) that the directory announced.
        entries: See `runs`.
        rows: See `runs`.

    Raises:
        CorruptError: It contradicts itself or the directory.
    """
    reader = ColumnReader(block, name)
    names = read_name_table(reader, runs, entries)
    rank = reader.integers(entries, low=EVERY_RANK, high=_LARGEST_INT32).astype(np.int32)
    dtype = reader.integers(entries, high=255).astype(np.uint8)
    ndim = reader.integers(entries, high=_MAX_NDIM).astype(np.uint8)
    depth = int(ndim.max()) if entries else 0
    raise_for(reader, depth_fault(max(entries, rows), depth))
    shape = np.ones((entries, depth), dtype=np.int64)
    shape[_within(ndim, depth)] = reader.integers(int(ndim.sum(dtype=np.int64)))
    counts = reader.integers(entries, high=rows)
    reader.finish()
    row = exclusive_sums(counts)
    if int(row[-1]) != rows:
        raise reader.corrupt(f"its tensors have {int(row[-1])} chunks instead of {rows}")
    if not _KNOWN_DTYPE[dtype].all():
        raise reader.corrupt(f"dtype code {int(dtype[~_KNOWN_DTYPE[dtype]][0])} is unknown")
    raise_for(reader, shapes_fault(shape, dtype, counts))
    raise_for(reader, repeated_fault(names, rank))
    return TensorGroup(names, rank, dtype, ndim, shape, row)


def encode_chunks(group: TensorGroup, chunks: ChunkColumns) -> bytes:
    """Write a block `chunks.<group>`.

    Args:
        group: The tensors.
        chunks: Their chunks; the boxes are as wide as `group.shape`.

    Raises:
        PlanningError: A box is empty, outside its tensor, or out of order.
    """
    counts = np.diff(group.row)
    grids = find_grids(counts, chunks.offsets, chunks.sizes, group.shape)
    within = _within(group.ndim, group.shape.shape[1])
    writer = ColumnWriter()
    writer.integers(grids.is_grid)
    writer.integers(grids.cells[grids.is_grid][within[grids.is_grid]])
    writer.integers(grids.extents)
    if not grids.is_grid.all():
        loose = np.repeat(~grids.is_grid, counts)
        owner = np.repeat(np.arange(len(counts)), counts)[loose]
        offsets, sizes = chunks.offsets[loose], chunks.sizes[loose]
        refuse(boxes_fault(owner, offsets, sizes, group.shape))
        _write_boxes(writer, group.ndim[owner], offsets, sizes)
    writer.integers(chunks.file, delta=True)
    writer.integers(chunks.byte_offset, delta=True)
    return writer.to_bytes()


def decode_chunks(block: bytes, name: str, group: TensorGroup, files: FileColumns) -> ChunkColumns:
    """Read a block `chunks.<group>`.

    Args:
        block: Its bytes.
        name: What to call it in errors.
        group: The tensors whose chunks they are.
        files: The files in which they lie.

    Returns:
        The chunks, boxes as wide as `group.shape`, in column-major memory.

    Raises:
        CorruptError: It contradicts itself, the tensors or the files.
    """
    reader = ColumnReader(block, name)
    counts = np.diff(group.row)
    is_grid = reader.integers(len(counts), high=1).astype(np.bool_)
    offsets, sizes = _read_grids(reader, group, counts, is_grid)
    if not is_grid.all():
        on_grid = np.repeat(is_grid, counts)
        owner = np.repeat(np.arange(len(counts)), counts)[~on_grid]
        loose_offsets, loose_sizes = _read_boxes(reader, group.ndim[owner], group.shape.shape[1])
        raise_for(reader, boxes_fault(owner, loose_offsets, loose_sizes, group.shape))
        offsets = _scatter(on_grid, offsets, loose_offsets)
        sizes = _scatter(on_grid, sizes, loose_sizes)
    rows = int(group.row[-1])
    file = reader.integers(rows, high=_LARGEST_INT32).astype(np.int32)
    byte_offset = reader.integers(rows)
    reader.finish()
    chunks = ChunkColumns(offsets, sizes, file, byte_offset)
    nbytes = chunk_nbytes(sizes, group.dtype, counts)
    raise_for(reader, spans_fault(chunks, nbytes, files))
    return chunks


def _within(ndim: UInt8, depth: int) -> npt.NDArray[np.bool_]:
    """Which places of a padded (T, depth) column are dimensions."""
    mask: npt.NDArray[np.bool_] = np.arange(depth) < ndim[:, None]
    return mask


def _read_grids(
    reader: ColumnReader, group: TensorGroup, counts: Int64, is_grid: npt.NDArray[np.bool_]
) -> tuple[Int64, Int64]:
    """Take the cells of the grids; returns the boxes of the grids only."""
    shapes, ndim, own = group.shape[is_grid], group.ndim[is_grid], counts[is_grid]
    cells = np.ones_like(shapes)
    cells[_within(ndim, shapes.shape[1])] = reader.integers(
        int(ndim.sum(dtype=np.int64)), low=1, high=max(1, int(group.row[-1]))
    )
    # A float is exact enough to see that a product exceeds the number of chunks, and does not overflow.
    covered = np.prod(cells, axis=1, dtype=np.float64)
    if np.any(covered > own) or np.any(own % np.prod(cells, axis=1) != 0):
        raise reader.corrupt("the cells of a grid are not as many as its chunks")
    extents = reader.integers(int((cells - 1).sum()), low=1)
    boxes = expand_grids(own, cells, extents, shapes)
    if boxes is None:
        raise reader.corrupt("the cells of a grid do not fit its shape")
    return boxes


def _write_boxes(writer: ColumnWriter, ndim: UInt8, offsets: Int64, sizes: Int64) -> None:
    """Append boxes dimension by dimension, each with only the rows that have it: offsets, then sizes."""
    for dimension in range(offsets.shape[1]):
        present = ndim > dimension
        writer.integers(offsets[present, dimension], delta=True)
        writer.integers(sizes[present, dimension])


def _read_boxes(reader: ColumnReader, ndim: UInt8, depth: int) -> tuple[Int64, Int64]:
    offsets = np.zeros((len(ndim), depth), dtype=np.int64, order="F")
    sizes = np.ones((len(ndim), depth), dtype=np.int64, order="F")
    for dimension in range(depth):
        present = ndim > dimension
        count = int(np.count_nonzero(present))
        offsets[present, dimension] = reader.integers(count)
        sizes[present, dimension] = reader.integers(count, low=1)
    return offsets, sizes


def _scatter(chosen: npt.NDArray[np.bool_], yes: Int64, no: Int64) -> Int64:
    merged = np.empty((len(chosen), yes.shape[1]), dtype=np.int64, order="F")
    merged[chosen] = yes
    merged[~chosen] = no
    return merged
