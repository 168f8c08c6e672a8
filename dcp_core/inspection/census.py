"""Counts what is in a checkpoint: tensors, boxes, files, bytes, who wrote how much. Reads the description only.

In: an open description. Out: columns with a row for each tensor and file; entries are made for the rows that somebody
looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.dtype import BY_CODE, ITEMSIZE
from dcp_core.file_names import TENSOR_FILE, data_file_name
from dcp_core.formats.chunk_checks import chunk_nbytes
from dcp_core.formats.columns_source import MetadataColumns
from dcp_core.formats.metadata_file import MetadataFile
from dcp_core.inspection.description import columns_of, repeated
from dcp_core.metadata import EVERY_RANK, FileColumns, Int64, Metadata, MetadataSource, SaveRecord, WriterRecord


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor.

    Attributes:
        name: Its name.
        rank: Whose own value it is; None for all ranks'.
        dtype: Element type.
        shape: Global shape.
        boxes: Stored boxes, copies included.
        cut: Into how many pieces each dimension is cut; None where the boxes are no regular grid.
        files: How many files it lies in.
        nbytes: Bytes of its elements.
        stored_nbytes: Bytes in files, copies included.
    """

    name: str
    rank: int | None
    dtype: str
    shape: tuple[int, ...]
    boxes: int
    cut: tuple[int, ...] | None
    files: int
    nbytes: int
    stored_nbytes: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One data file.

    Attributes:
        name: Its name.
        kind: "tensors" or "objects".
        rank: Who wrote it; None where that is not known.
        nbytes: Its size, header included.
        boxes: How many boxes lie in it.
        objects: How many objects.
    """

    name: str
    kind: str
    rank: int | None
    nbytes: int
    boxes: int
    objects: int


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly the ranks wrote.

    Attributes:
        ranks: How many there were.
        writers: How many of them wrote anything.
        most: Bytes of the rank that wrote most.
        most_rank: Which one.
        mean: Bytes a rank.
    """

    ranks: int
    writers: int
    most: int
    most_rank: int
    mean: float

    @property
    def ratio(self) -> float:
        """Most by mean: 1 is even."""
        return self.most / self.mean if self.mean else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Census:
    """What is in a checkpoint.

    Attributes:
        save: Which save it is.
        writer: Who wrote it.
        metadata_nbytes: Size of its description; None where that is no single file.
        columns: All that it describes.
        files: Its data files.
        file_names: Their names.
        nbytes: Bytes of each tensor's elements. Shape (T,).
        stored_nbytes: Bytes of each tensor in files, copies included. Shape (T,).
        files_of: In how many files each tensor lies. Shape (T,).
        boxes_in: Boxes in each file. Shape (F,).
        objects_in: Objects in each file. Shape (F,).
    """

    save: SaveRecord
    writer: WriterRecord
    metadata_nbytes: int | None
    columns: MetadataColumns
    files: FileColumns
    file_names: Sequence[str]
    nbytes: Int64
    stored_nbytes: Int64
    files_of: Int64
    boxes_in: Int64
    objects_in: Int64

    @property
    def balance(self) -> Balance | None:
        """How evenly the ranks wrote; None where the files do not say who wrote them."""
        ranks = self.files.rank
        if not len(ranks) or int(ranks.min()) < 0:
            return None
        written = sum_by(ranks, self.files.nbytes, int(ranks.max()) + 1)
        count = max(self.writer.world_size, len(np.unique(ranks)))
        most = int(np.argmax(written))
        return Balance(count, len(np.unique(ranks)), int(written[most]), most, float(written.sum()) / count)

    def rows_of(self, wanted: Callable[[str], bool], rank: int | None = None) -> list[int]:
        """The tensors whose names are wanted; with a rank, without the own values of other ranks."""
        return _chosen(self.columns.tensors.names, self.columns.tensors.rank, wanted, rank)

    def object_rows_of(self, wanted: Callable[[str], bool], rank: int | None = None) -> list[int]:
        """The objects whose names are wanted; with a rank, without the own values of other ranks."""
        return _chosen(self.columns.objects.names, self.columns.objects.rank, wanted, rank)

    def tensors(self, rows: Iterable[int]) -> list[TensorEntry]:
        """Some tensors."""
        return [self._tensor(row) for row in rows]

    def file_entries(self) -> list[FileEntry]:
        """All data files."""
        kinds = np.where(self.files.kind == TENSOR_FILE, "tensors", "objects").tolist()
        columns = (self.files.rank, self.files.nbytes, self.boxes_in, self.objects_in)
        rows = zip(self.file_names, kinds, *(column.tolist() for column in columns), strict=True)
        return [FileEntry(name, kind, None if rank < 0 else rank, *counts) for name, kind, rank, *counts in rows]

    def _tensor(self, row: int) -> TensorEntry:
        tensors = self.columns.tensors
        ndim, rank = int(tensors.ndim[row]), int(tensors.rank[row])
        return TensorEntry(
            tensors.names[row],
            None if rank == EVERY_RANK else rank,
            BY_CODE[int(tensors.dtype[row])].name,
            tuple(tensors.shape[row, :ndim].tolist()),
            int(tensors.row[row + 1] - tensors.row[row]),
            self._cut(row, ndim),
            int(self.files_of[row]),
            int(self.nbytes[row]),
            int(self.stored_nbytes[row]),
        )

    def _cut(self, row: int, ndim: int) -> tuple[int, ...] | None:
        tensors = self.columns.tensors
        own = self.columns.chunks.part(slice(int(tensors.row[row]), int(tensors.row[row + 1])), ndim)
        if not len(own):
            return (0,) * ndim
        pieces = tuple(len(np.unique(column)) for column in own.offsets.T)
        distinct = len(own) - int(repeated(np.zeros(len(own), np.int64), own).sum())
        return pieces if reduce(lambda one, other: one * other, pieces, 1) == distinct else None

    def to_values(self, rows: Iterable[int]) -> dict[str, Any]:
        """As plain values for JSON, objects left out."""
        balance = self.balance
        return {
            "save_id": self.save.save_id,
            "rank": self.save.rank,
            "world_size": self.writer.world_size,
            "library": self.writer.library,
            "framework": self.writer.framework,
            "framework_version": self.writer.framework_version,
            "metadata_nbytes": self.metadata_nbytes,
            "nbytes": int(self.nbytes.sum()),
            "stored_nbytes": int(self.stored_nbytes.sum()),
            "tensor_count": len(self.nbytes),
            "box_count": len(self.columns.chunks),
            "object_count": len(self.columns.objects.names),
            "balance": None if balance is None else {**as_values(balance), "ratio": balance.ratio},
            "tensors": [as_values(entry) for entry in self.tensors(rows)],
            "files": [as_values(entry) for entry in self.file_entries()],
        }


