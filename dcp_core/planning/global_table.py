"""The tables of all ranks as one: names made unique, agreement checked, every held box a row.

In: one encoded local table a rank. Out: a `GlobalTable`. Work that is the same for many ranks is done once for each
distinct section.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_core.dtype import BY_CODE
from dcp_core.errors import DTypeMismatchError, PlanningError, ShapeMismatchError
from dcp_core.metadata import Int32, Int64, UInt8, UInt64
from dcp_core.planning.int_columns import Array, decode_column
from dcp_core.planning.local_table import (
    COMPARED,
    OBJECT,
    PER_RANK,
    TENSOR,
    CommonSection,
    TableFrame,
    decode_common,
    parse_frame,
)
from dcp_core.planning.path_names import names_of_paths
from dcp_core.state_path import decode_path, spell_plain_names

_KIND_NAMES = {TENSOR: "a tensor", OBJECT: "a plain value", PER_RANK: "a PerRank value"}
_NAMED_MISMATCHES = 8


@dataclass(frozen=True, slots=True, eq=False)
class HoldingColumns:
    """Who holds values that are compared or stored as objects: one row a (rank, entry).

    Attributes:
        rank: The holder. Shape (H,).
        entry: Which entry. Shape (H,).
        leaf: The holder's leaf. Shape (H,).
        flags: The leaf's flags. Shape (H,).
        digest: Digest of the value. Shape (H, 2).
    """

    rank: Int32
    entry: Int64
    leaf: Int64
    flags: UInt8
    digest: UInt64


@dataclass(frozen=True, slots=True, eq=False)
class GlobalTable:
    """Everything that all ranks hold.

    Entries are sorted by (UTF-8 name); rows are in rank order, each rank's in its own leaf order.

    Attributes:
        ranks: Rank of each table, ascending.
        names: Printed name of each entry, unique. Length T.
        paths: Typed path of each entry. Length T.
        kind, dtype, ndim: Of each entry. Shape (T,).
        shape: Global shape, padded with 1. Shape (T, D).
        rank: Holder of each held box. Shape (N,).
        entry: Entry of each held box. Shape (N,).
        leaf: The holder's leaf. Shape (N,).
        ordinal: Position among the leaf's boxes. Shape (N,).
        offsets, sizes: The box. Shape (N, D), columns contiguous.
        holdings: Objects and compared values.
        tied_to: For each entry the entry whose memory it shares on every rank that has it; itself if none. (T,)
        leaf_entries: Per table the entry of each leaf (arrays shared between ranks with equal names).
        respelled: Entries whose name is not the plain one of their path.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    paths: tuple[bytes, ...]
    kind: UInt8
    dtype: UInt8
    ndim: UInt8
    shape: Int64
    rank: Int32
    entry: Int64
    leaf: Int32
    ordinal: Int32
    offsets: Int64
    sizes: Int64
    holdings: HoldingColumns
    tied_to: Int64
    leaf_entries: tuple[Int64, ...]
    respelled: frozenset[int]


class _Sections:
    """Decoded sections, each distinct one once."""

    def __init__(self) -> None:
        self._columns: dict[bytes, Array] = {}
        self.common: dict[bytes, CommonSection] = {}
        self.first_rank: dict[bytes, int] = {}

    def add_common(self, frame: TableFrame, rank: int) -> None:
        digest = frame.digests[0]
        if digest not in self.common:
            self.common[digest] = decode_common(frame.section(0))
            self.first_rank[digest] = rank

    def column(self, frame: TableFrame, number: int, *, keep: bool) -> Array:
        digest = frame.digests[number]
        found = self._columns.get(digest)
        if found is None:
            found = decode_column(frame.section(number))[0]
            if keep:
                self._columns[digest] = found
        return found


