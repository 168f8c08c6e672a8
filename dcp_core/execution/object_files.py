"""Reads objects out of a checkpoint's `.bytes` files, each checked against its digest.

Goes in: an object as the metadata has it. Comes out: its bytes, still encoded.
"""

from __future__ import annotations

from dcp_core.errors import CorruptError
from dcp_core.execution.data_files import check_size, file_facts
from dcp_core.formats.bytes_file import (
    ENTRY_NBYTES,
    PREAMBLE_NBYTES,
    BytesIndex,
    check_value,
    parse_index,
    parse_preamble,
)
from dcp_core.formats.safetensors_file import FileFacts
from dcp_core.metadata import FileColumns, SaveRecord, StoredObject
from dcp_core.storage.base import Storage


class ObjectFiles:
    """The `.bytes` files of one checkpoint; the index of each is read once."""

    def __init__(self, storage: Storage, files: FileColumns, save: SaveRecord) -> None:
        self._storage = storage
        self._files = files
        self._save = save
        self._indices: dict[int, tuple[FileFacts, BytesIndex]] = {}

    def read(self, stored: StoredObject) -> bytes:
        """Read one object's bytes.

        Raises:
            IncompleteError: Its file is missing or of another size.
            CorruptError: The file or the object contradicts its digest.
        """
        facts, index = self._find(stored)
        ordinal = stored.ordinal
        value = self._storage.read(facts.name, int(index.offsets[ordinal]), int(index.nbytes[ordinal]))
        check_value(value, int(index.digests[ordinal]), f"{stored.name} in {facts.name}")
        return value

    def nbytes(self, stored: StoredObject) -> int:
        """Length of one object's encoding; only the index of its file is read.

        Raises:
            IncompleteError: Its file is missing or of another size.
            CorruptError: The index contradicts its digest, or lacks the object.
        """
        _, index = self._find(stored)
        return int(index.nbytes[stored.ordinal])

    def _find(self, stored: StoredObject) -> tuple[FileFacts, BytesIndex]:
        if stored.file not in self._indices:
            facts = file_facts(self._files, self._save, stored.file)
            self._indices[stored.file] = facts, open_index(self._storage, facts)
        facts, index = self._indices[stored.file]
        if not 0 <= stored.ordinal < len(index):
            raise CorruptError(
                f"{stored.name}: {facts.name} holds {len(index)} objects, none with number {stored.ordinal}"
            )
        return facts, index


def open_index(storage: Storage, facts: FileFacts) -> BytesIndex:
    """Read the index of a `.bytes` file, checked against what the metadata says about the file.

    Raises:
        IncompleteError: The file is missing or of another size.
        CorruptError: The file or the metadata contradicts the format, or each other.
        NewerVersionError: A newer version of this library wrote the file.
    """
    check_size(storage, facts)
    start = facts.field_start
    if start != PREAMBLE_NBYTES or facts.data_start != start + facts.field_nbytes:
        raise CorruptError(f"{facts.name}: its index cannot lie at byte {start} before data at {facts.data_start}")
    header = storage.read(facts.name, 0, facts.data_start)
    if parse_preamble(header[:start], facts.nbytes, name=facts.name) * ENTRY_NBYTES != facts.field_nbytes:
        raise CorruptError(f"{facts.name}: its preamble contradicts the length of its index")
    return parse_index(header[start:], facts.digest, facts.nbytes, name=facts.name)
