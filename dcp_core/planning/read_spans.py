"""The regions of a load plan in the order of reading.

As columns for whoever reads many at once; as `ReadSpan`s, made when somebody looks, for everybody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np

from dcp_core.dtype import BY_CODE, ITEMSIZE, DType
from dcp_core.metadata import Int64
from dcp_core.planning.bulk import made_of_columns
from dcp_core.planning.items import ReadItem
from dcp_core.planning.read_items import Regions, extents_of
from dcp_core.planning.span_columns import Mask, SpanColumns
from dcp_core.planning.wanted import WantedBoxes


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A region to read, and where its chunk lies.

    Attributes:
        item: What it is.
        file: Row of the chunk's file in the metadata's `FileColumns`.
        byte_offset: Where the chunk starts in the file's data section, or the array that it is a region of.
        chunk_sizes: Extent of the chunk, or of that array, elements.
        dtype: Element type as stored.
        target_dtype: Element type of the target.
    """

    item: ReadItem
    file: int
    byte_offset: int
    chunk_sizes: tuple[int, ...]
    dtype: DType
    target_dtype: DType


class AllSpans:
    """What the slices of one plan's spans share.

    Args:
        regions: What is read.
        priority: Those with a lower number are read before others; None: all are alike. Shape (N,).
        whole_blocks: See `ReadSpans`, for each region; None: nowhere. Shape (N,).

    Attributes:
        boxes: What is wanted.
        order: Row of each span among the regions. Shape (N,).
        wanted: Index of the box that each fills. Shape (N,).
        whole_blocks: For each span; None: nowhere. Shape (N,).
    """

    def __init__(self, regions: Regions, priority: Int64 | None = None, whole_blocks: Mask | None = None) -> None:
        self.boxes = regions.boxes
        places = (regions.chunks.byte_offset, regions.chunks.file)
        self.order: Int64 = np.lexsort(places if priority is None else (*places, priority))
        self.wanted: Int64 = regions.reads.wanted[self.order]
        self.whole_blocks: Mask | None = None if whole_blocks is None else whole_blocks[self.order]
        self._regions = regions

    @cached_property
    def columns(self) -> SpanColumns:
        """The spans as columns."""
        order, reads, chunks = self.order, self._regions.reads, self._regions.chunks
        stored, target = self.boxes.stored_dtype[self.wanted], self.boxes.dtype[self.wanted]
        return SpanColumns(
            file=chunks.file[order].astype(np.int64),
            byte_offset=chunks.byte_offset[order],
            itemsize=ITEMSIZE[stored],
            ndim=self.boxes.ndim[self.wanted],
            chunk_sizes=(chunks.sizes if chunks.arrays is None else chunks.arrays.sizes)[order],
            offsets=self._regions.storage_offsets[order],
            sizes=reads.sizes[order],
            dtype=stored,
            same_dtype=stored == target,
        )

    def with_places(self, byte_offset: Int64) -> AllSpans:
        """The same spans, with other starts of their chunks. Shape of `byte_offset`: (N,)."""
        made = copy(self)
        made.columns = replace(self.columns, byte_offset=byte_offset)
        made.__dict__.pop("spans", None)
        return made

    @cached_property
    def fills_box(self) -> Mask:
        """Whether a region is a whole wanted box. Shape (N,)."""
        fills: Mask = (self.columns.sizes == self.boxes.sizes[self.wanted]).all(axis=1)
        return fills

    @cached_property
    def spans(self) -> list[ReadSpan]:
        """All spans."""
        every_item, columns, of_box = self._regions.items, self.columns, self.wanted.tolist()
        items = [every_item[row] for row in self.order.tolist()]
        sizes = [item.lengths for item in items]
        stored, target = self.boxes.stored_dtype.tolist(), self.boxes.dtype.tolist()
        return made_of_columns(
            ReadSpan, len(items),
            item=items,
            file=columns.file.tolist(),
            byte_offset=columns.byte_offset.tolist(),
            chunk_sizes=extents_of(columns.chunk_sizes, columns.sizes, sizes, columns.ndim),
            dtype=[BY_CODE[stored[row]] for row in of_box],
            target_dtype=[BY_CODE[target[row]] for row in of_box],
        )  # fmt: skip


class ReadSpans(Sequence[ReadSpan]):
    """Consecutive spans of a plan; slices are such sequences again, and copy nothing.

    Attributes:
        every: All spans of the plan.
        rows: Which of them these are.
        share_memory: Whether two targets of the plan are the same memory, so that the order of writing matters.
    """

    def __init__(self, every: AllSpans, rows: slice, *, share_memory: bool = False) -> None:
        self.every = every
        self.rows = rows
        self.share_memory = share_memory

    @property
    def whole_blocks(self) -> Mask | None:
        """Where every checksum block that is touched is to be read whole; None: nowhere. Shape (N,).

        The other part of such a block is wanted too, but read elsewhere: nobody could check it.
        """
        every = self.every.whole_blocks
        return None if every is None else every[self.rows]

    @property
    def boxes(self) -> WantedBoxes:
        """What the plan wants."""
        return self.every.boxes

    @property
    def wanted(self) -> Int64:
        """Index of the box that each span fills, or a part of it. Shape (N,)."""
        wanted: Int64 = self.every.wanted[self.rows]
        return wanted

    @property
    def fills_box(self) -> Mask:
        """Whether each span fills its box. Shape (N,)."""
        return self.every.fills_box[self.rows]

    @property
    def columns(self) -> SpanColumns:
        """These spans as columns."""
        return self.every.columns.part(self.rows.start, self.rows.stop)

    def with_places(self, byte_offset: Int64) -> ReadSpans:
        """The same regions, where a chunk's start in its file was found out later.

        Args:
            byte_offset: Where the chunk of each region starts in the file's data section. Shape (N,).
        """
        every = self.every.columns.byte_offset.copy()
        every[self.rows] = byte_offset
        return ReadSpans(self.every.with_places(every), self.rows, share_memory=self.share_memory)

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @overload
    def __getitem__(self, index: int) -> ReadSpan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ReadSpan]: ...
    def __getitem__(self, index: int | slice) -> ReadSpan | Sequence[ReadSpan]:
        chosen = range(self.rows.start, self.rows.stop)[index]
        if isinstance(chosen, int):
            return self.every.spans[chosen]
        if chosen.step == 1:
            return ReadSpans(
                self.every, slice(chosen.start, max(chosen.start, chosen.stop)), share_memory=self.share_memory
            )
        return [self.every.spans[row] for row in chosen]

    def __iter__(self) -> Iterator[ReadSpan]:
        return iter(self.every.spans[self.rows])
