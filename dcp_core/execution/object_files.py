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
        if stored.file not in self._indices:
            self._indices[stored.file] = self._open(stored.file)
        facts, index = self._indices[stored.file]
        ordinal = stored.ordinal
        if not 0 <= ordinal < len(index):
            raise CorruptError(f"{stored.name}: {facts.name} holds {len(index)} objects, none with number {ordinal}")
        value = self._storage.read(facts.name, int(index.offsets[ordinal]), int(index.nbytes[ordinal]))
        check_value(value, int(index.digests[ordinal]), f"{stored.name} in {facts.name}")
        return value

    def check(self, row: int) -> None:
        """Read all objects of a file and compare them with their digests.

        Raises:
            IncompleteError: The file is missing or of another size.
            CorruptError: The file or an object contradicts its digest.
        """
        facts, index = self._open(row)
        for ordinal in range(len(index)):
            value = self._storage.read(facts.name, int(index.offsets[ordinal]), int(index.nbytes[ordinal]))
            check_value(value, int(index.digests[ordinal]), f"object {ordinal} in {facts.name}")

    def _open(self, row: int) -> tuple[FileFacts, BytesIndex]:
        facts = file_facts(self._files, self._save, row)
        check_size(self._storage, facts)
        start = facts.field_start
        if start != PREAMBLE_NBYTES or facts.data_start != start + facts.field_nbytes:
            raise CorruptError(f"{facts.name}: its index cannot lie at byte {start} before data at {facts.data_start}")
        header = self._storage.read(facts.name, 0, facts.data_start)
        if parse_preamble(header[:start], facts.nbytes, name=facts.name) * ENTRY_NBYTES != facts.field_nbytes:
            raise CorruptError(f"{facts.name}: its preamble contradicts the length of its index")
        return facts, parse_index(header[start:], facts.digest, facts.nbytes, name=facts.name)
