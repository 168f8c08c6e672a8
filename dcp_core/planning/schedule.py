"""In which order shared buffers travel: from who reads what to one rank's list of operations.

Pure. All ranks know one total order of everything that is shared, although each sees only its own part of it:

- Pieces are ordered by stored name, offsets, sizes (the order of `SharedBuffers`), and where they start.
- A piece below the batch size waits in the batch of its (group, source, element type). A batch is sent where the next
  piece of the same three would not fit any more; what is left at the end is sent after all else, in the order of the
  batches' first pieces.
- Any other piece is sent where it stands, in blocks.

So the place of an operation depends on buffers of its own group only, which all its members have; no two operations
have one place, and every rank's list is a part of the one order. **Therefore no rank waits for ever**: of all
operations that are not done, take the first in the total order. All that its members do before it is done, so each of
them starts it, whatever else it would do next; and its source reads in the same order, waiting for nobody. Waiting
before an operation for *earlier* ones changes nothing in that: this is how what is under way is bounded, by number and
bytes, and how one communicator is used at a time. Groups are opened in the order of their keys, for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dcp_core.dtype import ITEMSIZE
from dcp_core.errors import ArgumentError
from dcp_core.metadata import Int32, Int64
from dcp_core.planning.block_edges import BlockEdges
from dcp_core.planning.buffer_parts import BLOCK_BYTES
from dcp_core.planning.load_plan import LoadPlan
from dcp_core.planning.rank_groups import SharedGroup
from dcp_core.planning.slabs import Slabs, find_slabs
from dcp_core.planning.source_answers import SharedBuffers

IN_FLIGHT = 8
IN_FLIGHT_BYTES = 64 << 20

_LARGEST_ELEMENT = 16


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """What bounds the operations. The first two shape them, and are the same on all ranks.

    Attributes:
        batch_bytes: Pieces below this are sent together, at most so many bytes of them.
        block_bytes: The most bytes of one operation that is no batch.
        in_flight: How many operations are under way at most.
        in_flight_bytes: How many bytes they move at most, unless one alone moves more.
        one_group_at_a_time: Whether operations of one group are done before another group's start.

    Raises:
        ArgumentError: A bound with which nothing could be sent.
    """

    batch_bytes: int
    block_bytes: int = BLOCK_BYTES
    in_flight: int = IN_FLIGHT
    in_flight_bytes: int = IN_FLIGHT_BYTES
    one_group_at_a_time: bool = False

    def __post_init__(self) -> None:
        if self.batch_bytes < 0 or self.block_bytes < _LARGEST_ELEMENT or self.in_flight < 1:
            raise ArgumentError(f"batches of 0 bytes or more, blocks of {_LARGEST_ELEMENT} or more, found {self}")


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One operation: parts of buffers go from one rank to all others of its group.

    Attributes:
        group: Index into the groups of the schedule.
        source: The rank of the job that sends.
        parts: What goes, in this order, as positions in the parts of the schedule.
        nbytes: Bytes that travel: those of the targets' elements.
        dtype: `DType.code` of all its targets.
        after: Operations of this schedule that are done before this one starts: all before that position.
    """

    group: int
    source: int
    parts: tuple[int, ...]
    nbytes: int
    dtype: int
    after: int


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of elements of wanted boxes, each of which is a box.

    Attributes:
        row: Index of the wanted box. Shape (P,).
        first: First element in it, row-major. Shape (P,).
        last: One past its last element. Shape (P,).
        source: The rank of the job that reads it. Shape (P,).
    """

    row: Int64
    first: Int64
    last: Int64
    source: Int32

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What one rank sends and receives.

    Attributes:
        groups: The groups of this rank, in the order in which they are opened.
        operations: In the order in which they start.
        parts: What travels, in the global order: together, the shared buffers.
        reads: What is read as a whole, in the same order: one part, or several that follow each other.
        read_of: For each part the one of `reads` that it is in. Shape (len(parts),).
    """

    groups: tuple[SharedGroup, ...]
    operations: tuple[Broadcast, ...]
    parts: Runs
    reads: Runs
    read_of: Int64


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """The pieces of this rank's shared buffers, in the global order; which buffer each is of, and their slabs."""

    runs: Runs
    buffer: Int64
    slabs: Slabs
    group: Int64
    dtype: Int64
    nbytes: Int64


