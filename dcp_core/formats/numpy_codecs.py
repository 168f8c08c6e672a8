"""Safe encodings of numpy's arrays, scalars and dtypes. Importing the module registers them.

Values keep their raw bytes, byte order and exact dtype, structured ones included. What holds Python objects, and
types that other packages added to numpy, are left to pickle.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.formats.object_codecs import ObjectCodec, register_codec
from dcp_core.type_names import name_of_type

_SIMPLE_DTYPE = re.compile(r"[<>|=][?bhilqBHILQefdgFDGiufcSUVmM][0-9]{0,9}(?:\[[0-9]{0,9}[a-zA-Z]{1,2}\])?|\|b1")
_CHARACTERS = "?bhilqBHILQefdgFDGSUVMm"
_MAX_CODE_POINT = 0x10FFFF
_X87_MANTISSA = 63
_X87_NBYTES = 10


class _NotPlainError(Exception):
    """A dtype that the encoding cannot hold."""


def _encode_dtype(dtype: np.dtype[Any]) -> object:
    try:
        return _plain_dtype(dtype)
    except _NotPlainError:
        return NotImplemented


def _plain_dtype(dtype: np.dtype[Any]) -> object:
    if dtype.hasobject or dtype.metadata is not None:
        raise _NotPlainError
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return "array", _plain_dtype(base), shape
    if dtype.names is not None:
        return _plain_structure(dtype)
    for spelled in (dtype.str, dtype.str[0] + dtype.char):
        if _SIMPLE_DTYPE.fullmatch(spelled) and _is_same(np.dtype(spelled), dtype):
            return spelled
    raise _NotPlainError


def _plain_structure(dtype: np.dtype[Any]) -> object:
    table: Any = dtype.fields or {}
    fields = [table[name] for name in dtype.names or ()]
    if any(len(field) > 2 for field in fields):  # fields with titles
        raise _NotPlainError
    formats = tuple([_plain_dtype(field[0]) for field in fields])
    offsets = tuple([field[1] for field in fields])
    return "structure", dtype.names, formats, offsets, dtype.itemsize, dtype.isalignedstruct, dtype.type is np.record


def _is_same(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    return one == other and one.type is other.type and one.char == other.char


def _decode_dtype(plain: Any) -> np.dtype[Any]:
    if isinstance(plain, str):
        if not _SIMPLE_DTYPE.fullmatch(plain):
            raise ValueError(f"{plain!r} is no dtype that can be stored")
        return np.dtype(plain)
    if plain[0] == "array":
        _, base, shape = plain
        return np.dtype((_decode_dtype(base), _checked_shape(shape)))
    _, names, formats, offsets, itemsize, is_aligned, is_record = plain
    spec = {
        "names": list(names),
        "formats": [_decode_dtype(entry) for entry in formats],
        "offsets": list(offsets),
        "itemsize": itemsize,
    }
    dtype: np.dtype[Any] = np.dtype(spec, align=is_aligned)  # type: ignore[call-overload]  # the stubs want a TypedDict
    return np.dtype((np.record, dtype)) if is_record else dtype


def _encode_array(array: npt.NDArray[Any]) -> object:
    dtype = _encode_dtype(array.dtype)
    if dtype is NotImplemented or array.dtype.itemsize == 0:
        return NotImplemented
    return dtype, array.shape, _without_padding(array).tobytes()


def _decode_array(plain: Any) -> npt.NDArray[Any]:
    spelled, shape, raw = plain
    dtype = _decode_dtype(spelled)
    shape = _checked_shape(shape)
    if type(raw) is not bytes or dtype.itemsize == 0 or math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"an array of shape {shape} and dtype {dtype} does not have the bytes that came with it")
    if dtype.kind == "U" and raw and np.frombuffer(raw, dtype.str[0] + "u4").max() > _MAX_CODE_POINT:
        raise ValueError("an array of text holds what is no character")
    return np.ndarray(shape, dtype, buffer=raw).copy()


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is not tuple or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{shape!r} is no shape")
    return shape


def _without_padding(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Structures have gaps, long doubles unused bytes: make them zero, not whatever memory held."""
    if array.dtype.char in "gG":
        return _clean_long_doubles(array)
    if array.dtype.names is None:
        return array
    clean = np.zeros(array.shape, array.dtype)
    for name in array.dtype.names:
        clean[name] = _without_padding(array[name])
    return clean


def _clean_long_doubles(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if np.finfo(np.longdouble).nmant != _X87_MANTISSA:
        return array
    raw = np.frombuffer(array.tobytes(), np.uint8).reshape(-1, np.dtype("g").itemsize).copy()
    unused = slice(None, -_X87_NBYTES) if array.dtype.str[0] == ">" else slice(_X87_NBYTES, None)
    raw[:, unused] = 0
    return np.ndarray(array.shape, array.dtype, buffer=raw.tobytes())


def _encode_scalar(scalar: np.generic) -> object:
    # Not item(), which loses zeros at the end.
    if isinstance(scalar, np.str_):
        return str.__str__(scalar)
    if isinstance(scalar, np.bytes_):
        return bytes.__getitem__(scalar, slice(None))
    return _encode_array(np.asarray(scalar))


def _decode_scalar(plain: Any) -> object:
    if isinstance(plain, str):
        return np.str_(plain)
    if isinstance(plain, bytes):
        return np.bytes_(plain)
    array = _decode_array(plain)
    if array.shape:
        raise ValueError("a numpy scalar has no dimensions")
    return array[()]


def _register() -> None:
    dtypes: set[type] = {type(np.dtype(character)) for character in _CHARACTERS}
    scalars: set[type] = {np.dtype(character).type for character in _CHARACTERS} | {np.record}
    for kind in dtypes:
        register_codec(ObjectCodec("numpy.dtype", name_of_type(kind), _encode_dtype, _decode_dtype))
    for kind in scalars:
        register_codec(ObjectCodec("numpy.scalar", name_of_type(kind), _encode_scalar, _decode_scalar))
    register_codec(ObjectCodec("numpy.array", name_of_type(np.ndarray), _encode_array, _decode_array))


_register()
