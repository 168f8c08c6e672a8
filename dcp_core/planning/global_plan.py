"""The global save plan: from what all ranks hold to what each rank writes, and to the metadata of the checkpoint.

In: the `GlobalTable` and the planner's options. Out: a `GlobalPlan` of columns. Stages: values that differ between
ranks, unique boxes and coverage, writers, regions, layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from dcp_core.dtype import ITEMSIZE
from dcp_core.metadata import EVERY_RANK, ChunkColumns, Int32, Int64, ObjectColumns, TensorColumns, UInt8
from dcp_core.planning.balance import Cut, assign_writers
from dcp_core.planning.divergence import Divergence, find_divergence
from dcp_core.planning.global_table import GlobalTable
from dcp_core.planning.layout import FileLayout, lay_out
from dcp_core.planning.local_table import PER_RANK, TENSOR
from dcp_core.planning.replicas import UniqueBoxes, box_nbytes, check_coverage, find_unique_boxes, gather

Mask = npt.NDArray[np.bool_]
_Text = TypeVar("_Text", str, bytes)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the standard save planner does.

    Attributes:
        remove_redundancy: Write each replica set once.
        save_to_minimum_rank: Give each replica set to its lowest holder.
        check_coverage: Check that the boxes tile every tensor; False where there is no global view.
        check_tied: Check that for tensors too that share the memory of another one.
    """

    remove_redundancy: bool = True
    save_to_minimum_rank: bool = False
    check_coverage: bool = True
    check_tied: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class RegionColumns:
    """Regions to write, sorted by (entry, offsets, rank).

    Attributes:
        held: The row of the `GlobalTable` that the region is cut from. Shape (W,).
        offsets: Where the region starts in the global tensor. Shape (W, D), elements.
        sizes: Its extent. Shape (W, D), elements.
        cut: True where the region is a part of the held box. Shape (W,).
        own: True where the value is its rank's alone, since it differs between ranks. Shape (W,).
    """

    held: Int64
    offsets: Int64
    sizes: Int64
    cut: Mask
    own: Mask


@dataclass(frozen=True, slots=True, eq=False)
class ObjectRows:
    """Objects to write, sorted by (entry, rank): rows of `holdings`.

    Attributes:
        holding: Row in `GlobalTable.holdings`. Shape (K,).
        own: True where the value is its rank's alone. Shape (K,).
        per_rank: True where the user asked for that. Shape (K,).
        ordinal: Position in its rank's `.bytes` file. Shape (K,).
    """

    holding: Int64
    own: Mask
    per_rank: Mask
    ordinal: Int64


@dataclass(frozen=True, slots=True, eq=False)
class GlobalPlan:
    """Who writes what, and where it lies.

    Attributes:
        table: What all ranks hold.
        divergence: Which values differ between ranks.
        regions: What is written.
        position: Index of each region's writer in `table.ranks`. Shape (W,).
        nbytes: Bytes of each region. Shape (W,).
        layout: Files and byte spans.
        objects: Objects that are written.
        digest: Digest of all of it; the same input gives the same digest.
    """

    table: GlobalTable
    divergence: Divergence
    regions: RegionColumns
    position: Int64
    nbytes: Int64
    layout: FileLayout
    objects: ObjectRows
    digest: bytes


def plan_globally(table: GlobalTable, options: PlanOptions) -> GlobalPlan:
    """Make the global plan.

    Raises:
        CoverageError, OverlapError: The boxes of a tensor do not tile its shape.
    """
    divergence = find_divergence(table)
    regions = choose_regions(table, divergence, options)
    return finish_plan(table, divergence, regions)


