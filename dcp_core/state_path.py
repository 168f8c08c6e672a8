"""Where a leaf lies in a nested state: typed paths, their bytes, and their printed names.

A path is a tuple of `PathKey`s from the root to the leaf. Paths identify leaves exactly (`1`, `True` and `"1"` are
three keys); names are what people and files see. `spell_names` gives the paths of one state unique names by a rule of
the paths alone. Walking a state is in `state_tree`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from dcp_core.errors import CorruptError, UnsupportedValueError

KeyKind: TypeAlias = Literal["key", "list", "tuple"]
KeyValue: TypeAlias = str | int | float | bytes | tuple["KeyValue", ...] | None

MAX_DEPTH = 128
"""Components that a path may have, and containers that a state may nest."""

_MAX_TUPLE_DEPTH = 16
_LIST, _TUPLE = b"L", b"U"
_STR, _INT, _FLOAT, _BYTES, _NONE, _TRUE, _FALSE, _ITEMS = b"s", b"i", b"f", b"b", b"N", b"T", b"F", b"("
_SURROGATE = re.compile("[\ud800-\udfff]")
_CHUNK_KEY = re.compile(r"(.*)@[0-9]+(?:,[0-9]+)*", re.DOTALL)
_RESERVED_NAME = "__metadata__"
_PRINTED_BITS = 1024


@dataclass(frozen=True, slots=True)
class PathKey:
    """One component of a path. Equality and hash go by kind, type and value.

    Attributes:
        kind: "key" for the key of a mapping; "list" or "tuple" for a position.
        value: The key or the position. Keys are str, int, bool, float (no NaN), bytes, None, and tuples of those,
            of exactly these types.
        encoded: The component as bytes; what is compared.

    Raises:
        UnsupportedValueError: A key of another type.

    >>> PathKey("key", 1) == PathKey("key", True)
    False
    """

    kind: KeyKind = field(compare=False)
    value: KeyValue = field(compare=False)
    encoded: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        value = self.value
        if self.kind == "key":
            encoded = _encode_key(value, 0)
        elif type(value) is not int or value < 0 or self.kind not in ("list", "tuple"):
            raise UnsupportedValueError(f"a component of kind {self.kind!r} cannot hold {value!r}: expected a position")
        else:
            encoded = (_LIST if self.kind == "list" else _TUPLE) + _varint(value)
        object.__setattr__(self, "encoded", encoded)


StatePath: TypeAlias = tuple[PathKey, ...]


@dataclass(frozen=True, slots=True)
class PerRank:
    """A value that every rank has for itself, stored once per rank under one key.

    The target of a load holds a `PerRank` too; its value is replaced by the one that this rank saved. Loading in
    another world size is an error.

    Attributes:
        value: This rank's value.
    """

    value: Any


def key_path(*keys: KeyValue) -> StatePath:
    """The path that goes through mappings only.

    >>> plain_name(key_path("model", "layers", 0))
    'model.layers.0'
    """
    return tuple(PathKey("key", key) for key in keys)


@lru_cache(maxsize=4096)
def position(kind: Literal["list", "tuple"], index: int) -> PathKey:
    """The component for a position in a list or tuple; cached."""
    return PathKey(kind, index)


def encode_path(path: StatePath) -> bytes:
    """Write a path as bytes: compact, the same on every run, different for different paths."""
    return b"".join([key.encoded for key in path])


def decode_path(blob: bytes) -> StatePath:
    """Undo `encode_path`.

    Raises:
        CorruptError: Bytes that `encode_path` never writes.
    """
    keys: list[PathKey] = []
    at = 0
    while at < len(blob):
        if len(keys) == MAX_DEPTH:
            raise CorruptError(f"a path of more than {MAX_DEPTH} components; the table of paths is damaged")
        key, end = _decode_component(blob, at)
        if key.encoded != blob[at:end]:
            raise _junk(at)
        keys.append(key)
        at = end
    return tuple(keys)


def plain_name(path: StatePath) -> str:
    """Join the components of a path by dots, as torch DCP does; different paths may share it.

    >>> plain_name((PathKey("key", "a.b"), PathKey("list", 0)))
    'a.b.0'
    """
    return ".".join([value if type(value := key.value) is str else _plain(value) for key in path])


def canonical_name(path: StatePath) -> str:
    r"""Spell a path so that no other path shares the name. It can always be written as UTF-8 and holds no "@".

    >>> canonical_name((PathKey("key", "a@b"), PathKey("key", 5), PathKey("list", 3), PathKey("tuple", 2)))
    '$["a\\u0040b"][5][#3][(2)]'
    """
    return "$" + "".join([_bracket(key) for key in path])


def spell_names(paths: Sequence[StatePath]) -> list[str]:
    """Name the leaves of one state.

    A path keeps its plain name unless that is reserved, could be taken for a chunk of another one (`w@0` beside `w`),
    or is shared with a path that has fewer components (ties: the smaller encoding). All others are spelled
    canonically. The order of the paths has no influence.

    Args:
        paths: Distinct paths.

    Returns:
        A unique name per path, in their order.

    >>> spell_names([key_path("a", "b"), key_path("a.b")])
    ['$["a"]["b"]', 'a.b']
    """
    names = [plain_name(path) for path in paths]
    taken = set(names)
    if len(taken) < len(names):
        _spell_collisions(names, paths)
    for index, name in enumerate(names):
        if _is_special(name) and _is_reserved(name, taken):
            names[index] = canonical_name(paths[index])
    return names


def _spell_collisions(names: list[str], paths: Sequence[StatePath]) -> None:
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(name, []).append(index)
    for group in groups.values():
        if len(group) == 1:
            continue
        keeper = min(group, key=lambda index: (len(paths[index]), encode_path(paths[index])))
        for index in group:
            if paths[index] != paths[keeper]:
                names[index] = canonical_name(paths[index])


def _is_special(name: str) -> bool:
    """Quick, and true for every name that `_is_reserved` may claim."""
    return not name.isascii() or not name or name[0] in "$_" or "@" in name


def _is_reserved(name: str, taken: set[str]) -> bool:
    if not name or name == "$" or name.startswith("$[") or name == _RESERVED_NAME or _SURROGATE.search(name):
        return True
    chunk = _CHUNK_KEY.fullmatch(name) if "@" in name else None
    return chunk is not None and chunk[1] in taken


def _plain(value: KeyValue) -> str:
    if type(value) is str:
        return value
    if type(value) is int:
        return _int_text(value)
    if type(value) is tuple:
        return f"({', '.join([_plain(item) for item in value])})"
    return repr(value)


def _int_text(value: int) -> str:
    """Decimal, or hexadecimal where Python may refuse to print that many digits."""
    return str(value) if value.bit_length() <= _PRINTED_BITS else hex(value)


def _bracket(key: PathKey) -> str:
    if key.kind == "list":
        return f"[#{key.value!r}]"
    if key.kind == "tuple":
        return f"[({key.value!r})]"
    return f"[{_exact(key.value)}]"


def _exact(value: KeyValue) -> str:
    """Spell a key so that type and value can be told from it."""
    if type(value) is str:
        # json leaves surrogates as they are; escaped by hand they differ from the character that a pair would make.
        text = json.dumps(value, ensure_ascii=False).replace("@", "\\u0040")
        return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    if value is None or type(value) is bool:
        return json.dumps(value)
    if type(value) is int:
        return _int_text(value)
    if type(value) is bytes:
        return f'b"{value.hex()}"'
    if type(value) is tuple:
        return f"({''.join([_exact(item) + ',' for item in value])})"
    return repr(value)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _encode_key(value: object, depth: int) -> bytes:
    if type(value) is str:
        return _sized(_STR, value.encode("utf-8", "surrogatepass"))
    if type(value) is int:
        return _sized(_INT, value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True))
    if value is None:
        return _NONE
    if type(value) is bool:
        return _TRUE if value else _FALSE
    if type(value) is bytes:
        return _sized(_BYTES, value)
    if type(value) is float and value == value:
        return _FLOAT + struct.pack("<d", value)
    if type(value) is tuple and depth < _MAX_TUPLE_DEPTH:
        return _ITEMS + _varint(len(value)) + b"".join([_encode_key(item, depth + 1) for item in value])
    raise _unsupported(value)


def _sized(tag: bytes, raw: bytes) -> bytes:
    nbytes = len(raw)
    return tag + (nbytes.to_bytes(1, "little") if nbytes < 0x80 else _varint(nbytes)) + raw


def _unsupported(value: object) -> UnsupportedValueError:
    kind = type(value)
    if kind is tuple:
        reason = f"tuples nested more than {_MAX_TUPLE_DEPTH} deep"
    elif kind is float:
        reason = "NaN, which nothing is equal to"
    else:
        reason = f"type {kind.__module__}.{kind.__qualname__}"
    return UnsupportedValueError(
        f"a mapping has a key of {reason}; keys must be exactly str, int, bool, float, bytes, None or tuples of those: "
        "convert it, for example to str"
    )


def _junk(at: int) -> CorruptError:
    return CorruptError(f"the bytes of a path make no sense at offset {at}; the checkpoint's table of paths is damaged")


def _decode_component(blob: bytes, at: int) -> tuple[PathKey, int]:
    tag = blob[at : at + 1]
    if tag in (_LIST, _TUPLE):
        index, end = _read_varint(blob, at + 1)
        return position("list" if tag == _LIST else "tuple", index), end
    try:
        value, end = _decode_key(blob, at, 0)
        return PathKey("key", value), end
    except (UnicodeDecodeError, UnsupportedValueError) as error:
        raise _junk(at) from error


def _decode_key(blob: bytes, at: int, depth: int) -> tuple[KeyValue, int]:
    tag, at = blob[at : at + 1], at + 1
    if tag == _NONE:
        return None, at
    if tag in (_TRUE, _FALSE):
        return tag == _TRUE, at
    if tag == _FLOAT:
        raw, at = _take(blob, at, 8)
        return float(struct.unpack("<d", raw)[0]), at
    count, at = _read_varint(blob, at)
    if tag == _ITEMS and depth < _MAX_TUPLE_DEPTH:
        return _decode_items(blob, at, count, depth + 1)
    raw, at = _take(blob, at, count)
    if tag == _STR:
        return raw.decode("utf-8", "surrogatepass"), at
    if tag == _INT:
        return int.from_bytes(raw, "little", signed=True), at
    if tag == _BYTES:
        return raw, at
    raise _junk(at)


def _decode_items(blob: bytes, at: int, count: int, depth: int) -> tuple[KeyValue, int]:
    items: list[KeyValue] = []
    for _ in range(count):
        item, at = _decode_key(blob, at, depth)
        items.append(item)
    return tuple(items), at


def _take(blob: bytes, at: int, count: int) -> tuple[bytes, int]:
    if count > len(blob) - at:
        raise _junk(at)
    return blob[at : at + count], at + count


def _read_varint(blob: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(blob) and shift < 63:
        number |= (blob[at] & 0x7F) << shift
        shift += 7
        at += 1
        if blob[at - 1] < 0x80:
            return number, at
    raise _junk(at)
