"""The regions of a save plan in the order of their files' bytes, with their places.

As columns for whoever writes many at once; as `ChunkSpan`s, made when somebody looks, for everybody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from dcp_core.dtype import BY_CODE, DType
from dcp_core.metadata import Int64
from dcp_core.planning.bulk import made_of_columns
from dcp_core.planning.items import WriteItem
from dcp_core.planning.write_columns import WriteColumns
from dcp_core.planning.write_items import WrittenRegions, name_chunks


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A region to write, and where it lies in its file.

    Attributes:
        item: What it is.
        key: Its name in the file's header, unique there.
        dtype: Element type.
        byte_offset: Start in the data section.
        nbytes: Length.
        part: Which of the rank's tensor files.
    """

    item: WriteItem
    key: str
    dtype: DType
    byte_offset: int
    nbytes: int
    part: int = 0


class AllSpans:
    """What the slices of one plan's spans share.

    Args:
        regions: What is written, in the order of the files' bytes.
        part_rows: How many of them each file holds. Shape (P,).
    """

    def __init__(self, regions: WrittenRegions, part_rows: Int64) -> None:
        self.regions = regions
        self._part_rows = part_rows

    @cached_property
    def columns(self) -> WriteColumns:
        """The spans as columns."""
        regions, keys = self.regions, []
        ends = np.cumsum(regions.nbytes, dtype=np.int64)
        stops = np.cumsum(self._part_rows, dtype=np.int64)
        starts = stops - self._part_rows
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            rows = slice(start, stop)
            keys += name_chunks(regions.names[rows], regions.offsets[rows], regions.ndim[rows])
        byte_offset = ends - regions.nbytes
        byte_offset -= np.repeat(byte_offset[starts], self._part_rows)
        part = np.repeat(np.arange(len(stops), dtype=np.uint8), self._part_rows)
        return WriteColumns(keys, part, byte_offset, regions.nbytes, regions.dtype, regions.ndim, regions.writes.sizes)

    @cached_property
    def spans(self) -> list[ChunkSpan]:
        """All spans."""
        columns = self.columns
        return made_of_columns(
            ChunkSpan, len(columns),
            item=self.regions.items,
            key=columns.keys,
            dtype=[BY_CODE[code] for code in columns.dtype.tolist()],
            byte_offset=columns.byte_offset.tolist(),
            nbytes=columns.nbytes.tolist(),
            part=columns.part.tolist(),
        )  # fmt: skip


class WriteSpans(Sequence[ChunkSpan]):
    """Consecutive spans of a plan; slices are such sequences again, and copy nothing.

    Attributes:
        every: All spans of the plan.
        rows: Which of them these are.
    """

    def __init__(self, every: AllSpans, rows: slice | None = None) -> None:
        self.every = every
        self.rows = slice(0, len(every.regions)) if rows is None else rows

    @property
    def columns(self) -> WriteColumns:
        """These spans as columns."""
        return self.every.columns.some(self.rows.start, self.rows.stop)

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @overload
    def __getitem__(self, index: int) -> ChunkSpan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ChunkSpan]: ...
    def __getitem__(self, index: int | slice) -> ChunkSpan | Sequence[ChunkSpan]:
        chosen = range(self.rows.start, self.rows.stop)[index]
        if isinstance(chosen, int):
            return self.every.spans[chosen]
        if chosen.step == 1:
            return WriteSpans(self.every, slice(chosen.start, max(chosen.start, chosen.stop)))
        return [self.every.spans[row] for row in chosen]

    def __iter__(self) -> Iterator[ChunkSpan]:
        return iter(self.every.spans[self.rows])
