"""What one rank reads itself, and in which order: its load plan after readers have been chosen.

Pure. In: a load plan and the rank's schedule. Out: `OwnReads`. What others wait for comes first, in the order in which
it is sent; then what this rank alone wants, file after file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcp_core.metadata import Int32, Int64
from dcp_core.planning.block_edges import ChunkRuns, span_in
from dcp_core.planning.buffer_parts import boxes_of
from dcp_core.planning.load_plan import LoadPlan, ReadColumns
from dcp_core.planning.read_spans import ReadSpans
from dcp_core.planning.schedule import Runs, Schedule
from dcp_core.planning.span_columns import Mask

OWN = -1
"""In a `source` column: this rank reads for itself alone."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnReads:
    """What one rank reads.

    Attributes:
        plan: All its regions, the reader of each named; regions are cut where readers change.
        own: Only what it reads itself.
        spans: The regions of `own` in the order of reading.
        shared: How many of the spans, from the first on, are read for others too.
        ready: For each part of the schedule how many spans, from the first on, are in when it can be sent; 0 where
            another rank sends it. Shape (len(schedule.parts),).
    """

    plan: LoadPlan
    own: LoadPlan
    spans: ReadSpans
    shared: int
    ready: Int64


def plan_own_reads(plan: LoadPlan, schedule: Schedule, rank: int) -> OwnReads:
    """Find out what a rank reads itself.

    Args:
        plan: Its load plan; `wanted` is what the schedule was made for.
        schedule: Its schedule.
        rank: Its number in the job.
    """
    reads, run, is_torn = _cut_at_runs(plan, schedule.reads)
    named = LoadPlan(plan.wanted, plan.objects, reads, share_memory=plan.share_memory)
    mine = np.flatnonzero((reads.source == OWN) | (reads.source == rank))
    own = LoadPlan(plan.wanted, plan.objects, reads.take(mine), share_memory=plan.share_memory)
    priority = np.where(run[mine] < 0, len(schedule.reads), run[mine])
    in_order = np.sort(priority)
    ready = np.searchsorted(in_order, schedule.read_of, side="right")
    ready[schedule.parts.source != rank] = 0
    shared = int(np.searchsorted(in_order, len(schedule.reads)))
    return OwnReads(named, own, own.spans_in_order(priority, is_torn[mine]), shared, ready)


def _cut_at_runs(plan: LoadPlan, runs: Runs) -> tuple[ReadColumns, Int64, Mask]:
    """Cut regions of shared boxes at the runs' bounds and name their readers.

    Returns:
        The regions; the run of each, -1: none; whether it was cut inside a checksum block.
    """
    reads, boxes = plan.reads, plan.wanted
    order = np.lexsort((runs.first, runs.row))
    base = np.zeros(len(boxes), dtype=np.int64)  # where each box starts if all elements stand in one line
    numel = np.prod(boxes.sizes, axis=1, dtype=np.int64)
    base[1:] = np.cumsum(numel)[:-1]
    is_shared = np.zeros(len(boxes), dtype=np.bool_)
    is_shared[runs.row] = True
    region = np.flatnonzero(is_shared[reads.wanted])
    row = reads.wanted[region]
    low, reach, _ = span_in(reads.offsets[region] - boxes.offsets[row], reads.sizes[region], boxes.sizes[row])
    place = (base[runs.row] + runs.first)[order]
    begin = np.searchsorted(place, base[row] + low, side="right") - 1
    count = np.ones(len(reads), dtype=np.int64)
    count[region] = np.searchsorted(place, base[row] + low + reach - 1, side="right") - begin
    source = np.repeat(np.arange(len(reads)), count)
    number = np.full(len(reads), -1, dtype=np.int64)
    number[region] = begin
    step = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
    met = number[source]
    met = np.where(met < 0, -1, order[met + step] if len(order) else -1)
    cut, is_cut = reads.take(source), count[source] > 1
    found, kept = _narrowed(plan, cut, met, runs, is_cut)
    is_torn = is_cut[kept]
    if is_torn.any():
        is_torn[is_torn] = _torn(plan, cut.take(kept[is_torn]), found.take(np.flatnonzero(is_torn)))
    return found, met[kept], is_torn


def _torn(plan: LoadPlan, before: ReadColumns, after: ReadColumns) -> Mask:
    """Whether cuts fell inside checksum blocks that were read whole before."""
    was, now = ChunkRuns.of(plan, before), ChunkRuns.of(plan, after)
    at_start = (now.start != was.start) & ~now.starts_on_edge
    at_stop = (now.stop != was.stop) & ~now.stops_on_edge
    torn: Mask = now.is_run & (at_start | at_stop)
    return torn


def _narrowed(plan: LoadPlan, reads: ReadColumns, run: Int64, runs: Runs, is_cut: Mask) -> tuple[ReadColumns, Int64]:
    """Narrow regions that are cut to their runs, name readers, leave out what does not meet; and which rows stay."""
    source: Int32 = np.full(len(reads), OWN, dtype=np.int32)
    shared = run >= 0
    source[shared] = runs.source[run[shared]]
    rows = np.flatnonzero(is_cut)
    if not len(rows):
        return ReadColumns(reads.wanted, reads.chunk, reads.offsets, reads.sizes, source), np.arange(len(reads))
    wanted = reads.wanted[rows]
    start, extent = boxes_of(runs.first[run[rows]], runs.last[run[rows]], plan.wanted.sizes[wanted])
    start = start + plan.wanted.offsets[wanted]
    offsets, sizes = reads.offsets.copy(), reads.sizes.copy()
    ends = np.minimum(offsets[rows] + sizes[rows], start + extent)
    offsets[rows] = np.maximum(offsets[rows], start)
    sizes[rows] = ends - offsets[rows]
    kept = np.flatnonzero((sizes > 0).all(axis=1))
    return ReadColumns(reads.wanted, reads.chunk, offsets, sizes, source).take(kept), kept
