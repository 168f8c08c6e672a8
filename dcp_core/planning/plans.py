"""Save plans: what planners return and storages carry out.

A plan is a frozen view over columns; items are made when somebody looks. `SavePlan.with_items` makes a plan from
items again, for planners that filter, rename or redirect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dcp_core.errors import PlanningError
from dcp_core.metadata import Int64
from dcp_core.planning.items import ItemType, WriteItem
from dcp_core.planning.local_table import TENSOR, LocalTable
from dcp_core.planning.path_names import names_of_paths
from dcp_core.planning.write_items import PlanItems, WrittenRegions
from dcp_core.planning.write_list import WriteList
from dcp_core.planning.write_spans import AllSpans, ChunkSpan, WriteSpans
from dcp_core.state_path import PathKey, decode_path, encode_path, spell_plain_names

__all__ = ["ChunkSpan", "Narrowing", "SavePlan", "everything_held"]


class SavePlan:
    """What one rank holds (a local plan) or writes (a final plan).

    Attributes:
        table: The rank's leaves and boxes.
        writes: Which regions of them, and which objects.
        containers: (encoded path, kind) of the containers that the paths of the leaves do not determine, sorted.
    """

    def __init__(
        self,
        table: LocalTable,
        writes: WriteList,
        containers: tuple[tuple[bytes, str], ...] = (),
        *,
        plain_names: Sequence[str] | None = None,
    ) -> None:
        self.table = table
        self.writes = writes
        self.containers = containers
        self._given_names = plain_names

    @classmethod
    def of_everything(
        cls,
        table: LocalTable,
        containers: tuple[tuple[bytes, str], ...] = (),
        *,
        plain_names: Sequence[str] | None = None,
    ) -> SavePlan:
        """The plan that writes all that the rank holds.

        Args:
            table: What it holds.
            containers: As in the plan.
            plain_names: Plain name of each leaf, where they are known already.
        """
        leaf = table.leaf_of_row().astype(np.int32)
        objects = np.flatnonzero(table.kind != TENSOR).astype(np.int32)
        ordinal = table.ordinal_of_row().astype(np.int32)
        writes = WriteList(leaf, ordinal, np.zeros_like(table.sizes), table.sizes, objects)
        return cls(table, writes, containers, plain_names=plain_names)

    def with_writes(self, writes: WriteList) -> SavePlan:
        """The plan that writes something else of the same table."""
        return SavePlan(self.table, writes, self.containers, plain_names=self._plain_names)

    @cached_property
    def _plain_names(self) -> Sequence[str]:
        return names_of_paths(self.table.paths) if self._given_names is None else self._given_names

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Printed name of each leaf."""
        is_local = not self.writes.plan_digest
        plain, paths = self._plain_names, self.table.paths
        names = spell_plain_names(plain, lambda leaf: decode_path(paths[leaf])) if is_local else list(plain)
        for leaf, name in self.writes.names.items():
            names[leaf] = name
        return tuple(names)

    @cached_property
    def _regions(self) -> WrittenRegions:
        return WrittenRegions(self.table, self.writes, self.names)

    @cached_property
    def items(self) -> Sequence[WriteItem]:
        """The plan's items, made on request."""
        return PlanItems(self._regions, self.names)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor regions."""
        return int(self._regions.nbytes.sum())

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
            part_rows=np.zeros(0, dtype=np.int64),
        )  # fmt: skip
        self._check_names(chosen)
        renamed = {item.leaf: item.index.fqn for item in chosen if item.index.fqn != self.names[item.leaf]}
        if not renamed:
            return self.with_writes(writes)
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

    def spans(self) -> WriteSpans:
        """The regions in the order of their files' bytes, part after part, with their places."""
        return self._spans

    @cached_property
    def _spans(self) -> WriteSpans:
        laid_out = self.laid_out()
        return WriteSpans(AllSpans(laid_out._regions, laid_out.writes.part_rows))

    def laid_out(self) -> SavePlan:
        """This plan with its regions in the order of their files' bytes."""
        writes = self.writes
        if len(writes.part_rows):
            return self
        rows, part_rows = self._regions.order_of_bytes()
        return self.with_writes(replace(
            writes, leaf=writes.leaf[rows], ordinal=writes.ordinal[rows], start=writes.start[rows],
            sizes=writes.sizes[rows], part_rows=part_rows,
        ))  # fmt: skip

    def objects(self) -> list[WriteItem]:
        """The objects in the order of the `.bytes` file."""
        return PlanItems(self._regions, self.names).objects


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


def everything_held(plan: SavePlan, table: LocalTable, narrowing: Narrowing | None) -> tuple[SavePlan, WriteList]:
    """All that a local plan writes: what counts when it is not known yet what this rank will write.

    Args:
        plan: The local plan.
        table: The table that travels, as `SavePlan.held` gave it.
        narrowing: As `SavePlan.held` gave it.

    Returns:
        The plan in terms of the planner's own table, and its rows in terms of the table that travels.
    """
    writes = SavePlan.of_everything(table).writes
    return plan.with_writes(writes if narrowing is None else narrowing.translate(writes)), writes
