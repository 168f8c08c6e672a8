"""Where the bytes of wanted boxes meet the edges of checksum blocks.

Pure. A block is checked when it is read whole, so a cut inside one, between two reads, leaves it unchecked. In: a load
plan, and cuts in its boxes, counted in elements, row-major. Out: which cuts are on edges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcp_core.dtype import ITEMSIZE
from dcp_core.metadata import Int64
from dcp_core.planning import buffer_parts
from dcp_core.planning.load_plan import LoadPlan, ReadColumns
from dcp_core.planning.span_columns import Mask


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRuns:
    """Regions as ranges of bytes of their chunks. N regions.

    Attributes:
        start: First byte, from the chunk's start. Shape (N,).
        stop: One past the last. Shape (N,).
        is_run: Whether the range holds nothing but the region. Shape (N,).
        chunk_nbytes: Bytes of the chunk. Shape (N,).
    """

    start: Int64
    stop: Int64
    is_run: Mask
    chunk_nbytes: Int64

    @classmethod
    def of(cls, plan: LoadPlan, reads: ReadColumns) -> ChunkRuns:
        """Find where regions of a plan's boxes lie in their chunks."""
        chunks = plan.wanted.chunk_rows(reads.wanted, reads.chunk)
        itemsize = ITEMSIZE[plan.wanted.stored_dtype[reads.wanted]]
        start, reach, numel = span_in(reads.offsets - chunks.offsets, reads.sizes, chunks.sizes)
        total = np.prod(chunks.sizes, axis=1, dtype=np.int64) * itemsize
        return cls(start * itemsize, (start + reach) * itemsize, reach == numel, total)

    @property
    def starts_on_edge(self) -> Mask:
        """Whether a block starts where the region does. Shape (N,)."""
        found: Mask = self.start % buffer_parts.ALIGNMENT == 0
        return found

    @property
    def stops_on_edge(self) -> Mask:
        """Whether a block ends where the region does. Shape (N,)."""
        found: Mask = (self.stop % buffer_parts.ALIGNMENT == 0) | (self.stop == self.chunk_nbytes)
        return found


def span_in(offsets: Int64, sizes: Int64, extent: Int64) -> tuple[Int64, Int64, Int64]:
    """What regions reach over, row-major.

    Args:
        offsets: Where they start in what holds them. Shape (N, D), elements.
        sizes: Their extents, padded with 1; what is said of empty ones means nothing. Shape (N, D).
        extent: Extents of what holds them, padded with 1. Shape (N, D).

    Returns:
        The first element of each; how many there are from it to the last one, both counted; how many of them are its
        own. Shape (N,) each.
    """
    low = np.zeros(len(offsets), dtype=np.int64)
    reach, numel = np.ones(len(offsets), dtype=np.int64), np.ones(len(offsets), dtype=np.int64)
    stride = np.ones(len(offsets), dtype=np.int64)
    for dim in reversed(range(offsets.shape[1])):
        low += offsets[:, dim] * stride
        reach += (sizes[:, dim] - 1) * stride
        numel *= sizes[:, dim]
        stride *= extent[:, dim]
    return low, reach, numel


class BlockEdges:
    """The edges of blocks in the boxes of one plan.

    Args:
        plan: Its regions are those before any is cut.
    """

    def __init__(self, plan: LoadPlan) -> None:
        reads, boxes = plan.reads, plan.wanted
        numel = np.prod(boxes.sizes, axis=1, dtype=np.int64)
        self._numel = numel
        self._base = np.cumsum(numel) - numel  # where each box starts if all elements stand in one line
        low, reach, own = span_in(reads.offsets - boxes.offsets[reads.wanted], reads.sizes, boxes.sizes[reads.wanted])
        runs = ChunkRuns.of(plan, reads)
        place = self._base[reads.wanted] + low
        order = np.argsort(place, kind="stable")
        self._place = place[order]
        self._start = runs.start[order]
        self._itemsize = ITEMSIZE[boxes.stored_dtype[reads.wanted]][order]
        self._nbytes = (runs.stop - runs.start)[order]
        self._is_run = (runs.is_run & (reach == own))[order]

    def are_edges(self, row: int, element: Int64) -> Mask:
        """Whether blocks end at cuts of a box, or chunks do.

        Args:
            row: Which box.
            element: The first element behind each cut. Shape (C,).
        """
        place = self._base[row] + element
        region = np.searchsorted(self._place, place, side="right") - 1
        step = place - self._place[region]
        at = self._start[region] + step * self._itemsize[region]
        found: Mask = self._is_run[region] & ((step == 0) | (at % buffer_parts.ALIGNMENT == 0))
        return found

    def cuts(self, row: int, row_numel: int) -> Int64:
        """Find where a box can be cut between its rows so that no block is torn.

        Args:
            row: Which box.
            row_numel: Elements of a row.

        Returns:
            The first element behind each cut, ascending, at least half a block after the one before; none where a
            part of the box has gaps in its chunk. Shape (C,).
        """
        begin = int(self._base[row])
        regions = np.flatnonzero((self._place >= begin) & (self._place < begin + self._numel[row]))
        if not self._is_run[regions].all():
            return np.zeros(0, dtype=np.int64)
        found: list[int] = []
        for region in regions.tolist():
            low, start, itemsize = (
                int(self._place[region]) - begin,
                int(self._start[region]),
                int(self._itemsize[region]),
            )
            block = buffer_parts.ALIGNMENT
            inner = low * itemsize + np.arange(-start % block, int(self._nbytes[region]), block)
            found += [low, *(inner[inner % itemsize == 0] // itemsize).tolist()]
            least = block // 2 // itemsize
        kept, last = list[int](), 0
        for cut in sorted(set(found)):
            if cut and cut % row_numel == 0 and cut - last >= least and int(self._numel[row]) - cut >= least:
                kept.append(cut)
                last = cut
        return np.array(kept, dtype=np.int64)
