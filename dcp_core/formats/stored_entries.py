"""From columns to the entries under one name: what `MetadataSource` answers, whatever it is made over."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from dcp_core.dtype import BY_CODE
from dcp_core.formats.metadata_blocks import ObjectGroup
from dcp_core.formats.tensor_blocks import TensorGroup
from dcp_core.metadata import ChunkColumns, StoredObject, StoredTensor
from dcp_core.state_path import decode_path


def stored_tensors(group: TensorGroup, chunks: ChunkColumns, name: str) -> tuple[StoredTensor, ...]:
    """The tensors of a group under one name.

    Args:
        group: Holds every tensor of that name.
        chunks: The group's chunks; the results are views into them.
        name: A printed name.

    Raises:
        CorruptError: A typed path is junk.
    """
    found = []
    for run in group.names.runs_of(name):
        path = decode_path(group.names.paths[run])
        for entry in group.names.entries_of(run):
            ndim, rows = int(group.ndim[entry]), slice(int(group.row[entry]), int(group.row[entry + 1]))
            boxes = chunks.offsets[rows, :ndim], chunks.sizes[rows, :ndim]
            own = ChunkColumns(*boxes, chunks.file[rows], chunks.byte_offset[rows])
            shape = tuple(group.shape[entry, :ndim].tolist())
            found.append(StoredTensor(name, path, int(group.rank[entry]), BY_CODE[int(group.dtype[entry])], shape, own))
    return tuple(found)


def stored_objects(group: ObjectGroup, name: str) -> tuple[StoredObject, ...]:
    """The objects of a group under one name.

    Raises:
        CorruptError: A typed path is junk.
    """
    found = []
    for run in group.names.runs_of(name):
        path = decode_path(group.names.paths[run])
        for entry in group.names.entries_of(run):
            rank, file, ordinal = int(group.rank[entry]), int(group.file[entry]), int(group.ordinal[entry])
            found.append(StoredObject(name, path, rank, bool(group.per_rank[entry]), file, ordinal))
    return tuple(found)


def merge_names(parts: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """All names in UTF-8 order (which is the order of code points), each once."""
    joined = [name for part in parts for name in part]
    joined.sort()
    if all(map(operator.lt, joined, joined[1:])):
        return tuple(joined)
    return tuple(dict.fromkeys(joined))
