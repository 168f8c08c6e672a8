"""What the coordinator answers: each rank's own write list, as flat bytes.

In: the `GlobalPlan`. Out: one answer a rank; on the rank a `WriteList`, rows in the order of its file's bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dcp_core.errors import CoordinationError
from dcp_core.metadata import Int32, Int64, UInt64
from dcp_core.planning.divergence import lowest_coefficients
from dcp_core.planning.global_plan import GlobalPlan
from dcp_core.planning.int_columns import decode_column, encode_column
from dcp_core.planning.local_table import LocalTable

_HEAD = struct.Struct("<4s16sIIIIIIQ")
_MAGIC = b"WRL2"
_NAME = struct.Struct("<II")


@dataclass(frozen=True, slots=True, eq=False)
class WriteList:
    """What one rank writes, in terms of its own leaves.

    Attributes:
        leaf: Leaf of each region. Shape (W,).
        ordinal: Which of the leaf's boxes. Shape (W,).
        start: Where in that box the region starts. Shape (W, D), elements.
        sizes: Its extent. Shape (W, D), elements.
        object_leaf: Leaf of each object, in the order of the `.bytes` file. Shape (K,).
        names: Names that are not the plain ones, by leaf.
        divergent: Leaves whose values differ between ranks. Shape (V,).
        lowest: Leaves that this rank is the lowest holder of, ascending, and their coefficients.
        lowest_factor: See `planning.divergence`.
        plan_digest: Digest of the global plan; empty where there was none.
        part_rows: Regions in each of the rank's files, whose order the rows are in; empty where nobody has laid
            them out yet. Shape (P,).
    """

    leaf: Int32
    ordinal: Int32
    start: Int64
    sizes: Int64
    object_leaf: Int32
    names: Mapping[int, str] = field(default_factory=dict)
    divergent: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    lowest: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    lowest_factor: UInt64 = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    plan_digest: bytes = b""
    part_rows: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


def encode_answers(plan: GlobalPlan) -> list[bytes]:
    """One write list a rank, in the order of `plan.table.ranks`."""
    table, order = plan.table, plan.layout.order
    held = plan.regions.held[order]
    leaf, ordinal, cut = table.leaf[held], table.ordinal[held], plan.regions.cut[order]
    lowest = lowest_coefficients(table, plan.divergence)
    objects = _by_rank(plan, table.holdings.rank[plan.objects.holding], table.holdings.leaf[plan.objects.holding])
    divergent_rows = np.flatnonzero(plan.divergence.entry[table.holdings.entry])
    divergent = _by_rank(plan, table.holdings.rank[divergent_rows], table.holdings.leaf[divergent_rows])
    bounds, part_rows, first_file = plan.layout.bounds.tolist(), np.diff(plan.layout.starts), plan.layout.first_file
    none = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64))
    answers = []
    for position, rank in enumerate(table.ranks):
        rows = slice(bounds[position], bounds[position + 1])
        cuts = np.flatnonzero(cut[rows])
        parts = [_raw(leaf[rows]), _raw(ordinal[rows])]
        names = _names_of(plan, position) if table.respelled else b""
        if len(cuts):
            cut_rows = order[rows][cuts]
            start = plan.regions.offsets[cut_rows] - table.offsets[plan.regions.held[cut_rows]]
            parts += [encode_column(cuts), encode_column(start), encode_column(plan.regions.sizes[cut_rows])]
        low_leaves, factors = lowest.get(rank, none)
        own_parts = part_rows[first_file[position] : first_file[position + 1]]
        tail = (own_parts, objects[position], divergent[position], low_leaves)
        parts += [*(_raw(column.astype(np.int32)) for column in tail), factors.astype("<u8").tobytes(), names]
        counts = (rows.stop - rows.start, len(cuts), *(len(column) for column in tail))
        answers.append(_HEAD.pack(_MAGIC, plan.digest, *counts, len(names)) + b"".join(parts))
    return answers


def encode_write_list(writes: WriteList) -> bytes:
    """Flatten one write list; `decode_answer` reads it against the table that its leaves belong to."""
    rows = np.arange(len(writes.leaf))
    parts = [_raw(writes.leaf), _raw(writes.ordinal)]
    if len(rows):
        parts += [encode_column(rows), encode_column(writes.start), encode_column(writes.sizes)]
    names = b"".join(_NAME.pack(leaf, len(text.encode())) + text.encode() for leaf, text in writes.names.items())
    tail = (writes.part_rows, writes.object_leaf, writes.divergent, writes.lowest)
    parts += [*(_raw(column.astype(np.int32)) for column in tail), writes.lowest_factor.astype("<u8").tobytes(), names]
    counts = (len(rows), len(rows), *(len(column) for column in tail))
    return _HEAD.pack(_MAGIC, writes.plan_digest, *counts, len(names)) + b"".join(parts)


def _raw(values: npt.NDArray[np.int32]) -> bytes:
    return values.astype("<i4", copy=False).tobytes()


def _by_rank(plan: GlobalPlan, rank: Int32, leaf: Int64) -> list[Int64]:
    """Split leaves by their rank, keeping the order within a rank."""
    order = np.argsort(rank, kind="stable")
    bounds = np.searchsorted(rank[order], np.array([*plan.table.ranks, np.iinfo(np.int32).max]))
    laid = leaf[order]
    return [laid[a:b] for a, b in zip(bounds.tolist(), bounds[1:].tolist(), strict=False)]


def _names_of(plan: GlobalPlan, position: int) -> bytes:
    """The names that this rank cannot tell from the paths of its own leaves alone."""
    table, parts = plan.table, []
    for leaf, entry in enumerate(table.leaf_entries[position].tolist()):
        if entry in table.respelled:
            text = table.names[entry].encode()
            parts.append(_NAME.pack(leaf, len(text)) + text)
    return b"".join(parts)


def decode_answer(answer: bytes, table: LocalTable) -> WriteList:
    """Read this rank's write list.

    Args:
        answer: What the coordinator sent.
        table: The local table that this rank sent.

    Raises:
        CoordinationError: The bytes are no write list.
    """
    try:
        magic, digest, count, cuts, files, objects, divergent, lowest, names_nbytes = _HEAD.unpack_from(answer, 0)
        if magic != _MAGIC:
            raise ValueError("not a write list")
        at = _HEAD.size
        leaf, at = _take(answer, at, count)
        ordinal, at = _take(answer, at, count)
        width = table.width
        row = (np.cumsum(table.boxes, dtype=np.int64) - table.boxes)[leaf] + ordinal
        start, sizes = np.zeros((count, width), dtype=np.int64), table.sizes[row]
        if cuts:
            which, at = decode_column(answer, at)
            cut_start, at = decode_column(answer, at)
            cut_sizes, at = decode_column(answer, at)
            start[which], sizes[which] = cut_start[:, :width], cut_sizes[:, :width]
        part_rows, at = _take(answer, at, files)
        object_leaf, at = _take(answer, at, objects)
        divergent_leaf, at = _take(answer, at, divergent)
        lowest_leaf, at = _take(answer, at, lowest)
        factor = np.frombuffer(answer, dtype="<u8", count=lowest, offset=at).astype(np.uint64)
        names = _decode_names(answer[at + 8 * lowest : at + 8 * lowest + names_nbytes])
    except (struct.error, ValueError, IndexError) as error:
        raise CoordinationError(f"the write list from the coordinator cannot be read: {error}") from error
    return WriteList(
        leaf, ordinal, start, sizes, object_leaf, names,
        divergent_leaf.astype(np.int64), lowest_leaf.astype(np.int64), factor, digest, part_rows.astype(np.int64),
    )  # fmt: skip


def _take(answer: bytes, at: int, count: int) -> tuple[Int32, int]:
    return np.frombuffer(answer, dtype="<i4", count=count, offset=at).astype(np.int32), at + 4 * count


def _decode_names(blob: bytes) -> dict[int, str]:
    names, at = {}, 0
    while at < len(blob):
        leaf, nbytes = _NAME.unpack_from(blob, at)
        at += _NAME.size
        names[leaf] = blob[at : at + nbytes].decode()
        at += nbytes
    return names
