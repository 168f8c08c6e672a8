"""Shards without DTensor: a plain tensor that carries where it lies in its global tensor.

For frameworks that cut tensors by hand. The note is kept with the tensor and with its storage, so that it survives
`detach()`, and therefore `nn.Module.state_dict()`; tensors made from it (`clone()`, optimizer moments) have none.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from dcp_core.errors import ArgumentError
from dcp_torch.elements import storage_identity

_ATTRIBUTE = "_dcp_chunk"
_noted_storages = False
"""Whether this process has noted anything on a storage; until then none is looked at."""

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


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
            object.__setattr__(self, name, _counts(name, getattr(self, name)))
        if self.replica_ranks is not None:
            object.__setattr__(self, "replica_ranks", _counts("replica_ranks", self.replica_ranks))
        if len(self.offsets) != len(self.sizes):
            raise ArgumentError(f"offsets {self.offsets} and sizes {self.sizes} differ in length")
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

    @property
    def is_flat(self) -> bool:
        """Whether it is a range of the flattened global tensor."""
        return len(self.sizes) == 1 and len(self.global_shape) != 1

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        found = 1
        for size in self.global_shape:
            found *= size
        return found


def _counts(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        found = tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise ArgumentError(f"{name} must be a sequence of whole numbers, one a dimension; got {values!r}") from error
    if any(value < 0 for value in found):
        raise ArgumentError(f"{name} must not be negative, found {found}")
    return found


def annotate_shard(
    tensor: _Tensor,
    *,
    offsets: Sequence[int],
    global_shape: Sequence[int],
    replica_ranks: Sequence[int] | None = None,
) -> _Tensor:
    """Note on a plain tensor which part of a global tensor it is.

    Args:
        tensor: A plain tensor or parameter.
        offsets: Where it starts in the global tensor, in elements; one number for a 1-d tensor that is a range of a
            flattened tensor with another number of dimensions.
        global_shape: Shape of the global tensor.
        replica_ranks: Ranks that hold the same part, if known.

    Returns:
        The same tensor.

    Raises:
        ArgumentError: Not a tensor, offsets or a shape that are no sequences of whole numbers, or a part that does
            not lie in the global tensor.
    """
    global _noted_storages
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"annotate_shard notes something on a torch.Tensor; got {tensor!r}, a {type(tensor).__name__}"
        )
    ranks = None if replica_ranks is None else _counts("replica_ranks", replica_ranks)
    chunk = ChunkInfo(_counts("offsets", offsets), tuple(tensor.shape), _counts("global_shape", global_shape), ranks)
    setattr(tensor, _ATTRIBUTE, chunk)
    key = _key(tensor)
    if key is not None:
        _noted_storages = True
        storage = tensor.untyped_storage()
        notes: dict[Hashable, ChunkInfo] = getattr(storage, _ATTRIBUTE, {})
        setattr(storage, _ATTRIBUTE, {**notes, key: chunk})
    return tensor


def chunk_of(tensor: torch.Tensor) -> ChunkInfo | None:
    """What `annotate_shard` noted on this tensor, or on one that is the same elements of the same memory.

    Raises:
        ArgumentError: The tensor has another shape than when it was annotated.
    """
    chunk: ChunkInfo | None = getattr(tensor, _ATTRIBUTE, None)
    if chunk is None:
        notes = getattr(tensor.untyped_storage(), _ATTRIBUTE, None) if _noted_storages else None
        key = _key(tensor) if notes else None
        return notes[key] if notes and key in notes else None
    if chunk.sizes != tuple(tensor.shape):
        raise ArgumentError(
            f"the tensor was annotated as a chunk of sizes {chunk.sizes} and now has the shape {tuple(tensor.shape)}; "
            "call annotate_shard() again"
        )
    return chunk


def has_note(tensor: torch.Tensor) -> bool:
    """Whether something was noted on this tensor, or on tensors that share its memory; `chunk_of` tells what."""
    if getattr(tensor, _ATTRIBUTE, None) is not None:
        return True
    return _noted_storages and hasattr(tensor.untyped_storage(), _ATTRIBUTE)


def _key(tensor: torch.Tensor) -> Hashable | None:
    return storage_identity(tensor)
