"""Write one value as nodes; the tags are in `objects`."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from dcp_core.errors import DcpError, UnsupportedValueError
from dcp_core.formats.object_codecs import codec_for
from dcp_core.key_codec import varint
from dcp_core.type_names import type_name

MAX_DEPTH = 64
"""Nodes that may lie in each other."""

Other: TypeAlias = "Callable[[Encoder, object, int], bytes]"
"""Gives the node of a value that has no safe encoding, at a depth."""


class Encoder:
    """Appends nodes to `parts`."""

    def __init__(self, where: str, other: Other, ignores_order: bool = False) -> None:
        self.where = where
        self.parts: list[bytes] = []
        self._other = other
        self._ignores_order = ignores_order

    def encoded(self, value: object, depth: int) -> bytes:
        """One node on its own."""
        outer, self.parts = self.parts, []
        try:
            self.add(value, depth)
            return b"".join(self.parts)
        finally:
            self.parts = outer

    def add(self, value: object, depth: int) -> None:
        """Append the node of any value."""
        if depth > MAX_DEPTH:
            raise UnsupportedValueError(
                f"{self.where}: values that hold themselves or nest more than {MAX_DEPTH} deep cannot be stored"
            )
        write = _WRITERS.get(type(value))
        if write is not None:
            write(self, value, depth)
        elif not self._add_by_codec(value, depth):
            self.parts.append(self._other(self, value, depth))

    def add_sequence(self, tag: bytes, values: Iterable[object], count: int, depth: int) -> None:
        """Append a list or tuple."""
        self.parts.append(tag + varint(count))
        for value in values:
            self.add(value, depth + 1)

    def add_sorted(self, tag: bytes, entries: Iterable[tuple[object, ...]], count: int, depth: int) -> None:
        """Append a container whose order does not count."""
        nodes = [tuple([self.encoded(value, depth + 1) for value in entry]) for entry in entries]
        self.parts.append(tag + varint(count))
        for entry_nodes in sorted(nodes):
            self.parts.extend(entry_nodes)

    def add_mapping(self, tag: bytes, value: dict[Any, Any], depth: int) -> None:
        """Append a dict."""
        if self._ignores_order and tag == b"d":
            self.add_sorted(tag, value.items(), len(value), depth)
            return
        self.parts.append(tag + varint(len(value)))
        for key, item in value.items():
            self.add(key, depth + 1)
            self.add(item, depth + 1)

    def _add_by_codec(self, value: object, depth: int) -> bool:
        codec = codec_for(type(value))
        if codec is None:
            return False
        try:
            plain = codec.encode(value)
        except DcpError:
            raise
        except Exception as error:
            raise UnsupportedValueError(
                f"{self.where}: a value of type {type_name(value)} cannot be stored: {short_text(error)}"
            ) from error
        if plain is NotImplemented:
            return False
        self.parts.append(sized(b"X", codec.name.encode()))
        self.add(plain, depth + 1)
        return True


def _write_int(encoder: Encoder, value: int, depth: int) -> None:
    encoder.parts.append(sized(b"i", value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)))


_WRITERS: dict[type, Callable[[Encoder, Any, int], None]] = {
    type(None): lambda encoder, value, depth: encoder.parts.append(b"N"),
    bool: lambda encoder, value, depth: encoder.parts.append(b"T" if value else b"F"),
    int: _write_int,
    float: lambda encoder, value, depth: encoder.parts.append(b"f" + struct.pack("<d", value)),
    complex: lambda encoder, value, depth: encoder.parts.append(b"c" + struct.pack("<dd", value.real, value.imag)),
    str: lambda encoder, value, depth: encoder.parts.append(sized(b"s", value.encode("utf-8", "surrogatepass"))),
    bytes: lambda encoder, value, depth: encoder.parts.append(sized(b"b", value)),
    bytearray: lambda encoder, value, depth: encoder.parts.append(sized(b"B", bytes(value))),
    list: lambda encoder, value, depth: encoder.add_sequence(b"l", value, len(value), depth),
    tuple: lambda encoder, value, depth: encoder.add_sequence(b"t", value, len(value), depth),
    set: lambda encoder, value, depth: encoder.add_sorted(b"S", ((item,) for item in value), len(value), depth),
    frozenset: lambda encoder, value, depth: encoder.add_sorted(b"Z", ((item,) for item in value), len(value), depth),
    dict: lambda encoder, value, depth: encoder.add_mapping(b"d", value, depth),
    OrderedDict: lambda encoder, value, depth: encoder.add_mapping(b"O", value, depth),
}


def sized(tag: bytes, raw: bytes) -> bytes:
    """A tag, a size and as many bytes."""
    return b"".join([tag, varint(len(raw)), raw])


def short_text(error: Exception) -> str:
    """What a foreign error says, cut to a line or two."""
    return f"{type(error).__name__}: {error}"[:500]
