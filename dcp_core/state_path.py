"""Where a leaf lies in a nested state: typed paths, their bytes, and their printed names.

A path is a tuple of `PathKey`s from the root to the leaf. Paths identify leaves exactly (`1`, `True` and `"1"` are
three keys); names are what people and files see. `spell_names` gives the paths of one state unique names by a rule of
the paths alone. Walking a state is in `state_tree`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from dcp_core.errors import CorruptError, UnsupportedValueError
from dcp_core.key_codec import INT, STR, KeyValue, decode_key, encode_key, junk, read_varint, varint

KeyKind: TypeAlias = Literal["key", "list", "tuple"]

MAX_DEPTH = 128
"""Components that a path may have, and containers that a state may nest."""

_LIST, _TUPLE = b"L", b"U"
_STR_TAG, _INT_TAG = STR[0], INT[0]
_SHORT_TAGS = frozenset(STR + INT + _LIST + _TUPLE)
_SURROGATE = re.compile("[\ud800-\udfff]")
_CHUNK_KEY = re.compile(r"(.*)@[0-9]+(?:,[0-9]+)*", re.DOTALL)
_RESERVED_NAME = "__metadata__"
_RESERVED_MARKS = ("@", "\n\n", "\n$\n", "\n$[", f"\n{_RESERVED_NAME}\n")
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
            encoded = encode_key(value)
        elif type(value) is not int or value < 0 or self.kind not in ("list", "tuple"):
            raise UnsupportedValueError(f"a component of kind {self.kind!r} cannot hold {value!r}: expected a position")
        else:
            encoded = (_LIST if self.kind == "list" else _TUPLE) + varint(value)
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
            raise junk(at)
        keys.append(key)
        at = end
    return tuple(keys)


def plain_name(path: StatePath) -> str:
    """Join the components of a path by dots, as torch DCP does; different paths may share it.

    >>> plain_name((PathKey("key", "a.b"), PathKey("list", 0)))
    'a.b.0'
    """
    return ".".join([value if type(value := key.value) is str else plain_key(value) for key in path])


def plain_names(paths: Iterable[bytes]) -> list[str]:
    """The plain names of encoded paths, much faster than by decoding them.

    Raises:
        CorruptError: Bytes that are no path.

    >>> plain_names([encode_path(key_path("model", "layers", 0))])
    ['model.layers.0']
    """
    return [_plain_name_of(path) for path in paths]


def _plain_name_of(path: bytes) -> str:
    """The plain name of an encoded path; keys that are short strings or integers are read without making components."""
    parts: list[bytes] = []
    at, end = 0, len(path)
    while at + 1 < end:
        tag, nbytes = path[at], path[at + 1]
        raw = path[at + 2 : at + 2 + nbytes]
        at += 2 + nbytes
        if tag == _STR_TAG and nbytes < 0x80:
            parts.append(raw)
        elif tag == _INT_TAG and nbytes < 0x80:
            parts.append(b"%d" % int.from_bytes(raw, "little", signed=True))
        else:
            return plain_name(decode_path(path))
    try:
        return b".".join(parts).decode("utf-8", "surrogatepass") if at == end else plain_name(decode_path(path))
    except UnicodeDecodeError:
        return plain_name(decode_path(path))


def canonical_name(path: StatePath) -> str:
    r"""Spell a path so that no other path shares the name. It can always be written as UTF-8 and holds no "@".

    >>> canonical_name((PathKey("key", "a@b"), PathKey("key", 5), PathKey("list", 3), PathKey("tuple", 2)))
    '$["a\\u0040b"][5][#3][(2)]'
    """
    return "$" + "".join([_bracket(key) for key in path])


def canonical_names(paths: Iterable[bytes]) -> list[str]:
    """The canonical names of encoded paths, much faster than by decoding them: most components occur again and again.

    Raises:
        CorruptError: Bytes that are no path.
    """
    spelled: dict[bytes, str] = {}
    return [_canonical_name_of(path, spelled) for path in paths]


def _canonical_name_of(path: bytes, spelled: dict[bytes, str]) -> str:
    """The canonical name of an encoded path; `spelled` remembers short components."""
    parts = ["$"]
    at = 0
    while at + 1 < len(path) and path[at + 1] < 0x80 and path[at] in _SHORT_TAGS and len(parts) <= MAX_DEPTH:
        end = at + 2 + (path[at + 1] if path[at] in (_STR_TAG, _INT_TAG) else 0)
        component = path[at:end]
        text = spelled.get(component)
        if text is None:
            text = spelled[component] = canonical_name(decode_path(component))[1:]
        parts.append(text)
        at = end
    return "".join(parts) if at == len(path) else canonical_name(decode_path(path))


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
    return spell_plain_names([plain_name(path) for path in paths], paths.__getitem__)


def spell_plain_names(plain: Sequence[str], path_at: Callable[[int], StatePath]) -> list[str]:
    """`spell_names` for a caller that has the plain names already.

    Args:
        plain: The plain name of each path.
        path_at: The path at a position; asked for the few whose name is not the plain one.
    """
    names = list(plain)
    taken = set(names)
    if len(taken) < len(names):
        _spell_collisions(names, path_at)
    if _may_be_reserved(names):
        for index, name in enumerate(names):
            if _is_special(name) and _is_reserved(name, taken):
                names[index] = canonical_name(path_at(index))
    return names


def _spell_collisions(names: list[str], path_at: Callable[[int], StatePath]) -> None:
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(name, []).append(index)
    for group in groups.values():
        if len(group) == 1:
            continue
        paths = {index: path_at(index) for index in group}
        keeper = min(paths.values(), key=lambda path: (len(path), encode_path(path)))
        for index, path in paths.items():
            if path != keeper:
                names[index] = canonical_name(path)


def _may_be_reserved(names: Sequence[str]) -> bool:
    """Look at all names at once: false when `_is_reserved` claims none of them."""
    text = "\n".join(["", *names, ""])
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return any(mark in text for mark in _RESERVED_MARKS)


def _is_special(name: str) -> bool:
    """Quick, and true for every name that `_is_reserved` may claim."""
    return not name.isascii() or not name or name[0] in "$_" or "@" in name


def _is_reserved(name: str, taken: set[str]) -> bool:
    if not name or name == "$" or name.startswith("$[") or name == _RESERVED_NAME or _SURROGATE.search(name):
        return True
    chunk = _CHUNK_KEY.fullmatch(name) if "@" in name else None
    return chunk is not None and chunk[1] in taken


def plain_key(value: KeyValue) -> str:
    """How a key or a position is printed in a plain name."""
    if type(value) is str:
        return value
    if type(value) is int:
        return _int_text(value)
    if type(value) is tuple:
        return f"({', '.join([plain_key(item) for item in value])})"
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


def _decode_component(blob: bytes, at: int) -> tuple[PathKey, int]:
    tag = blob[at : at + 1]
    if tag in (_LIST, _TUPLE):
        index, end = read_varint(blob, at + 1)
        return position("list" if tag == _LIST else "tuple", index), end
    try:
        value, end = decode_key(blob, at)
        return PathKey("key", value), end
    except UnsupportedValueError as error:
        raise junk(at) from error
