"""Turns rows of a load plan, with the targets that the planner gives for them, into tasks. Runs on the calling thread.

Goes in: neighbouring rows of one file, and for each its view. Comes out: a batch of pieces, each inside of one block of
one chunk, with the memory that it is read into (none: a part of the task's buffer), the checksum that it must have, and
where it goes from the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_core.execution import read_requests
from dcp_core.execution.data_files import OpenFile
from dcp_core.execution.read_placing import Acquired, Lane, Placing
from dcp_core.execution.read_ranges import Hulls, cut_at_blocks
from dcp_core.execution.read_requests import Task, plan_tasks
from dcp_core.execution.read_targets import Destination
from dcp_core.formats import checksums
from dcp_core.metadata import Int64
from dcp_core.planning.span_columns import Mask, SpanColumns


@dataclass(slots=True, eq=False)
class Batch:
    """Neighbouring rows whose targets are known, cut into pieces. Lists have one entry a piece, or a task.

    Attributes:
        file: Where all of them lie.
        first_row: The first row of the plan that is in it.
        views: What the planner gave, one a row.
        row: Which row of the plan.
        start: Where in the file.
        nbytes: How long.
        memory: What is read into; None: the task's buffer.
        expected: Checksum; None: not to be checked.
        at: Where a piece without memory starts, as its destination counts; bytes.
        destinations: For the rows that have such pieces.
        tasks: Which pieces are read together.
        lanes: How the buffer of each task is emptied; None where it needs none.
        left: Tasks that are not done.
    """

    file: OpenFile
    first_row: int
    views: list[Any]
    row: list[int]
    start: list[int]
    nbytes: list[int]
    memory: list[memoryview | None]
    expected: list[int | None]
    at: list[int]
    destinations: dict[int, Destination]
    tasks: list[Task]
    lanes: list[Lane | None]
    left: int


@dataclass(frozen=True, slots=True, eq=False)
class FileRows:
    """The rows of one file.

    Attributes:
        file: Where they lie.
        origin: The first row in the plan.
        columns: The rows.
        hulls: The bytes that they reach over.
        first_block: Position of each row's first block in the file's checksum table, -1 where nothing is checked.
        is_full: Whether every block that is touched is read whole.
        name_of: The target's name of a row of the plan, for errors.
    """

    file: OpenFile
    origin: int
    columns: SpanColumns
    hulls: Hulls
    first_block: Int64
    is_full: bool
    name_of: Callable[[int], str]

    def batch(self, first: int, last: int, acquired: Acquired) -> Batch:
        """Cut rows into pieces.

        Args:
            first: The first row, counted in the file.
            last: One past the last row.
            acquired: View and access of each row's target.

        Raises:
            ShapeMismatchError: A view is not shaped as its region.
        """
        columns, hulls, origin = self.columns.part(first, last), self.hulls.part(first, last), self.origin + first
        placing = Placing(columns, hulls, is_full=self.is_full, name_of=lambda row: self.name_of(origin + row))
        placing.place(acquired)
        pieces = _cut(hulls, placing, self._block_nbytes(), is_full=self.is_full)
        start = columns.byte_offset[pieces.row] + pieces.start + self.file.facts.data_start
        lane = placing.lane[pieces.row] * pieces.is_through
        tasks = plan_tasks(start, start + pieces.stop - pieces.start, lane)
        return Batch(
            self.file,
            origin,
            [view for view, _ in acquired],
            (pieces.row + origin).tolist(),
            start.tolist(),
            (pieces.stop - pieces.start).tolist(),
            _memory_of(pieces, placing),
            self._expected(first, pieces),
            pieces.at.tolist(),
            {origin + row: destination for row, destination in placing.destinations.items()},
            tasks,
            _lanes(tasks, pieces, lane, placing),
            len(tasks),
        )

    def _block_nbytes(self) -> int:
        """What no piece is larger than: what has one checksum; where nothing is checked, what a task may read."""
        block = checksums.BLOCK_BYTES
        return block if self.file.checksums is not None else max(read_requests.TASK_BYTES // block, 1) * block

    def _expected(self, first: int, pieces: _Pieces) -> list[int | None]:
        """The checksum of each piece that is a whole block."""
        table = self.file.checksums
        if table is None:
            return [None] * len(pieces.row)
        block = self.first_block[first + pieces.row] + pieces.start // checksums.BLOCK_BYTES
        if pieces.is_whole.all():
            found: list[int | None] = table.block[block].tolist()
            return found
        known = table.block[np.where(pieces.is_whole, block, 0)].tolist()
        return [value if is_whole else None for value, is_whole in zip(known, pieces.is_whole.tolist(), strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Pieces of rows, each inside of one block. Arrays of shape (P,).

    Attributes:
        row: Which row of the batch.
        start: First byte, from the chunk's start.
        stop: One past the last.
        at: Where it goes, bytes: in the region, or, through a buffer to a destination that counts so, in the chunk.
        is_whole: Whether it is a whole block.
        is_through: Whether it goes through a buffer.
    """

    row: Int64
    start: Int64
    stop: Int64
    at: Int64
    is_whole: Mask
    is_through: Mask


