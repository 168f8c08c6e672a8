"""The header of a data file, which is a valid safetensors file.

Goes in: the chunks of one rank in file order. Comes out: the header's bytes, with two fixed-width fields in its
`__metadata__` that are filled in when the data has been written: `dcp.save_id` (32 hex digits, always at
`SAVE_ID_START`) and `dcp.checksums` (see `formats.checksums`). Until then they hold placeholders, "0" and "A".
We write it ourselves because safetensors' own writer sorts tensors by dtype. Spaces pad it so that the data section
starts at a multiple of 64.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from dcp_core.errors import CorruptError, PlanningError
from dcp_core.formats.checksums import (
    Buffer,
    ChecksumTable,
    decode_field,
    encode_field,
    field_digest,
    field_length,
    make_table,
)
from dcp_core.formats.header_entries import HeaderColumns, HeaderEntry, check_entries, spell_entries

__all__ = [
    "ALIGNMENT",
    "MAX_HEADER_BYTES",
    "SAVE_ID_START",
    "FileFacts",
    "HeaderColumns",
    "HeaderEntry",
    "HeaderLayout",
    "build_header",
    "check_facts",
    "check_save_id",
    "fill_header",
    "read_checksums",
]

ALIGNMENT = 64
MAX_HEADER_BYTES = 100_000_000
"""safetensors refuses longer headers."""

_ID_CHARS = 32
_PREFIX = b'{"__metadata__":{"dcp.format":"1","dcp.save_id":"'
_BETWEEN = b'","dcp.checksums":"'
SAVE_ID_START = 8 + len(_PREFIX)
"""Where the save's id lies in every data file."""

