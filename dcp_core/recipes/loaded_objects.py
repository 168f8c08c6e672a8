"""The objects of a load: those that are the same for all ranks are read once, by the coordinator, and handed out.

In: what the plans want. Out: the bytes of each object, of which it is certain that they can be decoded, before any
target is touched.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from dcp_core.execution.interfaces import StorageReader
from dcp_core.formats.objects import decode_value, encode_value
from dcp_core.metadata import EVERY_RANK, Metadata, StoredObject
from dcp_core.planning.load_plan import WantedObject
from dcp_core.recipes.job import ObjectEncoding

OBJECT_HANDED_OUT_BYTES = 1 << 20
"""Objects up to this size are read once and handed out; larger ones every rank reads for itself."""

_CODEC = ObjectEncoding()


class LoadedObjects:
    """What one rank has of the objects that it wants.

    Args:
        reader: Where they are.
    """

    def __init__(self, reader: StorageReader) -> None:
        self._reader = reader
        self._blobs: dict[str, bytes] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._blobs

    def __getitem__(self, name: str) -> bytes:
        """The bytes of an object, by its stored name."""
        return self._blobs[name]

    def read(self, wanted: Iterable[WantedObject]) -> None:
        """Read objects for this rank.

        Raises:
            IncompleteError: A file is missing or short.
            CorruptError: Bytes contradict their digest, or cannot be decoded.
        """
        for want in wanted:
            self._blobs[want.stored.name] = self._read_one(want.stored, want.name)

    def read_shared(self, requests: Iterable[bytes], metadata: Metadata) -> bytes:
        """On the coordinator: read what any rank wants and is the same for all; gives what the ranks `take`.

        Args:
            requests: Of the ranks, from `shared_request`.
            metadata: The checkpoint's description.

        Raises:
            IncompleteError: A file is missing or short.
            CorruptError: Bytes contradict their digest, or cannot be decoded.
        """
        names: set[str] = set()
        for blob in requests:
            found = decode_value(zlib.decompress(blob), name="wanted objects")
            assert isinstance(found, list)
            names.update(found)
        read: dict[str, bytes] = {}
        for name in sorted(names):
            stored = next(entry for entry in metadata.source.objects(name) if entry.rank == EVERY_RANK)
            value = self._read_one(stored, name)
            if len(value) <= OBJECT_HANDED_OUT_BYTES:
                read[name] = value
        return zlib.compress(encode_value(read), 1)

    def take(self, answer: bytes) -> None:
        """Take what `read_shared` gave."""
        found = decode_value(zlib.decompress(answer), name="objects from the coordinator")
        assert isinstance(found, dict)
        self._blobs.update(found)

    def _read_one(self, stored: StoredObject, name: str) -> bytes:
        blob = self._reader.read_object(stored)
        _CODEC.decode(blob, name)
        return blob


def shared_request(wanted: Sequence[WantedObject]) -> bytes:
    """What a rank asks the coordinator for: objects that are the same for all ranks."""
    return zlib.compress(encode_value([want.stored.name for want in wanted]), 1)
