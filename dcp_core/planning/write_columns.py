"""Regions to write as columns: one row a region, part after part, each in the order of its bytes.

In: spans of a save plan. Out: what execution lays files out and heads them by, without looking at a span. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dcp_core.dtype import DType
from dcp_core.metadata import Int64, UInt8
from dcp_core.planning.items import WriteItem


class PlannedChunk(Protocol):
    """A chunk to write, and where: `planning.write_spans.ChunkSpan`."""

    @property
    def item(self) -> WriteItem:
        """What it is."""
        ...

    @property
    def key(self) -> str:
        """Its name in the file."""
        ...

    @property
    def dtype(self) -> DType:
        """Its element type."""
        ...

    @property
    def byte_offset(self) -> int:
        """Where it starts in the data section."""
        ...

    @property
    def nbytes(self) -> int:
        """Its length."""
        ...

    @property
    def part(self) -> int:
        """Which of the rank's tensor files it lies in; `byte_offset` counts in that file's data section."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class WriteColumns:
    """Regions to write.

    Attributes:
        keys: Name of each in the header of its file. Length N.
        part: Which of the rank's tensor files it lies in, ascending. Shape (N,).
        byte_offset: Where it starts in the data section of that file. Shape (N,).
        nbytes: Its length. Shape (N,).
        dtype: `DType.code`. Shape (N,).
        ndim: Number of dimensions. Shape (N,).
        sizes: Its extent, padded with 1 on the right. Shape (N, D), elements.
    """

    keys: Sequence[str]
    part: UInt8
    byte_offset: Int64
    nbytes: Int64
    dtype: UInt8
    ndim: UInt8
    sizes: Int64

    def __len__(self) -> int:
        return len(self.part)

    def some(self, start: int, stop: int) -> WriteColumns:
        """Some neighbouring rows, sharing memory."""
        rows = slice(start, stop)
        return WriteColumns(
            self.keys[rows], self.part[rows], self.byte_offset[rows], self.nbytes[rows], self.dtype[rows],
            self.ndim[rows], self.sizes[rows],
        )  # fmt: skip

    def part_bounds(self) -> list[tuple[int, int, int]]:
        """(part, first row, row behind the last) of each part."""
        if not len(self):
            return []
        starts = [0, *(np.flatnonzero(np.diff(self.part)) + 1).tolist()]
        return [
            (int(self.part[start]), start, stop)
            for start, stop in zip(starts, [*starts[1:], len(self)], strict=True)
        ]  # fmt: skip


def columns_of(spans: Sequence[PlannedChunk]) -> WriteColumns:
    """Make columns of spans that have none."""
    sizes = [span.item.sizes for span in spans]
    depth = max(map(len, sizes), default=0)
    padded = [(*row, *(1,) * (depth - len(row))) for row in sizes]
    return WriteColumns(
        [span.key for span in spans],
        np.array([span.part for span in spans], np.uint8),
        np.array([span.byte_offset for span in spans], np.int64),
        np.array([span.nbytes for span in spans], np.int64),
        np.array([span.dtype.code for span in spans], np.uint8),
        np.array([len(row) for row in sizes], np.uint8),
        np.array(padded, np.int64).reshape(len(sizes), depth),
    )
