"""Numpy as a framework of several ranks, for tests: sharded arrays, and an adapter that knows the ranks' group."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dcp_core.adapter import ProcessGroup
from dcp_core.arrays import ArrayAccess, NumpyAdapter, storage_of
from dcp_core.box import Box, slices
from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.dtype import DType, dtype_named, numpy_dtype
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.leaves import LocalTensor
from dcp_core.testing.numpy_broadcasts import NumpyBroadcasts
from dcp_core.testing.ranks import current_rank


@dataclass(frozen=True, slots=True, eq=False)
class ShardedArray:
    """What one rank holds of a global array: boxes of it, an array for each.

    Attributes:
        global_shape: Shape of the global array, elements.
        boxes: Which parts are held here; empty ones are allowed.
        arrays: For each box an array of its sizes.
        dtype_name: The element type where numpy lacks it ("bfloat16"); the arrays then hold raw bits.
        ragged: The cuts change from save to save.
        replica_ranks: Ranks known to hold the same boxes.

    Raises:
        ArgumentError: Boxes and arrays don't fit each other.
        UnsupportedValueError: Elements that can't be stored.
    """

    global_shape: tuple[int, ...]
    boxes: Sequence[Box]
    arrays: Sequence[npt.NDArray[Any]]
    dtype_name: str | None = None
    ragged: bool = False
    replica_ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(self.global_shape))
        object.__setattr__(self, "boxes", tuple(self.boxes))
        object.__setattr__(self, "arrays", tuple(self.arrays))
        found = [array.shape for array in self.arrays]
        if found != [box.sizes for box in self.boxes]:
            raise ArgumentError(f"arrays of shapes {found} don't fit boxes {self.boxes}")
        if self.dtype_name is None and not self.arrays:
            raise ArgumentError("a ShardedArray that holds nothing needs a dtype_name")
        bits = self.dtype.bits
        if self.dtype_name is not None and any(array.dtype != bits for array in self.arrays):
            raise ArgumentError(f"raw bits of {self.dtype_name} are arrays of {bits}")

    @classmethod
    def cut(cls, array: npt.NDArray[Any], boxes: Sequence[Box], dtype_name: str | None = None) -> ShardedArray:
        """Take boxes out of a global array, copied.

        Args:
            array: The global array.
            boxes: What this rank holds.
            dtype_name: Where numpy lacks the type, else None; needed too when `boxes` may be empty.
        """
        name = dtype_name if dtype_name is not None or boxes else array.dtype.name
        return cls(array.shape, boxes, [array[_index(box)].copy() for box in boxes], name)

    @property
    def dtype(self) -> DType:
        """The element type."""
        if self.dtype_name is not None:
            return dtype_named(self.dtype_name)
        found = numpy_dtype(self.arrays[0].dtype)
        if found is None:
            raise UnsupportedValueError(f"elements of type {self.arrays[0].dtype} can't be stored")
        return found

    def describe(self) -> LocalTensor:
        """Describe the boxes that are not empty."""
        held = [(box, array) for box, array in zip(self.boxes, self.arrays, strict=True) if not box.is_empty]
        storage: Hashable | None = tuple(storage_of(array) for _, array in held) or None
        return LocalTensor(
            self.global_shape,
            self.dtype,
            tuple(box for box, _ in held),
            tuple(array for _, array in held),
            ArrayAccess(self.dtype),
            storage=storage,
            ragged=self.ragged,
            replica_ranks=self.replica_ranks,
        )

    def put_into(self, array: npt.NDArray[Any]) -> None:
        """Copy what is held here to its place in a global array."""
        for box, part in zip(self.boxes, self.arrays, strict=True):
            array[_index(box)] = part


def even_boxes(shape: Sequence[int], parts: int, part: int, dim: int = 0) -> list[Box]:
    """Cut one dimension as torch chunks it, and return one part: no box where nothing is left for it.

    >>> even_boxes((5, 2), 4, 2), even_boxes((5, 2), 4, 3)
    ([Box(offsets=(4, 0), sizes=(1, 2))], [])
    """
    step = -(-shape[dim] // parts)
    start, stop = min(part * step, shape[dim]), min((part + 1) * step, shape[dim])
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, stop - start
    return [Box(tuple(offsets), tuple(sizes))] if stop > start else []


class NumpyRankAdapter(NumpyAdapter):
    """The numpy adapter inside `run_ranks`: knows `ShardedArray`, and the group of the ranks."""

    name = "numpy-ranks"

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a `ShardedArray`, or what `NumpyAdapter` describes."""
        return value.describe() if isinstance(value, ShardedArray) else super().describe(value)

    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        """The group of all ranks, or of those in `group`; a group of one outside `run_ranks`.

        Args:
            group: Ranks that form a group, ascending, this one among them; None: all.
            with_channel: Makes no difference here.

        Raises:
            ArgumentError: This rank is not in the group.
        """
        context = current_rank()
        if context is None:
            return super().process_group(group)
        members = tuple(range(context.world_size)) if group is None else tuple(group)
        if context.rank not in members:
            raise ArgumentError(f"rank {context.rank} is not in the group {members}")
        if len(members) == 1:
            return ProcessGroup(global_rank=context.rank)
        channel = _channel(context.channel_directory)
        key = "ranks" if group is None else "ranks-" + "-".join(str(member) for member in members)
        broadcasts = _broadcasts(context.channel_directory, context.rank)
        return ProcessGroup(
            members.index(context.rank), len(members), context.rank, channel, key, broadcasts=broadcasts
        )


@functools.cache
def _channel(directory: Path) -> DirectoryChannel:
    return DirectoryChannel(directory)


@functools.cache
def _broadcasts(directory: Path, rank: int) -> NumpyBroadcasts:
    return NumpyBroadcasts(_channel(directory), rank)


def _index(box: Box) -> Any:
    return (*slices(box), ...)
