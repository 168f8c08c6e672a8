"""What a rank wants of a checkpoint: boxes of tensors, and objects.

Boxes are columns, as a state may have very many; a `Wanted` is made when somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import overload

import numpy as np

from dcp_core.box import Box
from dcp_core.dtype import BY_CODE, DType
from dcp_core.metadata import ArrayColumns, ChunkColumns, Int32, Int64, StoredObject, StoredTensor, UInt8
from dcp_core.state_path import StatePath

MANY_CHUNKS = 512
"""From so many chunks on a tensor is looked at by itself; those of smaller ones are put together."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One box that a rank wants filled.

    Attributes:
        name: The target's name.
        leaf: Position of the target among the rank's leaves.
        ordinal: Which of its boxes.
        box: The box, global.
        dtype: Element type of the target.
        stored: The tensor that it is filled from.
    """

    name: str
    leaf: int
    ordinal: int
    box: Box
    dtype: DType
    stored: StoredTensor


@dataclass(frozen=True, slots=True)
class WantedObject:
    """One object that a rank wants.

    Attributes:
        name: The target's name.
        leaf: Position of the target among the rank's leaves.
        path: Where the target lies in the state.
        stored: The object that it is filled from.
    """

    name: str
    leaf: int
    path: StatePath
    stored: StoredObject


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlaces:
    """Where the chunks of W stored tensors lie.

    Attributes:
        pools: Chunks of these tensors and others.
        pool: In which of them each tensor's lie. Shape (W,).
        first: First row there. Shape (W,).
        count: Number of rows. Shape (W,).
    """

    pools: tuple[ChunkColumns, ...]
    pool: Int32
    first: Int64
    count: Int64

    @classmethod
    def of(cls, stored: Sequence[StoredTensor]) -> ChunkPlaces:
        """The places of tensors that have chunks of their own; a tensor may occur several times."""
        none = np.empty(0, dtype=np.int64)
        return cls((), none.astype(np.int32), none, none).with_tensors(stored)

    def take(self, rows: Int64) -> ChunkPlaces:
        """Select tensors."""
        return ChunkPlaces(self.pools, self.pool[rows], self.first[rows], self.count[rows])

    def with_tensors(self, stored: Sequence[StoredTensor]) -> ChunkPlaces:
        """Add tensors that have chunks of their own; those of small ones are copied into one pool."""
        if not stored:
            return self
        seen: dict[int, tuple[int, int]] = {}
        small: list[ChunkColumns] = []
        large: list[ChunkColumns] = []
        pooled, pools = 0, len(self.pools)
        for tensor in stored:
            if id(tensor) in seen:
                continue
            if len(tensor.chunks) < MANY_CHUNKS:
                seen[id(tensor)] = pools, pooled
                small.append(tensor.chunks)
                pooled += len(tensor.chunks)
            else:
                large.append(tensor.chunks)
                seen[id(tensor)] = pools + len(large), 0
        found = np.array([seen[id(tensor)] for tensor in stored], dtype=np.int64).reshape(-1, 2)
        count = np.array([len(tensor.chunks) for tensor in stored], dtype=np.int64)
        return ChunkPlaces(
            (*self.pools, _pooled(small), *large),
            np.concatenate([self.pool, found[:, 0].astype(np.int32)]),
            np.concatenate([self.first, found[:, 1]]),
            np.concatenate([self.count, count]),
        )


class WantedBoxes(Sequence[Wanted]):
    """Wanted boxes as columns.

    Attributes:
        names: Name of each box's target.
        stored_names: Name of the stored tensor that it is filled from.
        leaves: Position of the target among the rank's leaves.
        ordinals: Which of its boxes.
        boxes: The boxes, global.
        dtype: `DType.code` of each target. Shape (W,).
        stored_dtype: `DType.code` as stored. Shape (W,).
        chunks: Where the chunks of the stored tensors lie.
        stored: Makes the stored tensor of a box.
    """

    def __init__(
        self,
        names: list[str],
        stored_names: list[str],
        leaves: list[int],
        ordinals: list[int],
        boxes: list[Box],
        dtype: UInt8,
        stored_dtype: UInt8,
        chunks: ChunkPlaces,
        stored: Callable[[int], StoredTensor],
    ) -> None:
        self.names = names
        self.stored_names = stored_names
        self.leaves = leaves
        self.ordinals = ordinals
        self.boxes = boxes
        self.dtype = dtype
        self.stored_dtype = stored_dtype
        self.chunks = chunks
        self.stored = stored

    @classmethod
    def of(cls, wanted: Sequence[Wanted]) -> WantedBoxes:
        """Turn wanted boxes into columns."""
        if isinstance(wanted, WantedBoxes):
            return wanted
        stored = [item.stored for item in wanted]
        return cls(
            [item.name for item in wanted],
            [tensor.name for tensor in stored],
            [item.leaf for item in wanted],
            [item.ordinal for item in wanted],
            [item.box for item in wanted],
            np.array([item.dtype.code for item in wanted], dtype=np.uint8),
            np.array([tensor.dtype.code for tensor in stored], dtype=np.uint8),
            ChunkPlaces.of(stored),
            stored.__getitem__,
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Wanted: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Wanted, ...]: ...
    def __getitem__(self, index: int | slice) -> Wanted | tuple[Wanted, ...]:
        if isinstance(index, slice):
            return tuple(self[row] for row in range(*index.indices(len(self))))
        row = range(len(self))[index]
        dtype = BY_CODE[int(self.dtype[row])]
        return Wanted(self.names[row], self.leaves[row], self.ordinals[row], self.boxes[row], dtype, self.stored(row))

    @cached_property
    def ndim(self) -> Int64:
        """Dimensions of each box. Shape (W,)."""
        return np.fromiter(map(len, map(attrgetter("sizes"), self.boxes)), dtype=np.int64, count=len(self.boxes))

    @cached_property
    def offsets(self) -> Int64:
        """Where each box starts, padded with 0. Shape (W, D), D the most dimensions of a box."""
        return padded(list(map(attrgetter("offsets"), self.boxes)), self.ndim, 0)

    @cached_property
    def sizes(self) -> Int64:
        """Extent of each box, padded with 1. Shape (W, D)."""
        return padded(list(map(attrgetter("sizes"), self.boxes)), self.ndim, 1)

    def chunk_rows(self, wanted: Int64, chunk: Int64) -> ChunkColumns:
        """Gather chunks of the stored tensors, padded to the most dimensions of a box.

        Args:
            wanted: Index of a wanted box. Shape (N,).
            chunk: Row among the chunks of its stored tensor. Shape (N,).
        """
        width = self.offsets.shape[1]
        offsets, sizes = np.zeros((len(wanted), width), np.int64), np.ones((len(wanted), width), np.int64)
        file, byte_offset = np.zeros(len(wanted), np.int32), np.zeros(len(wanted), np.int64)
        places = self.chunks
        in_arrays = any(pool.arrays is not None for pool in places.pools)
        arrays = ArrayColumns(np.zeros_like(offsets), np.ones_like(sizes)) if in_arrays else None
        row, pool = places.first[wanted] + chunk, places.pool[wanted]
        numbers = np.unique(pool).tolist()
        for number in numbers:
            chunks = places.pools[number]
            mine = slice(None) if len(numbers) == 1 else np.flatnonzero(pool == number)
            rows = row[mine]
            own = min(width, chunks.offsets.shape[1])
            offsets[mine, :own], sizes[mine, :own] = chunks.offsets[rows, :own], chunks.sizes[rows, :own]
            file[mine], byte_offset[mine] = chunks.file[rows], chunks.byte_offset[rows]
            if arrays is not None:
                start, extent = _arrays_of(chunks, rows, own)
                arrays.offsets[mine, :own], arrays.sizes[mine, :own] = start, extent
        return ChunkColumns(offsets, sizes, file, byte_offset, arrays)


def padded(rows: Sequence[tuple[int, ...]], ndim: Int64, filler: int) -> Int64:
    """Rows of different lengths as one array, padded on the right.

    Args:
        rows: Tuples of integers.
        ndim: Their lengths. Shape (N,).
        filler: What to pad with.

    Returns:
        Shape (N, D), D the largest length; in column-major memory.
    """
    width = int(ndim.max()) if len(ndim) else 0
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(ndim.sum()))
    if bool((ndim == width).all()):
        return np.asfortranarray(flat.reshape(len(rows), width))
    column = np.full((len(rows), width), filler, dtype=np.int64, order="F")
    column[np.arange(width) < ndim[:, None]] = flat
    return column


def _pooled(chunks: Sequence[ChunkColumns]) -> ChunkColumns:
    """Put chunks together, one tensor after the other."""
    rows, width = sum(map(len, chunks)), max((part.offsets.shape[1] for part in chunks), default=0)
    offsets, sizes = np.zeros((rows, width), np.int64, order="F"), np.ones((rows, width), np.int64, order="F")
    in_arrays = any(part.arrays is not None for part in chunks)
    arrays = ArrayColumns(np.zeros_like(offsets), np.ones_like(sizes)) if in_arrays else None
    start = 0
    for part in chunks:
        mine, own = slice(start, start + len(part)), part.offsets.shape[1]
        offsets[mine, :own], sizes[mine, :own] = part.offsets, part.sizes
        if arrays is not None:
            arrays.offsets[mine, :own], arrays.sizes[mine, :own] = _arrays_of(part, slice(None), own)
        start += len(part)
    file = np.concatenate([np.empty(0, np.int32), *(part.file for part in chunks)])
    byte_offset = np.concatenate([np.empty(0, np.int64), *(part.byte_offset for part in chunks)])
    return ChunkColumns(offsets, sizes, file, byte_offset, arrays)


def _arrays_of(chunks: ChunkColumns, rows: slice | Int64, width: int) -> tuple[Int64 | int, Int64]:
    """Where chunks start in their arrays, and the extents of those; a chunk may be an array by itself."""
    if chunks.arrays is None:
        return 0, chunks.sizes[rows, :width]
    return chunks.arrays.offsets[rows, :width], chunks.arrays.sizes[rows, :width]