def take_census(metadata: Metadata) -> Census:
    """Count what a description describes.

    Raises:
        CorruptError: Some of it is not sound.

    Complexity:
        A few passes over columns of chunks, and a sort of those of tensors that lie in several files.
    """
    source = metadata.source
    columns, files = columns_of(source), source.files
    tensors, chunks = columns.tensors, columns.chunks
    counts = np.diff(tensors.row)
    stored = chunk_nbytes(chunks.sizes, tensors.dtype, counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    with np.errstate(over="ignore"):  # an empty tensor may have any extents
        about = np.prod(tensors.shape, axis=1, dtype=np.float64)
    exact = np.where(about < 2**62, np.prod(tensors.shape, axis=1, dtype=np.int64), 0)
    return Census(
        source.save,
        source.writer,
        source.nbytes if isinstance(source, MetadataFile) else None,
        columns,
        files,
        names_of_files(source),
        exact * ITEMSIZE[tensors.dtype],
        sum_by(owner, stored, len(counts)),
        _distinct_files(owner, chunks.file, len(counts), len(files)),
        np.bincount(chunks.file, minlength=len(files)).astype(np.int64),
        np.bincount(columns.objects.file, minlength=len(files)).astype(np.int64),
    )


def names_of_files(source: MetadataSource) -> list[str]:
    """The names of a checkpoint's data files, in the order of its files."""
    files = source.files
    if files.names:
        return list(files.names)
    columns = zip(files.rank.tolist(), files.part.tolist(), files.kind.tolist(), strict=True)
    return [data_file_name(rank, part, kind, source.save.suffix) for rank, part, kind in columns]


def sum_by(group: npt.NDArray[Any], values: Int64, groups: int) -> Int64:
    """Sum integers by group, exactly. `group` is of shape (N,), and so is `values`; the result of shape (groups,)."""
    sums = np.zeros(groups, np.int64)
    np.add.at(sums, group, values)
    return sums


def _distinct_files(owner: Int64, file: npt.NDArray[np.int32], tensors: int, files: int) -> Int64:
    """In how many files each tensor lies."""
    key = owner * max(files, 1) + file
    # neighbours are often in the same or in ascending files, where no sort is needed
    if len(key) and not (key[1:] >= key[:-1]).all():
        key = np.sort(key)
    is_new = np.ones(len(key), np.bool_)
    is_new[1:] = key[1:] != key[:-1]
    return np.bincount(key[is_new] // max(files, 1), minlength=tensors).astype(np.int64)


def _chosen(
    names: Sequence[str], ranks: npt.NDArray[np.int32], wanted: Callable[[str], bool], rank: int | None
) -> list[int]:  # fmt: skip
    rows = [row for row, name in enumerate(names) if wanted(name)]
    if rank is None:
        return rows
    mine = (ranks == EVERY_RANK) | (ranks == rank)
    return [row for row in rows if mine[row]]


def as_values(entry: Any) -> dict[str, Any]:
    """The attributes of a frozen entry, as a dict that JSON can hold."""
    return {name: getattr(entry, name) for name in entry.__dataclass_fields__}