def merge_tables(payloads: Sequence[bytes], ranks: Sequence[int] | None = None) -> GlobalTable:
    """Decode and join the ranks' tables.

    Args:
        payloads: `EncodedTable.payload` of each rank.
        ranks: The ranks they come from, ascending; 0, 1, 2, ... by default.

    Raises:
        ShapeMismatchError: Two ranks disagree on a global shape.
        DTypeMismatchError: Two ranks disagree on a dtype.
        PlanningError: One rank has a tensor where another has a plain value.
    """
    rank_list = tuple(range(len(payloads))) if ranks is None else tuple(ranks)
    frames = [parse_frame(payload) for payload in payloads]
    sections = _Sections()
    for frame, rank in zip(frames, rank_list, strict=True):
        sections.add_common(frame, rank)
    names, paths, respelled, entries_of = _name_entries(sections)
    width = max((section.shape.shape[1] for section in sections.common.values()), default=0)
    kind, dtype, ndim, shape = _agreed_columns(sections, entries_of, names, width)
    rows = _fill_rows(frames, rank_list, sections, entries_of, width)
    leaf_entries = tuple(entries_of[frame.digests[0]] for frame in frames)
    return GlobalTable(
        rank_list, names, paths, kind, dtype, ndim, shape, *rows,
        _holdings(frames, rank_list, sections, entries_of),
        _tied_entries(sections, entries_of, len(names)),
        leaf_entries, respelled,
    )  # fmt: skip


def _name_entries(
    sections: _Sections,
) -> tuple[tuple[str, ...], tuple[bytes, ...], frozenset[int], dict[bytes, Int64]]:
    """Give every distinct path a number, in the order of its name.

    Returns:
        The names, the paths, which names are not the plain ones, and for each section the numbers of its leaves.
    """
    number: dict[bytes, int] = {}
    first_seen = {}
    for digest, section in sections.common.items():
        if not number:  # a section has each path once
            number = dict(zip(section.paths, range(len(section.paths)), strict=True))
            first_seen[digest] = np.arange(len(number))
            continue
        ids = [number.setdefault(path, len(number)) for path in section.paths]
        first_seen[digest] = np.array(ids, dtype=np.int64)
    paths = list(number)
    plain = names_of_paths(paths)
    names = spell_plain_names(plain, lambda i: decode_path(paths[i]))
    order = sorted(range(len(paths)), key=names.__getitem__)  # by code points, which is the order of their UTF-8
    position = np.empty(len(paths), dtype=np.int64)
    position[order] = np.arange(len(paths))
    entries_of = {digest: position[ids] for digest, ids in first_seen.items()}
    odd = [] if names == plain else [row for row, i in enumerate(order) if names[i] != plain[i]]
    return tuple([names[i] for i in order]), tuple([paths[i] for i in order]), frozenset(odd), entries_of


def _agreed_columns(
    sections: _Sections, entries_of: dict[bytes, Int64], names: Sequence[str], width: int
) -> tuple[UInt8, UInt8, UInt8, Int64]:
    """Merge kind, dtype, ndim and shape of the entries, refusing any difference."""
    count = len(names)
    kind, dtype, ndim = (np.zeros(count, dtype=np.uint8) for _ in range(3))
    shape = np.ones((count, width), dtype=np.int64)
    owner = np.full(count, -1, dtype=np.int64)
    for digest, section in sections.common.items():
        entry = entries_of[digest]
        wide = np.ones((len(entry), width), dtype=np.int64)
        wide[:, : section.shape.shape[1]] = section.shape
        new = owner[entry] < 0
        rank = sections.first_rank[digest]
        fresh = entry[new]
        kind[fresh], dtype[fresh], ndim[fresh] = section.kind[new], section.dtype[new], section.ndim[new]
        shape[fresh] = wide[new]
        owner[fresh] = rank
        _check(section.kind, kind, entry, owner, names, rank, _kind_difference)
        _check(section.dtype, dtype, entry, owner, names, rank, _dtype_difference)
        differs = (section.ndim != ndim[entry]) | (wide != shape[entry]).any(axis=1)
        if differs.any():
            lines = []
            for leaf in np.flatnonzero(differs)[:_NAMED_MISMATCHES]:
                known, here = entry[leaf], int(leaf)
                ours = tuple(shape[known, : ndim[known]].tolist())
                theirs = tuple(wide[here, : section.ndim[here]].tolist())
                lines.append(f"{names[known]!r}: global shape {ours} on rank {owner[known]}, {theirs} on rank {rank}")
            raise ShapeMismatchError("ranks disagree on global shapes; make them equal: " + "; ".join(lines))
    return kind, dtype, ndim, shape


def _check(
    theirs: UInt8, ours: UInt8, entry: Int64, owner: Int64, names: Sequence[str], rank: int,
    difference: Callable[[str, int, int, int, int], PlanningError],
) -> None:  # fmt: skip
    differs = np.flatnonzero(theirs != ours[entry])
    if len(differs):
        leaf = int(differs[0])
        known = int(entry[leaf])
        raise difference(names[known], int(ours[known]), int(owner[known]), int(theirs[leaf]), rank)


