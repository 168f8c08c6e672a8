"""Read one value from nodes that may come from a stranger; the tags are in `objects`."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from dcp_core.errors import CorruptError
from dcp_core.formats.object_encoder import MAX_DEPTH

_MAX_VARINT_BITS = 63


class Decoder:
    """Reads nodes of `blob`, checking every size against what is left of it."""

    def __init__(
        self,
        blob: bytes,
        where: str,
        unpickle: Callable[[bytes, int], object],
        by_codec: Callable[[str, object, str], object],
    ) -> None:
        self._blob = bytes(blob)
        self._at = 0
        self._where = where
        self._unpickle = unpickle
        self._by_codec = by_codec

    def whole(self, depth: int) -> object:
        """The one node that the blob holds."""
        value = self.node(depth)
        if self._at != len(self._blob):
            raise self.junk("bytes are left over")
        return value

    def node(self, depth: int) -> object:
        """The next node."""
        if depth > MAX_DEPTH:
            raise self.junk(f"values nest more than {MAX_DEPTH} deep")
        tag = self.take(1)
        read = _READERS.get(tag)
        if read is None:
            raise self.junk(f"there is no tag {tag!r}")
        return read(self, depth)

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        if nbytes > len(self._blob) - self._at:
            raise self.junk(f"{nbytes} bytes are announced, {len(self._blob) - self._at} are left")
        self._at += nbytes
        return self._blob[self._at - nbytes : self._at]

    def number(self) -> int:
        """The next size or count."""
        number = 0
        for shift in range(0, _MAX_VARINT_BITS, 7):
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
        raise self.junk("a size is out of range")

    def sized(self) -> bytes:
        """A size and as many bytes."""
        return self.take(self.number())

    def nodes(self, depth: int, per_entry: int = 1) -> list[Any]:
        """A count and as many entries of `per_entry` nodes, flat."""
        count = self.number() * per_entry
        if count > len(self._blob) - self._at:
            raise self.junk(f"{count} values are announced, {len(self._blob) - self._at} bytes are left")
        return [self.node(depth + 1) for _ in range(count)]

    def distinct(self, kind: type, depth: int) -> object:
        """A set or frozenset."""
        items = self.nodes(depth)
        made = kind(items)
        if len(made) != len(items):
            raise self.junk("a set holds a value twice")
        return made

    def mapping(self, kind: type, depth: int) -> object:
        """A dict."""
        flat = self.nodes(depth, 2)
        made = kind(zip(flat[::2], flat[1::2], strict=True))
        if 2 * len(made) != len(flat):
            raise self.junk("a mapping holds a key twice")
        return made

    def coded(self, depth: int) -> object:
        """A codec's value."""
        name = self.sized().decode()
        return self._by_codec(name, self.node(depth + 1), self._where)

    def pickled(self, depth: int) -> object:
        """A pickled value."""
        return self._unpickle(self.sized(), depth)

    def junk(self, reason: str) -> CorruptError:
        """The error for bytes that are no encoding."""
        return CorruptError(f"{self._where}: damaged at byte {self._at} of {len(self._blob)}: {reason}")


_READERS: dict[bytes, Callable[[Decoder, int], object]] = {
    b"N": lambda decoder, depth: None,
    b"T": lambda decoder, depth: True,
    b"F": lambda decoder, depth: False,
    b"i": lambda decoder, depth: int.from_bytes(decoder.sized(), "little", signed=True),
    b"f": lambda decoder, depth: struct.unpack("<d", decoder.take(8))[0],
    b"c": lambda decoder, depth: complex(*struct.unpack("<dd", decoder.take(16))),
    b"s": lambda decoder, depth: decoder.sized().decode("utf-8", "surrogatepass"),
    b"b": lambda decoder, depth: decoder.sized(),
    b"B": lambda decoder, depth: bytearray(decoder.sized()),
    b"l": lambda decoder, depth: decoder.nodes(depth),
    b"t": lambda decoder, depth: tuple(decoder.nodes(depth)),
    b"S": lambda decoder, depth: decoder.distinct(set, depth),
    b"Z": lambda decoder, depth: decoder.distinct(frozenset, depth),
    b"d": lambda decoder, depth: decoder.mapping(dict, depth),
    b"O": lambda decoder, depth: decoder.mapping(OrderedDict, depth),
    b"X": lambda decoder, depth: decoder.coded(depth),
    b"P": lambda decoder, depth: decoder.pickled(depth),
}
