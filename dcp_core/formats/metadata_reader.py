"""Read a `.metadata` file by ranges: the header first, then only the blocks that a question needs.

In goes a function that reads bytes, out come the answers of `MetadataSource`. Every block is checked against its
digest, and every value against everything it could contradict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

import numpy as np

from dcp_core.errors import CorruptError, NewerVersionError
from dcp_core.file_names import METADATA_NAME, data_file_name
from dcp_core.formats.block_container import BlockContainer, BlockSource, Read
from dcp_core.formats.chunk_checks import chunk_nbytes, spans_fault
from dcp_core.formats.columns_source import MetadataColumns
from dcp_core.formats.group_directory import GroupDirectory, decode_directory
from dcp_core.formats.group_joins import join_chunks, join_objects, join_tensors
from dcp_core.formats.metadata_blocks import (
    ObjectGroup,
    decode_files,
    decode_nesting,
    decode_objects,
)
from dcp_core.formats.name_table import NameTable
from dcp_core.formats.stored_entries import Lookup, merge_names, stored_objects, stored_tensors
from dcp_core.formats.tensor_blocks import TensorGroup, decode_chunks, decode_tensors
from dcp_core.metadata import (
    ChunkColumns,
    FileColumns,
    FoundObjects,
    FoundTensors,
    Nesting,
    SaveRecord,
    StoredObject,
    StoredTensor,
    TensorColumns,
    WriterRecord,
)

FORMAT_NAME = "dcp"
FORMAT_VERSION = 1

MIGRATIONS: Mapping[int, Callable[[BlockSource], BlockSource]] = {}
"""version -> a view of a file of that version as one of the next."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_SUFFIX = re.compile(r"(?:\.[0-9a-f]{32})?")


class MetadataFile:
    """A `MetadataSource` over a `.metadata` file.

    Args:
        read: Gives bytes of the file; called with (offset, nbytes).
        nbytes: Size of the file.
        header_digest: The digest that the header must have, 16 bytes; None takes any.
        file_name: What to call the file in errors.

    Raises:
        CorruptError: This is not a sound file of this format, or not the one asked for.
        NewerVersionError: A newer version of this library wrote it.
    """

    def __init__(
        self, read: Read, nbytes: int, header_digest: bytes | None = None, file_name: str = METADATA_NAME
    ) -> None:
        container = BlockContainer(read, nbytes, header_digest, file_name)
        self.file_name = file_name
        self.header_digest = container.header_digest
        self._container = container
        self._blocks = _migrated(container, file_name)
        self._save = _save_record(self._blocks.strings, file_name)
        self._writer = _writer_record(self._blocks.strings, file_name)
        self._tensor_groups: dict[int, TensorGroup] = {}
        self._chunk_groups: dict[int, ChunkColumns] = {}
        self._object_groups: dict[int, ObjectGroup] = {}

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return self._container.nbytes

    def raw(self) -> bytes:
        """The whole file, as it was found."""
        return self._container.raw()

    def damaged_blocks(self) -> tuple[tuple[str, int, int], ...]:
        """Read every block; give those whose digest is wrong: name, byte offset in the file, length."""
        return self._container.damaged_blocks()

    @property
    def save(self) -> SaveRecord:
        """Which save wrote it."""
        return self._save

    @property
    def writer(self) -> WriterRecord:
        """Who wrote it."""
        return self._writer

    @cached_property
    def files(self) -> FileColumns:
        """The data files."""
        return decode_files(self._blocks.block("files"), self._describe("files"))

    @cached_property
    def nesting(self) -> Nesting:
        """How the state was nested."""
        return decode_nesting(self._blocks.block("nesting"), self._describe("nesting"))

    def file_names(self) -> list[str]:
        """The names of the data files, in the order of `files`."""
        columns = zip(self.files.rank.tolist(), self.files.part.tolist(), self.files.kind.tolist(), strict=True)
        return [data_file_name(rank, part, kind, self._save.suffix) for rank, part, kind in columns]

    def names(self) -> Sequence[str]:
        """Every name, tensors and objects, in UTF-8 order, each once."""
        return self._names

    def tensors(self, name: str) -> Sequence[StoredTensor]:
        """All tensors under one name: one, or one per rank; empty if there is none.

        Raises:
            CorruptError: The group that holds it is not sound.
        """
        group = self._tensor_directory.group_of(name)
        if group is None or not self._tensor_group(group).names.runs_of(name):
            return ()
        return stored_tensors(self._tensor_group(group), self._chunk_group(group), name)

    def objects(self, name: str) -> Sequence[StoredObject]:
        """All objects under one name: one, or one per rank; empty if there is none.

        Raises:
            CorruptError: The group that holds it is not sound.
        """
        group = self._object_directory.group_of(name)
        return () if group is None else stored_objects(self._object_group(group), name)

    def find_tensors(self, names: Sequence[str]) -> tuple[Sequence[FoundTensors], Sequence[int]]:
        """Look many names up among the tensors, all at once; only the groups that can hold them are read.

        Raises:
            CorruptError: A group that is read is not sound.
        """
        lookup = Lookup(names)
        found: list[FoundTensors] = []
        others: list[int] = []
        for group, part in enumerate(lookup.split(self._tensor_directory.first_names)):
            if part.start < part.stop:
                tensors, rest = lookup.tensors(part, self._tensor_group(group), partial(self._chunk_group, group))
                found += tensors
                others += rest
        return found, others

    def find_objects(self, names: Sequence[str]) -> tuple[Sequence[FoundObjects], Sequence[int]]:
        """Look many names up among the objects, all at once; only the groups that can hold them are read.

        Raises:
            CorruptError: A group that is read is not sound.
        """
        lookup = Lookup(names)
        found: list[FoundObjects] = []
        others: list[int] = []
        for group, part in enumerate(lookup.split(self._object_directory.first_names)):
            if part.start < part.stop:
                objects, rest = lookup.objects(part, self._object_group(group))
                found += objects
                others += rest
        return found, others

    def columns(self) -> MetadataColumns:
        """Read and check everything, also what only a look at all groups together can show.

        Raises:
            CorruptError: Something is not sound.
        """
        tensor_groups = [self._tensor_group(group) for group in range(len(self._tensor_directory))]
        chunk_groups = [self._chunk_group(group) for group in range(len(self._tensor_directory))]
        object_groups = [self._object_group(group) for group in range(len(self._object_directory))]
        depth = max((group.shape.shape[1] for group in tensor_groups), default=0)
        tensors = join_tensors(tensor_groups, depth)
        chunks = join_chunks(chunk_groups, depth)
        if len(chunk_groups) > 1:
            self._check_spans(tensors, chunks)
        return MetadataColumns(tensors, chunks, join_objects(object_groups), self.nesting)

    def _check_spans(self, tensors: TensorColumns, chunks: ChunkColumns) -> None:
        fault = spans_fault(chunks, chunk_nbytes(chunks.sizes, tensors.dtype, np.diff(tensors.row)), self.files)
        if fault is not None:
            raise CorruptError(f"{self.file_name} is corrupt: {fault}")

    def _describe(self, block: str) -> str:
        return f"block {block!r} of {self.file_name}"

    def _directory(self, block: str) -> GroupDirectory:
        return decode_directory(self._blocks.block(block), self._describe(block))

    @cached_property
    def _tensor_directory(self) -> GroupDirectory:
        return self._directory("directory.tensors")

    @cached_property
    def _object_directory(self) -> GroupDirectory:
        return self._directory("directory.objects")

    @cached_property
    def _names(self) -> tuple[str, ...]:
        tensors = (self._tensor_group(group).names.names for group in range(len(self._tensor_directory)))
        objects = (self._object_group(group).names.names for group in range(len(self._object_directory)))
        return merge_names((*tensors, *objects))

    def _tensor_group(self, group: int) -> TensorGroup:
        if group not in self._tensor_groups:
            block, directory = f"tensors.{group}", self._tensor_directory
            runs, entries, rows = (int(column[group]) for column in (directory.runs, directory.entries, directory.rows))
            decoded = decode_tensors(self._blocks.block(block), self._describe(block), runs, entries, rows)
            self._check_place(directory, group, decoded.names, block)
            self._tensor_groups[group] = decoded
        return self._tensor_groups[group]

    def _chunk_group(self, group: int) -> ChunkColumns:
        if group not in self._chunk_groups:
            block, tensors = f"chunks.{group}", self._tensor_group(group)
            self._chunk_groups[group] = decode_chunks(
                self._blocks.block(block), self._describe(block), tensors, self.files
            )
        return self._chunk_groups[group]

    def _object_group(self, group: int) -> ObjectGroup:
        if group not in self._object_groups:
            block, directory = f"objects.{group}", self._object_directory
            runs, entries = int(directory.runs[group]), int(directory.entries[group])
            decoded = decode_objects(self._blocks.block(block), self._describe(block), runs, entries, self.files)
            self._check_place(directory, group, decoded.names, block)
            self._object_groups[group] = decoded
        return self._object_groups[group]

    def _check_place(self, directory: GroupDirectory, group: int, names: NameTable, block: str) -> None:
        """A group must hold the names between its own first name and the next group's."""
        following = directory.first_names[group + 1 : group + 2]
        if names.names[0] != directory.first_names[group] or any(names.names[-1] >= name for name in following):
            raise CorruptError(f"{self._describe(block)} is corrupt: it holds other names than its directory says")


