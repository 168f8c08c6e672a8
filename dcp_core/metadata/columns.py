"""The bulk of a description: columns (numpy arrays), one row a tensor, chunk, object or file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
UInt64 = npt.NDArray[np.uint64]

EVERY_RANK = -1
"""In a `rank` column: the entry belongs to all ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorColumns:
    """Stored tensors, sorted by (UTF-8 name, rank).

    Attributes:
        names: Printed name of each tensor, unique but for `rank`.
        paths: Typed path of each, as `state_path.encode_path` writes it.
        rank: `EVERY_RANK`, or the rank whose own value this is. Shape (T,).
        dtype: `DType.code`. Shape (T,).
        ndim: Dimensions. Shape (T,).
        shape: Global shape, padded on the right with 1. Shape (T, D).
        row: First chunk row of each tensor; row[T] is the number of chunks. Shape (T + 1,).
    """

    names: Sequence[str]
    paths: Sequence[bytes]
    rank: Int32
    dtype: UInt8
    ndim: UInt8
    shape: Int64
    row: Int64


@dataclass(frozen=True, slots=True, eq=False)
class ArrayColumns:
    """The stored arrays that chunks are regions of: for chunks that do not lie in one piece in their file.

    Attributes:
        offsets: Where the chunk starts in its array, padded on the right with 0. Shape (N, D), elements.
        sizes: Extent of the array, padded on the right with 1. Shape (N, D), elements.
    """

    offsets: Int64
    sizes: Int64


@dataclass(frozen=True, slots=True, eq=False)
class ChunkColumns:
    """Stored boxes, sorted by (tensor, offsets).

    Attributes:
        offsets: Start of the box, padded on the right with 0. Shape (N, D), elements.
        sizes: Extent, padded on the right with 1. Shape (N, D), elements.
        file: Row in `FileColumns`. Shape (N,).
        byte_offset: From the start of the file's data section: of the chunk, or of its array. Shape (N,).
        arrays: The row-major arrays of which the chunks are regions; None where each is an array by itself, as in all
            that this library writes.
    """

    offsets: Int64
    sizes: Int64
    file: Int32
    byte_offset: Int64
    arrays: ArrayColumns | None = None

    def __len__(self) -> int:
        return len(self.file)

    def part(self, rows: slice | npt.NDArray[np.bool_], ndim: int | None = None) -> ChunkColumns:
        """Some rows, and the first `ndim` dimensions of them (None: all); neighbouring ones share memory."""
        arrays = self.arrays
        if arrays is not None:
            arrays = ArrayColumns(arrays.offsets[rows, :ndim], arrays.sizes[rows, :ndim])
        return ChunkColumns(
            self.offsets[rows, :ndim], self.sizes[rows, :ndim], self.file[rows], self.byte_offset[rows], arrays
        )


@dataclass(frozen=True, slots=True, eq=False)
class ObjectColumns:
    """Stored objects, sorted by (UTF-8 name, rank).

    Attributes:
        names: Printed name of each object.
        paths: Typed path of each.
        rank: `EVERY_RANK`, or the rank whose own value this is. Shape (K,).
        per_rank: 1 where the user asked for `PerRank` (another world size is then an error). Shape (K,).
        file: Row in `FileColumns` of the `.bytes` file. Shape (K,).
        ordinal: Position in that file's index. Shape (K,).
    """

    names: Sequence[str]
    paths: Sequence[bytes]
    rank: Int32
    per_rank: UInt8
    file: Int32
    ordinal: Int32


@dataclass(frozen=True, slots=True, eq=False)
class FileColumns:
    """Data files, sorted by (rank, kind, part). New at every save.

    Files that another program wrote have names of their own. Nothing in them says which save they are of, and there
    are no checksums: where they are read, `field_start`, `field_nbytes` and `digest` are 0, and `rank` is -1.

    Attributes:
        rank: Who wrote it. Shape (F,).
        part: 0, or the number of a further part. Shape (F,).
        kind: 0 for `.safetensors`, 1 for `.bytes`. Shape (F,).
        nbytes: Size of the whole file. Shape (F,).
        data_start: Where the data section starts. Shape (F,).
        field_start: Where the checksum field (safetensors) or the index (`.bytes`) starts. Shape (F,).
        field_nbytes: Its length. Shape (F,).
        digest: xxh3-128 of it, low word first. Shape (F, 2).
        names: Names of files that another program wrote; empty where `data_file_name` spells them. Length F.
    """

    rank: Int32
    part: Int32
    kind: UInt8
    nbytes: Int64
    data_start: Int64
    field_start: Int64
    field_nbytes: Int64
    digest: UInt64
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rank)


def box_of(chunks: ChunkColumns, row: int) -> Box:
    """The box of one chunk row."""
    return Box(tuple(chunks.offsets[row].tolist()), tuple(chunks.sizes[row].tolist()))
