"""Load plans: which regions of which chunks go where.

A plan is a frozen view over columns; items are made when somebody looks. `LoadPlan.with_items` makes a plan from items
again, for planners that filter or redirect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box
from dcp_core.dtype import DType
from dcp_core.errors import PlanningError
from dcp_core.metadata import Int32, Int64, MetadataIndex, StoredObject, StoredTensor
from dcp_core.planning.items import ItemType, ReadItem
from dcp_core.state_path import StatePath

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One box that a rank wants filled.

    Attributes:
        name: The target's name.
        leaf: Position of the target among the rank's leaves.
        ordinal: Which of its boxes.
        box: The box, global.
        dtype: Element type of the target.
        stored: The tensor that it is filled from.
    """

    name: str
    leaf: int
    ordinal: int
    box: Box
    dtype: DType
    stored: StoredTensor


@dataclass(frozen=True, slots=True)
class WantedObject:
    """One object that a rank wants.

    Attributes:
        name: The target's name.
        leaf: Position of the target among the rank's leaves.
        path: Where the target lies in the state.
        stored: The object that it is filled from.
    """

    name: str
    leaf: int
    path: StatePath
    stored: StoredObject


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A region to read, and where its chunk lies.

    Attributes:
        item: What it is.
        file: Row of the chunk's file in the metadata's `FileColumns`.
        byte_offset: Where the chunk starts in the file's data section.
        chunk_sizes: Extent of the chunk, elements.
        dtype: Element type as stored.
        target_dtype: Element type of the target.
        key: Name of the stored tensor.
    """

    item: ReadItem
    file: int
    byte_offset: int
    chunk_sizes: tuple[int, ...]
    dtype: DType
    target_dtype: DType


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


class _LazyReads(Sequence[ReadItem]):
    """The items of a plan, objects after tensors."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan.reads.wanted) + len(self._plan.objects)

    @overload
    def __getitem__(self, index: int) -> ReadItem: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ReadItem, ...]: ...
    def __getitem__(self, index: int | slice) -> ReadItem | tuple[ReadItem, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        position = range(len(self))[index]
        regions = len(self._plan.reads.wanted)
        return self._plan.tensor_item(position) if position < regions else self._plan.object_item(position - regions)

    def __iter__(self) -> Iterator[ReadItem]:
        return (self[position] for position in range(len(self)))


class LoadPlan:
    """What one rank reads.

    Attributes:
        wanted: The boxes to fill.
        objects: The objects to fetch.
        reads: Regions that fill the boxes.
    """

    def __init__(self, wanted: Sequence[Wanted], objects: Sequence[WantedObject], reads: ReadColumns) -> None:
        self.wanted = tuple(wanted)
        self.objects = tuple(objects)
        self.reads = reads

    @property
    def items(self) -> Sequence[ReadItem]:
        """The plan's items, made on request: regions, then objects."""
        return _LazyReads(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the regions, as stored."""
        numel = np.prod(self.reads.sizes, axis=1, dtype=np.int64)
        itemsize = np.array([wanted.stored.dtype.itemsize for wanted in self.wanted], dtype=np.int64)
        return int((numel * itemsize[self.reads.wanted]).sum()) if len(numel) else 0

    def tensor_item(self, position: int) -> ReadItem:
        """The item of one region."""
        reads = self.reads
        wanted = self.wanted[int(reads.wanted[position])]
        stored, ndim = wanted.stored, len(wanted.stored.shape)
        chunk = tuple(stored.chunks.offsets[int(reads.chunk[position])].tolist())[:ndim]
        start = reads.offsets[position, :ndim].tolist()
        source = int(reads.source[position])
        return ReadItem(
            ItemType.TENSOR,
            MetadataIndex(wanted.name, wanted.box.offsets, wanted.ordinal),
            tuple(a - b for a, b in zip(start, wanted.box.offsets, strict=True)),
            MetadataIndex(stored.name, chunk, int(reads.chunk[position])),
            tuple(a - b for a, b in zip(start, chunk, strict=True)),
            tuple(reads.sizes[position, :ndim].tolist()),
            None if source < 0 else source,
        )

    def object_item(self, position: int) -> ReadItem:
        """The item of one object."""
        wanted = self.objects[position]
        dest, storage = MetadataIndex(wanted.name), MetadataIndex(wanted.stored.name)
        return ReadItem(ItemType.BYTES, dest, (), storage, (), ())

    @cached_property
    def wanted_by_index(self) -> dict[tuple[str, int], Wanted]:
        """The wanted boxes by (name, ordinal)."""
        return {(wanted.name, wanted.ordinal): wanted for wanted in self.wanted}

    @cached_property
    def objects_by_name(self) -> dict[str, WantedObject]:
        """The wanted objects by name."""
        return {wanted.name: wanted for wanted in self.objects}

    def spans(self) -> Sequence[ReadSpan]:
        """The regions in the order of reading: file after file, each by byte offset."""
        return self._spans

    @cached_property
    def _spans(self) -> tuple[ReadSpan, ...]:
        reads = self.reads
        file = np.zeros(len(reads.wanted), dtype=np.int64)
        byte_offset = np.zeros(len(reads.wanted), dtype=np.int64)
        bounds = np.searchsorted(reads.wanted, np.arange(len(self.wanted) + 1))
        for index, wanted in enumerate(self.wanted):
            rows = slice(int(bounds[index]), int(bounds[index + 1]))
            chunk = reads.chunk[rows]
            file[rows] = wanted.stored.chunks.file[chunk]
            byte_offset[rows] = wanted.stored.chunks.byte_offset[chunk]
        order = np.lexsort((byte_offset, file)).tolist()
        return tuple(self._span(row, int(file[row]), int(byte_offset[row])) for row in order)

    def _span(self, row: int, file: int, byte_offset: int) -> ReadSpan:
        wanted = self.wanted[int(self.reads.wanted[row])]
        stored = wanted.stored
        sizes = tuple(stored.chunks.sizes[int(self.reads.chunk[row])].tolist())[: len(stored.shape)]
        return ReadSpan(self.tensor_item(row), file, byte_offset, sizes, stored.dtype, wanted.dtype)

    def with_items(self, items: Iterable[ReadItem]) -> LoadPlan:
        """Make the plan that reads just these items.

        Args:
            items: Items of this plan, possibly fewer, or smaller regions.

        Raises:
            PlanningError: An item that is not of this plan.
        """
        chosen = list(items)
        index = {(wanted.name, wanted.ordinal): i for i, wanted in enumerate(self.wanted)}
        tensors = [item for item in chosen if item.type is ItemType.TENSOR]
        for item in tensors:
            if (item.dest_index.fqn, item.dest_index.index) not in index or item.storage_index.index is None:
                raise PlanningError(
                    f"{item.dest_index.fqn!r}: derive the items of a load plan from those of the plan before"
                )
        tensors.sort(key=lambda item: index[item.dest_index.fqn, item.dest_index.index or 0])
        width = self.reads.offsets.shape[1]
        offsets, sizes = np.zeros((len(tensors), width), dtype=np.int64), np.ones((len(tensors), width), dtype=np.int64)
        for row, item in enumerate(tensors):
            start = [a + b for a, b in zip(item.dest_index.offset or (), item.dest_offsets, strict=True)]
            offsets[row, : len(start)], sizes[row, : len(start)] = start, item.lengths
        reads = ReadColumns(
            np.array([index[item.dest_index.fqn, item.dest_index.index or 0] for item in tensors], dtype=np.int64),
            np.array([item.storage_index.index for item in tensors], dtype=np.int64),
            offsets, sizes,
            np.array([-1 if item.source is None else item.source for item in tensors], dtype=np.int32),
        )  # fmt: skip
        names = {item.dest_index.fqn for item in chosen if item.type is ItemType.BYTES}
        return LoadPlan(self.wanted, [wanted for wanted in self.objects if wanted.name in names], reads)

    def with_sources(self, source: Int32) -> LoadPlan:
        """The same plan with a reader named for each region."""
        return LoadPlan(self.wanted, self.objects, replace(self.reads, source=source))


class PeerPlan(LoadPlan):
    """Another rank's load plan on the coordinator: its items and nothing else."""

    def __init__(self, items: Iterable[ReadItem]) -> None:
        nothing = np.zeros(0, dtype=np.int64)
        no_boxes = np.zeros((0, 0), dtype=np.int64)
        super().__init__((), (), ReadColumns(nothing, nothing, no_boxes, no_boxes, nothing.astype(np.int32)))
        self._items = tuple(items)

    @property
    def items(self) -> Sequence[ReadItem]:
        """The plan's items."""
        return self._items

    def with_items(self, items: Iterable[ReadItem]) -> LoadPlan:
        """The plan that reads just these items."""
        return PeerPlan(items)
