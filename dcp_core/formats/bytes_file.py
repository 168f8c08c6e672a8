"""The `.bytes` file: a rank's objects, back to back behind an index.

Layout, little-endian: the magic `DCPBYTES`, u32 version, u32 count, then the index of (u64 nbytes, u64 xxh3-64) per
value, then the values without gaps. `.metadata` knows the digest of the index, so one read of the index checks it all.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from dcp_core.errors import CorruptError, NewerVersionError

MAGIC = b"DCPBYTES"
VERSION = 1
PREAMBLE_NBYTES = 16
ENTRY_NBYTES = 16

_PREAMBLE = struct.Struct("<8sII")
_ENTRY = np.dtype([("nbytes", "<u8"), ("digest", "<u8")])


@dataclass(frozen=True, slots=True)
class BytesFile:
    """A file about to be written: the header, and then the values in order.

    Attributes:
        header: Everything before the values.
        field_start: Byte where the index starts.
        field_nbytes: Its length.
        digest: xxh3-128 of it.
        nbytes: Size of the whole file.
        data_start: Byte where the first value starts.
    """

    header: bytes
    field_start: int
    field_nbytes: int
    digest: int
    nbytes: int
    data_start: int


@dataclass(frozen=True, slots=True, eq=False)
class BytesIndex:
    """Where the values of a file lie.

    Attributes:
        offsets: Byte of the file where each value starts. Shape (count,).
        nbytes: Length of each. Shape (count,).
        digests: xxh3-64 of each. Shape (count,).
    """

    offsets: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.offsets)


def build_bytes_file(values: Sequence[bytes]) -> BytesFile:
    """Lay out a file.

    Args:
        values: Encoded objects in the order of their ordinals.
    """
    index = np.empty(len(values), _ENTRY)
    index["nbytes"] = [len(value) for value in values]
    index["digest"] = [xxhash.xxh3_64_intdigest(value) for value in values]
    raw = index.tobytes()
    data_start = PREAMBLE_NBYTES + len(raw)
    return BytesFile(
        header=_PREAMBLE.pack(MAGIC, VERSION, len(values)) + raw,
        field_start=PREAMBLE_NBYTES,
        field_nbytes=len(raw),
        digest=xxhash.xxh3_128_intdigest(raw),
        nbytes=data_start + sum(map(len, values)),
        data_start=data_start,
    )


def parse_preamble(raw: bytes, file_nbytes: int, *, name: str = "a .bytes file") -> int:
    """Read the first `PREAMBLE_NBYTES` bytes of a file and return how many values it holds.

    Raises:
        NewerVersionError: A newer version of the file.
        CorruptError: Not such a file, or too short for its index.
    """
    if len(raw) < PREAMBLE_NBYTES or raw[:8] != MAGIC:
        raise CorruptError(f"{name}: does not start like a .bytes file; it is damaged or another file")
    _, version, count = _PREAMBLE.unpack_from(raw)
    if version > VERSION:
        raise NewerVersionError(f"{name}: has version {version}, this library reads up to {VERSION}; update it")
    if version < 1 or PREAMBLE_NBYTES + count * ENTRY_NBYTES > file_nbytes:
        raise CorruptError(f"{name}: an index of {count} values does not fit into {file_nbytes} bytes")
    return int(count)


def parse_index(raw: bytes, digest: int | None, file_nbytes: int, *, name: str = "a .bytes file") -> BytesIndex:
    """Read the index of a file.

    Args:
        raw: The bytes of the index, as long as `.metadata` says.
        digest: Its xxh3-128 as `.metadata` has it; None if that is not known.
        file_nbytes: Size of the file.
        name: Its name, for errors.

    Raises:
        CorruptError: The bytes contradict the digest or the size of the file.
    """
    if digest is not None and xxhash.xxh3_128_intdigest(raw) != digest:
        raise CorruptError(f"{name}: its index does not match the digest in .metadata; the file is damaged")
    if len(raw) % ENTRY_NBYTES:
        raise CorruptError(f"{name}: an index of {len(raw)} bytes is not made of whole entries")
    index = np.frombuffer(raw, _ENTRY)
    lengths: list[int] = index["nbytes"].tolist()
    expected = PREAMBLE_NBYTES + len(raw) + sum(lengths)
    if expected != file_nbytes:
        raise CorruptError(f"{name}: its index describes {expected} bytes, the file has {file_nbytes}")
    nbytes = index["nbytes"].astype(np.int64)
    offsets = PREAMBLE_NBYTES + len(raw) + np.cumsum(nbytes) - nbytes
    return BytesIndex(offsets, nbytes, index["digest"].astype(np.uint64))


def check_value(blob: bytes, digest: int, what: str) -> None:
    """Check a value that was read.

    Raises:
        CorruptError: It does not have that digest.
    """
    if xxhash.xxh3_64_intdigest(blob) != digest:
        raise CorruptError(f"{what}: its {len(blob)} bytes do not match their checksum; the file is damaged")
