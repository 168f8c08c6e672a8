"""A second reader of paths and of the values in `.bytes` files, written from docs/reference/format.md alone."""

from __future__ import annotations

import io
import json
import pathlib
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from tests.core.format_records import require

Allowed = Mapping[tuple[str, str], Any]
"""(module, qualified name) -> what may be called for a pickle."""


@dataclass(frozen=True)
class Pickled:
    """What only pickle can read."""

    blob: bytes

    def load(self, allowed: Allowed) -> Any:
        return _Unpickler(self.blob, allowed).load()


@dataclass(frozen=True)
class Coded:
    """What only a codec of another package can read."""

    codec: str
    node: Any


class _Unpickler(pickle.Unpickler):
    def __init__(self, blob: bytes, allowed: Allowed) -> None:
        super().__init__(io.BytesIO(blob))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("dcp_core.formats.pickles", "restore_value"):
            return decode_value
        return self._allowed[module, name]


class Nodes:
    """Bytes, taken from the front."""

    def __init__(self, blob: bytes) -> None:
        self.blob, self.at = blob, 0

    def take(self, nbytes: int) -> bytes:
        require(nbytes <= len(self.blob) - self.at, "a node lies in its value")
        self.at += nbytes
        return self.blob[self.at - nbytes : self.at]

    def varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                require(byte or shift == 7, "a varint is as short as it can be")
                return value

    def sized(self) -> bytes:
        return self.take(self.varint())

    def doubles(self, count: int) -> tuple[float, ...]:
        return struct.unpack(f"<{count}d", self.take(8 * count))

    def node(self, depth: int = 0) -> Any:
        require(depth <= 64, "how deep nodes nest")
        tag = self.take(1)
        if tag in SINGLE:
            return SINGLE[tag]
        if tag in SIZED:
            return SIZED[tag](self.sized())
        if tag == b"f":
            return self.doubles(1)[0]
        if tag == b"c":
            return complex(*self.doubles(2))
        if tag == b"X":
            return coded(self.sized().decode(), self.node(depth + 1))
        if tag in b"dO":
            return self.mapping(dict if tag == b"d" else OrderedDict, depth + 1)
        if tag in b"SZ":
            return self.distinct(set if tag == b"S" else frozenset, depth + 1)
        require(tag in b"lt", "a tag")
        items = [self.node(depth + 1) for _ in range(self.varint())]
        return items if tag == b"l" else tuple(items)

    def mapping(self, kind: Callable[[Any], Any], depth: int) -> Any:
        pairs = [(self.node(depth), self.node(depth)) for _ in range(self.varint())]
        made = kind(pairs)
        require(len(made) == len(pairs), "a mapping holds a key once")
        return made

    def distinct(self, kind: Callable[[Any], Any], depth: int) -> Any:
        items, spelled = [], []
        for _ in range(self.varint()):
            start = self.at
            items.append(self.node(depth))
            spelled.append(self.blob[start : self.at])
        made = kind(items)
        require(len(made) == len(items) and spelled == sorted(spelled), "a set holds a value once, sorted by bytes")
        return made

    def component(self) -> tuple[str, Any]:
        """Kind and value of a component of a path."""
        tag = self.take(1)
        if tag in b"LU":
            return "list" if tag == b"L" else "tuple", self.varint()
        if tag == b"(":
            return "key", tuple(self.component()[1] for _ in range(self.varint()))
        if tag == b"f":
            return "key", self.doubles(1)[0]
        require(tag in b"NTFsib", "a component")
        return "key", SINGLE[tag] if tag in SINGLE else SIZED[tag](self.sized())


SINGLE = {b"N": None, b"T": True, b"F": False}
SIZED: dict[bytes, Callable[[bytes], Any]] = {
    b"i": lambda raw: int.from_bytes(raw, "little", signed=True),
    b"s": lambda raw: raw.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"B": bytearray,
    b"P": Pickled,
}


def decode_value(blob: bytes) -> Any:
    nodes = Nodes(blob)
    value = nodes.node()
    require(nodes.at == len(blob), "nothing follows a value")
    return value


