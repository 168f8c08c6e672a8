"""Shards that somebody cut by hand: where a plain local tensor lies in its global tensor.

In: offsets, sizes and a global shape, as a user gives them. Out: `ChunkInfo`, checked, and its boxes. The packages of
the frameworks note it on their tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_core.box import Box, flat_range_to_boxes
from dcp_core.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """Where a plain tensor lies in its global tensor.

    Attributes:
        offsets: Where it starts, in elements of the global tensor. One number for a 1-d tensor of a global tensor
            with another number of dimensions: it then holds a range of the *flattened* global tensor.
        sizes: Its shape.
        global_shape: Shape of the global tensor.
        replica_ranks: Ranks that hold the same part, if known.

    Raises:
        ArgumentError: The chunk does not lie in the global tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]
    replica_ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("offsets", "sizes", "global_shape"):
            object.__setattr__(self, name, counts(name, getattr(self, name)))
        if self.replica_ranks is not None:
            object.__setattr__(self, "replica_ranks", counts("replica_ranks", self.replica_ranks))
        if len(self.offsets) != len(self.sizes):
            raise ArgumentError(
                f"offsets {self.offsets} and sizes {self.sizes} differ in length: a part keeps all dimensions of its "
                "tensor, as local[at : at + 1] does and local[at] does not, and starts at as many numbers"
            )
        bounds = (self.numel,) if self.is_flat else self.global_shape
        if len(bounds) != len(self.sizes):
            raise ArgumentError(
                f"a chunk of sizes {self.sizes} cannot lie in a global shape {self.global_shape}: "
                "as many dimensions are needed, or one for a range of the flattened tensor"
            )
        if any(start + size > bound for start, size, bound in zip(self.offsets, self.sizes, bounds, strict=True)):
            raise ArgumentError(
                f"a chunk at {self.offsets} of sizes {self.sizes} reaches beyond the global shape {self.global_shape}"
            )

    def check_shape(self, shape: Sequence[int]) -> None:
        """Check that the tensor still has the shape that it had when it was annotated.

        Raises:
            ArgumentError: It has not.
        """
        if self.sizes != tuple(shape):
            raise ArgumentError(
                f"the tensor was annotated as a chunk of sizes {self.sizes} and now has the shape {tuple(shape)}; "
                "call annotate_shard() again"
            )

    @property
    def is_flat(self) -> bool:
        """Whether it is a range of the flattened global tensor."""
        return len(self.sizes) == 1 and len(self.global_shape) != 1

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return math.prod(self.global_shape)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """What it holds, in the order of the local memory: one box, or the boxes of a flat range."""
        if not self.is_flat:
            return (Box(self.offsets, self.sizes),)
        return flat_range_to_boxes(self.global_shape, self.offsets[0], self.offsets[0] + self.sizes[0])


def counts(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Check a sequence of whole numbers, none of them negative.

    Args:
        name: What an error calls it.
        values: The numbers.

    Raises:
        ArgumentError: Something else.
    """
    try:
        found = tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise ArgumentError(f"{name} must be a sequence of whole numbers, one a dimension; got {values!r}") from error
    if any(value < 0 for value in found):
        raise ArgumentError(f"{name} must not be negative, found {found}")
    return found