def _cut(hulls: Hulls, placing: Placing, block: int, *, is_full: bool) -> _Pieces:
    """Cut the ranges of rows at the edges of blocks of this size."""
    row, start, stop, at = _ranges(hulls, placing)
    from_start, from_stop, source = cut_at_blocks(start, stop, block)
    row, at = row[source], at[source] + from_start - start[source]
    start, stop, end = from_start, from_stop, hulls.chunk_nbytes[row]
    is_whole = (start % block == 0) & ((stop % block == 0) | (stop == end))
    is_through, takes_chunk = placing.is_through[row], placing.takes_chunk[row]
    if is_full and not is_whole.all():
        index, is_through = start // block, is_through | ~is_whole
        start = np.where(is_whole, start, index * block)
        stop = np.where(is_whole, stop, np.minimum((index + 1) * block, end))
        again = ~is_whole[1:] & (row[1:] == row[:-1]) & (index[1:] == index[:-1])
        kept = np.concatenate([np.ones(1, np.bool_), ~again])
        row, start, stop, at, is_through, takes_chunk = (
            column[kept] for column in (row, start, stop, at, is_through, takes_chunk)
        )
        is_whole = np.ones(len(row), np.bool_)
    return _Pieces(row, start, stop, np.where(is_through & takes_chunk, start, at), is_whole, is_through)


def _ranges(hulls: Hulls, placing: Placing) -> tuple[Int64, Int64, Int64, Int64]:
    """The ranges of all rows: row, start and stop in the chunk, place in the region."""
    count = (hulls.nbytes > 0).astype(np.int64)
    for row, ranges in placing.ranges.items():
        count[row] = len(ranges.starts)
    row_of = np.repeat(np.arange(len(count)), count)
    start, stop, at = hulls.start[row_of], hulls.stop[row_of], np.zeros(len(row_of), np.int64)
    first = np.cumsum(count) - count
    for row, ranges in placing.ranges.items():
        own = slice(int(first[row]), int(first[row] + count[row]))
        start[own], stop[own] = ranges.starts, ranges.starts + ranges.length
        at[own] = np.arange(count[row]) * ranges.length
    return row_of, start, stop, at


def _memory_of(pieces: _Pieces, placing: Placing) -> list[memoryview | None]:
    """What each piece is read into."""
    found: list[memoryview | None] = []
    columns = pieces.row, pieces.at, pieces.stop - pieces.start, pieces.is_through
    for row, at, nbytes, is_through in zip(*(column.tolist() for column in columns), strict=True):
        memory = None if is_through else placing.memory[row]
        if memory is None or (len(memory) == nbytes and not isinstance(memory, list)):
            found.append(memory)
        elif isinstance(memory, list):
            length = placing.ranges[row].length
            found.append(memory[at // length][at % length : at % length + nbytes])
        else:
            found.append(memory[at : at + nbytes])
    return found


def _lanes(tasks: list[Task], pieces: _Pieces, lane: Int64, placing: Placing) -> list[Lane | None]:
    if not pieces.is_through.any():
        return [None] * len(tasks)
    is_through, numbers = pieces.is_through.tolist(), lane.tolist()
    return [placing.lanes[numbers[task.first]] if any(is_through[task.first : task.last]) else None for task in tasks]