def decode_path(blob: bytes) -> tuple[tuple[str, Any], ...]:
    """Kind ("list", "tuple" or "key") and value of each component."""
    nodes, path = Nodes(blob), []
    while nodes.at < len(blob):
        path.append(nodes.component())
    return tuple(path)


# -- names ------------------------------------------------------------------------------------------------------------


def spell_names(paths: Sequence[bytes]) -> list[str]:
    """The names that this writer gives the paths of one state."""
    decoded = [decode_path(path) for path in paths]
    plain = [".".join(plain_key(value) for _, value in path) for path in decoded]
    best: dict[str, tuple[int, bytes]] = {}
    for name, path, components in zip(plain, paths, decoded, strict=True):
        best[name] = min(best.get(name, (len(components), path)), (len(components), path))
    names = []
    for name, path, components in zip(plain, paths, decoded, strict=True):
        owner = re.fullmatch("(.*)@[0-9]+(,[0-9]+)*", name, re.DOTALL)
        reserved = name in ("", "$", "__metadata__") or name.startswith("$[") or re.search("[\ud800-\udfff]", name)
        if reserved or (owner and owner[1] in plain) or best[name][1] != path:
            name = "$" + "".join(f"[{canonical(*component)}]" for component in components)
        names.append(name)
    return names


def plain_key(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return f"({', '.join(plain_key(item) for item in value)})"
    is_long = type(value) is int and abs(value) >= 2**1024
    return hex(value) if is_long else repr(value)


def canonical(kind: str, value: Any) -> str:
    """What stands between brackets."""
    if kind != "key":
        return f"#{value}" if kind == "list" else f"({value})"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return re.sub("[@\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)
    if isinstance(value, bytes):
        return f'b"{value.hex()}"'
    if isinstance(value, tuple):
        return f"({''.join(canonical('key', item) + ',' for item in value)})"
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), plain_key(value))


# -- codecs -----------------------------------------------------------------------------------------------------------


def coded(codec: str, node: Any) -> Any:
    return CODECS[codec](node) if codec in CODECS else Coded(codec, node)


def numpy_dtype(node: Any) -> np.dtype[Any]:
    if isinstance(node, str):
        return np.dtype(node)
    if node[0] == "array":
        return np.dtype((numpy_dtype(node[1]), node[2]))
    require(node[0] == "structure", "a dtype")
    names, dtypes, offsets, itemsize, aligned, record = node[1:]
    table = {"names": names, "formats": [numpy_dtype(dtype) for dtype in dtypes], "offsets": offsets}
    made: np.dtype[Any] = np.dtype({**table, "itemsize": itemsize}, align=aligned)  # type: ignore[call-overload]  # a TypedDict, it says
    return np.dtype((np.record, made)) if record else made


def numpy_array(node: Any) -> Any:
    dtype, shape, raw = node
    return np.ndarray(shape, numpy_dtype(dtype), raw)


def numpy_scalar(node: Any) -> Any:
    if isinstance(node, (str, bytes)):
        return np.str_(node) if isinstance(node, str) else np.bytes_(node)
    require(node[1] == (), "a scalar's shape")
    return numpy_array(node)[()]


def instant(kind: Any) -> Callable[[Any], Any]:
    """For the types whose last two parts are fold and zone."""
    return lambda node: kind(*node[:-2], fold=node[-2], tzinfo=node[-1])


CODECS: dict[str, Callable[[Any], Any]] = {
    "ellipsis": lambda node: ...,
    "range": lambda node: range(*node),
    "slice": lambda node: slice(*node),
    "date": lambda node: date(*node),
    "time": instant(time),
    "datetime": instant(datetime),
    "timedelta": lambda node: timedelta(*node),
    "timezone": lambda node: timezone(node[0]) if node[1] is None else timezone(*node),
    "zone": ZoneInfo,
    "path": lambda node: getattr(pathlib, node[0])(node[1]),
    "numpy.dtype": numpy_dtype,
    "numpy.array": numpy_array,
    "numpy.scalar": numpy_scalar,
}
