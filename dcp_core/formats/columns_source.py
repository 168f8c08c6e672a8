"""A checkpoint's description in memory: the columns that a save makes, and the answers they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dcp_core.formats.metadata_blocks import ObjectGroup
from dcp_core.formats.name_table import build_name_table
from dcp_core.formats.stored_entries import Lookup, merge_names, stored_objects, stored_tensors
from dcp_core.formats.tensor_blocks import TensorGroup
from dcp_core.metadata import (
    ChunkColumns,
    FileColumns,
    FoundObjects,
    FoundTensors,
    Nesting,
    ObjectColumns,
    SaveRecord,
    StoredObject,
    StoredTensor,
    TensorColumns,
    WriterRecord,
)


@dataclass(frozen=True, slots=True, eq=False)
class MetadataColumns:
    """Everything about a checkpoint that stays the same while the state's structure does."""

    tensors: TensorColumns
    chunks: ChunkColumns
    objects: ObjectColumns
    nesting: Nesting


class ColumnsSource:
    """A `MetadataSource` over columns in memory.

    Args:
        columns: What is stored.
        files: Where.
        save: Which save it was.
        writer: Who wrote it.
    """

    def __init__(self, columns: MetadataColumns, files: FileColumns, save: SaveRecord, writer: WriterRecord) -> None:
        self.columns = columns
        self._files = files
        self._save = save
        self._writer = writer

    @property
    def files(self) -> FileColumns:
        """The data files."""
        return self._files

    @property
    def save(self) -> SaveRecord:
        """Which save it was."""
        return self._save

    @property
    def writer(self) -> WriterRecord:
        """Who wrote it."""
        return self._writer

    @property
    def nesting(self) -> Nesting:
        """How the state was nested."""
        return self.columns.nesting

    def names(self) -> Sequence[str]:
        """Every name, tensors and objects, in UTF-8 order, each once."""
        return self._names

    def tensors(self, name: str) -> Sequence[StoredTensor]:
        """All tensors under one name."""
        return stored_tensors(self._tensors, self.columns.chunks, name)

    def objects(self, name: str) -> Sequence[StoredObject]:
        """All objects under one name."""
        return stored_objects(self._objects, name)

    def find_tensors(self, names: Sequence[str]) -> tuple[Sequence[FoundTensors], Sequence[int]]:
        """Look many names up among the tensors, all at once."""
        return Lookup(names).tensors(slice(None), self._tensors, lambda: self.columns.chunks)

    def find_objects(self, names: Sequence[str]) -> tuple[Sequence[FoundObjects], Sequence[int]]:
        """Look many names up among the objects, all at once."""
        return Lookup(names).objects(slice(None), self._objects)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return merge_names((self.columns.tensors.names, self.columns.objects.names))

    @cached_property
    def _tensors(self) -> TensorGroup:
        tensors = self.columns.tensors
        names = build_name_table(tensors.names, tensors.paths)
        return TensorGroup(names, tensors.rank, tensors.dtype, tensors.ndim, tensors.shape, tensors.row)

    @cached_property
    def _objects(self) -> ObjectGroup:
        objects = self.columns.objects
        names = build_name_table(objects.names, objects.paths)
        return ObjectGroup(names, objects.rank, objects.per_rank, objects.file, objects.ordinal)
