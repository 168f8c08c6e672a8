"""The plain memory of a tensor, or why it has none.

In: a torch tensor of any kind. Out: its elements as a detached strided tensor that shares their memory.
"""

from __future__ import annotations

import sys

import torch

from dcp_core.errors import UnsupportedValueError
from dcp_core.type_names import type_name

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_device_types: dict[torch.device, str] = {}
_LAYOUT_REMEDY = {
    torch.sparse_coo: "to_dense()",
    torch.sparse_csr: "to_dense()",
    torch.sparse_csc: "to_dense()",
    torch.sparse_bsr: "to_dense()",
    torch.sparse_bsc: "to_dense()",
}


def device_type(device: torch.device) -> str:
    """The `type` of a device, which torch makes anew each time."""
    return _device_types.get(device) or _device_types.setdefault(device, device.type)


def is_a(value: object, module: str, name: str) -> bool:
    """Whether a value is of a type whose module nobody may have imported."""
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(value, found)


def plain_memory(value: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as a detached strided tensor that shares their memory.

    Raises:
        UnsupportedValueError: It is of an unknown subclass, or has no strided memory.
    """
    if type(value) in PLAIN_TYPES:
        _check_memory(value)
        return value.detach()
    if is_a(value, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
        value = value.trigger_wait()  # type: ignore[attr-defined]  # of that subclass
    if isinstance(value, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
        raise UnsupportedValueError(
            f"a {type(value).__name__} has no shape yet; run the lazy module once before saving or loading"
        )
    if type(value) not in PLAIN_TYPES:
        raise UnsupportedValueError(
            f"a tensor of the subclass {type_name(value)} cannot be stored: what its elements are is known to nobody "
            "here; put its plain tensors into the state, or register a describer for the type by the hook "
            "dcp_describers"
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
