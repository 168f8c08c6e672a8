"""Copies what a save needs of the state into the arena, on the thread that called.

In: what this rank will write, or on a plan that nobody knows yet all that it holds; and the planner, who knows where
the bits are. Out: `Staged`, where they lie now. Nothing there shares memory with anything that lives: once `stage` has
returned, the state may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcp_core import log
from dcp_core.background.arena import Arena, Bytes
from dcp_core.background.device_copies import DeviceCopies
from dcp_core.background.host_copies import HostCopies, copying_threads
from dcp_core.background.staged import Staged, StagedSource, arrays_over, segment_memory
from dcp_core.errors import PlanningError, StorageError
from dcp_core.execution.planner_answers import RegionBits, object_bytes
from dcp_core.metadata import Int32, Int64
from dcp_core.planning.leaves import DeviceBits
from dcp_core.planning.planners import SavePlanner
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.planning.write_items import WrittenRegions
from dcp_core.planning.write_list import WriteList
from dcp_core.planning.write_spans import AllSpans, WriteSpans

__all__ = ["Staged", "StagedSource", "stage"]

BATCH_BYTES = 32 << 20
"""The planner is asked for about so many bytes at a time; a larger region is asked for alone."""

BATCH_REGIONS = 512

_LARGE_BYTES = 256 << 20  # before a region of this size is asked for, all that came before it has been copied


def stage(plan: SavePlan, writes: WriteList, planner: SavePlanner, arena: Arena, *, rank: int = 0) -> Staged:
    """Copy what a plan writes into the arena, objects encoded. What was staged there before is lost.

    Args:
        plan: What to copy, in terms of the planner's own table. Rows in the order of `writes`.
        writes: The same in terms of the table that travels.
        planner: Gives the bits.
        arena: Where to.
        rank: This process, for errors.

    Returns:
        Where it lies, row by row as in `writes`. Regions that are the same memory lie in the same place.

    Raises:
        PlanningError: The planner gives something else than was planned.
        StorageError: There is no memory.
    """
    objects = plan.objects()
    if len(plan.writes.leaf) != len(writes.leaf) or len(objects) != len(writes.object_leaf):
        raise PlanningError(
            f"rank {rank}: the plan to stage has {len(plan.writes.leaf)} regions and {len(objects)} objects, expected "
            f"{len(writes.leaf)} and {len(writes.object_leaf)}; finalize_plan must keep the items of the plan"
        )
    kept, copy_of = _each_once(plan, planner)
    regions = WrittenRegions(plan.table, _some(plan.writes, kept), plan.names)
    nbytes = int(regions.nbytes.sum())
    try:
        with log.stage("build_staged_state_dict"):
            values = [object_bytes(planner, item, rank) for item in objects]
            nbytes += sum(map(len, values))
            places = _Places.claimed(arena, [*regions.nbytes.tolist(), *map(len, values)])
            staged = places.of(writes, copy_of, len(regions))
            memory = segment_memory(staged, arena)
            for value, segment, offset in zip(
                values, staged.object_segment.tolist(), staged.object_offset.tolist(), strict=True
            ):
                memory[segment][offset : offset + len(value)].data[:] = value
            del values
            _copy_regions(regions, planner, rank, places, memory, arena)
    except MemoryError as error:
        raise StorageError(
            f"rank {rank}: no memory to stage {nbytes} bytes ({error}); save less at once, use save(), or give the "
            "process more memory"
        ) from error
    return staged


def _each_once(plan: SavePlan, planner: SavePlanner) -> tuple[Int64, Int64]:
    """Rows of a plan without those that are the memory of an earlier one, and for each row which of them it is.

    A planner with a `get_data` of its own may give something else under each name, so it is asked for all.
    """
    writes, rows = plan.writes, np.arange(len(plan.writes.leaf))
    first_leaf = plan.table.alias[writes.leaf]
    is_tied = first_leaf != writes.leaf
    is_standard = all(
        getattr(getattr(planner, name), "__func__", None) is getattr(StandardSavePlanner, name)
        for name in ("get_data", "get_batch")
    )
    if not is_standard or not is_tied.any():
        return rows, rows
    first: dict[tuple[int, ...], int] = {}
    same = rows.copy()
    some = np.flatnonzero(np.isin(first_leaf, first_leaf[is_tied]))
    columns = np.column_stack([first_leaf[some], writes.ordinal[some], writes.start[some], writes.sizes[some]])
    for row, key in zip(some.tolist(), map(tuple, columns.tolist()), strict=True):
        same[row] = first.setdefault(key, row)
    kept = np.flatnonzero(same == rows)
    return kept, np.searchsorted(kept, same)


def _some(writes: WriteList, rows: Int64) -> WriteList:
    if len(rows) == len(writes.leaf):
        return writes
    return replace(
        writes, leaf=writes.leaf[rows], ordinal=writes.ordinal[rows], start=writes.start[rows],
        sizes=writes.sizes[rows], part_rows=np.zeros(0, np.int64),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Places in the arena as columns: of each region that is copied, then of each object."""

    segment: Int32
    offset: Int64
    nbytes: Int64

    @classmethod
    def claimed(cls, arena: Arena, sizes: Sequence[int]) -> _Places:
        segment, offset = arena.place_columns(sizes)
        return cls(segment.astype(np.int32), offset, np.array(sizes, np.int64))

    def of(self, writes: WriteList, copy_of: Int64, regions: int) -> Staged:
        """Say what lies where: rows of a write list, each in the place of a region that is copied; and objects."""
        return Staged(
            writes.leaf, writes.ordinal, writes.start, writes.sizes,
            self.segment[copy_of], self.offset[copy_of], self.nbytes[copy_of],
            writes.object_leaf, self.segment[regions:], self.offset[regions:], self.nbytes[regions:],
        )  # fmt: skip


def _copy_regions(
    regions: WrittenRegions, planner: SavePlanner, rank: int, places: _Places, memory: Mapping[int, Bytes], arena: Arena
) -> None:
    """Copy each region to its place; all are there when this returns."""
    spans = WriteSpans(AllSpans(regions, np.array([len(regions)])))
    answers = RegionBits(spans, regions.dtype, regions.ndim, regions.writes.sizes, planner, rank)
    segments, offsets = places.segment.tolist(), places.offset.tolist()
    with HostCopies(copying_threads()) as host, DeviceCopies(arena) as device:

        def copy(first: int, stop: int) -> None:
            rows = slice(first, stop)
            chunks, _ = answers.ask(first, stop)
            memories = [memory[segment] for segment in segments[rows]]
            targets = arrays_over(memories, offsets[rows], answers.shapes[rows], answers.dtypes[rows])
            for bits, target, segment in zip(chunks, targets, segments[rows], strict=True):
                if isinstance(bits, DeviceBits):
                    device.copy(bits, target.reshape(-1).view(np.uint8), segment)
                else:
                    host.copy(target, bits)

        for first, stop in _batches(regions.nbytes):
            if regions.nbytes[first] >= _LARGE_BYTES:
                host.wait()
            copy(first, stop)


def _batches(nbytes: Int64) -> Iterator[tuple[int, int]]:
    """First row of each batch, and the row behind its last."""
    ends = np.cumsum(nbytes)
    first = 0
    while first < len(ends):
        limit = (int(ends[first - 1]) if first else 0) + BATCH_BYTES
        fitting = int(np.searchsorted(ends, limit, side="right"))
        stop = min(max(fitting, first + 1), first + BATCH_REGIONS)
        yield first, stop
        first = stop
