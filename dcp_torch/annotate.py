"""Shards without DTensor: a plain tensor that carries where it lies in its global tensor.

For frameworks that cut tensors by hand. The note is kept with the tensor and with its storage, so that it survives
`detach()`, and therefore `nn.Module.state_dict()`; tensors made from it (`clone()`, optimizer moments) have none.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch

from dcp_core.errors import ArgumentError
from dcp_core.planning.chunk_info import ChunkInfo, counts
from dcp_torch.elements import storage_identity

__all__ = ["ChunkInfo", "annotate_shard", "chunk_of", "has_note"]

_ATTRIBUTE = "_dcp_chunk"
_noted_storages = False
"""Whether this process has noted anything on a storage; until then none is looked at."""

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


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
    ranks = None if replica_ranks is None else counts("replica_ranks", replica_ranks)
    chunk = ChunkInfo(counts("offsets", offsets), tuple(tensor.shape), counts("global_shape", global_shape), ranks)
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
    chunk.check_shape(tensor.shape)
    return chunk


def has_note(tensor: torch.Tensor) -> bool:
    """Whether something was noted on this tensor, or on tensors that share its memory; `chunk_of` tells what."""
    if getattr(tensor, _ATTRIBUTE, None) is not None:
        return True
    return _noted_storages and hasattr(tensor.untyped_storage(), _ATTRIBUTE)


def _key(tensor: torch.Tensor) -> Hashable | None:
    return storage_identity(tensor)
