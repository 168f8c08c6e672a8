"""Load plans: which regions of which chunks go where.

A plan is a frozen view over columns; items are made when somebody looks. `LoadPlan.with_items` makes a plan from items
again, for planners that filter or redirect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, overload

import numpy as np

from dcp_core.dtype import ITEMSIZE
from dcp_core.errors import PlanningError
from dcp_core.metadata import Int32, Int64, MetadataIndex
from dcp_core.planning.items import ItemType, ReadItem
from dcp_core.planning.read_items import ReadColumns, Regions
from dcp_core.planning.read_spans import AllSpans, ReadSpan, ReadSpans
from dcp_core.planning.span_columns import Mask
from dcp_core.planning.wanted import Wanted, WantedBoxes, WantedObject

if TYPE_CHECKING:
    from dcp_core.planning.sharing import Sharing

__all__ = ["LoadPlan", "PeerPlan", "ReadColumns", "ReadSpan", "Wanted", "WantedObject"]


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
        reads: Regions that fill the boxes, sorted by box.
        share_memory: Whether two targets are the same memory, so that the order of writing matters.
        sharing: How reads are shared with other ranks; None where this rank reads everything itself.
    """

    sharing: Sharing | None = None

    def __init__(
        self,
        wanted: Sequence[Wanted],
        objects: Sequence[WantedObject],
        reads: ReadColumns,
        *,
        share_memory: bool = False,
    ) -> None:
        self.wanted = WantedBoxes.of(wanted)
        self.objects = tuple(objects)
        self.reads = reads
        self.share_memory = share_memory

    @property
    def items(self) -> Sequence[ReadItem]:
        """The plan's items, made on request: regions, then objects."""
        return _LazyReads(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the regions, as stored."""
        numel = np.prod(self.reads.sizes, axis=1, dtype=np.int64)
        return int((numel * ITEMSIZE[self.wanted.stored_dtype[self.reads.wanted]]).sum())

    def tensor_item(self, position: int) -> ReadItem:
        """The item of one region."""
        return self._regions.items[position]

    def object_item(self, position: int) -> ReadItem:
        """The item of one object."""
        wanted = self.objects[position]
        dest, storage = MetadataIndex(wanted.name), MetadataIndex(wanted.stored.name)
        return ReadItem(ItemType.BYTES, dest, (), storage, (), ())

    @cached_property
    def objects_by_name(self) -> dict[str, WantedObject]:
        """The wanted objects by name."""
        return {wanted.name: wanted for wanted in self.objects}

    def spans(self) -> ReadSpans:
        """The regions in the order of reading: file after file, each by byte offset."""
        return ReadSpans(self._spans, slice(0, len(self.reads)), share_memory=self.share_memory)

    def spans_in_order(self, priority: Int64, whole_blocks: Mask | None = None) -> ReadSpans:
        """The regions in another order: those with a lower number first, equal ones as in `spans`.

        Args:
            priority: A number for each region. Shape (N,).
            whole_blocks: See `ReadSpans`, for each region; None: nowhere. Shape (N,).
        """
        every = AllSpans(self._regions, priority, whole_blocks)
        return ReadSpans(every, slice(0, len(self.reads)), share_memory=self.share_memory)

    @cached_property
    def _regions(self) -> Regions:
        return Regions(self.wanted, self.reads)

    @cached_property
    def _spans(self) -> AllSpans:
        return AllSpans(self._regions)

    def with_items(self, items: Iterable[ReadItem]) -> LoadPlan:
        """Make the plan that reads just these items.

        Args:
            items: Items of this plan, possibly fewer, or smaller regions.

        Raises:
            PlanningError: An item that is not of this plan.
        """
        chosen = list(items)
        boxes = self.wanted
        index = {key: row for row, key in enumerate(zip(boxes.names, boxes.ordinals, strict=True))}
        tensors = [item for item in chosen if item.type is ItemType.TENSOR]
        for item in tensors:
            row, chunk = index.get((item.dest_index.fqn, item.dest_index.index or 0)), item.storage_index.index
            if row is None or chunk is None or not 0 <= chunk < boxes.chunks.count[row]:
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
        objects = [wanted for wanted in self.objects if wanted.name in names]
        return LoadPlan(self.wanted, objects, reads, share_memory=self.share_memory)

    def with_sources(self, source: Int32) -> LoadPlan:
        """The same plan with a reader named for each region."""
        return LoadPlan(self.wanted, self.objects, replace(self.reads, source=source), share_memory=self.share_memory)


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
