"""Finding an example of what is wrong with one tensor that its boxes do not tile.

Halving: the sum of the boxes' volumes inside a region, less the region's volume, is its *excess*. A region with a
positive excess holds an overlap, one with a negative excess a hole, and one of the two halves of such a region has an
excess of the same sign. We cut at the median of the box edges inside the region, so that each step drops a fixed
share of the edges, until a region has none: then every box left covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dcp_core.box import Box
from dcp_core.planning.tiling_rows import Bools, Int64

_ROWS_NAMED = 4


@dataclass(frozen=True, slots=True)
class TilingFault:
    """One thing that is wrong with the boxes of a tensor.

    Attributes:
        tensor: Which tensor.
        kind: "hole": elements in no box; "overlap": elements in two; "outside": a box that leaves the tensor.
        box: The elements in question: a largest empty box; what two boxes share; the box that leaves the tensor.
        rows: Boxes involved, ascending: for a hole some that touch it, for an overlap the two, else the one.
    """

    tensor: int
    kind: Literal["hole", "overlap", "outside"]
    box: Box
    rows: tuple[int, ...]

    def told(self, name: str, shape: tuple[int, ...], holders: Sequence[str]) -> str:
        """Say what is wrong, for a message.

        Args:
            name: Of the tensor.
            shape: Its extent, elements.
            holders: The boxes involved, and which ranks hold them, in words.

        >>> TilingFault(0, "hole", Box((6, 0), (1, 4)), ()).told("w", (7, 4), [])
        "'w' of global shape (7, 4): nobody holds offsets (6, 0) sizes (1, 4)"
        """
        region = f"offsets {self.box.offsets} sizes {self.box.sizes}"
        problem = {
            "hole": f"nobody holds {region}",
            "overlap": f"boxes overlap in {region}: {'; '.join(holders)}",
            "outside": f"a box leaves the tensor: {'; '.join(holders)}",
        }[self.kind]
        return f"{name!r} of global shape {shape}: {problem}"


@dataclass(frozen=True, slots=True, eq=False)
class _Region:
    """A region of the tensor and what its boxes have in it.

    Attributes:
        start, end: The region. Each of shape (D,).
        low, high: The boxes cut off at the region, none of them empty. Each of shape (N, D).
        rows: Which boxes they are. Shape (N,).
    """

    start: Int64
    end: Int64
    low: Int64
    high: Int64
    rows: Int64

    def excess(self) -> int:
        """Elements that the boxes hold here, less those that there are."""
        volumes = np.prod(self.high - self.low, axis=1, dtype=np.int64)
        held = (int((volumes >> 31).sum()) << 31) + int((volumes & 0x7FFFFFFF).sum())
        return held - int(np.prod(self.end - self.start, dtype=np.int64))

    def split(self) -> tuple[_Region, _Region] | None:
        """Cut at the median edge, in the dimension with most edges; None when no edge lies inside."""
        edges = [self._edges(dim) for dim in range(len(self.start))]
        if not any(map(len, edges)):
            return None
        dim = max(range(len(edges)), key=lambda each: len(edges[each]))
        middle = len(edges[dim]) // 2
        cut = int(np.partition(edges[dim], middle)[middle])
        start, end = self.start.copy(), self.end.copy()
        start[dim] = end[dim] = cut
        return self.clip(self.start, end), self.clip(start, self.end)

    def _edges(self, dim: int) -> Int64:
        low, high = self.low[:, dim], self.high[:, dim]
        return np.concatenate([low[low > self.start[dim]], high[high < self.end[dim]]])

    def clip(self, start: Int64, end: Int64) -> _Region:
        """The part of this region, and of its boxes, between `start` and `end`."""
        low, high = np.maximum(self.low, start), np.minimum(self.high, end)
        inside = (low < high).all(axis=1)
        return _Region(start, end, low[inside], high[inside], self.rows[inside])


@dataclass(frozen=True, slots=True, eq=False)
class Suspect:
    """A tensor that its boxes do not tile.

    Attributes:
        tensor: Its number, for the fault.
        offsets, sizes: Its boxes, not empty, inside or not. Each of shape (N, D), elements.
        rows: Their numbers, for the fault. Shape (N,).
        shape: Its extent, not empty. Shape (D,).
    """

    tensor: int
    offsets: Int64
    sizes: Int64
    rows: Int64
    shape: Int64

    def outside(self) -> Bools:
        """Mark the boxes that leave the tensor. Shape (N,)."""
        marked: Bools = (self.sizes > self.shape - self.offsets).any(axis=1)
        return marked

    def box(self, row: int) -> Box:
        """The box at a position."""
        return Box(tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist()))


def find_faults(suspect: Suspect, is_tiled: Callable[[Int64, Int64, Int64], bool]) -> Iterator[TilingFault]:
    """Find an example of what is wrong.

    Args:
        suspect: A tensor that its boxes do not tile.
        is_tiled: The exact check: whether boxes (offsets, sizes) tile a shape.

    Yields:
        One fault for a box outside; else one overlap or one hole; or both where each makes up for the volume of the
        other, as when a box is shifted.

    Complexity:
        O(N D^2), and O(D log N) exact checks at the most, where holes and overlaps cancel in every part looked at.
    """
    outside = np.flatnonzero(suspect.outside())
    if len(outside):
        row = int(outside[0])
        yield TilingFault(suspect.tensor, "outside", suspect.box(row), (int(suspect.rows[row]),))
        return
    start = np.zeros_like(suspect.shape)
    high = suspect.offsets + suspect.sizes
    region = _Region(start, suspect.shape, suspect.offsets, high, np.arange(len(suspect.rows)))
    for part, excess in _unbalanced(region, is_tiled):
        yield _overlap(suspect, part) if excess > 0 else _hole(suspect, part)


def _unbalanced(region: _Region, is_tiled: Callable[[Int64, Int64, Int64], bool]) -> list[tuple[_Region, int]]:
    """Narrow a faulty region down to where the volumes show it."""
    excess = region.excess()
    while excess == 0:
        halves = region.split()
        assert halves is not None, "without an edge inside, one box fills the region: nothing is wrong there"
        one, other = halves
        excess = one.excess()
        if excess:
            return [(one, excess), (other, -excess)]
        region = other if is_tiled(one.low - one.start, one.high - one.low, one.end - one.start) else one
    return [(region, excess)]


def _descend(region: _Region, sign: int) -> _Region:
    """Follow an excess of one sign down to a region without an edge."""
    while (halves := region.split()) is not None:
        region = halves[0] if halves[0].excess() * sign > 0 else halves[1]
    return region


def _overlap(suspect: Suspect, region: _Region) -> TilingFault:
    """Report two boxes that share elements, from a region with a positive excess."""
    one, other = _descend(region, 1).rows[:2].tolist()
    low = np.maximum(suspect.offsets[one], suspect.offsets[other])
    high = np.minimum(suspect.offsets[one] + suspect.sizes[one], suspect.offsets[other] + suspect.sizes[other])
    rows = sorted(suspect.rows[[one, other]].tolist())
    return TilingFault(suspect.tensor, "overlap", _box_between(low, high), tuple(rows))


def _hole(suspect: Suspect, region: _Region) -> TilingFault:
    """Report a box that nobody holds, grown as far as it goes, from a region with a negative excess."""
    found = _descend(region, -1)
    start, end = found.start.copy(), found.end.copy()
    low, high = suspect.offsets, suspect.offsets + suspect.sizes
    for dim in range(len(start)):
        meets = (low < end) & (high > start)
        meets[:, dim] = True
        beside = meets.all(axis=1)
        below = high[beside & (high[:, dim] <= start[dim]), dim]
        above = low[beside & (low[:, dim] >= end[dim]), dim]
        start[dim] = below.max(initial=0)
        end[dim] = above.min(initial=suspect.shape[dim])
    touches = np.flatnonzero(((low <= end) & (high >= start)).all(axis=1))[:_ROWS_NAMED]
    return TilingFault(suspect.tensor, "hole", _box_between(start, end), tuple(sorted(suspect.rows[touches].tolist())))


def _box_between(start: Int64, end: Int64) -> Box:
    return Box(tuple(start.tolist()), tuple((end - start).tolist()))
