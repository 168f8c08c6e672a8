"""Into which slabs the buffers of one plan are cut, to be shared out between readers.

Pure. All ranks that want a buffer know where it is stored, and so find the same slabs. Slabs end at the edges of
checksum blocks where rows do: then every block is read once, whole, by one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcp_core.dtype import ITEMSIZE
from dcp_core.metadata import Int64
from dcp_core.planning import buffer_parts
from dcp_core.planning.block_edges import BlockEdges
from dcp_core.planning.buffer_parts import block_starts, slabs_of
from dcp_core.planning.load_plan import LoadPlan

_LEAST_BLOCKS = 2
"""Buffers that have fewer checksum blocks are hardly worth a cut."""

_MOST_UNEVEN = 2
"""Slabs are shared out as if all were of one size: none is larger than so many of the average."""


@dataclass(frozen=True, slots=True, eq=False)
class Slabs:
    """The slabs of some buffers.

    Attributes:
        count: How many slabs each has. Shape (N,).
        numel: Elements of a slab; the last one of a buffer may be shorter. Shape (N,).
        total: Elements of the buffer. Shape (N,).
        bounds: For buffers with slabs of several sizes where each slab starts, and where the last one ends, by index.
    """

    count: Int64
    numel: Int64
    total: Int64
    bounds: dict[int, Int64]

    def ends(self, index: Int64, slab: Int64) -> Int64:
        """Where runs of slabs end.

        Args:
            index: Which buffer. Shape (P,).
            slab: How many slabs of it there are up to there. Shape (P,).

        Returns:
            One past the last element. Shape (P,).
        """
        found = np.minimum(slab * self.numel[index], self.total[index])
        for number, bounds in self.bounds.items():
            mine = index == number
            found[mine] = bounds[slab[mine]]
        return found

    def blocks(self, index: int, first: int, last: int, sizes: tuple[int, ...], block_numel: int) -> Int64:
        """Cut a run of slabs into blocks.

        Args:
            index: Which buffer.
            first: Where the run starts.
            last: Where it ends.
            sizes: Extent of the buffer, elements.
            block_numel: The most elements of a block.

        Returns:
            The first element of each block.
        """
        bounds = self.bounds.get(index)
        if bounds is None:
            return block_starts(first, last, sizes, int(self.numel[index]), block_numel)
        found, start = [], first
        while start < last:
            stop = min(start + block_numel, last)
            stop = int(bounds[np.searchsorted(bounds, stop, side="right") - 1])
            if stop <= start:  # a slab larger than a block
                stop = min(int(bounds[np.searchsorted(bounds, start, side="right")]), last)
            found.append(block_starts(start, stop, sizes, stop - start, block_numel))
            start = stop
        return np.concatenate(found)


def find_slabs(plan: LoadPlan, rows: Int64) -> Slabs:
    """Find the slabs of buffers.

    Args:
        plan: What a rank wants, and where that lies.
        rows: Which of its wanted boxes, none of them empty. Shape (N,).
    """
    boxes = plan.wanted
    sizes, itemsize = boxes.sizes[rows], ITEMSIZE[boxes.stored_dtype[rows]]
    count, numel = slabs_of(sizes, itemsize)
    total = np.prod(sizes, axis=1, dtype=np.int64)
    large = np.flatnonzero((total * itemsize >= _LEAST_BLOCKS * buffer_parts.ALIGNMENT) & (count > 1))
    bounds: dict[int, Int64] = {}
    edges = BlockEdges(plan) if len(large) else None
    row_numel = total // buffer_parts.row_count(sizes)
    for index in large.tolist():
        assert edges is not None, "there is a large one"
        inner = np.arange(1, int(count[index])) * int(numel[index])
        if edges.are_edges(int(rows[index]), inner).all():
            continue
        found = edges.cuts(int(rows[index]), int(row_numel[index]))
        ends = np.concatenate([[0], found, total[index : index + 1]])
        if len(found) and np.diff(ends).max() <= _MOST_UNEVEN * int(total[index]) / (len(found) + 1):
            bounds[index] = ends
            count[index] = len(found) + 1
    return Slabs(count, numel, total, bounds)
