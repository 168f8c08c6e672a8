"""The description of a committed save, on a rank that did not commit it itself: read when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from dcp_core.execution.interfaces import StorageWriter
from dcp_core.metadata import (
    FileColumns,
    FoundObjects,
    FoundTensors,
    Metadata,
    MetadataSource,
    Nesting,
    SaveRecord,
    StoredObject,
    StoredTensor,
    WriterRecord,
)


def committed_metadata(writer: StorageWriter, save_id: str, rank: int | None = None) -> Metadata:
    """The description of a save.

    Args:
        writer: Where it lies; reads it when it is first asked for something.
        save_id: Which save.
        rank: Of a rank that saved alone, its number.
    """
    return Metadata(_Committed(writer, save_id, rank))


class _Committed:
    """The metadata of a committed save, opened when somebody asks."""

    def __init__(self, writer: StorageWriter, save_id: str, rank: int | None) -> None:
        self._writer = writer
        self._save_id = save_id
        self._rank = rank

    @cached_property
    def _source(self) -> MetadataSource:
        if self._rank is None:
            return self._writer.committed_metadata(self._save_id).source
        return self._writer.committed_metadata(self._save_id, self._rank).source

    @property
    def writer(self) -> WriterRecord:
        return self._source.writer

    @property
    def save(self) -> SaveRecord:
        return self._source.save

    @property
    def files(self) -> FileColumns:
        return self._source.files

    @property
    def nesting(self) -> Nesting:
        return self._source.nesting

    def names(self) -> Sequence[str]:
        return self._source.names()

    def tensors(self, name: str) -> Sequence[StoredTensor]:
        return self._source.tensors(name)

    def objects(self, name: str) -> Sequence[StoredObject]:
        return self._source.objects(name)

    def find_tensors(self, names: Sequence[str]) -> tuple[Sequence[FoundTensors], Sequence[int]]:
        return self._source.find_tensors(names)

    def find_objects(self, names: Sequence[str]) -> tuple[Sequence[FoundObjects], Sequence[int]]:
        return self._source.find_objects(names)
