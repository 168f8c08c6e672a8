"""From columns to the entries under one name: what `MetadataSource` answers, whatever it is made over."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dcp_core.dtype import BY_CODE
from dcp_core.formats.metadata_blocks import ObjectGroup
from dcp_core.formats.name_table import NameTable
from dcp_core.formats.tensor_blocks import TensorGroup
from dcp_core.metadata import (
    EVERY_RANK,
    ChunkColumns,
    FoundObjects,
    FoundTensors,
    Int64,
    StoredObject,
    StoredTensor,
)
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
            own = chunks.part(rows, ndim)
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


class Lookup:
    """Names that are looked up all at once, in tables that each hold the names of one range.

    Args:
        names: Any names; one may occur several times.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._order = sorted(range(len(names)), key=names.__getitem__)
        self._sorted = [names[position] for position in self._order]

    def split(self, first_names: Sequence[str]) -> list[slice]:
        """For tables that begin with these names, ascending: which of the names, when sorted, each may hold."""
        bounds = [*(bisect_left(self._sorted, name) for name in first_names), len(self._sorted)]
        return list(map(slice, bounds, bounds[1:]))

    def tensors(
        self, part: slice, group: TensorGroup, chunks: Callable[[], ChunkColumns]
    ) -> tuple[list[FoundTensors], list[int]]:
        """The tensors of a group under some of the names; see `MetadataSource.find_tensors`."""
        asked, runs, entries, others = self._entries(part, group.names, group.rank == EVERY_RANK)
        if not len(asked):
            return [], others
        paths, columns = _paths(group.names, runs), (group.dtype[entries], group.ndim[entries], group.shape[entries])
        first, count = group.row[entries], group.row[entries + 1] - group.row[entries]
        return [FoundTensors(asked, paths, *columns, first, count, chunks())], others

    def objects(self, part: slice, group: ObjectGroup) -> tuple[list[FoundObjects], list[int]]:
        """The objects of a group under some of the names; see `MetadataSource.find_objects`."""
        is_common = (group.rank == EVERY_RANK) & (group.per_rank == 0)
        asked, runs, entries, others = self._entries(part, group.names, is_common)
        if not len(asked):
            return [], others
        return [FoundObjects(asked, _paths(group.names, runs), group.file[entries], group.ordinal[entries])], others

    def _entries(
        self, part: slice, table: NameTable, is_common: npt.NDArray[np.bool_]
    ) -> tuple[Int64, Int64, Int64, list[int]]:
        """Positions, runs and entries of what is alone under its name and of all ranks; and positions of the rest."""
        first, runs = table.find_runs(self._sorted[part])
        asked = np.array(self._order[part], dtype=np.int64)[runs > 0]
        first, runs = first[runs > 0], runs[runs > 0]
        entry = table.start[first]
        is_plain = (runs == 1) & (table.start[first + 1] - entry == 1) & is_common[entry]
        return asked[is_plain], first[is_plain], entry[is_plain], asked[~is_plain].tolist()


def _paths(table: NameTable, runs: Int64) -> list[bytes]:
    """Encoded paths of some runs."""
    if len(runs) * 4 < len(table.paths):
        return [table.paths[run] for run in runs.tolist()]
    paths = list(table.paths)
    return [paths[run] for run in runs.tolist()]


def merge_names(parts: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """All names in UTF-8 order (which is the order of code points), each once."""
    joined = [name for part in parts for name in part]
    joined.sort()
    if all(map(operator.lt, joined, joined[1:])):
        return tuple(joined)
    return tuple(dict.fromkeys(joined))
