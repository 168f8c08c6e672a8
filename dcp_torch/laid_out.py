"""Tensors that are laid out as HyperParallel's DTensor, known by their public surface.

In: a value with `to_local()`, a global `shape`, and a `layout` of `dcp_core.planning.foreign_layouts`. Out:
`LocalTensor`. The framework is not imported, and its type is not asked for: whatever has this surface is served.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.foreign_layouts import holding, is_layout, refuse_partial
from dcp_core.planning.leaves import LocalTensor, TensorAccess
from dcp_torch.memory import plain_memory
from dcp_torch.parts import describe_range, described


def layout_of(value: object) -> Any | None:
    """The layout of a value with this surface; None for any other value, tensors of torch among them."""
    kind = type(value)
    if not callable(getattr(kind, "to_local", None)) or getattr(kind, "layout", None) is torch.Tensor.layout:
        return None
    layout = getattr(value, "layout", None)
    return layout if is_layout(layout) and hasattr(value, "shape") else None


def describe_laid_out(value: Any, access: TensorAccess) -> LocalTensor | None:
    """Describe a value with this surface. A rank outside the layout's rank list holds nothing.

    Args:
        value: What `layout_of` knows.
        access: How the views of the result are reached.

    Returns:
        None where the local tensor is not torch's.

    Raises:
        UnsupportedValueError: A Partial, a cut that does not come out even where the layout does not say how it is
            made, or a local tensor that is not shaped as the layout says.
    """
    local = value.to_local()
    if not isinstance(local, torch.Tensor):
        return None
    layout, shape = value.layout, tuple(value.shape)
    refuse_partial(layout, getattr(value, "placements", None))
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    here = holding(layout, shape, rank)
    memory = plain_memory(local)
    if here is None:
        return described(shape, [memory], (), (), access, dtype=memory.dtype)
    if here.flat_range is not None:
        return describe_range(memory, here.flat_range, shape, access, here.replica_ranks)
    assert here.cut is not None
    if tuple(memory.shape) != here.cut.local_shape:
        raise UnsupportedValueError(
            f"a tensor of shape {shape} with the layout {layout!r} should have a local tensor of shape "
            f"{here.cut.local_shape} on rank {rank}, found {tuple(memory.shape)}; make it with the right layout, or "
            "annotate_shard() the local tensor"
        )
    whole = len(here.cut.boxes) == 1
    views = [memory if whole else memory[slices] for slices in here.cut.slices]
    ranks = here.replica_ranks
    return described(shape, [memory], here.cut.boxes, views, access, dtype=memory.dtype, replica_ranks=ranks)