def make_schedule(plan: LoadPlan, shared: SharedBuffers, limits: ScheduleLimits) -> Schedule:
    """Make one rank's schedule.

    Args:
        plan: What it wants, and where that lies.
        shared: What it shares, from the coordinator.
        limits: See there.

    Complexity:
        O(pieces log pieces), and work per operation.
    """
    boxes = plan.wanted
    pieces = _pieces_of(plan, shared)
    is_small = pieces.nbytes < limits.batch_bytes
    parts, part_of, reads, read_of = _cut_into_blocks(plan, pieces, is_small, limits.block_bytes)
    nbytes = (parts.last - parts.first) * ITEMSIZE[boxes.dtype[parts.row]]
    places: list[tuple[int, int]] = []
    taken: list[tuple[int, ...]] = []
    for number in np.flatnonzero(~is_small[part_of]).tolist():
        places.append((number, number))
        taken.append((number,))
    small = np.flatnonzero(is_small[part_of])  # a small piece is one part
    group, dtype = pieces.group[part_of], pieces.dtype[part_of]
    for place, batch in _batches(small, group[small], parts.source[small], dtype[small], nbytes[small], limits):
        places.append((place if place >= 0 else len(parts) + batch[0], batch[0]))
        taken.append(batch)
    order = sorted(range(len(places)), key=places.__getitem__)
    first = np.array([taken[index][0] for index in order], dtype=np.int64)
    total = [int(nbytes[list(taken[index])].sum()) for index in order]
    after = _waits(group[first].tolist(), total, limits)
    columns = (group[first].tolist(), parts.source[first].tolist(), [taken[i] for i in order], total,
               dtype[first].tolist(), after)  # fmt: skip
    operations = tuple([Broadcast(*fields) for fields in zip(*columns, strict=True)])
    return Schedule(shared.groups, operations, parts, reads, read_of)


def _pieces_of(plan: LoadPlan, shared: SharedBuffers) -> _Pieces:
    boxes = plan.wanted
    buffer = np.repeat(np.arange(len(shared)), shared.pieces)
    row = shared.row[buffer]
    slabs = find_slabs(plan, shared.row)
    last = slabs.ends(buffer, shared.stop)
    first = np.zeros(len(row), dtype=np.int64)
    same = buffer[1:] == buffer[:-1]
    first[1:][same] = last[:-1][same]
    dtype = boxes.dtype[row].astype(np.int64)
    runs = Runs(row, first, last, shared.reader)
    nbytes = (last - first) * ITEMSIZE[boxes.dtype[row]]
    return _Pieces(runs, buffer, slabs, shared.group[buffer], dtype, nbytes)


def _cut_into_blocks(
    plan: LoadPlan, pieces: _Pieces, is_small: npt.NDArray[np.bool_], block_bytes: int
) -> tuple[Runs, Int64, Runs, Int64]:
    """The parts, the piece of each, what is read as a whole, and which of that each part is in.

    A piece is read block by block where no cut between them falls inside a checksum block, which nobody would check.
    """
    boxes, runs = plan.wanted, pieces.runs
    large = np.flatnonzero(~is_small & (pieces.nbytes > block_bytes)).tolist()
    edges = BlockEdges(plan) if large else None
    starts = {}
    whole = np.ones(len(runs), dtype=np.bool_)
    for number in large:
        row = int(runs.row[number])
        block_numel = block_bytes // int(ITEMSIZE[boxes.dtype[row]])
        cuts = pieces.slabs.blocks(
            int(pieces.buffer[number]),
            int(runs.first[number]),
            int(runs.last[number]),
            boxes.boxes[row].sizes,
            block_numel,
        )
        starts[number] = cuts
        whole[number] = edges is None or not edges.are_edges(row, cuts[1:]).all()
    blocks = np.ones(len(runs), dtype=np.int64)
    blocks[list(starts)] = [len(cuts) for cuts in starts.values()]
    part_of = np.repeat(np.arange(len(runs)), blocks)
    first = runs.first[part_of]
    at = np.cumsum(blocks) - blocks
    for number, cuts in starts.items():
        first[at[number] : at[number] + len(cuts)] = cuts
    last = np.append(first[1:], 0)
    last[at + blocks - 1] = runs.last
    parts = Runs(runs.row[part_of], first, last, runs.source[part_of])
    begins = np.ones(len(parts), dtype=np.bool_)
    begins[1:] = ~whole[part_of[1:]] | (part_of[1:] != part_of[:-1])
    head = np.flatnonzero(begins)
    tail = np.append(head[1:], len(parts)) - 1
    reads = Runs(parts.row[head], first[head], last[tail], parts.source[head])
    return parts, part_of, reads, np.cumsum(begins) - 1


def _batches(
    part: Int64, group: Int64, source: Int32, dtype: Int64, nbytes: Int64, limits: ScheduleLimits
) -> list[tuple[int, tuple[int, ...]]]:
    """Put small parts together: for each batch the part that closed it, -1 for a left-over, and its parts."""
    order = np.lexsort((part, dtype, source, group))
    keys = np.column_stack([group, source, dtype])[order]
    edges = [0, *(np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1).tolist(), len(order)]
    part, ends = part[order], np.cumsum(nbytes[order])
    found: list[tuple[int, tuple[int, ...]]] = []
    for start, stop in pairwise(edges):
        while start < stop:
            done = int(ends[start - 1]) if start else 0
            full = min(int(np.searchsorted(ends, done + limits.batch_bytes, side="right")), stop)
            found.append((int(part[full]) if full < stop else -1, tuple(part[start:full].tolist())))
            start = full
    return found


def _waits(group: list[int], nbytes: list[int], limits: ScheduleLimits) -> list[int]:
    """How many operations are done before each starts."""
    waits: list[int] = []
    oldest = under_way = 0
    for number, size in enumerate(nbytes):
        while oldest < number and (
            number - oldest >= limits.in_flight
            or under_way + size > limits.in_flight_bytes
            or (limits.one_group_at_a_time and group[oldest] != group[number])
        ):
            under_way -= nbytes[oldest]
            oldest += 1
        under_way += size
        waits.append(oldest)
    return waits
