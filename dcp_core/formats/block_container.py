"""The container of `.metadata`: named blocks of bytes in a valid safetensors file, each with a digest.

The header starts with a digest of itself and holds the digests of all blocks, so 16 bytes stand for the whole file and
any block can be read alone and checked. This framing is the same in every version of the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from dcp_core.errors import CorruptError
from dcp_core.file_names import METADATA_NAME

Read = Callable[[int, int], bytes]
"""(offset, nbytes) -> those bytes of the file."""
_Span = tuple[int, int, bytes]
"""Where a block starts in the file, its length, its digest."""

MAX_HEADER_NBYTES = 1 << 21
FIRST_READ_NBYTES = 1 << 16
"""One read of this much gets the header, and with it the whole of a small file."""
DIGEST_NBYTES = 16

_PREFIX = b'{"__metadata__":{"header_xxh3":"'
_DIGEST_START = 8 + len(_PREFIX)
_DIGEST_STOP = _DIGEST_START + 2 * DIGEST_NBYTES
_ALIGNMENT = 8
_HEX_DIGEST = re.compile(rb"[0-9a-f]{32}")
_REMEDY = "restore the file, or load another checkpoint"


@dataclass(frozen=True, slots=True)
class Block:
    """A named run of bytes and its xxh3-128, big-endian as xxhash prints it."""

    name: str
    content: bytes
    digest: bytes

    @classmethod
    def of(cls, name: str, content: bytes) -> Block:
        """Make a block of some bytes."""
        return cls(name, content, xxhash.xxh3_128_digest(content))


class BlockSource(Protocol):
    """Strings and blocks by name: a container, or a migrated view of one."""

    @property
    def strings(self) -> Mapping[str, str]:
        """The header's strings."""
        ...

    @property
    def block_names(self) -> Sequence[str]:
        """The names of the blocks, in file order."""
        ...

    def block(self, name: str) -> bytes:
        """Read one block and check it."""
        ...


def foreign_kind(first: bytes) -> str:
    """Tell by a file's first bytes that another program wrote it.

    Args:
        first: The first bytes, at least 16 if there are as many.

    Returns:
        What it is, in words; "" for a file that may be ours, be it broken, and for what nobody can tell.

    >>> foreign_kind(b"PK and more"), foreign_kind(b"")
    ('a zip archive', '')
    """
    if first[8:_DIGEST_START] == _PREFIX or first[3:8] == bytes(5):  # the length of a header such as ours
        return ""
    if first[:1] == b"\x80":
        return "a pickle"
    return "a zip archive" if first[:2] == b"PK" else ""


