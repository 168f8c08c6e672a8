"""Safe encodings of MindSpore values that stand inside objects (a leaf tensor is stored as a tensor, not here).

In: a value of exactly the named type. Out: plain values that `dcp_core.formats.objects` encodes, and back. Tensors come
back in host memory, whatever device they were on.
"""

from __future__ import annotations

from typing import Any

import mindspore

from dcp_core.dtype import dtype_named
from dcp_core.errors import CorruptError
from dcp_core.formats.objects import ObjectCodec, register_codec
from dcp_core.formats.tensor_values import plain_tensor, tensor_bits
from dcp_mindspore.elements import dtype_of, mindspore_dtype_of, read_bits, tensor_of_bits

_KINDS = ("Bool", "Int", "UInt", "Float", "BFloat", "Complex")
_PARAMETER_TYPE = "abc.Parameter"  # MindSpore makes a class of this name for parameters


def _encode_tensor(value: Any) -> object:
    return plain_tensor(read_bits(value), dtype_of(value.dtype), value.shape)


def _decode_tensor(plain: Any) -> Any:
    try:
        name, shape, raw = plain
        return tensor_of_bits(*tensor_bits(name, shape, raw))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CorruptError(f"an encoded tensor is not well formed: {error}") from error


def _encode_parameter(value: Any) -> object:
    return (_encode_tensor(value), str(value.name), bool(value.requires_grad))


def _decode_parameter(plain: Any) -> Any:
    try:
        encoded, name, requires_grad = plain
        return mindspore.Parameter(_decode_tensor(encoded), name=name, requires_grad=bool(requires_grad))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CorruptError(f"an encoded parameter is not well formed: {error}") from error


def _encode_dtype(value: Any) -> object:
    return dtype_of(value).name


def _decode_dtype(plain: Any) -> Any:
    try:
        return mindspore_dtype_of(dtype_named(plain))
    except (TypeError, ValueError) as error:
        raise CorruptError(f"{plain!r} is no dtype of mindspore {mindspore.__version__}") from error


def tensor_codec() -> ObjectCodec:
    """The codec of plain tensors."""
    return ObjectCodec("mindspore.Tensor", "mindspore.common.tensor.Tensor", _encode_tensor, _decode_tensor)


def register_more() -> None:
    """Register the codecs of types whose names do not say where they come from, or of which there are several."""
    register_codec(ObjectCodec("mindspore.Parameter", _PARAMETER_TYPE, _encode_parameter, _decode_parameter))
    for kind in _KINDS:
        type_name = f"mindspore._c_expression.typing.{kind}"
        register_codec(ObjectCodec("mindspore.dtype", type_name, _encode_dtype, _decode_dtype))
