"""What MindSpore tensors hold of their global tensors.

In: tensors and parameters, plain, annotated, or laid out as HyperParallel's DTensor (known by its surface: no module of
it is imported). Out: `LocalTensor`. What `layouts=` says of plain tensors is added by `state_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore

from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.foreign_layouts import holding, is_layout, refuse_partial
from dcp_core.planning.leaves import LocalTensor, whole_shape, whole_tensor
from dcp_core.planning.placed_shards import place_by_chunk, place_by_holding, place_nowhere
from dcp_core.type_names import name_of_type
from dcp_mindspore.annotate import chunk_of
from dcp_mindspore.elements import memory_of

_SPARSE = tuple(
    kind for name in ("COOTensor", "CSRTensor", "RowTensor") if (kind := getattr(mindspore, name, None)) is not None
)


def describe_tensor(value: Any, rank: Callable[[], int]) -> LocalTensor | None:
    """Describe any tensor of MindSpore.

    Args:
        value: A tensor or parameter, plain, annotated, or with the surface of HyperParallel's DTensor.
        rank: Tells this process's rank in the job, where a layout is asked.

    Returns:
        None for a value that is no tensor.

    Raises:
        UnsupportedValueError: A tensor that cannot be stored as it is; the message says what to do.
    """
    if is_laid_out(value):
        return describe_laid_out(value, rank())
    if not isinstance(value, mindspore.Tensor):
        _refuse_sparse(value)
        return None
    _refuse_subclass(value)
    _initialise(value)
    tensor = _describe_whole(value)
    try:
        chunk = chunk_of(value)
    except ArgumentError as error:
        raise UnsupportedValueError(str(error)) from error
    return tensor if chunk is None else place_by_chunk(tensor, chunk)


def _describe_whole(tensor: Any) -> LocalTensor:
    memory = memory_of(tensor)
    whole = whole_shape(tuple(tensor.shape))
    return whole_tensor(whole, memory.dtype, memory.view, memory.access, memory.device, memory.storage)


def is_laid_out(value: Any) -> bool:
    """Whether a value has the surface of HyperParallel's DTensor: `to_local()`, a global `shape`, and a `layout`."""
    if not callable(getattr(type(value), "to_local", None)):
        return False
    return is_layout(getattr(value, "layout", None)) and hasattr(value, "shape")


def describe_laid_out(value: Any, rank: int) -> LocalTensor | None:
    """Describe a value with that surface. A rank outside its layout's rank list holds nothing.

    Args:
        value: What `is_laid_out` knows.
        rank: This rank, as the layout names ranks.

    Returns:
        None where the local tensor is not MindSpore's.

    Raises:
        UnsupportedValueError: A Partial, a local tensor that is not shaped as the layout says, or one without values.
    """
    local = value.to_local()
    if not isinstance(local, mindspore.Tensor):
        return None
    layout, shape = value.layout, tuple(int(size) for size in value.shape)
    refuse_partial(layout, getattr(value, "placements", None))
    if local.has_init:
        raise UnsupportedValueError(
            f"a DTensor of shape {shape} has no values yet: its initialisation was put off; initialise it before it is "
            "saved or loaded into"
        )
    here = holding(layout, shape, rank)
    tensor = _describe_whole(local)
    if here is None:
        return place_nowhere(tensor, shape)
    return place_by_holding(tensor, shape, here, f"the layout {layout!r}")


def _refuse_sparse(value: Any) -> None:
    if isinstance(value, _SPARSE):
        raise UnsupportedValueError(
            f"a {type(value).__name__} has no plain memory; store its indices, values and shape as tensors of their own"
        )
    if isinstance(value, mindspore.Parameter):  # a MapParameter is a Parameter and no Tensor
        raise UnsupportedValueError(
            f"a {type(value).__name__} is a table and no tensor; store the tensors that its export_data() gives"
        )


def _refuse_subclass(value: Any) -> None:
    """Refuse a subclass of Tensor that nobody here knows. MindSpore makes a class for parameters of each class."""
    kind = type(value)
    if kind is mindspore.Tensor or kind is mindspore.Parameter:
        return
    if isinstance(value, mindspore.Parameter) and set(kind.__bases__) <= {mindspore.Parameter, mindspore.Tensor}:
        return
    raise UnsupportedValueError(
        f"a tensor of the subclass {name_of_type(kind)} cannot be stored: what its elements are is "
        "known to nobody here; put its plain tensors into the state, or register a describer for the type by the hook "
        "dcp_describers"
    )


def _initialise(value: Any) -> None:
    """Give a tensor its values whose initialisation was put off; it stays the same object."""
    if value.has_init:
        value.init_data()
