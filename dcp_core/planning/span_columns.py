"""Regions to read as columns: one row a region, in the order of reading.

In: spans of a load plan. Out: what execution plans its reads from, without looking at a span. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dcp_core.dtype import DType
from dcp_core.errors import PlanningError
from dcp_core.metadata import Int64, UInt8
from dcp_core.planning.items import ReadItem

Mask = npt.NDArray[np.bool_]


class PlannedRegion(Protocol):
    """A region to read, and where it lies: `planning.read_spans.ReadSpan`."""

    @property
    def item(self) -> ReadItem:
        """What it is: `storage_offsets` and `lengths` select the region of the chunk."""
        ...

    @property
    def file(self) -> int:
        """Row of its file in the metadata's `FileColumns`."""
        ...

    @property
    def byte_offset(self) -> int:
        """Where the chunk (not the region) starts in the data section."""
        ...

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Extent of the chunk in elements."""
        ...

    @property
    def dtype(self) -> DType:
        """Element type as stored."""
        ...

    @property
    def target_dtype(self) -> DType:
        """Element type of the target."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SpanColumns:
    """Regions to read, file after file and by byte offset.

    Attributes:
        file: Row of the chunk's file in the metadata's `FileColumns`. Shape (N,).
        byte_offset: Where the chunk (not the region) starts in the file's data section. Here and below, where a chunk
            is a region of a larger stored array, it is the array. Shape (N,).
        itemsize: Bytes of an element as stored. Shape (N,).
        ndim: Number of dimensions. Shape (N,).
        chunk_sizes: Extent of the chunk, padded with 1 on the right. Shape (N, D), elements.
        offsets: Where the region starts in the chunk, padded with 0. Shape (N, D), elements.
        sizes: Extent of the region, padded with 1. Shape (N, D), elements.
        dtype: `DType.code` as stored. Shape (N,).
        same_dtype: Whether the target has that type too. Shape (N,).
    """

    file: Int64
    byte_offset: Int64
    itemsize: Int64
    ndim: Int64
    chunk_sizes: Int64
    offsets: Int64
    sizes: Int64
    dtype: UInt8
    same_dtype: Mask

    def __len__(self) -> int:
        return len(self.file)

    def part(self, start: int, stop: int) -> SpanColumns:
        """Some neighbouring rows, sharing memory."""
        rows = slice(start, stop)
        return SpanColumns(
            self.file[rows],
            self.byte_offset[rows],
            self.itemsize[rows],
            self.ndim[rows],
            self.chunk_sizes[rows],
            self.offsets[rows],
            self.sizes[rows],
            self.dtype[rows],
            self.same_dtype[rows],
        )


def columns_of(spans: Sequence[PlannedRegion]) -> SpanColumns:
    """The columns of spans: those that they have as `columns`, or made of them one by one.

    Raises:
        PlanningError: A region of another number of dimensions than its chunk.
    """
    known: SpanColumns | None = getattr(spans, "columns", None)
    if known is not None:
        return known
    rows = [(span, span.item, span.chunk_sizes) for span in spans]
    for _, item, sizes in rows:
        if len(sizes) != len(item.lengths) or len(sizes) != len(item.storage_offsets):
            raise PlanningError(f"{item.storage_index.fqn}: a region of another rank than its chunk of {sizes}")
    depth = max((len(sizes) for _, _, sizes in rows), default=0)
    return SpanColumns(
        _column([span.file for span in spans]),
        _column([span.byte_offset for span in spans]),
        _column([span.dtype.itemsize for span in spans]),
        _column([len(sizes) for _, _, sizes in rows]),
        _padded([sizes for _, _, sizes in rows], depth, 1),
        _padded([item.storage_offsets for _, item, _ in rows], depth, 0),
        _padded([item.lengths for _, item, _ in rows], depth, 1),
        np.array([span.dtype.code for span in spans], np.uint8),
        np.array([span.dtype == span.target_dtype for span in spans], np.bool_),
    )


def _column(values: list[Any]) -> Int64:
    return np.array(values, np.int64)


def _padded(rows: list[tuple[int, ...]], depth: int, filler: int) -> Int64:
    return np.array([(*row, *(filler,) * (depth - len(row))) for row in rows], np.int64).reshape(len(rows), depth)
