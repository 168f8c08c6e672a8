"""Puts attack files together byte by byte: pickles, zip archives, compressed streams, safetensors.

Nothing here depends on how a library happens to write things, so that the files come out the same everywhere.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence

import xxhash

MARK, STOP = b"(", b"."
REDUCE, BUILD, NEWOBJ = b"R", b"b", b"\x81"
NONE, EMPTY_TUPLE = b"N", b")"
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)


def proto(number: int, *parts: bytes) -> bytes:
    """A pickle."""
    return (b"\x80" + bytes([number]) if number >= 2 else b"") + b"".join(parts) + STOP


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def raw_bytes(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(encoded) < 256:
        return b"\x8a" + bytes([len(encoded)]) + encoded
    return b"\x8b" + struct.pack("<i", len(encoded)) + encoded


def named(module: str, name: str) -> bytes:
    """GLOBAL: protocol 0 and later."""
    return b"c" + f"{module}\n{name}\n".encode()


def named_by_stack(module: str, name: str) -> bytes:
    """STACK_GLOBAL: protocol 4 and later; names with dots are attributes of attributes."""
    return short_text(module) + short_text(name) + b"\x93"


def short_text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value.encode())]) + value.encode()


def tuple_of(*items: bytes) -> bytes:
    return MARK + b"".join(items) + b"t"


def list_of(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def dict_of(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + tuple_of(*arguments) + REDUCE


def made(kind: bytes, *fields: tuple[str, bytes]) -> bytes:
    """An object whose attributes are set."""
    return kind + EMPTY_TUPLE + NEWOBJ + dict_of(*((text(name), value) for name, value in fields)) + BUILD


def shared_bomb(levels: int, leaf: bytes = NONE) -> bytes:
    """A tuple of two that are one tuple of two that are one ...: short to write, 2**levels to walk."""
    parts = [leaf + b"q\x00"]
    for level in range(levels):
        parts.append(b"h" + bytes([level]) + b"\x86q" + bytes([level + 1]))
    return b"".join(parts)


def zeros_stream(nbytes: int) -> bytes:
    """A zlib stream of zeros, one match of 258 after the other: 160 times smaller."""
    bits: list[int] = []

    def put(value: int, count: int) -> None:
        bits.extend(value >> at & 1 for at in range(count))

    def put_code(value: int, count: int) -> None:
        bits.extend(value >> at & 1 for at in reversed(range(count)))

    put(1, 1)
    put(1, 2)
    matches, rest = divmod(nbytes - 1, 258)
    for _ in range(rest + 1):
        put_code(0b00110000, 8)
    for _ in range(matches):
        put_code(0b11000101, 8)
        put_code(0, 5)
    put_code(0, 7)
    bits.extend([0] * (-len(bits) % 8))
    packed = bytes(sum(bit << at for at, bit in enumerate(bits[start : start + 8])) for start in range(0, len(bits), 8))
    checksum = 1
    for _ in range(nbytes >> 16):
        checksum = zlib.adler32(bytes(1 << 16), checksum)
    return b"\x78\x9c" + packed + struct.pack(">I", zlib.adler32(bytes(nbytes & 0xFFFF), checksum))


def archive(records: Mapping[str, bytes], *, deflated: Mapping[str, int] | None = None) -> bytes:
    """A zip archive of records as they are; of `deflated`, each holds so many zeros, compressed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as zipped:
        for name, content in records.items():
            zipped.writestr(zipfile.ZipInfo(name, _ZIP_DATE), content)
    whole = stream.getvalue()
    for name, nbytes in (deflated or {}).items():
        packed = zeros_stream(nbytes)[2:-4]
        whole = _replaced_record(whole, name, packed, nbytes)
    return whole


def _replaced_record(whole: bytes, name: str, packed: bytes, nbytes: int) -> bytes:
    """Put a deflated record in the place of an empty one, which must be the last."""
    with zipfile.ZipFile(io.BytesIO(whole)) as zipped:
        found = zipped.getinfo(name)
        start = found.header_offset
        end = zipped.start_dir
        count = len(zipped.infolist())
    checksum = 0
    for _ in range(nbytes >> 20):
        checksum = zlib.crc32(bytes(1 << 20), checksum)
    checksum = zlib.crc32(bytes(nbytes & 0xFFFFF), checksum)
    sizes = struct.pack("<III", checksum, len(packed), nbytes)
    spelled = name.encode()
    method = struct.pack("<H", zipfile.ZIP_DEFLATED)
    local = whole[start : start + 8] + method + whole[start + 10 : start + 14] + sizes + whole[start + 26 : start + 30]
    central = bytearray(whole[end:])
    entry = central.index(spelled) - 46
    central[entry + 10 : entry + 12] = method
    central[entry + 16 : entry + 28] = sizes
    body = whole[:start] + local + spelled + packed
    tail = central.index(b"PK\x05\x06")
    directory = bytes(central[:tail])
    record = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, len(directory), len(body), 0)
    return body + directory + record


def safetensors(header: Mapping[str, object] | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file of any header, which may lie about its length."""
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str, shape: Sequence[object], start: object, stop: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def sealed(header: bytes, blocks: bytes = b"") -> bytes:
    """A `.metadata` with this header, a place of 32 zeros in it for its digest, which is right."""
    whole = struct.pack("<Q", len(header)) + header
    place = whole.index(b"0" * 32)
    digest = xxhash.xxh3_128_hexdigest(whole).encode()
    return whole[:place] + digest + whole[place + 32 :] + blocks


def varint(value: int) -> bytes:
    digits = bytearray()
    while value >= 128:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def shared_bomb_of_memoize(levels: int) -> bytes:
    """`shared_bomb` as protocol 4 and later spell it."""
    return NONE + b"\x94" + b"".join(b"h" + bytes([level]) + b"\x86\x94" for level in range(levels))
