"""Local tensors as shards: what a layout, or a note of the user, makes of a plain tensor.

In: the description of the local tensor by itself, and where it lies. Out: the description that counts. Views are cut by
the tensor's own access, so this serves every framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dcp_core.box import Box
from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.chunk_info import ChunkInfo
from dcp_core.planning.foreign_layouts import Holding
from dcp_core.planning.leaves import LocalTensor
from dcp_core.planning.strategy_layouts import KnownLayout

_SHOWN_RANKS = 16


def place_by_layout(
    tensor: LocalTensor, known: KnownLayout, rank: int, global_shape: Sequence[int] | None = None
) -> LocalTensor:
    """Describe a local tensor by its layout.

    Args:
        tensor: The local tensor as a whole one.
        known: Its layout, which names this rank.
        rank: This rank, as the layout counts.
        global_shape: The shape as a whole; by default what the layout tells, or the local shape times the cuts.

    Raises:
        UnsupportedValueError: The rank is not in the layout, or the local tensor is not shaped as it says.
    """
    shape = known.whole_shape(tensor.global_shape) if global_shape is None else tuple(global_shape)
    here = known.holding(shape, rank)
    if here is None:
        raise UnsupportedValueError(
            f"a tensor of shape {tensor.global_shape} lies on rank {rank}, and its layout is for the ranks "
            f"{list(known.layout.ranks[:_SHOWN_RANKS])}; give each rank the layouts of what it holds"
        )
    return place_by_holding(tensor, shape, here, f"tensor_map {known.layout.tensor_map}")


def place_by_holding(tensor: LocalTensor, shape: tuple[int, ...], here: Holding, named: str) -> LocalTensor:
    """Describe a local tensor by what is held of the global one.

    Args:
        tensor: The local tensor as a whole one.
        shape: Global shape.
        here: What this rank holds.
        named: What an error calls the layout.

    Raises:
        UnsupportedValueError: The local tensor has another shape.
    """
    local = tensor.global_shape
    if here.flat_range is not None:
        start, stop = here.flat_range
        return place_by_chunk(tensor, ChunkInfo((start,), (stop - start,), shape, here.replica_ranks))
    assert here.cut is not None
    if here.cut.local_shape != local:
        raise UnsupportedValueError(
            f"a tensor of shape {shape} with {named} has a local tensor of shape {here.cut.local_shape} on this rank; "
            f"found one of shape {local}"
        )
    boxes, view = here.cut.boxes, tensor.views[0] if tensor.views else None
    if view is None or len(boxes) == 1:
        views: tuple[Any, ...] = (view,)
    else:
        places = [
            Box(tuple(part.start for part in place), box.sizes)
            for place, box in zip(here.cut.slices, boxes, strict=True)
        ]
        views = tuple(tensor.access.narrow(view, place) for place in places)
    return _placed(tensor, shape, boxes, views, here.replica_ranks)


def place_by_chunk(tensor: LocalTensor, chunk: ChunkInfo) -> LocalTensor:
    """Describe a local tensor by a note on it.

    Args:
        tensor: The local tensor as a whole one.
        chunk: Where it lies; its sizes are the tensor's shape.

    Raises:
        UnsupportedValueError: A flat range in memory that has no other shape.
    """
    boxes = chunk.boxes
    view = tensor.views[0] if tensor.views else None
    views: list[Any] = [view]
    if chunk.is_flat and view is not None:
        views, at = [], 0
        for box in boxes:
            part = tensor.access.narrow(view, Box((at,), (box.numel,)))
            views.append(part if box.ndim == 1 else _reshaped(part, box.sizes))
            at += box.numel
    return _placed(tensor, chunk.global_shape, boxes, views, chunk.replica_ranks)


def place_nowhere(tensor: LocalTensor, shape: tuple[int, ...]) -> LocalTensor:
    """Describe a local tensor that is no part of the global one, on a rank outside its layout.

    Args:
        tensor: The local tensor as a whole one.
        shape: Global shape.
    """
    return replace(tensor, global_shape=shape, boxes=(), views=(), storage=None, plain=False)


def _reshaped(part: Any, sizes: tuple[int, ...]) -> Any:
    if not hasattr(part, "reshape"):
        raise UnsupportedValueError(
            f"a range of a flattened tensor on a device, {part!r}, cannot be taken apart here; annotate tensors of as "
            "many dimensions as the global one"
        )
    return part.reshape(sizes)


def _placed(
    tensor: LocalTensor,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    views: Sequence[Any],
    ranks: tuple[int, ...] | None,
) -> LocalTensor:
    """The description with these parts; without any where the tensor has no elements."""
    if not tensor.views:
        boxes, views = (), ()
    return replace(tensor, global_shape=shape, boxes=tuple(boxes), views=tuple(views), plain=False, replica_ranks=ranks)
