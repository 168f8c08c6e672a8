"""What the coordinator answers: for each buffer that a rank offered, its group and who reads which part of it.

In: choices as columns. Out: one answer a class of ranks; on the rank `SharedBuffers`, in the order of the offer.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcp_core.errors import CoordinationError
from dcp_core.metadata import Int32, Int64
from dcp_core.planning.int_columns import decode_column, encode_column
from dcp_core.planning.rank_groups import Origin, SharedGroup, decode_group, encode_group
from dcp_core.planning.shared_offers import NOT_NAMED, Offer

_MAGIC = b"SRC1"
_HEAD = struct.Struct("<4sIII")
_ORIGIN = struct.Struct("<B16s")


@dataclass(frozen=True, slots=True, eq=False)
class SharedBuffers:
    """The buffers that one rank shares, in the order that all ranks walk shared buffers in.

    Attributes:
        groups: The groups of this rank that share anything, ascending by key: the order in which they are opened.
        row: Index of each buffer among the rank's wanted boxes. Shape (B,).
        group: Its group, as an index into `groups`. Shape (B,).
        pieces: Into how many pieces it is cut. Shape (B,).
        reader: Who reads each piece: a rank of the job. Buffer after buffer. Shape (P,).
        stop: Slab at which each piece ends; the first one starts at 0, others where the one before ends. Shape (P,).
    """

    groups: tuple[SharedGroup, ...]
    row: Int64
    group: Int64
    pieces: Int64
    reader: Int32
    stop: Int64

    def __len__(self) -> int:
        return len(self.row)

    @classmethod
    def none(cls) -> SharedBuffers:
        """Nothing is shared."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls((), nothing, nothing, nothing, nothing.astype(np.int32), nothing)


def encode_origin(group: SharedGroup, name_digest: bytes) -> bytes:
    """Flatten a group of an answer's table.

    Args:
        group: The group.
        name_digest: What stands for its name.
    """
    return _ORIGIN.pack(group.origin.value, name_digest) + encode_group(group.key)


def encode_sources(table: Sequence[bytes], group: Int64, pieces: Int64, reader: Int64, inner: Int64) -> bytes:
    """Flatten one answer.

    Args:
        table: The groups of the ranks that it is for, each by `encode_origin`, ascending by key.
        group: For each offered buffer 0, or 1 and the index of its group in the table. Shape (B,).
        pieces: For each shared buffer into how many pieces it is cut. Shape (S,).
        reader: For each piece the position of its reader in the group. Shape (P,).
        inner: Slabs at which pieces end, without the last piece of each buffer. Shape (P - S,).
    """
    groups = zlib.compress(b"".join(table), 1)
    columns = [encode_column(column) for column in (group, pieces, reader, inner)]
    return b"".join((_HEAD.pack(_MAGIC, len(group), len(table), len(groups)), groups, *columns))


def decode_sources(answer: bytes, offer: Offer) -> SharedBuffers:
    """Read an answer.

    Args:
        answer: What the coordinator sent; empty: nothing is shared.
        offer: What this rank sent.

    Raises:
        CoordinationError: The bytes are no answer to this offer.
    """
    if not answer:
        return SharedBuffers.none()
    try:
        magic, offered, groups, nbytes = _HEAD.unpack_from(answer, 0)
        if magic != _MAGIC:
            raise ValueError("not an answer")
        at = _HEAD.size + nbytes
        table = _decode_table(zlib.decompress(answer[_HEAD.size : at]), groups, offer)
        columns = []
        for _ in range(4):
            column, at = decode_column(answer, at)
            columns.append(column.astype(np.int64))
        group, pieces, reader, inner = columns
        shared = np.flatnonzero(group)
        if offered != len(offer.buffers) or len(group) != offered or len(pieces) != len(shared):
            raise ValueError(f"{offered} buffers, and {len(offer.buffers)} were offered")
        group = group[shared] - 1
        return SharedBuffers(
            table, offer.buffers.row[shared], group, pieces,
            _ranks_of(table, np.repeat(group, pieces), reader), _stops(pieces, inner, offer.buffers.slabs[shared]),
        )  # fmt: skip
    except (struct.error, zlib.error, ValueError, IndexError) as error:
        raise CoordinationError(f"the readers from the coordinator cannot be read: {error}") from error


def _decode_table(blob: bytes, count: int, offer: Offer) -> tuple[SharedGroup, ...]:
    named = {(held.key, held.name_digest): held.name for held in offer.groups}
    table, at = [], 0
    for _ in range(count):
        origin, digest = _ORIGIN.unpack_from(blob, at)
        key, at = decode_group(blob, at + _ORIGIN.size)
        name = "" if digest == NOT_NAMED else named.get((key, digest))
        if name is None or offer.rank not in key.ranks:
            raise ValueError(f"a group of ranks {key.ranks} that rank {offer.rank} does not know")
        table.append(SharedGroup(key, Origin(origin), name))
    return tuple(table)


def _ranks_of(table: tuple[SharedGroup, ...], group: Int64, position: Int64) -> Int32:
    """Ranks from their positions in groups."""
    sizes = np.array([len(entry.key.ranks) for entry in table], dtype=np.int64)
    ranks = np.array([rank for entry in table for rank in entry.key.ranks], dtype=np.int32)
    if (position >= sizes[group]).any():
        raise ValueError("a reader outside of its group")
    found: Int32 = ranks[(np.cumsum(sizes) - sizes)[group] + position]
    return found


def _stops(pieces: Int64, inner: Int64, slabs: Int64) -> Int64:
    """Where pieces end: those that travelled, and for each buffer's last piece its end."""
    stop = np.empty(int(pieces.sum()), dtype=np.int64)
    is_last = np.zeros(len(stop), dtype=np.bool_)
    is_last[np.cumsum(pieces) - 1] = True
    stop[is_last], stop[~is_last] = slabs, inner
    return stop
