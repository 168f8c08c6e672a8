"""Describe a sharded value by its parts: local tensors, and where each lies. What describers of foreign types call.

In: torch tensors with their offsets in a global tensor. Out: `LocalTensor`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from dcp_core import plugins
from dcp_core.box import Box, flat_range_to_boxes
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.chunk_info import counts
from dcp_core.planning.leaves import LocalTensor, TensorAccess
from dcp_torch.annotate import ChunkInfo
from dcp_torch.elements import dtype_of, storage_identity
from dcp_torch.memory import device_type, plain_memory


def describe_parts(
    parts: Sequence[tuple[torch.Tensor, Sequence[int]]],
    *,
    global_shape: Sequence[int],
    dtype: torch.dtype | None = None,
    replica_ranks: Sequence[int] | None = None,
    ragged: bool = False,
) -> LocalTensor:
    """Describe what this rank holds of one tensor, for the `describe` method of a describer.

    The parts are not copied: a save reads their memory, a load fills it. Those without elements are left out.

    Args:
        parts: Local tensors, each with where it starts in the global tensor, in elements. One number for a 1-d tensor
            of a global tensor with another number of dimensions: a range of the *flattened* global tensor, which is
            split into boxes. None for a rank that holds nothing.
        global_shape: Shape of the whole tensor, the same on all ranks.
        dtype: Element type; needed where there are no parts.
        replica_ranks: Ranks that hold the same parts, if known.
        ragged: Whether the cuts change from save to save.

    Raises:
        ArgumentError: A part that is no pair of a tensor and where it starts, a shape, dtype or ranks that are none.
        UnsupportedValueError: A part that does not lie in the global tensor, has another dtype, or no plain memory.

    >>> half = torch.zeros(2, 6)
    >>> describe_parts([(half, (2, 0))], global_shape=(4, 6)).boxes
    (Box(offsets=(2, 0), sizes=(2, 6)),)
    >>> describe_parts([(torch.zeros(9), (3,))], global_shape=(4, 6)).boxes
    (Box(offsets=(0, 3), sizes=(1, 3)), Box(offsets=(1, 0), sizes=(1, 6)))
    """
    if not isinstance(parts, Sequence):
        raise ArgumentError(f"parts must be a sequence of pairs (torch tensor, start), found {parts!r}")
    for part in parts:
        _check_part(part)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype must be a torch.dtype, found {dtype!r}")
    shape = counts("global_shape", global_shape)
    ranks = None if replica_ranks is None else counts("replica_ranks", replica_ranks)
    if dtype is None:
        if not parts:
            raise UnsupportedValueError("a rank that holds no part of a tensor must tell its dtype: pass dtype=")
        dtype = parts[0][0].dtype
    memories = [plain_memory(tensor) for tensor, _ in parts]
    boxes: list[Box] = []
    views: list[torch.Tensor] = []
    for memory, (_, offsets) in zip(memories, parts, strict=True):
        if memory.dtype != dtype:
            raise UnsupportedValueError(f"the parts of one tensor have the dtypes {dtype} and {memory.dtype}")
        try:
            chunk = ChunkInfo(tuple(offsets), tuple(memory.shape), shape)
        except ArgumentError as error:
            raise UnsupportedValueError(str(error)) from error
        of_part = boxes_and_views(memory, chunk)
        boxes += of_part[0]
        views += of_part[1]
    access = plugins.adapter_named("torch")
    return described(shape, memories, boxes, views, access, dtype=dtype, replica_ranks=ranks, ragged=ragged)


def _check_part(part: Any) -> None:
    if isinstance(part, (tuple, list)) and len(part) == 2 and isinstance(part[0], torch.Tensor):
        if isinstance(part[1], Sequence) and not isinstance(part[1], str):
            return
        found = f"(a tensor, {part[1]!r})"
    elif isinstance(part, (tuple, list)):
        found = f"({', '.join(type(each).__qualname__ for each in part)})"
    else:
        found = f"a {type(part).__qualname__}"
    raise ArgumentError(
        f"describe_parts was given {found} as a part: a part is (torch tensor, start), where start has one number a "
        "dimension; arrays of numpy become tensors of the same memory by torch.from_numpy()"
    )


def boxes_and_views(memory: torch.Tensor, chunk: ChunkInfo) -> tuple[Sequence[Box], Sequence[torch.Tensor]]:
    """The boxes of a part, and for each the view of its elements.

    Args:
        memory: A detached strided tensor of the chunk's sizes.
        chunk: Where it lies.
    """
    if not chunk.is_flat:
        return (Box(chunk.offsets, chunk.sizes),), (memory,)
    (start,), (size,) = chunk.offsets, chunk.sizes
    boxes = flat_range_to_boxes(chunk.global_shape, start, start + size)
    return boxes, _cut_flat(memory, boxes)


def describe_range(
    local: torch.Tensor,
    flat_range: tuple[int, int],
    shape: tuple[int, ...],
    access: TensorAccess,
    replica_ranks: tuple[int, ...] | None = None,
) -> LocalTensor:
    """Describe a local tensor that is a range of the flattened global tensor.

    Args:
        local: A detached strided tensor; contiguous if it has more than one dimension.
        flat_range: First element of the flattened tensor, and one past the last.
        shape: Global shape.
        access: How views are reached.
        replica_ranks: Ranks that hold the same, if known.

    Raises:
        UnsupportedValueError: Another number of elements, or memory that is no range.
    """
    start, stop = flat_range
    if local.numel() != stop - start or (local.dim() != 1 and not local.is_contiguous()):
        raise UnsupportedValueError(
            f"the local tensor of a ragged shard should hold elements {start} to {stop} of the flattened tensor of "
            f"shape {shape} here, one after the other; found {tuple(local.shape)} with strides {local.stride()}"
        )
    boxes = flat_range_to_boxes(shape, start, stop)
    views = _cut_flat(local.reshape(-1), boxes)
    return described(shape, [local], boxes, views, access, dtype=local.dtype, replica_ranks=replica_ranks)


def _cut_flat(memory: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """The consecutive parts of a 1-d tensor, each in the shape of its box."""
    views, at = [], 0
    for box in boxes:
        part = memory[at : at + box.numel]
        strides = _row_major(box.sizes, memory.stride(0))
        views.append(part.as_strided(box.sizes, strides))
        at += box.numel
    return views


def _row_major(sizes: Sequence[int], step: int) -> list[int]:
    strides = []
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return strides[::-1]


def described(
    shape: tuple[int, ...],
    memories: Sequence[torch.Tensor],
    boxes: Sequence[Box],
    views: Sequence[torch.Tensor],
    access: TensorAccess,
    *,
    dtype: torch.dtype,
    plain: bool = False,
    replica_ranks: tuple[int, ...] | None = None,
    ragged: bool = False,
) -> LocalTensor:
    """Put a `LocalTensor` together; boxes without elements are left out.

    Args:
        shape: Global shape.
        memories: The local tensors, detached, that the views are parts of.
        boxes: What is held.
        views: For each box its elements.
        access: How to reach them.
        dtype: Element type.
        plain: Whether it is a whole value.
        replica_ranks: Ranks that hold the same, if known.
        ragged: Whether the cuts change from save to save.
    """
    held = [(box, view) for box, view in zip(boxes, views, strict=True) if view.numel()]
    storage: Hashable | None = None
    if held:
        found = [storage_identity(memory) for memory in memories if memory.numel()]
        storage = found[0] if len(found) == 1 else tuple(found)
    return LocalTensor(
        global_shape=shape,
        dtype=dtype_of(dtype),
        boxes=tuple([box for box, _ in held]),
        views=tuple([view for _, view in held]),
        access=access,
        device=device_type(memories[0].device) if memories else "cpu",
        storage=storage,
        plain=plain,
        ragged=ragged,
        replica_ranks=replica_ranks,
    )
