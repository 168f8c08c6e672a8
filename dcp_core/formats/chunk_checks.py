"""Contradictions in chunk columns, found before anything is written or read by them.

Each check returns what is wrong as text, or None: the writer makes a `PlanningError` of it, the reader a
`CorruptError`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.dtype import ITEMSIZE
from dcp_core.errors import PlanningError
from dcp_core.file_names import TENSOR_FILE
from dcp_core.formats.column_codec import FREE_NBYTES, LARGEST, ColumnReader
from dcp_core.metadata import ChunkColumns, FileColumns, Int32, Int64, UInt8


def refuse(fault: str | None) -> None:
    """Refuse to write what has a fault.

    Raises:
        PlanningError: There is one.
    """
    if fault is not None:
        raise PlanningError(f"the plan cannot be written as metadata: {fault}")


def raise_for(reader: ColumnReader, fault: str | None) -> None:
    """Refuse a block that has a fault.

    Raises:
        CorruptError: There is one.
    """
    if fault is not None:
        raise reader.corrupt(fault)


def boxes_fault(owner: Int64, offsets: Int64, sizes: Int64, shapes: Int64) -> str | None:
    """Check that boxes are not empty, lie inside their tensor, and are sorted.

    Args:
        owner: Tensor of each box, ascending. Shape (N,).
        offsets: Shape (N, D), elements.
        sizes: Shape (N, D), elements.
        shapes: Global shapes, indexed by `owner`. Shape (T, D), elements.
    """
    whole = shapes[owner]
    outside = (offsets < 0) | (sizes < 1) | (sizes > whole) | (offsets > whole - sizes)
    if outside.any():
        row = int(np.flatnonzero(outside.any(axis=1))[0])
        return (
            f"chunk {row} at offsets {offsets[row].tolist()} with sizes {sizes[row].tolist()} "
            f"does not fit the shape {whole[row].tolist()}"
        )
    tied = owner[1:] == owner[:-1]
    for dimension in range(offsets.shape[1]):
        column = offsets[:, dimension]
        if np.any(tied & (column[1:] < column[:-1])):
            return "the chunks of a tensor are not in the order of their offsets"
        tied &= column[1:] == column[:-1]
    return None


def shapes_fault(shapes: Int64, dtype: UInt8, counts: Int64) -> str | None:
    """Check that tensors with chunks have a size in bytes that 64 bits hold, so that no product overflows."""
    if shapes.size == 0:
        return None
    nbytes = np.prod(shapes.astype(np.float64), axis=1) * ITEMSIZE[dtype]
    wrong = np.flatnonzero((counts > 0) & (nbytes > LARGEST / 2))
    return f"a tensor of shape {shapes[wrong[0]].tolist()} is too large" if len(wrong) else None


def depth_fault(rows: int, depth: int) -> str | None:
    """Check that padding everything to the largest number of dimensions stays small."""
    if depth <= 8 or rows * depth <= 8 * FREE_NBYTES:
        return None
    return f"{rows} tensors or chunks with up to {depth} dimensions are too many in one group"


def chunk_nbytes(sizes: Int64, dtype: UInt8, counts: Int64) -> Int64:
    """Bytes of each chunk, from its extents (N, D) and the dtype and number of chunks of each tensor. Shape (N,)."""
    nbytes = np.repeat(ITEMSIZE[dtype], counts)
    for dimension in range(sizes.shape[1]):
        nbytes *= sizes[:, dimension]
    return nbytes


def spans_fault(chunks: ChunkColumns, nbytes: Int64, files: FileColumns) -> str | None:
    """Check that chunks lie inside the data sections of tensor files and do not overlap, unless they are the same.

    Args:
        chunks: Their `file` and `byte_offset`, neither negative.
        nbytes: Their lengths. Shape (N,).
        files: The data files.
    """
    if len(chunks) == 0:
        return None
    if int(chunks.file.max()) >= len(files):
        return f"a chunk lies in file {int(chunks.file.max())} of {len(files)}"
    room = np.where(files.kind == TENSOR_FILE, files.nbytes - files.data_start, -1)
    beyond = np.flatnonzero(chunks.byte_offset > room[chunks.file] - nbytes)
    if len(beyond):
        row = int(beyond[0])
        start, file = int(chunks.byte_offset[row]), int(chunks.file[row])
        return f"a chunk at bytes {start}..{start + int(nbytes[row])} lies outside the data of file {file}"
    return _overlap_fault(chunks.file, chunks.byte_offset, nbytes)


def _overlap_fault(file: Int32, byte_offset: Int64, nbytes: Int64) -> str | None:
    # Files hold their chunks in nearly this order already, so a stable sort by file alone is usually enough.
    if not _has_overlap(_by_file(file), file, byte_offset, nbytes):
        return None
    order = np.lexsort((nbytes, byte_offset, file))
    same = np.zeros(len(order), dtype=np.bool_)
    same[1:] = _equal_neighbours(file[order]) & _equal_neighbours(byte_offset[order]) & _equal_neighbours(nbytes[order])
    if not _has_overlap(order[~same], file, byte_offset, nbytes):
        return None
    return "two chunks overlap in their file"


def _by_file(file: Int32) -> npt.NDArray[np.intp]:
    # numpy sorts 16-bit integers by radix, several times faster than wider ones.
    key = file.astype(np.uint16) if int(file.max()) < 1 << 16 else file
    return np.argsort(key, kind="stable")


def _has_overlap(order: npt.NDArray[np.intp], file: Int32, byte_offset: Int64, nbytes: Int64) -> bool:
    """Whether a chunk reaches beyond the start of the next one in `order` in the same file."""
    owner, start = file[order], byte_offset[order]
    end = start + nbytes[order]
    return bool(np.any((end[:-1] > start[1:]) & (owner[1:] == owner[:-1])))


def _equal_neighbours(column: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return np.asarray(column[1:] == column[:-1], dtype=np.bool_)
