"""What torch tensors hold of their global tensors.

In: DTensors, tensors of `torch.distributed._shard`, annotated and plain tensors. Out: `LocalTensor`. A rank outside a
tensor's mesh holds nothing of it. Types that are not imported are not looked for: this module imports no DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from dcp_core.box import Box, flat_range_to_boxes
from dcp_core.dtype import DTYPES, Kind
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.leaves import LocalTensor, TensorAccess, whole_shape, whole_tensor
from dcp_torch.annotate import ChunkInfo, chunk_of, has_note
from dcp_torch.elements import contiguous_identity, dtype_of, storage_identity
from dcp_torch.sharding import Layout, local_layout, placement_cuts

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_SIMPLE_DTYPES = {
    getattr(torch, dtype.name): dtype
    for dtype in DTYPES
    if dtype.kind is not Kind.COMPLEX and hasattr(torch, dtype.name)
}
_device_types: dict[torch.device, str] = {}
_layouts: dict[Hashable, Layout] = {}
_MOST_LAYOUTS = 4096
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
    simple = _describe_simple(value, access)
    if simple is not None:
        return simple
    special = _special_describer(value)
    if special is not None:
        return special(value, access)
    memory = plain_memory(value)
    try:
        chunk = chunk_of(value)
    except ArgumentError as error:
        raise UnsupportedValueError(str(error)) from error
    return _describe_whole(memory, access) if chunk is None else _describe_annotated(memory, chunk, access)


def _describe_simple(value: torch.Tensor, access: TensorAccess) -> LocalTensor | None:
    """Describe a plain, whole, contiguous tensor, as nearly all are; None for others, and for what must be refused.

    It says what the rest of this module says, in a few calls of torch: this runs once a tensor at every save and load.
    """
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        return None
    dtype = _SIMPLE_DTYPES.get(value.dtype)
    if dtype is None or value.is_nested:
        return None
    if value.layout is not torch.strided or not value.is_contiguous() or value.is_neg():
        return None
    device = _device_type(value.device)
    if device == "meta" or has_note(value) or value.untyped_storage().nbytes() < value.nbytes:
        return None
    whole = whole_shape(value.shape)
    view = value.detach() if value.requires_grad else value
    storage = contiguous_identity(value, whole.shape) if whole.boxes else None
    return whole_tensor(whole, dtype, view, access, device, storage)


def _device_type(device: torch.device) -> str:
    """The `type` of a device, which torch makes anew each time."""
    return _device_types.get(device) or _device_types.setdefault(device, device.type)


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
    if type(value) in _PLAIN_TYPES:
        _check_memory(value)
        return value.detach()
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
    steps = sum([(size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)])
    needed = (value.storage_offset() + steps + 1) * value.itemsize if value.numel() else 0
    if value.untyped_storage().nbytes() < needed:
        raise UnsupportedValueError(
            f"{what} needs {needed} bytes and its storage has {value.untyped_storage().nbytes()}: its memory was freed "
            "(untyped_storage().resize_); bring it back before saving or loading"
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
    shape, mesh = tuple(value.shape), value.device_mesh
    coordinate = mesh.get_coordinate()
    local: torch.Tensor = value._local_tensor
    if coordinate is None:
        return _described(shape, local, (), (), access, dtype=value.dtype)
    if _is_a(local, "torch.distributed.tensor._shards_wrapper", "LocalShardsWrapper"):
        wrapper = cast("LocalShardsWrapper", local)
        return _describe_shards(shape, wrapper.local_shards(), wrapper.local_offsets(), access, value.dtype)
    layout = _layout(shape, value._spec, tuple(mesh.shape), tuple(coordinate))
    memory = plain_memory(local)
    _check_local_shape(value, memory, layout)
    whole = len(layout.boxes) == 1
    views = [memory if whole else memory[slices] for slices in layout.slices]
    return _described(shape, memory, layout.boxes, views, access)


def _layout(shape: tuple[int, ...], spec: Any, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Layout:
    """Where a local tensor lies; computed once for all tensors of a shape that are placed alike.

    Placements are told apart here by what is used of them: torch calls a `Shard` equal to some `_StridedShard`s.
    """
    placed = tuple([(type(p), getattr(p, "dim", None), getattr(p, "split_factor", 1)) for p in spec.placements])
    order = tuple([(entry.tensor_dim, tuple(entry.mesh_dims)) for entry in spec.shard_order or ()])
    key = (shape, placed, mesh_shape, coordinate, order)
    found = _layouts.get(key)
    if found is None:
        cuts = placement_cuts(spec.placements, mesh_shape, coordinate, len(shape), dict(order))
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        found = _layouts[key] = local_layout(shape, cuts)
    return found


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
        storage: Hashable = tuple([storage_identity(view) for _, view in held]) or None
    else:
        storage = storage_identity(memory) if held and memory is not None else None
    return LocalTensor(
        global_shape=shape,
        dtype=dtype_of(dtype),
        boxes=tuple(box for box, _ in held),
        views=tuple(view for _, view in held),
        access=access,
        device="cpu" if memory is None else _device_type(memory.device),
        storage=storage,
        plain=plain,
        replica_ranks=replica_ranks,
    )
