"""Shards without DTensor: a plain tensor that carries where it lies in its global tensor.

For frameworks that cut tensors by hand. The note is kept with the tensor and with its storage, so that it survives
`detach()`, and therefore `nn.Module.state_dict()`; tensors made from it (`clone()`, optimizer moments) have none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence
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
        return math.prod(self.global_shape)


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


def split_flat(
    buffer: torch.Tensor,
    *,
    start: int,
    shapes: Mapping[str, Sequence[int]],
    begins: Mapping[str, int] | None = None,
) -> dict[str, torch.Tensor]:
    """Take apart this rank's range of a flat buffer that several tensors were packed into.

    FSDP's flat parameters and distributed optimizers pack many tensors one after the other, and cut the whole anywhere.
    The result holds a shard for each of those tensors; it can be saved, and loaded into, in place of the buffer.

    Args:
        buffer: What this rank holds: 1-d, contiguous or not.
        start: Which element of the whole packed buffer comes first in it.
        shapes: For each tensor its name and its global shape, in the order in which they are packed.
        begins: For each tensor where it begins in the whole packed buffer, where they do not follow each other without
            a gap. What belongs to no tensor is padding: it is neither saved nor loaded.

    Returns:
        By name an annotated tensor that shares the buffer's memory; one without elements where this rank has none.

    Raises:
        ArgumentError: Not a 1-d tensor, a start that is none, or `begins` that does not name the same tensors.

    >>> parts = split_flat(torch.arange(5), start=4, shapes={"a": (2, 3), "b": (4,)})
    >>> [(name, part.tolist()) for name, part in parts.items()]
    [('a', [0, 1]), ('b', [2, 3, 4])]
    """
    if not isinstance(buffer, torch.Tensor) or buffer.dim() != 1:
        raise ArgumentError(f"split_flat takes a 1-d tensor apart; got {type(buffer).__name__} {buffer!r}")
    (first,) = _counts("start", (start,))
    sizes = {name: _counts(f"the shape of {name}", shape) for name, shape in shapes.items()}
    places = _places(sizes, begins)
    memory, stop = buffer.detach(), first + buffer.numel()
    found: dict[str, torch.Tensor] = {}
    for name, shape in sizes.items():
        begin, end = places[name], places[name] + math.prod(shape)
        low = min(max(begin, first), end)
        high = max(min(end, stop), low)
        part = memory[low - first : high - first] if low < high else memory[:0]
        found[name] = annotate_shard(part, offsets=(low - begin,), global_shape=shape)
    return found


def _places(sizes: Mapping[str, tuple[int, ...]], begins: Mapping[str, int] | None) -> dict[str, int]:
    """Where each tensor begins in the whole packed buffer."""
    if begins is not None:
        if set(begins) != set(sizes):
            raise ArgumentError(
                f"begins must name the tensors that shapes names; these are only in one of them: "
                f"{', '.join(sorted(set(begins) ^ set(sizes)))}"
            )
        return {name: _counts(f"the begin of {name}", (begin,))[0] for name, begin in begins.items()}
    places, at = {}, 0
    for name, shape in sizes.items():
        places[name] = at
        at += math.prod(shape)
    return places


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