def _migrated(container: BlockContainer, file_name: str) -> BlockSource:
    """Bring a file of an older version up to this one, a step at a time."""
    strings = container.strings
    if strings.get("format") != FORMAT_NAME:
        raise CorruptError(f"{file_name} has format {strings.get('format')!r} instead of {FORMAT_NAME!r}")
    version = _number(strings, "version", file_name)
    if version > FORMAT_VERSION:
        raise NewerVersionError(
            f"{file_name} has format version {version}, and this library reads up to {FORMAT_VERSION}; "
            f"upgrade dcp to load this checkpoint"
        )
    blocks: BlockSource = container
    for step in range(version, FORMAT_VERSION):
        if step not in MIGRATIONS:
            raise CorruptError(f"{file_name} has format version {version}, which never existed")
        blocks = MIGRATIONS[step](blocks)
    return blocks


def _save_record(strings: Mapping[str, str], file_name: str) -> SaveRecord:
    save_id, suffix, rank = (strings.get(key, "?") for key in ("save_id", "suffix", "rank"))
    if not _SAVE_ID.fullmatch(save_id) or not _SUFFIX.fullmatch(suffix):
        raise CorruptError(f"{file_name} names its save {save_id!r} and its files' suffix {suffix!r}")
    return SaveRecord(save_id, suffix, None if rank == "" else _number(strings, "rank", file_name))


def _writer_record(strings: Mapping[str, str], file_name: str) -> WriterRecord:
    library, framework, framework_version = (
        strings.get(key, "") for key in ("library", "framework", "framework_version")
    )
    return WriterRecord(library, framework, framework_version, _number(strings, "world_size", file_name))


def _number(strings: Mapping[str, str], key: str, file_name: str) -> int:
    text = strings.get(key, "")
    if not _NUMBER.fullmatch(text):
        raise CorruptError(f"{file_name} says {text!r} for {key}, which is no number")
    return int(text)