def finish_plan(table: GlobalTable, divergence: Divergence, regions: RegionColumns) -> GlobalPlan:
    """Lay the chosen regions out and take the plan's digest."""
    ranks = np.array(table.ranks, dtype=np.int32)
    position = np.searchsorted(ranks, table.rank[regions.held]).astype(np.int64)
    nbytes = ITEMSIZE[table.dtype[table.entry[regions.held]]]
    for column in regions.sizes.T:
        nbytes = nbytes * column
    layout = lay_out(position, nbytes, len(ranks))
    objects = _choose_objects(table, divergence)
    hasher = xxhash.xxh3_128()
    hasher.update(b"".join(table.paths))
    path_lengths = np.fromiter(map(len, table.paths), dtype=np.int64, count=len(table.paths))
    for array in (
        path_lengths, ranks, table.kind, table.dtype, table.ndim, table.shape, table.entry[regions.held], position,
        regions.offsets.T, regions.sizes.T, regions.own, layout.part, layout.byte_offset, table.tied_to,
        table.holdings.entry[objects.holding], table.holdings.rank[objects.holding], objects.own,
    ):  # fmt: skip
        hasher.update(np.ascontiguousarray(array).data)
    return GlobalPlan(table, divergence, regions, position, nbytes, layout, objects, hasher.digest())


def choose_regions(table: GlobalTable, divergence: Divergence, options: PlanOptions) -> RegionColumns:
    """Decide which regions are written by whom."""
    divergent_row = divergence.entry[table.entry]
    filled = np.ones(len(table.entry), dtype=bool)
    for column in table.sizes.T:
        filled &= column > 0
    boxes = find_unique_boxes(table, np.flatnonzero(filled & ~divergent_row))
    tied = tied_entries(table, divergence)
    if options.check_coverage:
        exempt = divergence.entry if options.check_tied else divergence.entry | tied
        check_coverage(table, boxes, exempt)
    boxes = boxes.only(~tied[boxes.entry])
    regions = _share_boxes(table, boxes, options) if options.remove_redundancy else _every_holder(table, boxes)
    own_rows = np.flatnonzero(filled & divergent_row)
    return _with_own_values(table, regions, own_rows) if len(own_rows) else regions


def tied_entries(table: GlobalTable, divergence: Divergence) -> Mask:
    """Entries whose bytes are those of another entry. Shape (T,)."""
    itself = table.tied_to == np.arange(len(table.tied_to))
    tied: Mask = ~itself & ~divergence.entry & ~divergence.entry[table.tied_to]
    return tied


def _whole_regions(table: GlobalTable, held: Int64, *, own: bool) -> RegionColumns:
    flags = np.zeros(len(held), dtype=bool)
    return RegionColumns(held, gather(table.offsets, held), gather(table.sizes, held), flags, flags | own)


def _every_holder(table: GlobalTable, boxes: UniqueBoxes) -> RegionColumns:
    """Let every rank write all that it holds."""
    starts = np.repeat(boxes.first, boxes.count)
    nth = np.arange(len(starts)) - np.repeat(np.cumsum(boxes.count) - boxes.count, boxes.count)
    return _whole_regions(table, boxes.row[starts + nth], own=False)


def _cut_axis(sizes: Int64) -> tuple[Int64, Int64]:
    """The first dimension of more than one element, and its extent: cuts along it stay contiguous."""
    axis = np.zeros(len(sizes), dtype=np.int64)
    rows = np.ones(len(sizes), dtype=np.int64)
    for d in reversed(range(sizes.shape[1])):
        longer = sizes[:, d] > 1
        axis[longer] = d
        rows[longer] = sizes[longer, d]
    return axis, rows


def _share_boxes(table: GlobalTable, boxes: UniqueBoxes, options: PlanOptions) -> RegionColumns:
    """Write each unique box once, cut by rows where one holder would write too much."""
    axis, rows = _cut_axis(boxes.sizes)
    position = np.searchsorted(np.array(table.ranks), table.rank[boxes.row]).astype(np.int64)
    assignment = assign_writers(
        position, boxes.first, boxes.count, box_nbytes(table, boxes), rows, len(table.ranks),
        to_minimum_rank=options.save_to_minimum_rank,
    )  # fmt: skip
    held = boxes.row[boxes.first + assignment.writer]
    flags = np.zeros(len(held), dtype=bool)
    regions = RegionColumns(held, boxes.offsets, boxes.sizes, flags, flags)
    return _with_cuts(boxes, regions, assignment.cuts, axis) if assignment.cuts else regions


