"""Save plans: what planners return and storages carry out.

A plan is a frozen view over columns; items are made when somebody looks. `SavePlan.with_items` makes a plan from
items again, for planners that filter, rename or redirect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np

from dcp_core.dtype import BY_CODE, ITEMSIZE, DType
from dcp_core.errors import PlanningError
from dcp_core.metadata import Int64, MetadataIndex
from dcp_core.planning.items import ItemType, WriteItem
from dcp_core.planning.layout import lay_out
from dcp_core.planning.local_table import TENSOR, LocalTable
from dcp_core.planning.write_list import WriteList
from dcp_core.state_path import PathKey, canonical_name, decode_path, encode_path, plain_name, spell_names


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A region to write, and where it lies in its file.

    Attributes:
        item: What it is.
        key: Its name in the file's header, unique there.
        dtype: Element type.
        byte_offset: Start in the data section.
        nbytes: Length.
    """

    item: WriteItem
    key: str
    dtype: DType
    byte_offset: int
    nbytes: int


class _LazyItems(Sequence[WriteItem]):
    """The items of a plan, objects after tensors."""

    def __init__(self, plan: SavePlan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan.writes.leaf) + len(self._plan.writes.object_leaf)

    @overload
    def __getitem__(self, index: int) -> WriteItem: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[WriteItem, ...]: ...
    def __getitem__(self, index: int | slice) -> WriteItem | tuple[WriteItem, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        position = range(len(self))[index]
        regions = len(self._plan.writes.leaf)
        return self._plan.tensor_item(position) if position < regions else self._plan.object_item(position - regions)

    def __iter__(self) -> Iterator[WriteItem]:
        return (self[position] for position in range(len(self)))


class SavePlan:
    """What one rank holds (a local plan) or writes (a final plan).

    Attributes:
        table: The rank's leaves and boxes.
        writes: Which regions of them, and which objects.
        containers: (encoded path, kind) of the containers that the paths of the leaves do not determine, sorted.
    """

    def __init__(self, table: LocalTable, writes: WriteList, containers: tuple[tuple[bytes, str], ...] = ()) -> None:
        self.table = table
        self.writes = writes
        self.containers = containers

    @classmethod
    def of_everything(cls, table: LocalTable, containers: tuple[tuple[bytes, str], ...] = ()) -> SavePlan:
        """The plan that writes all that the rank holds."""
        leaf = table.leaf_of_row().astype(np.int32)
        objects = np.flatnonzero(table.kind != TENSOR).astype(np.int32)
        ordinal = table.ordinal_of_row().astype(np.int32)
        return cls(table, WriteList(leaf, ordinal, np.zeros_like(table.sizes), table.sizes, objects), containers)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Printed name of each leaf."""
        paths = [decode_path(path) for path in self.table.paths]
        is_local = not self.writes.plan_digest
        names = spell_names(paths) if is_local else [plain_name(path) for path in paths]
        for leaf, name in self.writes.names.items():
            names[leaf] = name
        return tuple(names)

    @property
    def items(self) -> Sequence[WriteItem]:
        """The plan's items, made on request."""
        return _LazyItems(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor regions."""
        return int(self._region_nbytes().sum())

    def _region_nbytes(self) -> Int64:
        numel = np.prod(self.writes.sizes, axis=1, dtype=np.int64)
        nbytes: Int64 = numel * ITEMSIZE[self.table.dtype[self.writes.leaf]]
        return nbytes

    @cached_property
    def _first_row(self) -> Int64:
        return np.cumsum(self.table.boxes, dtype=np.int64) - self.table.boxes

    def tensor_item(self, position: int) -> WriteItem:
        """The item of one region."""
        writes, table = self.writes, self.table
        leaf, ordinal = int(writes.leaf[position]), int(writes.ordinal[position])
        ndim = int(table.ndim[leaf])
        start = tuple(writes.start[position, :ndim].tolist())
        sizes = tuple(writes.sizes[position, :ndim].tolist())
        box = table.offsets[int(self._first_row[leaf]) + ordinal, :ndim].tolist()
        offset = tuple(a + b for a, b in zip(box, start, strict=True))
        dtype = BY_CODE[int(table.dtype[leaf])]
        nbytes = int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize
        return WriteItem(
            MetadataIndex(self.names[leaf], offset), ItemType.TENSOR, sizes, nbytes, leaf, ordinal, start, dtype,
            tuple(table.shape[leaf, :ndim].tolist()),
        )  # fmt: skip

    def object_item(self, position: int) -> WriteItem:
        """The item of one object."""
        leaf = int(self.writes.object_leaf[position])
        return WriteItem(MetadataIndex(self.names[leaf]), ItemType.BYTES, (), 0, leaf)

    def with_items(self, items: Iterable[WriteItem]) -> SavePlan:
        """Make the plan that writes just these items.

        Args:
            items: Items of this plan, possibly fewer, cut smaller, or under another `index.fqn`.

        Raises:
            PlanningError: An item names a leaf or box that this rank does not hold, or two values share a name.
        """
        chosen = list(items)
        self._check_items(chosen)
        tensors = [item for item in chosen if item.type is ItemType.TENSOR]
        objects = [item for item in chosen if item.type is ItemType.BYTES]
        width = self.table.width
        start, sizes = np.zeros((len(tensors), width), dtype=np.int64), np.ones((len(tensors), width), dtype=np.int64)
        for row, item in enumerate(tensors):
            start[row, : len(item.start)], sizes[row, : len(item.sizes)] = item.start, item.sizes
        writes = replace(
            self.writes,
            leaf=np.array([item.leaf for item in tensors], dtype=np.int32),
            ordinal=np.array([item.box for item in tensors], dtype=np.int32),
            start=start, sizes=sizes, object_leaf=np.array([item.leaf for item in objects], dtype=np.int32),
        )  # fmt: skip
        self._check_names(chosen)
        renamed = {item.leaf: item.index.fqn for item in chosen if item.index.fqn != self.names[item.leaf]}
        if not renamed:
            return SavePlan(self.table, writes, self.containers)
        paths = list(self.table.paths)
        for leaf, name in renamed.items():
            paths[leaf] = encode_path((PathKey("key", name),))
        names = {leaf: name for leaf, name in self.writes.names.items() if leaf not in renamed}
        return SavePlan(replace(self.table, paths=tuple(paths)), replace(writes, names=names), self.containers)

    @staticmethod
    def _check_names(items: Sequence[WriteItem]) -> None:
        leaf_of: dict[str, int] = {}
        for item in items:
            if leaf_of.setdefault(item.index.fqn, item.leaf) != item.leaf:
                raise PlanningError(
                    f"two values of this rank would be stored under {item.index.fqn!r}, and one of them lost; give "
                    "every value a name of its own"
                )

    def _check_items(self, items: Sequence[WriteItem]) -> None:
        leaves = len(self.table.paths)
        for item in items:
            boxes = int(self.table.boxes[item.leaf]) if 0 <= item.leaf < leaves else -1
            if boxes < 0 or (item.type is ItemType.TENSOR and not 0 <= item.box < boxes):
                raise PlanningError(
                    f"{item.index.fqn!r}: the plan names box {item.box} of leaf {item.leaf}, this rank has {leaves} "
                    "leaves; derive the items of a plan from the items of the plan before"
                )

    def held(self) -> tuple[LocalTable, Narrowing | None]:
        """What travels to the coordinator: the table, narrowed to what the plan writes.

        Returns:
            The table, and how to read an answer to a narrowed one; None for a plan of everything.
        """
        table, writes = self.table, self.writes
        everything = (
            len(writes.leaf) == len(table.sizes)
            and len(writes.object_leaf) == int((table.kind != TENSOR).sum())
            and np.array_equal(writes.sizes, table.sizes)
            and np.array_equal(writes.leaf, table.leaf_of_row())
        )
        return (table, None) if everything else _narrowed(table, writes)

    def spans(self) -> list[ChunkSpan]:
        """The regions in the order of their file's bytes, with their places."""
        writes = self.writes
        count = len(writes.leaf)
        keys = [self.names[leaf].encode() for leaf in writes.leaf.tolist()]
        items = [self.tensor_item(position) for position in range(count)]
        walk = sorted(range(count), key=lambda i: (keys[i], items[i].index.offset))
        nbytes = self._region_nbytes()[walk]
        layout = lay_out(np.zeros(count, dtype=np.int64), nbytes, 1)
        file_keys = name_chunks([items[i] for i in walk])
        return [
            ChunkSpan(
                items[walk[row]], file_keys[row], BY_CODE[int(self.table.dtype[items[walk[row]].leaf])],
                int(layout.byte_offset[row]), int(nbytes[row]),
            )
            for row in layout.order.tolist()
        ]  # fmt: skip

    def objects(self) -> list[WriteItem]:
        """The objects in the order of the `.bytes` file."""
        return [self.object_item(position) for position in range(len(self.writes.object_leaf))]


@dataclass(frozen=True, slots=True, eq=False)
class Narrowing:
    """How leaves and boxes of a narrowed table map to those of the table it was made from.

    Attributes:
        leaf: Leaf before, for each leaf. Shape (L',).
        ordinal: Box before, for each box row. Shape (N',).
        start: Where in that box the row starts. Shape (N', D).
        first_row: First box row of each leaf. Shape (L',).
    """

    leaf: Int64
    ordinal: Int64
    start: Int64
    first_row: Int64

    def translate(self, writes: WriteList) -> WriteList:
        """Restate a write list in terms of the table before."""
        row = self.first_row[writes.leaf] + writes.ordinal
        return replace(
            writes,
            leaf=self.leaf[writes.leaf].astype(np.int32),
            ordinal=self.ordinal[row].astype(np.int32),
            start=writes.start + self.start[row],
            object_leaf=self.leaf[writes.object_leaf].astype(np.int32),
            names={int(self.leaf[leaf]): name for leaf, name in writes.names.items()},
            divergent=self.leaf[writes.divergent],
            lowest=self.leaf[writes.lowest],
        )


def _narrowed(table: LocalTable, writes: WriteList) -> tuple[LocalTable, Narrowing]:
    """A table of just the leaves and regions that a plan writes, and of leaves that are the same memory as those."""
    written = np.zeros(len(table.paths), dtype=bool)
    written[writes.leaf] = written[writes.object_leaf] = True
    tied = ~written & written[table.alias]
    kept = np.flatnonzero(written | tied)
    order = np.argsort(writes.leaf, kind="stable")
    leaf = writes.leaf[order]
    row = (np.cumsum(table.boxes, dtype=np.int64) - table.boxes)[leaf] + writes.ordinal[order]
    boxes = np.bincount(np.searchsorted(kept, leaf), minlength=len(kept)).astype(np.int32)
    alias = np.searchsorted(kept, np.where(tied, table.alias, np.arange(len(tied)))[kept]).astype(np.int32)
    narrow = LocalTable(
        tuple(table.paths[i] for i in kept.tolist()), table.kind[kept], table.dtype[kept], table.ndim[kept],
        table.flags[kept], boxes, alias, table.shape[kept],
        table.offsets[row] + writes.start[order], writes.sizes[order], table.values[kept],
    )  # fmt: skip
    first_row = np.cumsum(boxes, dtype=np.int64) - boxes
    return narrow, Narrowing(kept, writes.ordinal[order].astype(np.int64), writes.start[order], first_row)


def name_chunks(items: Sequence[WriteItem]) -> list[str]:
    """Name the chunks of one file: the tensor's name, with `@` and the offsets where it has several there.

    A name that would meet another is spelled canonically, its `@` escaped.
    """
    several: dict[str, int] = {}
    for item in items:
        several[item.index.fqn] = several.get(item.index.fqn, 0) + 1
    single = {name for name, count in several.items() if count == 1}
    keys, taken = [], set(single)
    for item in items:
        name, offset = item.index.fqn, item.index.offset or ()
        key = name if name in single else _with_offsets(name, offset)
        if name not in single and key in taken:
            key = _with_offsets(canonical_name((PathKey("key", name),)), offset)
        taken.add(key)
        keys.append(key)
    return keys


def _with_offsets(name: str, offset: tuple[int, ...]) -> str:
    return f"{name}@{','.join(map(str, offset))}"
