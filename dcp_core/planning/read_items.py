"""From the columns of a load plan to its items, all at once.

Most regions are whole chunks that fill whole boxes. Their tuples of offsets and sizes are those of the boxes; only
the other regions get tuples of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import attrgetter

import numpy as np

from dcp_core.metadata import ChunkColumns, Int32, Int64, MetadataIndex
from dcp_core.planning.bulk import made_of_columns, tuples_of
from dcp_core.planning.items import ItemType, ReadItem
from dcp_core.planning.wanted import WantedBoxes

Extents = list[tuple[int, ...]]
"""Offsets or sizes of one region after the other, elements."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadColumns:
    """Regions to read, one row a (wanted box, stored chunk) that meet.

    Attributes:
        wanted: Index of the wanted box. Shape (N,).
        chunk: Row among the stored tensor's chunks. Shape (N,).
        offsets: Where the region starts in the global tensor, padded with 0. Shape (N, D), elements.
        sizes: Its extent, padded with 1. Shape (N, D), elements.
        source: The rank that reads it, -1 where each reads for itself. Shape (N,).
    """

    wanted: Int64
    chunk: Int64
    offsets: Int64
    sizes: Int64
    source: Int32

    def __len__(self) -> int:
        return len(self.wanted)

    def take(self, rows: Int64) -> ReadColumns:
        """Select rows."""
        boxes = self.offsets[rows], self.sizes[rows]
        return ReadColumns(self.wanted[rows], self.chunk[rows], *boxes, self.source[rows])


class Regions:
    """The regions of a plan, with what is found out about them when it is asked for.

    Args:
        boxes: What is wanted.
        reads: The regions.
    """

    def __init__(self, boxes: WantedBoxes, reads: ReadColumns) -> None:
        self.boxes = boxes
        self.reads = reads

    @cached_property
    def chunks(self) -> ChunkColumns:
        """The chunk of each region, padded as the regions are."""
        return self.boxes.chunk_rows(self.reads.wanted, self.reads.chunk)

    @cached_property
    def storage_offsets(self) -> Int64:
        """Where each region starts in its chunk, or in the array that the chunk is a region of. Shape (N, D)."""
        inside: Int64 = self.reads.offsets - self.chunks.offsets
        return inside if self.chunks.arrays is None else inside + self.chunks.arrays.offsets

    @cached_property
    def items(self) -> list[ReadItem]:
        """The item of each region."""
        return _make_items(self.boxes, self.reads, self.chunks, self.storage_offsets)


def _make_items(boxes: WantedBoxes, reads: ReadColumns, chunks: ChunkColumns, storage_offsets: Int64) -> list[ReadItem]:
    wanted, ndim = reads.wanted.tolist(), boxes.ndim[reads.wanted]
    origin, nowhere = boxes.offsets[reads.wanted], np.zeros_like(reads.offsets)
    offsets = list(map(attrgetter("offsets"), boxes.boxes))
    sizes = list(map(attrgetter("sizes"), boxes.boxes))
    starts = [(0,) * length for length in range(origin.shape[1] + 1)]
    zeros = [starts[length] for length in ndim.tolist()]
    targets = made_of_columns(MetadataIndex, len(boxes), fqn=boxes.names, offset=offsets, index=boxes.ordinals)
    sources = made_of_columns(
        MetadataIndex, len(reads),
        fqn=[boxes.stored_names[row] for row in wanted],
        offset=extents_of(chunks.offsets, origin, [offsets[row] for row in wanted], ndim),
        index=reads.chunk.tolist(),
    )  # fmt: skip
    return made_of_columns(
        ReadItem, len(reads),
        type=repeat(ItemType.TENSOR),
        dest_index=[targets[row] for row in wanted],
        dest_offsets=extents_of(reads.offsets - origin, nowhere, zeros, ndim),
        storage_index=sources,
        storage_offsets=extents_of(storage_offsets, nowhere, zeros, ndim),
        lengths=extents_of(reads.sizes, boxes.sizes[reads.wanted], [sizes[row] for row in wanted], ndim),
        source=[None if rank < 0 else rank for rank in reads.source.tolist()],
    )  # fmt: skip


def extents_of(rows: Int64, known: Int64, known_tuples: Extents, ndim: Int64) -> Extents:
    """Rows of a padded column as tuples.

    Args:
        rows: Shape (N, D).
        known: Rows whose tuples are at hand. Shape (N, D).
        known_tuples: These, taken where the rows are the same.
        ndim: Number of dimensions of each row. Shape (N,).
    """
    others = np.flatnonzero((rows != known).any(axis=1))
    if not len(others):
        return known_tuples
    found = list(known_tuples)
    for row, extent in zip(others.tolist(), tuples_of(rows[others], ndim[others]), strict=True):
        found[row] = extent
    return found