def build_container(strings: Mapping[str, str], blocks: Sequence[Block]) -> bytes:
    """Write a container.

    Args:
        strings: Goes into the header, in this order.
        blocks: Lie back to back in this order.
    """
    digests = b"".join(block.digest for block in blocks).hex()
    metadata = {"header_xxh3": "0" * 2 * DIGEST_NBYTES, **strings, "block_xxh3": digests}
    entries: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for block in blocks:
        end = position + len(block.content)
        entries[block.name] = {"dtype": "U8", "shape": [len(block.content)], "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    digest = xxhash.xxh3_128_hexdigest(header).encode()
    header = header[:_DIGEST_START] + digest + header[_DIGEST_STOP:]
    return b"".join((header, *(block.content for block in blocks)))


class BlockContainer:
    """A container read by ranges.

    Args:
        read: Gives bytes of the file.
        nbytes: Size of the file.
        header_digest: What the header's digest must be, if it is known. 16 bytes.
        file_name: What to call the file in errors.

    Raises:
        CorruptError: This is no container, or a broken or another one.
    """

    def __init__(
        self, read: Read, nbytes: int, header_digest: bytes | None = None, file_name: str = METADATA_NAME
    ) -> None:
        self.file_name = file_name
        self._read = read
        self._nbytes = nbytes
        self._first = b""
        self._first = self._exactly(0, min(nbytes, FIRST_READ_NBYTES))
        header = self._header()
        self.header_digest: bytes = _checked_digest(header, file_name)
        if header_digest is not None and header_digest != self.header_digest:
            raise CorruptError(
                f"{file_name} is not the one that was agreed on: expected header digest {header_digest.hex()}, "
                f"found {self.header_digest.hex()}; was the checkpoint saved over meanwhile?"
            )
        self.strings: Mapping[str, str]
        self.strings, self._spans = _parse_header(header, nbytes, file_name)

    @property
    def block_names(self) -> Sequence[str]:
        """The names of the blocks, in file order."""
        return tuple(self._spans)

    def block(self, name: str) -> bytes:
        """Read one block and check it.

        Raises:
            CorruptError: There is no such block, or its digest is wrong.
        """
        if name not in self._spans:
            raise CorruptError(f"{self.file_name} lacks the block {name!r}")
        offset, nbytes, digest = self._spans[name]
        content = self._exactly(offset, nbytes)
        self._check(name, content, digest)
        return content

    def damaged_blocks(self) -> tuple[tuple[str, int, int], ...]:
        """Read every block; give those whose digest is wrong: name, byte offset in the file, length."""
        found = []
        for name, (offset, nbytes, digest) in self._spans.items():
            if xxhash.xxh3_128_digest(self._exactly(offset, nbytes)) != digest:
                found.append((name, offset, nbytes))
        return tuple(found)

    def _check(self, name: str, content: bytes | memoryview, digest: bytes) -> None:
        found = xxhash.xxh3_128_digest(content)
        if found != digest:
            raise CorruptError(
                f"block {name!r} of {self.file_name} is corrupt: expected digest {digest.hex()}, found {found.hex()}; "
                f"{_REMEDY}"
            )

    def _header(self) -> bytes:
        """The header with its length, read and measured."""
        length = int.from_bytes(self._first[:8], "little")
        if self._first[8:_DIGEST_START] != _PREFIX or length < len(_PREFIX):
            if self._first[:1] == b"\x80":
                raise CorruptError(
                    f"{self.file_name} is a pickle, which is never opened: it was written by "
                    "torch.distributed.checkpoint, or is another pickle, which this version does not read; load it "
                    "with dcp_torch.TorchDCPReader, or torch.distributed.checkpoint.load, and save it anew with dcp"
                )
            raise CorruptError(
                f"{self.file_name} was not written by this library, or its first bytes are broken; {_REMEDY}"
            )
        if length > min(self._nbytes - 8, MAX_HEADER_NBYTES):
            raise CorruptError(
                f"{self.file_name} has {self._nbytes} bytes, but announces a header of {length} bytes; {_REMEDY}"
            )
        return self._exactly(0, 8 + length)

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return self._nbytes

    def raw(self) -> bytes:
        """The whole file, every block checked.

        Raises:
            CorruptError: The digest of a block is wrong.
        """
        content = self._exactly(0, self._nbytes)
        view = memoryview(content)
        for name, (offset, nbytes, digest) in self._spans.items():
            self._check(name, view[offset : offset + nbytes], digest)
        return content

    def _exactly(self, offset: int, nbytes: int) -> bytes:
        if 0 < offset + nbytes <= len(self._first):
            return self._first[offset : offset + nbytes]
        content = bytes(self._read(offset, nbytes))
        if len(content) != nbytes:
            raise CorruptError(f"{self.file_name} ends early: {len(content)} of {nbytes} bytes at {offset}; {_REMEDY}")
        return content


def _checked_digest(header: bytes, file_name: str) -> bytes:
    """The header's digest of itself (computed over it with zeros in the digest's place)."""
    stored = header[_DIGEST_START:_DIGEST_STOP]
    blank = header[:_DIGEST_START] + b"0" * len(stored) + header[_DIGEST_STOP:]
    found = xxhash.xxh3_128_hexdigest(blank)
    if not _HEX_DIGEST.fullmatch(stored):
        raise CorruptError(f"the header of {file_name} is corrupt: its digest is no hex number; {_REMEDY}")
    if stored.decode() != found:
        raise CorruptError(
            f"the header of {file_name} is corrupt: expected digest {stored.decode()}, found {found}; {_REMEDY}"
        )
    return bytes.fromhex(stored.decode())


def _parse_header(header: bytes, nbytes: int, file_name: str) -> tuple[dict[str, str], dict[str, _Span]]:
    """The strings, and where each block lies, in file order."""
    try:
        entries = json.loads(header[8:], object_pairs_hook=_unique)
        strings = entries.pop("__metadata__")
        digests = bytes.fromhex(strings.pop("block_xxh3"))
        if not all(isinstance(value, str) for value in strings.values()):
            raise ValueError("a string of __metadata__ is none")
        return strings, _spans(entries, digests, len(header), nbytes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"the header of {file_name} is malformed: {error}; {_REMEDY}") from error


def _spans(entries: Mapping[str, Any], digests: bytes, data_start: int, nbytes: int) -> dict[str, _Span]:
    """Where each block lies; they must follow each other without holes up to the end of the file."""
    if len(digests) != DIGEST_NBYTES * len(entries):
        raise ValueError(f"{len(entries)} blocks, but {len(digests)} bytes of digests")
    spans: dict[str, _Span] = {}
    position = data_start
    for row, (name, entry) in enumerate(entries.items()):
        start, end = entry["data_offsets"]
        if type(start) is not int or type(end) is not int or data_start + start != position or end < start:
            raise ValueError(f"block {name!r} overlaps another, or leaves a hole: {start}..{end}")
        if entry["dtype"] != "U8" or entry["shape"] != [end - start]:
            raise ValueError(f"block {name!r} is not a row of {end - start} bytes")
        spans[name] = (position, end - start, digests[DIGEST_NBYTES * row : DIGEST_NBYTES * (row + 1)])
        position += end - start
    if position != nbytes:
        raise ValueError(f"the file should have {position} bytes, found {nbytes}")
    return spans


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
