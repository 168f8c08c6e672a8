"""The keys of mappings as bytes, each of its exact type, and back: what the components of a path are written as.

In: a key, or bytes of a path and where a component starts in them. Out: bytes, or the key and where the next component
starts. Different keys have different bytes, also `1`, `True` and `"1"`.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

from dcp_core.errors import CorruptError, UnsupportedValueError
from dcp_core.type_names import name_of_type

KeyValue: TypeAlias = str | int | float | bytes | tuple["KeyValue", ...] | None

STR, INT = b"s", b"i"
_FLOAT, _BYTES, _NONE, _TRUE, _FALSE, _ITEMS = b"f", b"b", b"N", b"T", b"F", b"("
_MAX_TUPLE_DEPTH = 16
_STR_HEADS = tuple(STR + bytes([nbytes]) for nbytes in range(0x80))


def encode_key(key: object) -> bytes:
    """Write the key of a mapping as bytes: the `encoded` of its `PathKey`, without making one.

    The bytes of the components, one after the other, are the bytes of the path.

    Raises:
        UnsupportedValueError: A key of a type that no path can hold.
    """
    if type(key) is str:
        raw = key.encode("utf-8", "surrogatepass")
        return (_STR_HEADS[len(raw)] if len(raw) < 0x80 else STR + varint(len(raw))) + raw
    return _encode_key(key, 0)


def decode_key(blob: bytes, at: int) -> tuple[KeyValue, int]:
    """Undo `encode_key`.

    Args:
        blob: Bytes of a path.
        at: Where the key starts in them.

    Returns:
        The key, and where it ends.

    Raises:
        CorruptError: Bytes that are no key. Not all that `encode_key` never writes are found: encode and compare.
    """
    try:
        return _decode_key(blob, at, 0)
    except UnicodeDecodeError as error:
        raise junk(at) from error


def varint(number: int) -> bytes:
    """A number in as few bytes as it needs, 7 bits a byte, low ones first."""
    if number < 0x80:
        return number.to_bytes(1, "little")
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_varint(blob: bytes, at: int) -> tuple[int, int]:
    """Undo `varint`; return the number and where it ends.

    Raises:
        CorruptError: The bytes end before it, or it is too large.
    """
    number = shift = 0
    while at < len(blob) and shift < 63:
        number |= (blob[at] & 0x7F) << shift
        shift += 7
        at += 1
        if blob[at - 1] < 0x80:
            return number, at
    raise junk(at)


def junk(at: int) -> CorruptError:
    """The error for bytes that are no path."""
    return CorruptError(f"the bytes of a path make no sense at offset {at}; the checkpoint's table of paths is damaged")


def _encode_key(value: object, depth: int) -> bytes:
    if type(value) is str:
        return _sized(STR, value.encode("utf-8", "surrogatepass"))
    if type(value) is int:
        return _sized(INT, value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True))
    if value is None:
        return _NONE
    if type(value) is bool:
        return _TRUE if value else _FALSE
    if type(value) is bytes:
        return _sized(_BYTES, value)
    if type(value) is float and value == value:
        return _FLOAT + struct.pack("<d", value)
    if type(value) is tuple and depth < _MAX_TUPLE_DEPTH:
        return _ITEMS + varint(len(value)) + b"".join([_encode_key(item, depth + 1) for item in value])
    raise _unsupported(value)


def _sized(tag: bytes, raw: bytes) -> bytes:
    nbytes = len(raw)
    return tag + (nbytes.to_bytes(1, "little") if nbytes < 0x80 else varint(nbytes)) + raw


def _unsupported(value: object) -> UnsupportedValueError:
    kind = type(value)
    if kind is tuple:
        reason = f"tuples nested more than {_MAX_TUPLE_DEPTH} deep"
    elif kind is float:
        reason = "NaN, which nothing is equal to"
    else:
        reason = f"type {name_of_type(kind)}"
    return UnsupportedValueError(
        f"a mapping has a key of {reason}; keys must be exactly str, int, bool, float, bytes, None or tuples of those: "
        "convert it, for example to str"
    )


def _decode_key(blob: bytes, at: int, depth: int) -> tuple[KeyValue, int]:
    tag, at = blob[at : at + 1], at + 1
    if tag == _NONE:
        return None, at
    if tag in (_TRUE, _FALSE):
        return tag == _TRUE, at
    if tag == _FLOAT:
        raw, at = _take(blob, at, 8)
        return float(struct.unpack("<d", raw)[0]), at
    count, at = read_varint(blob, at)
    if tag == _ITEMS and depth < _MAX_TUPLE_DEPTH:
        return _decode_items(blob, at, count, depth + 1)
    raw, at = _take(blob, at, count)
    if tag == STR:
        return raw.decode("utf-8", "surrogatepass"), at
    if tag == INT:
        return int.from_bytes(raw, "little", signed=True), at
    if tag == _BYTES:
        return raw, at
    raise junk(at)


def _decode_items(blob: bytes, at: int, count: int, depth: int) -> tuple[KeyValue, int]:
    items: list[KeyValue] = []
    for _ in range(count):
        item, at = _decode_key(blob, at, depth)
        items.append(item)
    return tuple(items), at


def _take(blob: bytes, at: int, count: int) -> tuple[bytes, int]:
    if count > len(blob) - at:
        raise junk(at)
    return blob[at : at + count], at + count
