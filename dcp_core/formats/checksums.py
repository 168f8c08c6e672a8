"""Checksums of a data file: one per block, one per chunk, one of the header.

Goes in: the bytes of chunks as they are written or read. Comes out: the *checksum field*, base64 of little-endian
64-bit words::

    header checksum, C, byte length of each of the C chunks, checksum of each chunk, checksum of each block

A block is 1 MiB of a chunk, counted from the chunk's start; the last one is shorter. Its checksum is xxh3-64 of its
bytes; a chunk's is xxh3-64 of its blocks' checksums. Chunks and their blocks stand in file order. The lengths say
which blocks are a chunk's, so a reader needs no other part of the header.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from dcp_core.errors import CorruptError

BLOCK_BYTES = 1 << 20
"""Bytes that share one checksum."""

Buffer = bytes | bytearray | memoryview

_FIXED_WORDS = 2


def block_checksum(block: Buffer) -> int:
    """xxh3-64 of one block."""
    return xxh3_64_intdigest(block)


def field_digest(field: Buffer) -> int:
    """xxh3-128 of a checksum field, as `.metadata` keeps it."""
    return xxh3_128_intdigest(field)


def block_counts(nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many blocks chunks of these lengths have.

    >>> block_counts(np.array([0, 1, 1 << 20, (1 << 20) + 1])).tolist()
    [0, 1, 1, 2]
    """
    return -(-nbytes // BLOCK_BYTES)


def field_length(nbytes: npt.NDArray[np.int64]) -> int:
    """Characters of the checksum field of a file whose chunks have these byte lengths. Shape of `nbytes`: (C,)."""
    words = _FIXED_WORDS + 2 * len(nbytes) + int(block_counts(nbytes).sum())
    return 4 * -(-8 * words // 3)


@dataclass(frozen=True, slots=True, eq=False)
class ChecksumTable:
    """The checksums of one data file.

    Attributes:
        header: xxh3-64 of the header with its fixed-width fields at their placeholders.
        byte_offset: Where each chunk starts in the data section; the last entry is the section's length. (C + 1,)
        chunk: Checksum of each chunk. Shape (C,).
        first_block: Where each chunk's blocks start in `block`; the last entry is their number. Shape (C + 1,).
        block: Checksum of each block. Shape (B,).
    """

    header: int
    byte_offset: npt.NDArray[np.int64]
    chunk: npt.NDArray[np.uint64]
    first_block: npt.NDArray[np.int64]
    block: npt.NDArray[np.uint64]

    def first_blocks_of(
        self, byte_offset: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Find chunks by their spans.

        Args:
            byte_offset: Where each starts in the data section. Shape (N,).
            nbytes: Their lengths. Shape (N,).

        Returns:
            Position in `block` of each chunk's first block; -1 for an empty one and where the file has no such chunk.
        """
        found = np.full(len(byte_offset), -1, np.int64)
        end = byte_offset + nbytes
        row = np.searchsorted(self.byte_offset, end) - 1
        asked = np.flatnonzero((nbytes > 0) & (row >= 0) & (row < len(self.chunk)))
        row = row[asked]
        is_chunk = (self.byte_offset[row] == byte_offset[asked]) & (self.byte_offset[row + 1] == end[asked])
        found[asked[is_chunk]] = self.first_block[row[is_chunk]]
        return found


def make_table(
    header: int, nbytes: npt.NDArray[np.int64], blocks: Sequence[int] | npt.NDArray[np.uint64]
) -> ChecksumTable:
    """Join the block checksums of a whole file to its table.

    Args:
        header: Checksum of the header.
        nbytes: Byte length of each chunk, in file order. Shape (C,).
        blocks: Checksum of every block, in file order.

    Raises:
        ValueError: The blocks are not as many as the lengths say.
    """
    block = np.array(blocks, dtype="<u8")
    first_block = _starts(block_counts(nbytes))
    if len(block) != first_block[-1]:
        raise ValueError(f"{len(block)} block checksums for chunks of {int(first_block[-1])} blocks")
    return ChecksumTable(header, _starts(nbytes), _chunk_checksums(first_block, block), first_block, block)


def encode_field(table: ChecksumTable) -> bytes:
    """Spell a table as the checksum field."""
    nbytes = np.diff(table.byte_offset)
    fixed = np.array([table.header, len(nbytes)], dtype="<u8")
    words = np.concatenate([fixed, nbytes.astype("<u8"), table.chunk.astype("<u8"), table.block.astype("<u8")])
    return binascii.b2a_base64(words.tobytes(), newline=False)


def decode_field(field: bytes, data_nbytes: int, name: str) -> ChecksumTable:
    """Undo `encode_field`, trusting nothing.

    Args:
        field: The field's characters.
        data_nbytes: Length of the file's data section.
        name: The file, for the error.

    Raises:
        CorruptError: The field contradicts itself or the length of the data section.
    """
    words = _words(field, name)
    count = int(words[1]) if len(words) >= _FIXED_WORDS else -1
    if count < 0 or _FIXED_WORDS + 2 * count > len(words):
        raise CorruptError(f"{name}: the checksum field of {len(words)} words cannot describe {count} chunks")
    lengths, chunk, block = np.split(words[_FIXED_WORDS:], [count, 2 * count])
    total = sum(lengths.tolist())
    if total != data_nbytes:
        raise CorruptError(f"{name}: its chunks have {total} bytes by its checksum field, its data {data_nbytes}")
    nbytes = lengths.astype(np.int64)
    first_block = _starts(block_counts(nbytes))
    if first_block[-1] != len(block):
        raise CorruptError(f"{name}: {len(block)} block checksums, expected {int(first_block[-1])}")
    if not np.array_equal(_chunk_checksums(first_block, block), chunk):
        raise CorruptError(f"{name}: the checksum of a chunk contradicts those of its blocks")
    return ChecksumTable(int(words[0]), _starts(nbytes), chunk, first_block, block)


def _words(field: bytes, name: str) -> npt.NDArray[np.uint64]:
    try:
        raw = binascii.a2b_base64(field)
    except (binascii.Error, ValueError) as error:
        raise CorruptError(f"{name}: the checksum field is not base64: {error}") from error
    if len(raw) % 8:
        raise CorruptError(f"{name}: the checksum field holds {len(raw)} bytes, no multiple of 8")
    return np.frombuffer(raw, dtype="<u8")


def _starts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _chunk_checksums(first_block: npt.NDArray[np.int64], block: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    raw = memoryview(block.astype("<u8", copy=False).tobytes())
    edges = (first_block * 8).tolist()
    return np.array([xxh3_64_intdigest(raw[start:stop]) for start, stop in pairwise(edges)], dtype="<u8")
