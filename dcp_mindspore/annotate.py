"""Shards by hand: a plain tensor or parameter that carries where it lies in its global tensor.

The note stays with the object. A `Cell` and its optimizer hand out the very parameters that they hold, so it survives
`state_dict()`; what an optimizer keeps for an annotated parameter is taken to be cut like it (`state_rules`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import mindspore

from dcp_core.errors import ArgumentError
from dcp_core.planning.chunk_info import ChunkInfo, counts

__all__ = ["ChunkInfo", "annotate_shard", "chunk_of"]

_ATTRIBUTE = "_dcp_chunk"

_Tensor = TypeVar("_Tensor")


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
    if not isinstance(tensor, mindspore.Tensor):
        raise ArgumentError(
            f"annotate_shard notes something on a mindspore.Tensor; got {tensor!r}, a {type(tensor).__name__}"
        )
    local: Any = tensor
    ranks = None if replica_ranks is None else counts("replica_ranks", replica_ranks)
    chunk = ChunkInfo(counts("offsets", offsets), tuple(local.shape), counts("global_shape", global_shape), ranks)
    setattr(tensor, _ATTRIBUTE, chunk)
    return tensor


def chunk_of(tensor: Any) -> ChunkInfo | None:
    """What `annotate_shard` noted on this tensor.

    Raises:
        ArgumentError: The tensor has another shape than when it was annotated.
    """
    chunk: ChunkInfo | None = getattr(tensor, _ATTRIBUTE, None)
    if chunk is not None:
        chunk.check_shape(tensor.shape)
    return chunk