_FIELD_START = SAVE_ID_START + _ID_CHARS + len(_BETWEEN)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a checkpoint's metadata says about one data file.

    Attributes:
        name: Its name.
        save_id: The save that wrote it; None for a file of another program, which says nothing about itself.
        nbytes: Size of the whole file.
        data_start: Where the data section starts.
        field_start: Where the checksum field (`.bytes`: the index) starts.
        field_nbytes: Its length.
        digest: xxh3-128 of it.
    """

    name: str
    save_id: str | None
    nbytes: int
    data_start: int
    field_start: int
    field_nbytes: int
    digest: int

    @property
    def data_nbytes(self) -> int:
        """Length of the data section."""
        return self.nbytes - self.data_start


def check_facts(file: FileFacts) -> None:
    """Refuse facts that no data file can have, before memory is set aside for them.

    Raises:
        CorruptError: The metadata contradicts the format.
    """
    first = 0 if file.save_id is None else SAVE_ID_START
    if not first <= file.data_start <= min(file.nbytes, MAX_HEADER_BYTES + 8 + ALIGNMENT):
        raise CorruptError(f"{file.name}: a header of {file.data_start} bytes in a file of {file.nbytes} is impossible")


@dataclass(frozen=True, slots=True, eq=False)
class HeaderLayout:
    """A header whose fields are not filled in yet. Depends on the chunks alone, so it can be kept.

    Attributes:
        header: Its bytes, the length word included; the placeholders stand in the fields.
        field_nbytes: Length of the checksum field.
        chunk_nbytes: Length of each chunk, in file order. Shape (C,).
        data_nbytes: Length of the data section.
    """

    header: bytes
    field_nbytes: int
    chunk_nbytes: npt.NDArray[np.int64]
    data_nbytes: int

    @property
    def data_start(self) -> int:
        """Where the data section starts in the file; a multiple of 64."""
        return len(self.header)

    @property
    def field_start(self) -> int:
        """Where the checksum field starts in the file."""
        return _FIELD_START

    @property
    def nbytes(self) -> int:
        """Length of the whole file."""
        return len(self.header) + self.data_nbytes


def build_header(chunks: HeaderColumns | Sequence[HeaderEntry]) -> HeaderLayout:
    """Lay out the header of a data file.

    Args:
        chunks: Its chunks, back to back from byte 0 on.

    Raises:
        PlanningError: Chunks that are not back to back, whose length contradicts their dtype and sizes, whose keys
            repeat or cannot be spelled; a header longer than safetensors allows.
    """
    columns = chunks if isinstance(chunks, HeaderColumns) else HeaderColumns.of_entries(chunks)
    check_entries(columns)
    field_nbytes = field_length(columns.nbytes)
    fields = b"".join([_PREFIX, b"0" * _ID_CHARS, _BETWEEN, b"A" * field_nbytes, b'"}'])
    body = b"".join([fields, "".join(spell_entries(columns)).encode(), b"}"])
    body += b" " * (-(8 + len(body)) % ALIGNMENT)
    if len(body) > MAX_HEADER_BYTES:
        raise PlanningError(
            f"the header of one data file would take {len(body)} bytes for {len(columns.keys)} chunks; safetensors "
            f"allows {MAX_HEADER_BYTES}: save fewer or larger tensors per rank"
        )
    header = struct.pack("<Q", len(body)) + body
    return HeaderLayout(header, field_nbytes, columns.nbytes, int(columns.nbytes.sum()))


def fill_header(
    layout: HeaderLayout, save_id: str, blocks: Sequence[int] | npt.NDArray[np.uint64]
) -> tuple[bytes, int]:
    """Fill the fields in.

    Args:
        layout: From `build_header`.
        save_id: 32 hex digits.
        blocks: The checksum of every block of the data section, in file order.

    Returns:
        The finished header, and the digest of its checksum field.

    Raises:
        ValueError: Too many or too few blocks, or an id of another length.
    """
    if len(save_id) != _ID_CHARS:
        raise ValueError(f"a save's id has {_ID_CHARS} characters, not {len(save_id)}")
    table = make_table(_header_checksum(layout.header, layout.field_nbytes), layout.chunk_nbytes, blocks)
    field = encode_field(table)
    header = bytearray(layout.header)
    header[SAVE_ID_START : SAVE_ID_START + _ID_CHARS] = save_id.encode()
    header[_FIELD_START : _FIELD_START + layout.field_nbytes] = field
    return bytes(header), field_digest(field)


def _header_checksum(header: Buffer, field_nbytes: int) -> int:
    """xxh3-64 of a header as it is with placeholders in its fields."""
    view = memoryview(header)
    hasher = xxh3_64(view[:SAVE_ID_START])
    hasher.update(b"0" * _ID_CHARS)
    hasher.update(view[SAVE_ID_START + _ID_CHARS : _FIELD_START])
    hasher.update(b"A" * field_nbytes)
    hasher.update(view[_FIELD_START + field_nbytes :])
    return hasher.intdigest()


def check_save_id(found: bytes, save_id: str, name: str) -> None:
    """Compare the 32 bytes at `SAVE_ID_START` with the id of the save that the checkpoint is.

    Raises:
        CorruptError: The file is another save's, or was never finished.
    """
    if found == save_id.encode():
        return
    reason = (
        "was never finished" if not found.strip(b"0\0") else f"belongs to the save {found.decode('ascii', 'replace')}"
    )
    raise CorruptError(
        f"{name}: the file {reason}, the checkpoint to the save {save_id}; something replaced it: restore the file, "
        "or load another checkpoint"
    )


def read_checksums(header: bytes, file: FileFacts) -> ChecksumTable:
    """Check every byte of a data file's header, and give the checksums of its data.

    Args:
        header: The file from byte 0 to the start of its data section.
        file: What the checkpoint's metadata says about the file.

    Raises:
        CorruptError: Another save's file, or bytes that changed since it was written.
    """
    check_save_id(header[SAVE_ID_START : SAVE_ID_START + _ID_CHARS], file.save_id or "", file.name)
    if file.field_start != _FIELD_START or _FIELD_START + file.field_nbytes > len(header):
        raise CorruptError(f"{file.name}: its checksum field cannot lie at byte {file.field_start}")
    field = header[_FIELD_START : _FIELD_START + file.field_nbytes]
    if field_digest(field) != file.digest:
        raise CorruptError(f"{file.name}: its checksum field contradicts the metadata; the file has been changed")
    table = decode_field(field, file.data_nbytes, file.name)
    if _header_checksum(header, file.field_nbytes) != table.header:
        raise CorruptError(f"{file.name}: its header contradicts its checksum; the file has been changed")
    return table
