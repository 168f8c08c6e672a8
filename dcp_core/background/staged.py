"""What was staged for one save: where the bytes of each region and object lie, and their way out again.

In: the places that `staging` filled. Out: a `WriteSource`, from which a storage writer takes the bytes where they lie,
in the trainer or in the background process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.background.arena import Buffers, Bytes, Place
from dcp_core.box import Box, slices
from dcp_core.dtype import BY_CODE
from dcp_core.errors import CoordinationError, PlanningError
from dcp_core.metadata import Int32, Int64
from dcp_core.planning.bulk import tuples_of
from dcp_core.planning.items import ItemType, WriteItem
from dcp_core.planning.local_table import LocalTable
from dcp_core.planning.write_columns import PlannedChunk
from dcp_core.planning.write_items import WrittenRegions
from dcp_core.planning.write_spans import AllSpans, WriteSpans

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """Where what one rank staged lies, in terms of the table that travels. Regions of one memory share a place.

    Attributes:
        leaf: Leaf of each region. Shape (W,).
        ordinal: Which of the leaf's boxes. Shape (W,).
        start: Where in that box the region starts. Shape (W, D), elements.
        sizes: Its extent. Shape (W, D), elements.
        segment: Segment of the arena. Shape (W,).
        offset: First byte in it. Shape (W,).
        nbytes: Length. Shape (W,).
        object_leaf: Leaf of each object. Shape (K,).
        object_segment, object_offset, object_nbytes: Where its bytes lie. Shape (K,).
    """

    leaf: Int32
    ordinal: Int32
    start: Int64
    sizes: Int64
    segment: Int32
    offset: Int64
    nbytes: Int64
    object_leaf: Int32
    object_segment: Int32
    object_offset: Int64
    object_nbytes: Int64

    def to_plain(self) -> dict[str, Array]:
        """The columns by name, which `formats.objects.encode_value` takes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_plain(cls, columns: Mapping[str, Any]) -> Staged:
        """Undo `to_plain`.

        Raises:
            CoordinationError: These are no such columns.
        """
        names = [field.name for field in fields(cls)]
        if set(columns) != set(names) or not all(isinstance(column, np.ndarray) for column in columns.values()):
            raise CoordinationError(f"what was staged is described by {sorted(columns)}, expected arrays {names}")
        return cls(*[columns[name] for name in names])


