"""Flat buffers that several tensors are packed into, as shards.

In: a rank's range of such a buffer. Out: annotated tensors that share its memory, one for each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dcp_core.errors import ArgumentError
from dcp_core.planning.packed import packed_parts
from dcp_torch.annotate import annotate_shard


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
        ArgumentError: Not a 1-d tensor, a start or a shape that is none, or `begins` that names other tensors.

    >>> parts = split_flat(torch.arange(5), start=4, shapes={"a": (2, 3), "b": (4,)})
    >>> [(name, part.tolist()) for name, part in parts.items()]
    [('a', [0, 1]), ('b', [2, 3, 4])]
    """
    if not isinstance(buffer, torch.Tensor) or buffer.dim() != 1:
        raise ArgumentError(f"split_flat takes a 1-d tensor apart; got {type(buffer).__name__} {buffer!r}")
    memory = buffer.detach()
    return {
        name: annotate_shard(memory[part.start : part.stop], offsets=(part.offset,), global_shape=part.shape)
        for name, part in packed_parts(start, memory.numel(), shapes, begins).items()
    }
