"""Which stored chunks meet which wanted boxes.

Three ways, by how many there are: tensors of few chunks are compared all at once, every box with every chunk; one box
of a tensor of many chunks is compared with all of them, without copying; many boxes of one such tensor are found by
sorting, so that the work does not grow with boxes times chunks. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dcp_core.metadata import ChunkColumns, Int32, Int64
from dcp_core.planning.wanted import MANY_CHUNKS, WantedBoxes

MANY_PAIRS = 1 << 20
"""From so many pairs of a box and a chunk of one tensor on, they are found by sorting."""
BATCH_PAIRS = 1 << 17
"""Pairs that are compared at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Meetings:
    """Pairs of a wanted box and a chunk that have elements in common.

    Attributes:
        wanted: Index of the box. Shape (N,).
        chunk: Row among the stored tensor's chunks. Shape (N,).
        offsets: Where the common region starts in the global tensor: a column a dimension, each of shape (N,).
        sizes: Its extent, likewise.
    """

    wanted: Int64
    chunk: Int64
    offsets: tuple[Int64, ...]
    sizes: tuple[Int64, ...]


def find_meetings(boxes: WantedBoxes) -> Iterator[Meetings]:
    """Find all pairs; each comes once, in no particular order.

    Complexity:
        Linear in boxes and in the chunks of their tensors, and in the pairs where a tensor has few chunks; else a sort
        of the chunks along each dimension, and the pairs that meet along the best of them.
    """
    places = boxes.chunks
    order = np.lexsort((places.first, places.pool))
    for mine in _runs(order, places.pool[order]):
        chunks = places.pools[int(places.pool[mine[0]])]
        is_many = places.count[mine] >= MANY_CHUNKS
        yield from _every_pair(boxes, chunks, mine[~is_many])
        many = mine[is_many]
        for same_tensor in _runs(many, places.first[many]):
            yield from _meet_many(boxes, chunks, same_tensor)


def _runs(rows: Int64, key: Int32 | Int64) -> list[Int64]:
    """Cut rows where their key changes."""
    if not len(rows):
        return []
    return np.split(rows, np.flatnonzero(key[1:] != key[:-1]) + 1)


def _every_pair(boxes: WantedBoxes, chunks: ChunkColumns, mine: Int64) -> Iterator[Meetings]:
    """Compare boxes with all chunks of their tensors, a batch of pairs at a time."""
    first, count = boxes.chunks.first[mine], boxes.chunks.count[mine]
    for batch in _batches(count):
        index, place = _spread(count[batch])
        wanted = mine[batch][index]
        yield _meet(boxes, chunks, wanted, first[batch][index] + place)


def _batches(count: Int64) -> Iterator[slice]:
    """Cut rows so that each part has about `BATCH_PAIRS` pairs."""
    ends = np.cumsum(count)
    start = 0
    while start < len(count):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + BATCH_PAIRS, side="right")))
        yield slice(start, stop)
        start = stop


def _spread(count: Int64) -> tuple[Int64, Int64]:
    """For rows that stand for several each: the row, and which of its several, one after the other."""
    index = np.repeat(np.arange(len(count)), count)
    first = np.cumsum(count) - count
    return index, np.arange(len(index)) - first[index]


def _meet(boxes: WantedBoxes, chunks: ChunkColumns, wanted: Int64, row: Int64) -> Meetings:
    """Of pairs of a box and a row of the pool keep those with elements in common."""
    offsets: list[Int64] = []
    sizes: list[Int64] = []
    for dim in range(min(boxes.offsets.shape[1], chunks.offsets.shape[1])):
        start, chunk_start = boxes.offsets[wanted, dim], chunks.offsets[row, dim]
        low = np.maximum(start, chunk_start)
        size = np.minimum(start + boxes.sizes[wanted, dim], chunk_start + chunks.sizes[row, dim]) - low
        meets = size > 0
        if not meets.all():
            wanted, row, low, size = wanted[meets], row[meets], low[meets], size[meets]
            offsets, sizes = [column[meets] for column in offsets], [column[meets] for column in sizes]
        offsets.append(low)
        sizes.append(size)
    return Meetings(wanted, row - boxes.chunks.first[wanted], tuple(offsets), tuple(sizes))


def _meet_many(boxes: WantedBoxes, chunks: ChunkColumns, mine: Int64) -> Iterator[Meetings]:
    """Compare boxes of one tensor with its many chunks."""
    first, count = int(boxes.chunks.first[mine[0]]), int(boxes.chunks.count[mine[0]])
    if len(mine) == 1 or len(mine) * count < MANY_PAIRS:
        for index in mine.tolist():
            yield _scan(boxes, chunks, index)
        return
    for wanted, place in _sorted_search(boxes, chunks, mine, slice(first, first + count)):
        yield _meet(boxes, chunks, wanted, first + place)


def _scan(boxes: WantedBoxes, chunks: ChunkColumns, index: int) -> Meetings:
    """Compare one box with all chunks of its tensor."""
    first, count = int(boxes.chunks.first[index]), int(boxes.chunks.count[index])
    rows: slice | Int64 = slice(first, first + count)
    offsets: list[Int64] = []
    sizes: list[Int64] = []
    for dim, (start, size) in enumerate(zip(boxes.boxes[index].offsets, boxes.boxes[index].sizes, strict=True)):
        chunk_start = chunks.offsets[rows, dim]
        low = np.maximum(chunk_start, start)
        length = np.minimum(chunk_start + chunks.sizes[rows, dim], start + size) - low
        meets = length > 0
        if not meets.all():
            kept = np.flatnonzero(meets)
            rows = kept + first if isinstance(rows, slice) else rows[kept]
            low, length = low[kept], length[kept]
            offsets, sizes = [column[kept] for column in offsets], [column[kept] for column in sizes]
        offsets.append(low)
        sizes.append(length)
    chunk = np.arange(count) if isinstance(rows, slice) else rows - first
    return Meetings(np.full(len(chunk), index), chunk, tuple(offsets), tuple(sizes))


def _sorted_search(boxes: WantedBoxes, chunks: ChunkColumns, mine: Int64, rows: slice) -> Iterator[tuple[Int64, Int64]]:
    """Pairs of a box and a chunk of one tensor that meet along one dimension, the one that leaves the fewest.

    Along a dimension the chunks are sorted by their start. Those that a box can meet then lie between the first that
    ends, or follows one that ends, beyond the box's start, and the last that starts before the box's end.
    """
    count = rows.stop - rows.start
    every = np.full(len(mine), count, dtype=np.int64)
    best: tuple[int, Int64, Int64, Int64] = len(mine) * count, np.arange(count), np.zeros_like(every), every
    for dim in range(int(boxes.ndim[mine[0]])):
        start = chunks.offsets[rows, dim]
        order = np.argsort(start, kind="stable")
        start = start[order]
        reach = np.maximum.accumulate(start + chunks.sizes[rows, dim][order])
        low = np.searchsorted(reach, boxes.offsets[mine, dim], side="right")
        high = np.searchsorted(start, boxes.offsets[mine, dim] + boxes.sizes[mine, dim], side="left")
        found = np.maximum(high - low, 0)
        total = int(found.sum())
        if total < best[0]:
            best = total, order, low, found
    _, order, low, found = best
    for batch in _batches(found):
        index, place = _spread(found[batch])
        yield mine[batch][index], order[low[batch][index] + place]
