"""What one rank wrote, and how it tells the coordinator."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dcp_core.errors import CoordinationError

_RESULT = struct.Struct("<IdQ")
_FILE = struct.Struct("<HBQQII16s")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A data file that was written.

    Attributes:
        rank: Who wrote it.
        part: 0, or the number of a further part.
        kind: `file_names.TENSOR_FILE` or `file_names.OBJECT_FILE`.
        nbytes: Size of the whole file.
        data_start: Where its data section starts.
        field_start: Where its checksum field (`.bytes`: its index) starts.
        field_nbytes: Length of that.
        digest: xxh3-128 of that.
    """

    rank: int
    part: int
    kind: int
    nbytes: int
    data_start: int
    field_start: int
    field_nbytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What one rank wrote.

    Attributes:
        rank: Who.
        files: Its data files; none for a rank that had nothing to write.
        seconds: How long writing took.
        data_nbytes: Bytes of values in them, headers not counted.
    """

    rank: int
    files: tuple[FileRecord, ...]
    seconds: float
    data_nbytes: int

    def to_bytes(self) -> bytes:
        """Flatten to at most 120 bytes for the two usual files."""
        files = []
        for f in self.files:
            digest = f.digest.to_bytes(16, "big")
            files.append(_FILE.pack(f.part, f.kind, f.nbytes, f.data_start, f.field_start, f.field_nbytes, digest))
        return _RESULT.pack(self.rank, self.seconds, self.data_nbytes) + b"".join(files)

    @classmethod
    def from_bytes(cls, raw: bytes) -> WriteResult:
        """Undo `to_bytes`.

        Raises:
            CoordinationError: The bytes are no result.
        """
        if len(raw) < _RESULT.size or (len(raw) - _RESULT.size) % _FILE.size:
            raise CoordinationError(f"{len(raw)} bytes are no result of a write; do all ranks run one version of DCP?")
        rank, seconds, data_nbytes = _RESULT.unpack_from(raw)
        files = tuple(
            FileRecord(rank, part, kind, nbytes, data_start, field_start, field_nbytes, int.from_bytes(digest, "big"))
            for part, kind, nbytes, data_start, field_start, field_nbytes, digest in _FILE.iter_unpack(
                raw[_RESULT.size :]
            )
        )
        return cls(rank, files, seconds, data_nbytes)
