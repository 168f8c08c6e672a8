"""Safe encodings of torch values that stand inside objects (a leaf tensor is stored as a tensor, not here).

In: a value of exactly the named type. Out: plain values that `dcp_core.formats.objects` encodes, and back. Tensors come
back on the CPU, whatever device they were on.
"""

from __future__ import annotations

from typing import Any

import torch

from dcp_core.errors import CorruptError
from dcp_core.formats.objects import ObjectCodec
from dcp_core.formats.tensor_values import plain_tensor, tensor_bits
from dcp_torch.elements import dtype_of, read_bits, tensor_of_bits
from dcp_torch.memory import plain_memory


def _encode_tensor(value: Any) -> object:
    bits = read_bits(plain_memory(value))
    return (*plain_tensor(bits, dtype_of(value.dtype), value.shape), bool(value.requires_grad))


def _decode_tensor(plain: Any) -> torch.Tensor:
    try:
        name, shape, raw, requires_grad = plain
        return tensor_of_bits(*tensor_bits(name, shape, raw)).requires_grad_(bool(requires_grad))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CorruptError(f"an encoded tensor is not well formed: {error}") from error


def _decode_parameter(plain: Any) -> torch.nn.Parameter:
    tensor = _decode_tensor(plain)
    return torch.nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)


def _decode_size(plain: Any) -> torch.Size:
    try:
        return torch.Size(tuple(plain))
    except TypeError as error:
        raise CorruptError(f"an encoded torch.Size is not well formed: {error}") from error


def _decode_dtype(plain: Any) -> torch.dtype:
    found = getattr(torch, plain, None) if isinstance(plain, str) else None
    if not isinstance(found, torch.dtype):
        raise CorruptError(f"{plain!r} is no dtype of torch {torch.__version__}")
    return found


def _decode_device(plain: Any) -> torch.device:
    try:
        return torch.device(plain)
    except (TypeError, RuntimeError) as error:
        raise CorruptError(f"{plain!r} is no torch device: {error}") from error


def tensor_codec() -> ObjectCodec:
    """The codec of plain tensors."""
    return ObjectCodec("torch.Tensor", "torch.Tensor", _encode_tensor, _decode_tensor)


def parameter_codec() -> ObjectCodec:
    """The codec of parameters."""
    return ObjectCodec("torch.Parameter", "torch.nn.parameter.Parameter", _encode_tensor, _decode_parameter)


def size_codec() -> ObjectCodec:
    """The codec of shapes."""
    return ObjectCodec("torch.Size", "torch.Size", list, _decode_size)


def dtype_codec() -> ObjectCodec:
    """The codec of dtypes."""
    return ObjectCodec("torch.dtype", "torch.dtype", lambda value: str(value).removeprefix("torch."), _decode_dtype)


def device_codec() -> ObjectCodec:
    """The codec of devices."""
    return ObjectCodec("torch.device", "torch.device", str, _decode_device)
