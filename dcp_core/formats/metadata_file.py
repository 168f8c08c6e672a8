"""The `.metadata` file: columns to bytes and back. `docs/reference/format.md` describes the bytes.

Writing has two steps. `encode_body` makes all that depends on the state's structure alone, and is kept between saves;
`assemble` adds what is new at every save: the header and the files block. Reading is `open_metadata`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dcp_core.errors import PlanningError
from dcp_core.file_names import METADATA_NAME, OBJECT_FILE, TENSOR_FILE
from dcp_core.formats.block_container import Block, Read, build_container
from dcp_core.formats.columns_source import ColumnsSource, MetadataColumns
from dcp_core.formats.group_directory import MAX_ROWS, GroupDirectory, cut_groups, encode_directory
from dcp_core.formats.metadata_blocks import encode_files, encode_nesting, encode_objects
from dcp_core.formats.metadata_reader import FORMAT_NAME, FORMAT_VERSION, MetadataFile
from dcp_core.formats.name_table import build_name_table
from dcp_core.formats.tensor_blocks import TensorGroup, encode_chunks, encode_tensors
from dcp_core.metadata import (
    ChunkColumns,
    FileColumns,
    Int32,
    Int64,
    ObjectColumns,
    SaveRecord,
    TensorColumns,
    WriterRecord,
)

__all__ = [
    "ColumnsSource",
    "EncodedBody",
    "MetadataColumns",
    "MetadataFile",
    "assemble",
    "encode_body",
    "file_names",
    "open_bytes",
    "open_metadata",
]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBody:
    """All of a `.metadata` that does not change from save to save while the structure stays the same.

    Attributes:
        blocks: The encoded blocks with their digests, in file order.
        tensor_files: Rows of `FileColumns` in which chunks lie, ascending.
        object_files: Rows in which objects lie, ascending.
    """

    blocks: tuple[Block, ...]
    tensor_files: Int64
    object_files: Int64

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(len(block.content) for block in self.blocks)


def encode_body(columns: MetadataColumns) -> EncodedBody:
    """Encode what depends on the state's structure alone.

    Args:
        columns: What is stored, sorted as their docstrings say.

    Returns:
        The same bytes for the same columns.

    Raises:
        PlanningError: The columns are out of order, contradict each other, or exceed the format's limits.
    """
    tensors, objects = columns.tensors, columns.objects
    if columns.chunks.arrays is not None:
        raise PlanningError("a chunk that is a region of a larger array cannot be described in .metadata")
    if max(len(tensors.names), len(objects.names), len(columns.chunks)) > MAX_ROWS:
        raise PlanningError(f"a checkpoint holds at most {MAX_ROWS} tensors, objects and chunks each")
    tensor_directory, tensor_blocks, chunk_blocks = _encode_tensor_groups(tensors, columns.chunks)
    object_directory, object_blocks = _encode_object_groups(objects)
    blocks = (
        Block.of("directory.tensors", encode_directory(tensor_directory)),
        Block.of("directory.objects", encode_directory(object_directory)),
        Block.of("nesting", encode_nesting(columns.nesting)),
        *object_blocks,
        *tensor_blocks,
        *chunk_blocks,
    )
    return EncodedBody(blocks, _distinct(columns.chunks.file), _distinct(objects.file))


def assemble(body: EncodedBody, files: FileColumns, save: SaveRecord, writer: WriterRecord) -> bytes:
    """Write a whole `.metadata`.

    Args:
        body: From `encode_body`; its blocks are taken as they are.
        files: The data files of this save, in the order in which the body counts them.
        save: Which save it is.
        writer: Who writes it.

    Raises:
        PlanningError: The body puts chunks or objects into files that do not exist or are of the other kind.
    """
    _check_rows(body.tensor_files, files, TENSOR_FILE, "chunks")
    _check_rows(body.object_files, files, OBJECT_FILE, "objects")
    strings = {
        "format": FORMAT_NAME,
        "version": str(FORMAT_VERSION),
        "save_id": save.save_id,
        "suffix": save.suffix,
        "rank": "" if save.rank is None else str(save.rank),
        "world_size": str(writer.world_size),
        "library": writer.library,
        "framework": writer.framework,
        "framework_version": writer.framework_version,
    }
    return build_container(strings, (*body.blocks, Block.of("files", encode_files(files))))


def open_metadata(
    read: Read, nbytes: int, *, header_digest: bytes | None = None, file_name: str = METADATA_NAME
) -> MetadataFile:
    """Open a `.metadata` by ranged reads.

    Args:
        read: Called with (offset, nbytes), gives those bytes of the file.
        nbytes: Size of the file.
        header_digest: What `MetadataFile.header_digest` must be, if another rank said so. 16 bytes.
        file_name: What to call the file in errors.

    Returns:
        The open file; so far only its header has been read.

    Raises:
        CorruptError: This is not a sound file of this format, or not the one asked for.
        NewerVersionError: A newer version of this library wrote it.
    """
    return MetadataFile(read, nbytes, header_digest, file_name)


def open_bytes(blob: bytes, *, header_digest: bytes | None = None, file_name: str = METADATA_NAME) -> MetadataFile:
    """Open a `.metadata` that is in memory; see `open_metadata`."""
    view = memoryview(blob)
    return MetadataFile(
        lambda offset, nbytes: bytes(view[offset : offset + nbytes]), len(blob), header_digest, file_name
    )


def file_names(blob: bytes) -> list[str]:
    """The names of the data files that a `.metadata` in memory speaks of.

    Raises:
        CorruptError: It is not sound.
    """
    return open_bytes(blob).file_names()


def _encode_tensor_groups(
    tensors: TensorColumns, chunks: ChunkColumns
) -> tuple[GroupDirectory, list[Block], list[Block]]:
    tensor_blocks, chunk_blocks, runs, rows = [], [], [], []
    cuts = cut_groups(tensors.names, np.diff(tensors.row))
    for number, cut in enumerate(cuts):
        group, own_rows = _tensor_group(tensors, cut)
        depth = group.shape.shape[1]
        own = chunks.part(own_rows, depth)
        tensor_blocks.append(Block.of(f"tensors.{number}", encode_tensors(group)))
        chunk_blocks.append(Block.of(f"chunks.{number}", encode_chunks(group, own)))
        runs.append(len(group.names.names))
        rows.append(len(own))
    return _directory(tensors.names, cuts, runs, rows), tensor_blocks, chunk_blocks


def _tensor_group(tensors: TensorColumns, cut: slice) -> tuple[TensorGroup, slice]:
    """Cut a group out, its shapes no wider than it needs; returns it and its rows among the chunks."""
    names = build_name_table(tensors.names[cut], tensors.paths[cut])
    ndim = tensors.ndim[cut]
    row = tensors.row[cut.start : cut.stop + 1]
    shape = tensors.shape[cut, : int(ndim.max())]
    group = TensorGroup(names, tensors.rank[cut], tensors.dtype[cut], ndim, shape, row - row[0])
    return group, slice(int(row[0]), int(row[-1]))


def _encode_object_groups(objects: ObjectColumns) -> tuple[GroupDirectory, list[Block]]:
    blocks, runs = [], []
    cuts = cut_groups(objects.names, np.zeros(len(objects.names), dtype=np.int64))
    for number, cut in enumerate(cuts):
        columns = (objects.rank[cut], objects.per_rank[cut], objects.file[cut], objects.ordinal[cut])
        content, names = encode_objects(ObjectColumns(objects.names[cut], objects.paths[cut], *columns))
        blocks.append(Block.of(f"objects.{number}", content))
        runs.append(names)
    return _directory(objects.names, cuts, runs, [0] * len(cuts)), blocks


def _directory(names: Sequence[str], cuts: list[slice], runs: list[int], rows: list[int]) -> GroupDirectory:
    first_names = [names[cut.start] for cut in cuts]
    if any(left >= right for left, right in pairwise(first_names)):
        raise PlanningError("the plan cannot be written as metadata: names are not in order")
    entries = np.array([cut.stop - cut.start for cut in cuts], dtype=np.int64)
    return GroupDirectory(first_names, np.array(runs, dtype=np.int64), entries, np.array(rows, dtype=np.int64))


def _distinct(rows: Int32) -> Int64:
    return np.flatnonzero(np.bincount(rows)) if len(rows) else np.empty(0, dtype=np.int64)


def _check_rows(rows: Int64, files: FileColumns, kind: int, what: str) -> None:
    if len(rows) and (int(rows[-1]) >= len(files) or np.any(files.kind[rows] != kind)):
        raise PlanningError(
            f"the plan puts {what} into files {rows[:8].tolist()}..{int(rows[-1])}, but some of these are missing "
            f"among the {len(files)} files written, or hold something else"
        )
