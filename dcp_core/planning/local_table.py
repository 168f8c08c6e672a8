"""What one rank holds, as columns: the local plan, and the bytes it travels in.

In: the rank's leaves. Out: a `LocalTable`, and its `encode_table` bytes. The bytes fall into sections, each with a
digest: thousands of ranks send the same names, dtypes and shapes, and the coordinator decodes each distinct section
once.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from dcp_core.errors import CoordinationError
from dcp_core.metadata import Int32, Int64, UInt8, UInt64
from dcp_core.planning.int_columns import decode_column, encode_column

TENSOR = 0
OBJECT = 1
PER_RANK = 2

COMPARED = 1
"""Flag: ranks are expected to hold the same value here, and `values` has its digest."""
RAGGED = 2
"""Flag: the cut of this tensor changes from save to save."""
PICKLED = 4
"""Flag: the value needs pickle, so its digest says nothing of its content."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalTable:
    """The leaves of one rank, sorted by (plain name, typed path), and the boxes it holds of them.

    Attributes:
        paths: Typed path of each leaf, encoded. Length L.
        kind: TENSOR, OBJECT or PER_RANK. Shape (L,).
        dtype: `DType.code`, 0 for objects. Shape (L,).
        ndim: Dimensions, 0 for objects. Shape (L,).
        flags: COMPARED, RAGGED, PICKLED. Shape (L,).
        boxes: How many boxes of the leaf are held here. Shape (L,).
        alias: The first leaf that is the same memory and the same boxes; the leaf itself where there is none before
            it. Shape (L,).
        shape: Global shape, padded with 1. Shape (L, D), elements.
        offsets: Start of each box, leaf after leaf, padded with 0. Shape (N, D), elements.
        sizes: Extent of each box, padded with 1. Shape (N, D), elements.
        values: Digest of the value where COMPARED, low word first. Shape (L, 2).
    """

    paths: tuple[bytes, ...]
    kind: UInt8
    dtype: UInt8
    ndim: UInt8
    flags: UInt8
    boxes: Int32
    alias: Int32
    shape: Int64
    offsets: Int64
    sizes: Int64
    values: UInt64

    @property
    def width(self) -> int:
        """The number of dimensions that the columns have room for."""
        return int(self.shape.shape[1])

    def leaf_of_row(self) -> Int64:
        """The leaf of each box row. Shape (N,)."""
        return np.repeat(np.arange(len(self.paths)), self.boxes)

    def ordinal_of_row(self) -> Int64:
        """The position of each box row among its leaf's boxes. Shape (N,)."""
        first = np.cumsum(self.boxes, dtype=np.int64) - self.boxes
        return np.arange(len(self.offsets)) - np.repeat(first, self.boxes)


@dataclass(frozen=True, slots=True)
class EncodedTable:
    """A local table as it travels.

    Attributes:
        payload: The bytes for the coordinator.
        structure: Digest of everything but the values.
    """

    payload: bytes
    structure: bytes


_HEAD = struct.Struct("<4sIIII")
_SECTION = struct.Struct("<I16s")
_MAGIC = b"PLN1"
_LENGTH = struct.Struct("<I")


def encode_paths(paths: Sequence[bytes]) -> bytes:
    """Flatten encoded paths into one deflated table."""
    lengths = np.fromiter((len(path) for path in paths), dtype=np.int64, count=len(paths))
    body = zlib.compress(b"".join(paths), 1)
    return _LENGTH.pack(len(body)) + body + encode_column(lengths)


def decode_paths(blob: bytes | memoryview, offset: int = 0) -> tuple[tuple[bytes, ...], int]:
    """Undo `encode_paths`; return the paths and where the next part starts."""
    (nbytes,) = _LENGTH.unpack_from(blob, offset)
    start = offset + _LENGTH.size
    text = zlib.decompress(memoryview(blob)[start : start + nbytes])
    lengths, end = decode_column(blob, start + nbytes)
    bounds = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    return tuple([text[a:b] for a, b in pairwise(bounds)]), end