def _with_cuts(boxes: UniqueBoxes, whole: RegionColumns, cuts: Sequence[Cut], axis: Int64) -> RegionColumns:
    """Replace the regions of boxes that are cut by their pieces."""
    pieces = np.ones(len(whole.held), dtype=np.int64)
    for cut in cuts:
        pieces[cut.box] = len(cut.holders)
    unique = np.repeat(np.arange(len(pieces)), pieces)
    flags = np.zeros(len(unique), dtype=bool)
    regions = RegionColumns(
        whole.held[unique], gather(whole.offsets, unique), gather(whole.sizes, unique), flags, flags.copy()
    )
    start_of = np.cumsum(pieces) - pieces
    for cut in cuts:
        start, along, first = int(start_of[cut.box]), int(axis[cut.box]), int(boxes.first[cut.box])
        part = slice(start, start + len(cut.holders))
        bounds = np.array(cut.bounds)
        regions.held[part] = boxes.row[first + np.array(cut.holders)]
        regions.offsets[part, along] += bounds[:-1]
        regions.sizes[part, along] = np.diff(bounds)
        regions.cut[part] = True
    return _in_order_again(regions, boxes.entry[unique], np.unique(boxes.entry[[cut.box for cut in cuts]]))


def _in_order_again(regions: RegionColumns, entry: Int64, changed: Int64) -> RegionColumns:
    """Sort the regions of some entries by offsets: pieces of a box may lie behind the start of the next box."""
    rows = np.flatnonzero(np.isin(entry, changed))
    order = rows[np.lexsort((*regions.offsets[rows].T[::-1], entry[rows]))]
    for column in (regions.held, regions.offsets, regions.sizes, regions.cut):
        column[rows] = column[order]
    return regions


def _with_own_values(table: GlobalTable, shared: RegionColumns, rows: Int64) -> RegionColumns:
    """Add the values that are kept for each rank, in their places by entry and rank."""
    own = _whole_regions(table, rows, own=True)
    held = np.concatenate([shared.held, own.held])
    order = np.argsort(table.entry[held], kind="stable")
    return RegionColumns(
        held[order],
        np.concatenate([shared.offsets, own.offsets])[order],
        np.concatenate([shared.sizes, own.sizes])[order],
        np.concatenate([shared.cut, own.cut])[order],
        np.concatenate([shared.own, own.own])[order],
    )


def _choose_objects(table: GlobalTable, divergence: Divergence) -> ObjectRows:
    """Give each object to its lowest holder, or to every holder where the values are the ranks' own."""
    held = table.holdings
    kind = table.kind[held.entry]
    per_rank = kind == PER_RANK
    own = per_rank | divergence.entry[held.entry]
    lowest = divergence.lowest[held.entry] == np.arange(len(held.entry))
    chosen = np.flatnonzero((kind != TENSOR) & (own | lowest))
    chosen = chosen[np.lexsort((held.rank[chosen], held.entry[chosen]))]
    by_rank = np.argsort(held.rank[chosen], kind="stable")
    rank = held.rank[chosen][by_rank]
    ordinal = np.empty(len(chosen), dtype=np.int64)
    ordinal[by_rank] = np.arange(len(rank)) - np.searchsorted(rank, rank)
    return ObjectRows(chosen, own[chosen], per_rank[chosen], ordinal)


@dataclass(frozen=True, slots=True, eq=False)
class FileRows:
    """Which data files the plan makes: rows in the file table.

    Attributes:
        tensor_file: Row of each rank's first tensor file, the others follow; -1 where it has none. Shape (R,).
        object_file: Row of each rank's object file, or -1. Shape (R,).
    """

    tensor_file: Int64
    object_file: Int64