class StagedSource:
    """Gives a writer the staged bytes, without a copy: a `WriteSource`.

    Args:
        staged: Where they lie.
        table: The leaves and boxes that `staged`, and the plans that are asked for, speak of.
        buffers: The memory.
        check: Called before every answer; raises when there is no point in going on.
    """

    def __init__(
        self, staged: Staged, table: LocalTable, buffers: Buffers, check: Callable[[], None] = lambda: None
    ) -> None:
        self._staged = staged
        self._table = table
        self._check = check
        self._memory = segment_memory(staged, buffers)
        self._first_row: Int64 = np.cumsum(table.boxes, dtype=np.int64) - table.boxes
        key = self._first_row[staged.leaf] + staged.ordinal
        self._order: Int64 = np.argsort(key, kind="stable")
        self._keys: Int64 = key[self._order]
        self._answers: tuple[AllSpans, _Answers] | None = None

    def get_data(self, item: WriteItem) -> Array | bytes:
        """The bits of a region, or the bytes of an object.

        Raises:
            PlanningError: They were not staged.
        """
        self._check()
        return self._object(item) if item.type is ItemType.BYTES else self._region(item)

    def get_batch(self, spans: Sequence[PlannedChunk]) -> list[Array]:
        """The bits of some regions of a plan.

        Raises:
            PlanningError: They were not staged.
        """
        if not isinstance(spans, WriteSpans):
            self._check()
            return [self._region(span.item) for span in spans]
        self._check()
        if self._answers is None or self._answers[0] is not spans.every:
            self._answers = spans.every, self._answers_for(spans.every.regions)
        return self._answers[1].arrays(spans.rows)

    def _object(self, item: WriteItem) -> bytes:
        staged, row = self._staged, self._object_rows.get(item.leaf)
        if row is None:
            raise PlanningError(f"{item.index.fqn!r} was not staged; keep the objects of the plan")
        start = int(staged.object_offset[row])
        memory = self._memory[int(staged.object_segment[row])]
        return memory[start : start + int(staged.object_nbytes[row])].tobytes()

    @cached_property
    def _object_rows(self) -> dict[int, int]:
        return {leaf: row for row, leaf in enumerate(self._staged.object_leaf.tolist())}

    def _region(self, item: WriteItem) -> Array:
        ndim, width = len(item.sizes), self._staged.sizes.shape[1]
        start, sizes = np.zeros((1, width), np.int64), np.ones((1, width), np.int64)
        start[0, :ndim], sizes[0, :ndim] = item.start, item.sizes
        row = int(self._rows_of(np.array([item.leaf]), np.array([item.box]), start, sizes)[0])
        if row < 0:
            raise PlanningError(_not_staged(item.index.fqn, item.start, item.sizes))
        return self._view(row, item.start, item.sizes)

    def _view(self, row: int, start: tuple[int, ...], sizes: tuple[int, ...]) -> Array:
        """The part of a staged region that starts at a place in its box."""
        staged, ndim = self._staged, len(sizes)
        shape, origin = tuple(staged.sizes[row, :ndim].tolist()), tuple(staged.start[row, :ndim].tolist())
        dtype = BY_CODE[int(self._table.dtype[staged.leaf[row]])].bits
        whole: Array = np.ndarray(shape, dtype, self._memory[int(staged.segment[row])], int(staged.offset[row]))
        if shape == sizes:
            return whole
        index: Any = (*slices(Box(start, sizes), origin), ...)
        part: Array = whole[index]
        return part

    def _rows_of(self, leaf: Array, ordinal: Array, start: Int64, sizes: Int64) -> Int64:
        """The staged region that holds each region, -1 where there is none."""
        if not len(self._keys):
            return np.full(len(leaf), -1, np.int64)
        key = self._first_row[leaf] + ordinal
        at, end = np.searchsorted(self._keys, key), np.searchsorted(self._keys, key, side="right")
        stops = start + sizes
        rows: Int64 = np.full(len(leaf), -1, np.int64)
        waiting = np.flatnonzero(at < end)
        while len(waiting):  # as often as a box has staged regions: nearly always once
            candidate = self._order[at[waiting]]
            low = self._staged.start[candidate]
            high = low + self._staged.sizes[candidate]
            holds = ((low <= start[waiting]) & (stops[waiting] <= high)).all(axis=1)
            rows[waiting[holds]] = candidate[holds]
            waiting = waiting[~holds]
            at[waiting] += 1
            waiting = waiting[at[waiting] < end[waiting]]
        return rows

    def _answers_for(self, regions: WrittenRegions) -> _Answers:
        writes, staged = regions.writes, self._staged
        rows = self._rows_of(writes.leaf, writes.ordinal, writes.start, writes.sizes)
        for missing in np.flatnonzero(rows < 0)[:1].tolist():
            item = regions.items[missing]
            raise PlanningError(_not_staged(item.index.fqn, item.start, item.sizes))
        partial = np.flatnonzero((staged.sizes[rows] != writes.sizes).any(axis=1)).tolist()
        items = regions.items if partial else []
        return _Answers(
            tuples_of(writes.sizes, regions.ndim),
            [BY_CODE[code].bits for code in regions.dtype.tolist()],
            list(map(self._memory.__getitem__, staged.segment[rows].tolist())),
            staged.offset[rows].tolist(),
            {row: self._view(int(rows[row]), items[row].start, items[row].sizes) for row in partial},
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Answers:
    """What `get_batch` says of every region of one plan.

    Attributes:
        shapes, dtypes, memories, offsets: Of each region that was staged just so; see `numpy.ndarray`.
        parts: Those that are parts of what was staged, by row.
    """

    shapes: list[tuple[int, ...]]
    dtypes: list[np.dtype[Any]]
    memories: list[Bytes]
    offsets: list[int]
    parts: Mapping[int, Array]

    def arrays(self, rows: slice) -> list[Array]:
        made = arrays_over(self.memories[rows], self.offsets[rows], self.shapes[rows], self.dtypes[rows])
        if self.parts:
            for row in range(rows.start, rows.stop):
                if row in self.parts:
                    made[row - rows.start] = self.parts[row]
        return made


def segment_memory(staged: Staged, buffers: Buffers) -> dict[int, Bytes]:
    """Of each segment, the memory up to the end of what was staged there."""
    segment = np.concatenate([staged.segment, staged.object_segment])
    end = np.concatenate([staged.offset + staged.nbytes, staged.object_offset + staged.object_nbytes])
    numbers = np.unique(segment).tolist()
    return {number: buffers.buffer(Place(number, 0, int(end[segment == number].max()))) for number in numbers}


def arrays_over(
    memories: Sequence[Bytes],
    offsets: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[np.dtype[Any]],
) -> list[Array]:
    """Contiguous arrays over parts of memories."""
    make: Any = np.ndarray
    return list(map(make, shapes, dtypes, memories, offsets))


def _not_staged(name: str, start: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    return (
        f"{name!r}: the region at {start} of extent {sizes} was not staged on this rank; plans may only write what "
        "their rank holds"
    )