def encode_table(table: LocalTable) -> EncodedTable:
    """Flatten a local table and take the digest of its structure."""
    common = encode_paths(table.paths) + b"".join(
        encode_column(column)
        for column in (table.kind, table.dtype, table.ndim, table.flags, table.boxes, table.alias, table.shape)
    )
    sections = (common, encode_column(table.sizes), encode_column(table.offsets), encode_column(table.values))
    digests = [xxhash.xxh3_128_digest(section) for section in sections]
    head = _HEAD.pack(_MAGIC, len(table.paths), len(table.offsets), table.width, len(sections))
    directory = b"".join(_SECTION.pack(len(s), d) for s, d in zip(sections, digests, strict=True))
    structure = xxhash.xxh3_128_digest(b"".join(digests[:3]))
    return EncodedTable(head + directory + b"".join(sections), structure)


@dataclass(frozen=True, eq=False)
class CommonSection:
    """The part of a table that most ranks share."""

    paths: tuple[bytes, ...]
    kind: UInt8
    dtype: UInt8
    ndim: UInt8
    flags: UInt8
    boxes: Int64
    alias: Int64
    shape: Int64
    cache: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def row_leaf(self) -> Int64:
        """Leaf of each box row."""
        return np.repeat(np.arange(len(self.paths)), self.boxes)

    @cached_property
    def row_ordinal(self) -> Int64:
        """Position of each box row in its leaf."""
        first = np.cumsum(self.boxes) - self.boxes
        return np.arange(int(self.boxes.sum())) - np.repeat(first, self.boxes)


@dataclass(frozen=True, slots=True)
class TableFrame:
    """A table as it arrived: section digests, and where the sections lie in the payload."""

    leaves: int
    rows: int
    width: int
    digests: tuple[bytes, ...]
    spans: tuple[tuple[int, int], ...]
    payload: bytes

    def section(self, number: int) -> memoryview:
        """Bytes of one section."""
        start, stop = self.spans[number]
        return memoryview(self.payload)[start:stop]


def parse_frame(payload: bytes) -> TableFrame:
    """Read the directory of an encoded table; sections stay as they are.

    Raises:
        CoordinationError: The bytes are no table.
    """
    try:
        magic, leaves, rows, width, count = _HEAD.unpack_from(payload, 0)
        entries = [_SECTION.unpack_from(payload, _HEAD.size + i * _SECTION.size) for i in range(count)]
    except struct.error as error:
        raise CoordinationError(f"a plan from a peer is cut short: {error}") from error
    if magic != _MAGIC:
        raise CoordinationError("a plan from a peer has another format: do all ranks run the same version of dcp_core?")
    start = _HEAD.size + count * _SECTION.size
    spans = []
    for nbytes, _ in entries:
        spans.append((start, start + nbytes))
        start += nbytes
    return TableFrame(leaves, rows, width, tuple(d for _, d in entries), tuple(spans), payload)


def decode_common(blob: bytes | memoryview) -> CommonSection:
    """Read the section of names, kinds, dtypes and shapes."""
    paths, at = decode_paths(blob)
    columns = []
    for _ in range(7):
        column, at = decode_column(blob, at)
        columns.append(column)
    kind, dtype, ndim, flags = (column.astype(np.uint8) for column in columns[:4])
    boxes, alias, shape = (column.astype(np.int64) for column in columns[4:])
    return CommonSection(paths, kind, dtype, ndim, flags, boxes, alias, shape)


def decode_table(payload: bytes) -> LocalTable:
    """Undo `encode_table`."""
    frame = parse_frame(payload)
    common = decode_common(frame.section(0))
    sizes, offsets, values = (decode_column(frame.section(number))[0] for number in (1, 2, 3))
    return LocalTable(
        common.paths, common.kind, common.dtype, common.ndim, common.flags,
        common.boxes.astype(np.int32), common.alias.astype(np.int32), common.shape,
        offsets.astype(np.int64), sizes.astype(np.int64), values.astype(np.uint64),
    )  # fmt: skip