def number_files(plan: GlobalPlan) -> FileRows:
    """Number the files by (rank, kind, part), leaving out those that would be empty."""
    ranks = np.array(plan.table.ranks, dtype=np.int32)
    files = np.zeros((len(ranks), 2), dtype=np.int64)
    files[:, 0] = plan.layout.parts
    files[np.searchsorted(ranks, plan.table.holdings.rank[plan.objects.holding]), 1] = 1
    number = (np.cumsum(files.reshape(-1)) - files.reshape(-1)).reshape(files.shape)
    number[files == 0] = -1
    return FileRows(number[:, 0], number[:, 1])


def describe_tensors(plan: GlobalPlan, files: FileRows) -> tuple[TensorColumns, ChunkColumns]:
    """Write down the tensors and where their chunks lie, tied names included."""
    table, regions = plan.table, plan.regions
    entry = table.entry[regions.held]
    tied = np.flatnonzero(tied_entries(table, plan.divergence))
    chunk = np.arange(len(entry))
    owner = np.where(regions.own, table.rank[regions.held], EVERY_RANK).astype(np.int64)
    if len(tied):
        first = np.searchsorted(entry, table.tied_to[tied])
        length = np.searchsorted(entry, table.tied_to[tied], side="right") - first
        nth = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
        chunk = np.concatenate([chunk, np.repeat(first, length) + nth])
        entry = np.concatenate([entry, np.repeat(tied, length)])
        order = np.argsort(entry, kind="stable")
        chunk, entry = chunk[order], entry[order]
    file = files.tensor_file[plan.position[chunk]] + plan.layout.part[chunk]
    tensor_entry, tensor_rank, row = _tensor_rows(table, plan.divergence, entry, owner[chunk])
    tensors = TensorColumns(
        _take(table.names, tensor_entry), _take(table.paths, tensor_entry), tensor_rank.astype(np.int32),
        table.dtype[tensor_entry], table.ndim[tensor_entry], table.shape[tensor_entry], row,
    )  # fmt: skip
    return tensors, ChunkColumns(
        gather(regions.offsets, chunk), gather(regions.sizes, chunk),
        file.astype(np.int32), plan.layout.byte_offset[chunk],
    )  # fmt: skip


def _take(values: tuple[_Text, ...], rows: Int64) -> tuple[_Text, ...]:
    if len(rows) == len(values) and bool((rows == np.arange(len(rows))).all()):
        return values
    return tuple([values[row] for row in rows.tolist()])


def _tensor_rows(table: GlobalTable, divergence: Divergence, entry: Int64, owner: Int64) -> tuple[Int64, Int64, Int64]:
    """One row a stored tensor: (entry, rank it belongs to), with the bounds of its chunks."""
    new = np.ones(len(entry), dtype=bool)
    new[1:] = (entry[1:] != entry[:-1]) | (owner[1:] != owner[:-1])
    start = np.flatnonzero(new)
    found, rank = entry[start], owner[start]
    chunkless = np.ones(len(table.names), dtype=bool)
    chunkless[found] = False
    empty = np.flatnonzero(chunkless & (table.kind == TENSOR) & ~divergence.entry)
    if len(empty):
        at = np.searchsorted(found, empty)
        start = np.insert(start, at, np.append(start, len(entry))[at])
        found, rank = np.insert(found, at, empty), np.insert(rank, at, EVERY_RANK)
    return found, rank, np.append(start, len(entry)).astype(np.int64)


def describe_objects(plan: GlobalPlan, files: FileRows) -> ObjectColumns:
    """Write down the objects and where they lie."""
    table, objects = plan.table, plan.objects
    entry, rank = table.holdings.entry[objects.holding], table.holdings.rank[objects.holding]
    position = np.searchsorted(np.array(table.ranks, dtype=np.int32), rank)
    per_rank: UInt8 = objects.per_rank.astype(np.uint8)
    owner: Int32 = np.where(objects.own, rank, EVERY_RANK).astype(np.int32)
    return ObjectColumns(
        _take(table.names, entry), _take(table.paths, entry), owner, per_rank,
        files.object_file[position].astype(np.int32), objects.ordinal.astype(np.int32),
    )  # fmt: skip