def _kind_difference(name: str, ours: int, our_rank: int, theirs: int, their_rank: int) -> PlanningError:
    return PlanningError(
        f"{name!r} is {_KIND_NAMES[ours]} on rank {our_rank} and {_KIND_NAMES[theirs]} on rank {their_rank}; "
        "store one kind of value under one key"
    )


def _dtype_difference(name: str, ours: int, our_rank: int, theirs: int, their_rank: int) -> PlanningError:
    return DTypeMismatchError(
        f"{name!r} has dtype {BY_CODE[ours].name} on rank {our_rank} and {BY_CODE[theirs].name} on rank "
        f"{their_rank}; convert it to one dtype on all ranks"
    )


def _fill_rows(
    frames: Sequence[TableFrame], ranks: Sequence[int], sections: _Sections, entries_of: dict[bytes, Int64], width: int
) -> tuple[Int32, Int64, Int32, Int32, Int64, Int64]:
    """Lay all held boxes into one set of columns, rank after rank."""
    total = sum(frame.rows for frame in frames)
    rank_of = np.repeat(np.array(ranks, dtype=np.int32), [frame.rows for frame in frames])
    entry = np.empty(total, dtype=np.int64)
    leaf, ordinal = np.empty(total, dtype=np.int32), np.empty(total, dtype=np.int32)
    offsets = np.zeros((width, total), dtype=np.int64)
    sizes = np.ones((width, total), dtype=np.int64)
    start = 0
    for frame in frames:
        digest, stop = frame.digests[0], start + frame.rows
        section = sections.common[digest]
        row_entry = section.cache.get("entry")
        if row_entry is None:
            row_entry = section.cache["entry"] = entries_of[digest][section.row_leaf]
        entry[start:stop] = row_entry
        leaf[start:stop] = section.row_leaf
        ordinal[start:stop] = section.row_ordinal
        sizes[: frame.width, start:stop] = sections.column(frame, 1, keep=True).T
        offsets[: frame.width, start:stop] = sections.column(frame, 2, keep=False).T
        start = stop
    return rank_of, entry, leaf, ordinal, offsets.T, sizes.T


def _holdings(
    frames: Sequence[TableFrame], ranks: Sequence[int], sections: _Sections, entries_of: dict[bytes, Int64]
) -> HoldingColumns:
    """Collect who holds objects and compared values."""
    parts: list[tuple[int, Int64, Int64, UInt8, Array]] = []
    for frame, rank in zip(frames, ranks, strict=True):
        digest = frame.digests[0]
        section = sections.common[digest]
        leaves = section.cache.get("held")
        if leaves is None:
            leaves = np.flatnonzero((section.kind != TENSOR) | (section.flags & COMPARED != 0))
            section.cache["held"] = leaves
        if len(leaves):
            values = sections.column(frame, 3, keep=True)
            parts.append((rank, entries_of[digest][leaves], leaves, section.flags[leaves], values[leaves]))
    if not parts:
        empty = np.zeros(0, dtype=np.int64)
        return HoldingColumns(
            empty.astype(np.int32), empty, empty, empty.astype(np.uint8), np.zeros((0, 2), dtype=np.uint64)
        )
    return HoldingColumns(
        np.repeat(np.array([p[0] for p in parts], dtype=np.int32), [len(p[1]) for p in parts]),
        np.concatenate([p[1] for p in parts]),
        np.concatenate([p[2] for p in parts]),
        np.concatenate([p[3] for p in parts]),
        np.concatenate([p[4] for p in parts]).astype(np.uint64),
    )


def _tied_entries(sections: _Sections, entries_of: dict[bytes, Int64], count: int) -> Int64:
    """Find entries that share the memory of one other entry on every rank that holds a part of them."""
    own = np.arange(count, dtype=np.int64)
    tied = np.full(count, -1, dtype=np.int64)
    for digest, section in sections.common.items():
        holds = (section.boxes > 0) | (section.alias != np.arange(len(section.alias)))
        entry, target = entries_of[digest][holds], entries_of[digest][section.alias[holds]]
        settled = (tied[entry] == -1) | (tied[entry] == target)
        tied[entry] = np.where(settled, target, entry)
    tied[tied < 0] = own[tied < 0]
    chained = tied[tied] != tied
    tied[chained] = own[chained]
    return tied
