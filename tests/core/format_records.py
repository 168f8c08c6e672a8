"""How `.metadata` is framed, and the records of its blocks, read by docs/reference/format.md alone."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import xxhash


class DeviationError(ValueError):
    """Bytes that are not what the page says."""


def require(fact: object, what: str) -> None:
    if not fact:
        raise DeviationError(what)


def unique_json(text: bytes) -> Any:
    """JSON whose objects name nothing twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        require(len(dict(pairs)) == len(pairs), "a name occurs twice in the JSON")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)


class Container:
    OPENING = b'{"__metadata__":{"header_xxh3":"'

    def __init__(self, blob: bytes) -> None:
        require(len(blob) >= 8, "a length word")
        (length,) = struct.unpack_from("<Q", blob)
        require(length <= 2097152 and 8 + length <= len(blob), "a header's length")
        start = 8 + len(self.OPENING)
        require(blob[8:start] == self.OPENING, "how a header opens")
        blank = blob[:start] + b"0" * 32 + blob[start + 32 : 8 + length]
        require(xxhash.xxh3_128_hexdigest(blank).encode() == blob[start : start + 32], "the header's digest")
        header = unique_json(blob[8 : 8 + length])
        self.strings: dict[str, str] = header.pop("__metadata__")
        require((self.strings["format"], self.strings["version"]) == ("dcp", "1"), "format and version")
        require(re.fullmatch("[0-9a-f]{32}", self.strings["save_id"]), "a save id")
        require(re.fullmatch(r"(\.[0-9a-f]{32})?", self.strings["suffix"]), "a suffix")
        require(re.fullmatch("0|[1-9][0-9]*|", self.strings["rank"]), "a rank")
        self.blocks: dict[str, bytes] = {}
        at = 0
        for row, (name, entry) in enumerate(header.items()):
            first, last = entry["data_offsets"]
            require((entry["dtype"], entry["shape"], first) == ("U8", [last - at], at), f"the place of block {name}")
            self.blocks[name] = blob[8 + length + first : 8 + length + last]
            digest = self.strings["block_xxh3"][32 * row : 32 * row + 32]
            require(xxhash.xxh3_128_hexdigest(self.blocks[name]) == digest, f"the digest of block {name}")
            at = last
        require(8 + length + at == len(blob), "blocks end with the file")
        require(len(self.strings["block_xxh3"]) == 32 * len(self.blocks), "a digest for each block")


class Records:
    def __init__(self, block: bytes) -> None:
        self.block, self.at = block, 0

    def raw(self, nbytes: int) -> bytes:
        require(0 <= nbytes <= len(self.block) - self.at, "a record lies in its block")
        self.at += nbytes
        return self.block[self.at - nbytes : self.at]

    def unpack(self, layout: str) -> tuple[int, ...]:
        fields: tuple[int, ...] = struct.unpack("<" + layout, self.raw(struct.calcsize("<" + layout)))
        return fields

    def count(self) -> int:
        return self.unpack("Q")[0]

    def stored(self, nbytes: int, compressed: bool, expected: int, allocated: int) -> bytes:
        require(allocated <= max(4194304, 8 * nbytes), "a record is not much larger than what is stored")
        found = self.raw(nbytes)
        if compressed:
            stream = zlib.decompressobj()
            found = stream.decompress(found, expected + 1)
            require(stream.eof and not stream.unused_data, "a zlib stream ends where it should")
        require(len(found) == expected, "a record's length")
        return found

    def string(self) -> bytes:
        coding, expected, nbytes = self.unpack("BQQ")
        require(coding in (0, 1), "the coding of a byte string")
        return self.stored(nbytes, coding == 1, expected, expected)

    def column(self, count: int) -> list[int]:
        coding, width, nbytes, first, base = self.unpack("BBQqq")
        require(coding < 4 and width in (0, 1, 2, 4, 8), "the coding of a column")
        differences = bool(coding & 2)
        length = max(count - 1, 0) if differences else count
        planes = self.stored(nbytes, bool(coding & 1), length * width, length * max(width, 1))
        steps = [base + sum(planes[p * length + row] << 8 * p for p in range(width)) for row in range(length)]
        if differences:
            values = [first] * min(count, 1)
            for step in steps:
                values.append(values[-1] + step)
        else:
            values = steps
        return [(value + 2**63) % 2**64 - 2**63 for value in values]

    def table(self, count: int) -> list[bytes]:
        return cut(self.string_lengths(count), self.string())

    def string_lengths(self, count: int) -> list[int]:
        lengths = self.column(count)
        require(all(length >= 0 for length in lengths), "lengths of strings")
        return lengths

    def end(self) -> None:
        require(self.at == len(self.block), "nothing follows the last record")


def cut(lengths: Sequence[int], joined: bytes) -> list[bytes]:
    require(sum(lengths) == len(joined), "strings fill what is stored of them")
    ends = accumulate(lengths)
    return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]
