"""What torch tensors hold of their global tensors.

In: DTensors, tensors of `torch.distributed._shard`, annotated and plain tensors. Out: `LocalTensor`. A rank outside a
tensor's mesh holds nothing of it. Types that are not imported are not looked for: this module imports no DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from dcp_core.box import Box, flat_range_to_boxes
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.leaves import LocalTensor, TensorAccess
from dcp_torch.annotate import ChunkInfo, chunk_of
from dcp_torch.elements import dtype_of, storage_identity
from dcp_torch.sharding import Layout, local_layout, placement_cuts

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_LAYOUT_REMEDY = {
    torch.sparse_coo: "to_dense()",
    torch.sparse_csr: "to_dense()",
    torch.sparse_csc: "to_dense()",
    torch.sparse_bsr: "to_dense()",
    torch.sparse_bsc: "to_dense()",
}


def describe_tensor(value: torch.Tensor, access: TensorAccess) -> LocalTensor:
    """Describe any torch tensor.

    Args:
        value: A plain tensor, an annotated one, a DTensor or a ShardedTensor.
        access: How the views of the result are reached.

    Raises:
        UnsupportedValueError: A tensor that cannot be stored as it is; the message says what to do.
    """
    special = _special_describer(value)
    if special is not None:
        return special(value, access)
    memory = plain_memory(value)
    try:
        chunk = chunk_of(value)
    except ArgumentError as error:
        raise UnsupportedValueError(str(error)) from error
    return _describe_whole(memory, access) if chunk is None else _describe_annotated(memory, chunk, access)


def _special_describer(value: torch.Tensor) -> Callable[[Any, TensorAccess], LocalTensor] | None:
    if type(value) in _PLAIN_TYPES:
        return None
    if _is_a(value, "torch.distributed.tensor", "DTensor"):
        return describe_dtensor
    if _is_a(value, "torch.distributed._shard.sharded_tensor", "ShardedTensor"):
        return describe_sharded_tensor
    return None


def _is_a(value: object, module: str, name: str) -> bool:
    """Whether a value is of a type whose module nobody may have imported."""
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(value, found)


def plain_memory(value: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as a detached strided tensor that shares their memory.

    Raises:
        UnsupportedValueError: It is of an unknown subclass, or has no strided memory.
    """
    if _is_a(value, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
        value = value.trigger_wait()  # type: ignore[attr-defined]  # of that subclass
    if isinstance(value, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
        raise UnsupportedValueError(
            f"a {type(value).__name__} has no shape yet; run the lazy module once before saving or loading"
        )
    if type(value) not in _PLAIN_TYPES:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UnsupportedValueError(
            f"a tensor of the subclass {name} cannot be stored: what its elements are is known to nobody here; put its "
            "plain tensors into the state, or register a describer for the type by the hook dcp_describers"
        )
    _check_memory(value)
    return value.detach()


def _check_memory(value: torch.Tensor) -> None:
    what = f"a {tuple(value.shape) if not value.is_nested else 'nested'} tensor"
    if value.is_meta:
        raise UnsupportedValueError(
            f"{what} on the meta device has no elements; give it memory first, as module.to_empty(device=...) does"
        )
    if value.is_quantized:
        raise UnsupportedValueError(f"{what} is quantized; store its int_repr() and scales, or dequantize() it")
    if value.is_nested:
        raise UnsupportedValueError(f"{what} has no single shape; store its values() and offsets()")
    if value.layout is not torch.strided:
        remedy = _LAYOUT_REMEDY.get(value.layout, "to_dense()")
        raise UnsupportedValueError(
            f"{what} has the layout {value.layout}; store {remedy}, or its indices and values as tensors of their own"
        )


def _describe_whole(memory: torch.Tensor, access: TensorAccess) -> LocalTensor:
    shape = tuple(memory.shape)
    return _described(shape, memory, [Box.whole(shape)], [memory], access, plain=True)


def _describe_annotated(memory: torch.Tensor, chunk: ChunkInfo, access: TensorAccess) -> LocalTensor:
    boxes: Sequence[Box] = [Box(chunk.offsets, chunk.sizes)]
    views = [memory]
    if chunk.is_flat:
        start = chunk.offsets[0]
        boxes = flat_range_to_boxes(chunk.global_shape, start, start + chunk.sizes[0])
        views = _cut_flat(memory, boxes)
    return _described(chunk.global_shape, memory, boxes, views, access, replica_ranks=chunk.replica_ranks)


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


def describe_dtensor(value: DTensor, access: TensorAccess) -> LocalTensor:
    """Describe a DTensor by its placements. A rank outside its mesh holds nothing.

    Raises:
        UnsupportedValueError: A `Partial`, or a local tensor that is not shaped as the placements say.
    """
    shape = tuple(value.shape)
    coordinate = value.device_mesh.get_coordinate()
    local: torch.Tensor = value._local_tensor
    if coordinate is None:
        return _described(shape, local, (), (), access, dtype=value.dtype)
    if _is_a(local, "torch.distributed.tensor._shards_wrapper", "LocalShardsWrapper"):
        wrapper = cast("LocalShardsWrapper", local)
        return _describe_shards(shape, wrapper.local_shards(), wrapper.local_offsets(), access, value.dtype)
    order = {entry.tensor_dim: entry.mesh_dims for entry in value._spec.shard_order or ()}
    cuts = placement_cuts(value.placements, value.device_mesh.shape, coordinate, len(shape), order)
    layout = local_layout(shape, cuts)
    memory = plain_memory(local)
    _check_local_shape(value, memory, layout)
    whole = len(layout.boxes) == 1
    views = [memory if whole else memory[slices] for slices in layout.slices]
    return _described(shape, memory, layout.boxes, views, access)


def _check_local_shape(value: DTensor, memory: torch.Tensor, layout: Layout) -> None:
    if tuple(memory.shape) != layout.local_shape:
        raise UnsupportedValueError(
            f"a DTensor of shape {tuple(value.shape)} with placements {list(value.placements)} on a mesh "
            f"{tuple(value.device_mesh.shape)} should have a local tensor of shape {layout.local_shape} here, found "
            f"{tuple(memory.shape)}; give DTensor.from_local() the right shape=, or annotate_shard() the local tensor"
        )


def describe_sharded_tensor(value: ShardedTensor, access: TensorAccess) -> LocalTensor:
    """Describe a tensor of the older `torch.distributed._shard`, with any number of local shards.

    Raises:
        UnsupportedValueError: A local shard has no plain memory.
    """
    metadata = value.metadata()
    shards = value.local_shards()
    offsets = [tuple(shard.metadata.shard_offsets) for shard in shards]
    tensors = [shard.tensor for shard in shards]
    return _describe_shards(tuple(metadata.size), tensors, offsets, access, metadata.tensor_properties.dtype)


def _describe_shards(
    shape: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[Sequence[int]],
    access: TensorAccess,
    dtype: torch.dtype,
) -> LocalTensor:
    memories = [plain_memory(tensor) for tensor in tensors]
    boxes = [Box(tuple(start), tuple(memory.shape)) for start, memory in zip(offsets, memories, strict=True)]
    first = memories[0] if memories else None
    return _described(shape, first, boxes, memories, access, dtype=dtype, storage_of=memories)


def _described(
    shape: tuple[int, ...],
    memory: torch.Tensor | None,
    boxes: Sequence[Box],
    views: Sequence[torch.Tensor],
    access: TensorAccess,
    *,
    plain: bool = False,
    dtype: torch.dtype | None = None,
    replica_ranks: tuple[int, ...] | None = None,
    storage_of: Sequence[torch.Tensor] = (),
) -> LocalTensor:
    """Put a `LocalTensor` together; boxes without elements are left out."""
    if dtype is None:
        dtype = torch.get_default_dtype() if memory is None else memory.dtype
    held = [(box, view) for box, view in zip(boxes, views, strict=True) if view.numel()]
    if storage_of:
        keys = [storage_identity(view) for _, view in held]
        storage = tuple(keys) if keys else None
    else:
        storage = storage_identity(memory) if held and memory is not None else None  # type: ignore[assignment]  # a key or a tuple of keys
    return LocalTensor(
        global_shape=shape,
        dtype=dtype_of(dtype),
        boxes=tuple(box for box, _ in held),
        views=tuple(view for _, view in held),
        access=access,
        device="cpu" if memory is None else memory.device.type,
        storage=storage,
        plain=plain,
        replica_ranks=replica_ranks,
    )
