"""How the ranks of a load get the checkpoint's description: the coordinator opens it, and tells the others.

In: a reader. Out: bytes for the first exchange on the coordinator; from those, the description on every rank.
"""

from __future__ import annotations

import zlib

from xxhash import xxh3_128_digest

from dcp_core.errors import CorruptError, NotFoundError
from dcp_core.execution.interfaces import StorageReader
from dcp_core.formats.metadata_file import (
    ColumnsSource,
    MetadataColumns,
    MetadataFile,
    assemble,
    encode_body,
    open_bytes,
)
from dcp_core.metadata import Metadata
from dcp_core.recipes.job import logger

HANDED_OUT_BYTES = 1 << 30
"""Metadata travels to the ranks as bytes while its size times their number stays below this."""

_WHOLE, _ENCODED, _BY_RANGES, _FALL_BACK = b"W", b"E", b"R", b"F"


class MetadataHandout:
    """One rank's part in it, for one load.

    Args:
        reader: Where the description is.
        rank: This process in the group.
    """

    def __init__(self, reader: StorageReader, rank: int) -> None:
        self._reader = reader
        self._rank = rank
        self._found: Metadata | None = None

    def find(self, ranks: int) -> bytes:
        """On the coordinator: open the description and decide how the others get it.

        Args:
            ranks: How many ranks load together.

        Returns:
            What `receive` takes, on all ranks.

        Raises:
            NotFoundError: There is none, and this rank has not saved alone either.
        """
        try:
            found = self._found = self._reader.load_metadata()
        except NotFoundError as missing:
            try:
                self._reader.load_metadata(self._rank)
            except NotFoundError:
                raise missing from None
            return _FALL_BACK
        limit, alone = HANDED_OUT_BYTES // ranks, ranks == 1
        encoded = self._reader.encode_metadata(found)
        if encoded is not None and len(encoded) > limit:
            return _BY_RANGES + xxh3_128_digest(encoded)
        if encoded is not None:
            return _ENCODED + (b"" if alone else zlib.compress(encoded, 1))
        blob = _metadata_bytes(found, limit)
        if isinstance(blob, int):
            source = found.source
            assert isinstance(source, MetadataFile)
            return _BY_RANGES + source.header_digest
        return _WHOLE + (b"" if alone else zlib.compress(blob, 1))

    def receive(self, answer: bytes) -> Metadata:
        """Take the description that the coordinator found.

        Args:
            answer: From `find`.

        Raises:
            NotFoundError: It is gone, or this rank has not saved alone as others have.
            CorruptError: It is damaged, or another rank's.
        """
        kind, body = answer[:1], answer[1:]
        if kind == _FALL_BACK:
            return self._own()
        if self._found is not None:
            return self._found
        if kind == _BY_RANGES:
            return self._reader.load_metadata(header_digest=body)
        if kind == _ENCODED:
            return self._reader.decode_metadata(zlib.decompress(body))
        return Metadata(open_bytes(zlib.decompress(body)))

    def _own(self) -> Metadata:
        """What this rank saved alone."""
        rank = self._rank
        logger.info("there is no .metadata: every rank reads its own {rank}.metadata")
        metadata = self._reader.load_metadata(rank)
        written_by = metadata.source.save.rank
        if written_by != rank:
            raise CorruptError(f"{rank}.metadata was written by rank {written_by}; restore the files of rank {rank}")
        return metadata


def _metadata_bytes(metadata: Metadata, limit: int) -> bytes | int:
    """The description as bytes, or its size where that is above the limit."""
    source = metadata.source
    if isinstance(source, MetadataFile):
        return source.nbytes if source.nbytes > limit else source.raw()
    columns: MetadataColumns
    if isinstance(source, ColumnsSource):
        columns = source.columns
    else:
        columns = source.columns()  # type: ignore[attr-defined]  # a source of somebody else, made like a file
    return assemble(encode_body(columns), source.files, source.save, source.writer)
