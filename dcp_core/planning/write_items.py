"""The regions and objects that a save plan writes: as columns, and as items when somebody looks.

In: a rank's table and its write list. Out: `WriteItem`s, and names of chunks in the headers of files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import overload

import numpy as np

from dcp_core.dtype import BY_CODE, ITEMSIZE
from dcp_core.metadata import Int64, MetadataIndex, UInt8
from dcp_core.planning.bulk import made_of_columns, tuples_of
from dcp_core.planning.items import ItemType, WriteItem
from dcp_core.planning.layout import lay_out
from dcp_core.planning.local_table import LocalTable
from dcp_core.planning.write_list import WriteList
from dcp_core.state_path import PathKey, canonical_name


class WrittenRegions:
    """The tensor regions of a plan, in the order of its write list.

    Args:
        table: The rank's leaves and boxes.
        writes: Which regions of them.
        names: Name of each leaf.

    Attributes:
        writes: As given.
        row: Box row of each region in the table. Shape (W,).
        dtype: `DType.code`. Shape (W,).
        ndim: Number of dimensions. Shape (W,).
        nbytes: Bytes of each region. Shape (W,).
    """

    def __init__(self, table: LocalTable, writes: WriteList, names: Sequence[str]) -> None:
        self.writes = writes
        self.row: Int64 = (np.cumsum(table.boxes, dtype=np.int64) - table.boxes)[writes.leaf] + writes.ordinal
        self.dtype: UInt8 = table.dtype[writes.leaf]
        self.ndim: UInt8 = table.ndim[writes.leaf]
        self.nbytes: Int64 = np.prod(writes.sizes, axis=1, dtype=np.int64) * ITEMSIZE[self.dtype]
        self._table = table
        self._names = names

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def offsets(self) -> Int64:
        """Where each region starts in its global tensor. Shape (W, D), elements."""
        return self._table.offsets[self.row] + self.writes.start

    @cached_property
    def is_whole(self) -> list[bool]:
        """Whether a region is all of the box that it is cut from."""
        whole: list[bool] = (self.writes.sizes == self._table.sizes[self.row]).all(axis=1).tolist()
        return whole

    @cached_property
    def names(self) -> list[str]:
        """Name of each region's tensor."""
        return [self._names[leaf] for leaf in self.writes.leaf.tolist()]

    @cached_property
    def items(self) -> list[WriteItem]:
        """All regions as items."""
        writes, ndim = self.writes, self.ndim
        index = made_of_columns(
            MetadataIndex, len(self), fqn=self.names, offset=tuples_of(self.offsets, ndim), index=repeat(None)
        )
        return made_of_columns(
            WriteItem, len(self),
            index=index,
            type=repeat(ItemType.TENSOR),
            sizes=tuples_of(writes.sizes, ndim),
            nbytes=self.nbytes.tolist(),
            leaf=writes.leaf.tolist(),
            box=writes.ordinal.tolist(),
            start=tuples_of(writes.start, ndim),
            dtype=[BY_CODE[code] for code in self.dtype.tolist()],
            global_shape=tuples_of(self._table.shape[writes.leaf], ndim),
        )  # fmt: skip

    def order_of_bytes(self) -> tuple[Int64, Int64]:
        """Lay the regions out by the rule of `planning.layout`.

        Returns:
            The regions in the order of the files' bytes, and how many of them each file holds.
        """
        place = np.empty(len(self._names), dtype=np.int64)
        place[sorted(range(len(place)), key=self._names.__getitem__)] = np.arange(len(place))
        walk = np.lexsort((*self.offsets.T[::-1], place[self.writes.leaf]))
        layout = lay_out(np.zeros(len(walk), dtype=np.int64), self.nbytes[walk], 1)
        return walk[layout.order], np.diff(layout.starts)


class PlanItems(Sequence[WriteItem]):
    """The items of a plan, objects after tensors.

    Args:
        regions: The tensor regions.
        names: Name of each leaf.
    """

    def __init__(self, regions: WrittenRegions, names: Sequence[str]) -> None:
        self._regions = regions
        self._names = names

    @cached_property
    def objects(self) -> list[WriteItem]:
        """The objects, in the order of the `.bytes` file."""
        leaves = self._regions.writes.object_leaf.tolist()
        return [WriteItem(MetadataIndex(self._names[leaf]), ItemType.BYTES, (), 0, leaf) for leaf in leaves]

    def __len__(self) -> int:
        return len(self._regions) + len(self._regions.writes.object_leaf)

    @overload
    def __getitem__(self, index: int) -> WriteItem: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[WriteItem, ...]: ...
    def __getitem__(self, index: int | slice) -> WriteItem | tuple[WriteItem, ...]:
        if isinstance(index, slice):
            return tuple([*self._regions.items, *self.objects][index])
        position, regions = range(len(self))[index], len(self._regions)
        return self._regions.items[position] if position < regions else self.objects[position - regions]

    def __iter__(self) -> Iterator[WriteItem]:
        yield from self._regions.items
        yield from self.objects


def name_chunks(names: Sequence[str], offsets: Int64, ndim: UInt8) -> list[str]:
    """Name the chunks of one file: the tensor's name, with `@` and the offsets where it has several there.

    A name that would meet another is spelled canonically, its `@` escaped.

    Args:
        names: Name of each chunk's tensor.
        offsets: Where each chunk starts in its tensor. Shape (N, D), elements.
        ndim: Number of dimensions. Shape (N,).
    """
    counts = Counter(names)
    if len(counts) == len(names):
        return list(names)
    keys = list(names)
    taken = {name for name, count in counts.items() if count == 1}
    several = [row for row, name in enumerate(names) if counts[name] > 1]
    for row, offset in zip(several, tuples_of(offsets[several], ndim[several]), strict=True):
        key = _with_offsets(names[row], offset)
        keys[row] = key if key not in taken else _with_offsets(canonical_name((PathKey("key", names[row]),)), offset)
        taken.add(keys[row])
    return keys


def _with_offsets(name: str, offset: tuple[int, ...]) -> str:
    return f"{name}@{','.join(map(str, offset))}"
