"""What torch tensors hold of their global tensors.

In: DTensors, tensors of `torch.distributed._shard`, tensors laid out as HyperParallel's, annotated and plain tensors.
Out: `LocalTensor`. A rank outside a tensor's mesh holds nothing of it. Types that are not imported are not looked for:
this module imports no DTensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from dcp_core.box import Box
from dcp_core.dtype import DTYPES, DType, Kind
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.cuts import LocalLayout, local_layout
from dcp_core.planning.leaves import LocalTensor, TensorAccess, part_tensor, whole_shape, whole_tensor
from dcp_torch.annotate import ChunkInfo, chunk_of, has_note
from dcp_torch.elements import contiguous_identity
from dcp_torch.laid_out import describe_laid_out, layout_of
from dcp_torch.memory import PLAIN_TYPES, device_type, is_a, plain_memory
from dcp_torch.parts import boxes_and_views, describe_range, described
from dcp_torch.sharding import placement_cuts, ragged_part

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

_SIMPLE_DTYPES = {
    getattr(torch, dtype.name): dtype
    for dtype in DTYPES
    if dtype.kind is not Kind.COMPLEX and hasattr(torch, dtype.name)
}
_layouts: dict[Hashable, LocalLayout] = {}
_MOST_LAYOUTS = 4096
_meshes: dict[int, tuple[weakref.ref[DeviceMesh], tuple[int, ...], tuple[int, ...] | None]] = {}
_MOST_MESHES = 256


def describe_tensor(value: torch.Tensor, access: TensorAccess) -> LocalTensor:
    """Describe any torch tensor.

    Args:
        value: A plain tensor, an annotated one, a DTensor, a ShardedTensor, or one laid out as HyperParallel's.
        access: How the views of the result are reached.

    Raises:
        UnsupportedValueError: A tensor that cannot be stored as it is; the message says what to do.
    """
    simple = _describe_simple(value, access)
    if simple is not None:
        return simple
    special = _special_describer(value)
    found = special(value, access) if special is not None else None
    if found is not None:
        return found
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
    simple = _simple_memory(value)
    if simple is None or has_note(value):
        return None
    dtype, view, device = simple
    whole = whole_shape(value.shape)
    storage = contiguous_identity(value, whole.shape) if whole.boxes else None
    return whole_tensor(whole, dtype, view, access, device, storage)


def _simple_memory(value: torch.Tensor) -> tuple[DType, torch.Tensor, str] | None:
    """Element type, detached elements and device of a contiguous tensor with nothing special; None for any other."""
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        return None
    dtype = _SIMPLE_DTYPES.get(value.dtype)
    if dtype is None or value.is_nested:
        return None
    if value.layout is not torch.strided or not value.is_contiguous() or value.is_neg():
        return None
    device = device_type(value.device)
    if device == "meta" or value.untyped_storage().nbytes() < value.nbytes:
        return None
    return dtype, value.detach() if value.requires_grad else value, device


def _special_describer(value: torch.Tensor) -> Callable[[Any, TensorAccess], LocalTensor | None] | None:
    if type(value) in PLAIN_TYPES:
        return None
    if is_a(value, "torch.distributed.tensor", "DTensor"):
        return describe_dtensor
    if is_a(value, "torch.distributed._shard.sharded_tensor", "ShardedTensor"):
        return describe_sharded_tensor
    return describe_laid_out if layout_of(value) is not None else None


def _describe_whole(memory: torch.Tensor, access: TensorAccess) -> LocalTensor:
    shape = tuple(memory.shape)
    return described(shape, [memory], [Box.whole(shape)], [memory], access, dtype=memory.dtype, plain=True)


def _describe_annotated(memory: torch.Tensor, chunk: ChunkInfo, access: TensorAccess) -> LocalTensor:
    boxes, views = boxes_and_views(memory, chunk)
    ranks = chunk.replica_ranks
    return described(chunk.global_shape, [memory], boxes, views, access, dtype=memory.dtype, replica_ranks=ranks)


def describe_dtensor(value: DTensor, access: TensorAccess) -> LocalTensor:
    """Describe a DTensor by its placements. A rank outside its mesh holds nothing.

    Raises:
        UnsupportedValueError: A `Partial`, or a local tensor that is not shaped as the placements say.
    """
    spec = value._spec
    shape, (mesh_shape, coordinate) = tuple(value.shape), _place_on(spec.mesh)
    local: torch.Tensor = value._local_tensor
    if coordinate is None:
        return described(shape, [local], (), (), access, dtype=value.dtype)
    if is_a(local, "torch.distributed.tensor._shards_wrapper", "LocalShardsWrapper"):
        wrapper = cast("LocalShardsWrapper", local)
        return _describe_shards(shape, wrapper.local_shards(), wrapper.local_offsets(), access, value.dtype)
    ragged = ragged_part(spec.placements, mesh_shape, coordinate, shape)
    if ragged is not None:
        return describe_range(plain_memory(local), ragged, shape, access)
    layout = _layout(shape, spec, mesh_shape, coordinate)
    simple = _simple_memory(local)
    if simple is not None and len(layout.boxes) == 1 and local.shape == layout.local_shape:
        dtype, view, device = simple
        storage = contiguous_identity(local, layout.local_shape)
        return part_tensor(shape, layout.boxes[0], dtype, view, access, device, storage)
    memory = plain_memory(local)
    _check_local_shape(value, memory, layout)
    whole = len(layout.boxes) == 1
    views = [memory if whole else memory[slices] for slices in layout.slices]
    return described(shape, [memory], layout.boxes, views, access, dtype=memory.dtype)


def _place_on(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shape of a mesh, and this rank's coordinate on it; looked up once for all tensors on it."""
    found = _meshes.get(id(mesh))
    if found is not None and found[0]() is mesh:
        return found[1], found[2]
    coordinate = mesh.get_coordinate()
    shape, place = tuple(mesh.shape), None if coordinate is None else tuple(coordinate)
    if len(_meshes) >= _MOST_MESHES:
        _meshes.clear()
    _meshes[id(mesh)] = weakref.ref(mesh), shape, place
    return shape, place


def _layout(shape: tuple[int, ...], spec: Any, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> LocalLayout:
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


def _check_local_shape(value: DTensor, memory: torch.Tensor, layout: LocalLayout) -> None:
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
    return described(shape, memories, boxes, memories, access, dtype=dtype)
