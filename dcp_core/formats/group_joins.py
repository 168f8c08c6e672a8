"""Put the groups of a `.metadata` together again to whole columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcp_core.formats.column_codec import exclusive_sums
from dcp_core.formats.metadata_blocks import ObjectGroup
from dcp_core.formats.name_table import NameTable
from dcp_core.formats.tensor_blocks import TensorGroup
from dcp_core.metadata import ChunkColumns, Int64, ObjectColumns, TensorColumns


def join_tensors(groups: Sequence[TensorGroup], depth: int) -> TensorColumns:
    """Join consecutive groups, shapes padded to `depth` dimensions."""
    shape = np.ones((sum(len(group.rank) for group in groups), depth), dtype=np.int64)
    start = 0
    for group in groups:
        shape[start : start + len(group.rank), : group.shape.shape[1]] = group.shape
        start += len(group.rank)
    names, paths = _join_names([group.names for group in groups])
    return TensorColumns(
        names=names,
        paths=paths,
        rank=np.concatenate([np.empty(0, dtype=np.int32), *(group.rank for group in groups)]),
        dtype=np.concatenate([np.empty(0, dtype=np.uint8), *(group.dtype for group in groups)]),
        ndim=np.concatenate([np.empty(0, dtype=np.uint8), *(group.ndim for group in groups)]),
        shape=shape,
        row=exclusive_sums(np.concatenate([np.empty(0, dtype=np.int64), *(np.diff(group.row) for group in groups)])),
    )


def join_chunks(groups: Sequence[ChunkColumns], depth: int) -> ChunkColumns:
    """Join the chunks of consecutive groups, boxes padded to `depth` dimensions."""
    total = sum(len(group) for group in groups)
    offsets: Int64 = np.zeros((total, depth), dtype=np.int64, order="F")
    sizes: Int64 = np.ones((total, depth), dtype=np.int64, order="F")
    start = 0
    for group in groups:
        rows, own = slice(start, start + len(group)), slice(0, group.offsets.shape[1])
        offsets[rows, own], sizes[rows, own] = group.offsets, group.sizes
        start += len(group)
    file = np.concatenate([np.empty(0, dtype=np.int32), *(group.file for group in groups)])
    byte_offset = np.concatenate([np.empty(0, dtype=np.int64), *(group.byte_offset for group in groups)])
    return ChunkColumns(offsets, sizes, file, byte_offset)


def join_objects(groups: Sequence[ObjectGroup]) -> ObjectColumns:
    """Join consecutive groups."""
    names, paths = _join_names([group.names for group in groups])
    return ObjectColumns(
        names=names,
        paths=paths,
        rank=np.concatenate([np.empty(0, dtype=np.int32), *(group.rank for group in groups)]),
        per_rank=np.concatenate([np.empty(0, dtype=np.uint8), *(group.per_rank for group in groups)]),
        file=np.concatenate([np.empty(0, dtype=np.int32), *(group.file for group in groups)]),
        ordinal=np.concatenate([np.empty(0, dtype=np.int32), *(group.ordinal for group in groups)]),
    )


def _join_names(tables: Sequence[NameTable]) -> tuple[list[str], list[bytes]]:
    names: list[str] = []
    paths: list[bytes] = []
    for table in tables:
        runs = table.run_of_entries()
        names += [table.names[run] for run in runs]
        paths += [table.paths[run] for run in runs]
    return names, paths
