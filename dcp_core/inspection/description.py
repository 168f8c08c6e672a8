"""Opens a checkpoint's description, reads all of it, and checks what only the whole of it shows.

In: a storage and the name of a description. Out: its columns as far as they can be read, and what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dcp_core.errors import ArgumentError, DcpError, NewerVersionError, NotFoundError, StorageError
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.interfaces import StorageReader
from dcp_core.execution.present_metadata import open_present
from dcp_core.file_names import parse_rank_metadata_name
from dcp_core.formats.columns_source import ColumnsSource, MetadataColumns
from dcp_core.formats.metadata_file import MetadataFile
from dcp_core.inspection.report import KEYS_NAMED, RETRY, Problem
from dcp_core.metadata import EVERY_RANK, ChunkColumns, FileColumns, Int64, Metadata, MetadataSource
from dcp_core.planning.tiling import TilingFault, check_tiling
from dcp_core.storage.base import Storage

MAX_FAULTS = 1000
"""Holes and overlaps that are listed at most: each costs a search."""

_RANKS_SHOWN = 8

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """A description, as far as it can be read.

    Attributes:
        name: Its file.
        source: The open file; None where its header is not sound.
        files: The data files that it names; None where that cannot be read.
        columns: What it describes; None where some of that is not sound.
        problems: What is wrong.
    """

    name: str
    source: MetadataFile | None = None
    files: FileColumns | None = None
    columns: MetadataColumns | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def file_names(self) -> list[str]:
        """Names of the data files."""
        return [] if self.source is None or self.files is None else self.source.file_names()


def columns_of(source: MetadataSource) -> MetadataColumns:
    """Everything that a description holds, as columns.

    Raises:
        CorruptError: Something in it is not sound.
    """
    if isinstance(source, MetadataFile):
        return source.columns()
    assert isinstance(source, ColumnsSource), "every source is one of the two"
    return source.columns


def open_metadata(reader: StorageReader, rank: int | None) -> Metadata:
    """Open the description of all ranks, or of one that saved alone.

    Args:
        reader: Has been initialised.
        rank: Whose description, where there is none of all ranks.

    Raises:
        NotFoundError: There is none; it says what else there is.
        ArgumentError: There is one of all ranks, and they were fewer.
        DcpError: It cannot be read.
    """
    try:
        metadata = reader.load_metadata()
    except NotFoundError as error:
        return _of_one_rank(reader, rank, error)
    world = metadata.source.writer.world_size
    if rank is not None and isinstance(metadata.source, MetadataFile) and not 0 <= rank < world:
        raise ArgumentError(f"there is no rank {rank} in {_place_of(reader)}: it was saved by {world} ranks, from 0 on")
    return metadata


def _of_one_rank(reader: StorageReader, rank: int | None, error: NotFoundError) -> Metadata:
    names = reader.storage.list() if isinstance(reader, FileSystemReader) else []
    alone = sorted(number for name in names if (number := parse_rank_metadata_name(name)) is not None)
    if not alone:
        raise error
    if rank in alone:
        return reader.load_metadata(rank)
    shown = ", ".join(map(str, alone[:_RANKS_SHOWN])) + (", ..." if len(alone) > _RANKS_SHOWN else "")
    which = "no checkpoint of all ranks" if rank is None else f"nothing that rank {rank} saved"
    raise NotFoundError(f"there is {which} in {_place_of(reader)}; these ranks saved alone there: {shown}. Pass --rank")


def _place_of(reader: StorageReader) -> str:
    return reader.storage.describe() if isinstance(reader, FileSystemReader) else "the checkpoint"


def read_description(storage: Storage, name: str) -> Description:
    """Read all of a description. Never raises a `DcpError`: it becomes a problem."""
    try:
        source = open_present(storage, name)
    except NewerVersionError as error:
        remedy = "use a version of this library that is as new as the one that saved"
        return Description(name, problems=[Problem("newer version", str(error), name, remedy=remedy)])
    except NotFoundError as error:
        return Description(name, problems=[Problem("no checkpoint", str(error), name)])
    except StorageError as error:
        return Description(name, problems=[Problem("unreadable", str(error), name, remedy=RETRY)])
    except DcpError as error:
        return Description(name, problems=[Problem("damaged description", str(error), name)])
    problems: list[Problem] = []
    files = columns = None
    try:
        files = source.files
        columns = source.columns()
    except DcpError as error:
        problems += _damaged_blocks(source, name, error)
    return Description(name, source, files, columns, problems)


def _damaged_blocks(source: MetadataFile, name: str, error: DcpError) -> list[Problem]:
    """All blocks that are damaged; what was raised, where each of them fits its digest."""
    try:
        found = source.damaged_blocks()
    except StorageError as other:
        return [Problem("unreadable", str(other), name, remedy=RETRY)]
    except DcpError as other:
        return [Problem("damaged description", str(other), name)]
    if not found:
        return [Problem("damaged description", str(error), name)]
    return [
        Problem("damaged description", f"block {block!r} of {name} contradicts its digest", name,
                byte_offset=start, nbytes=nbytes)
        for block, start, nbytes in found
    ]  # fmt: skip


def coverage_problems(columns: MetadataColumns, file_names: Sequence[str]) -> tuple[list[Problem], bool]:
    """Check that the boxes of every tensor, each copy counted once, cover it without gaps and overlaps.

    Returns:
        What is wrong, by tensor; and whether the search ended early, after `MAX_FAULTS` faults.
    """
    tensors, chunks = columns.tensors, columns.chunks
    owner = np.repeat(np.arange(len(tensors.names), dtype=np.int64), np.diff(tensors.row))
    kept = np.flatnonzero(~repeated(owner, chunks))
    if len(kept) == len(owner):
        offsets, sizes = chunks.offsets, chunks.sizes
    else:
        owner, offsets, sizes = owner[kept], chunks.offsets[kept], chunks.sizes[kept]
    try:
        faults = check_tiling(
            owner, offsets, sizes, tensors.shape, tensors.ndim, is_sorted=True, max_faults=MAX_FAULTS
        )  # fmt: skip
    except DcpError as error:
        return [Problem("contradiction", f"the boxes that are described cannot be: {error}")], False
    problems = [_fault_problem(fault, columns, kept, file_names) for fault in faults]
    return problems, len(faults) >= MAX_FAULTS


def repeated(owner: Int64, chunks: ChunkColumns) -> Mask:
    """Mark the rows whose tensor and box are those of the row before: copies of one box. Shape (N,)."""
    same: Mask = np.zeros(len(owner), np.bool_)
    if len(owner) > 1:
        tied = owner[1:] == owner[:-1]
        for column in (*chunks.offsets.T, *chunks.sizes.T):
            if not tied.any():
                break
            tied &= column[1:] == column[:-1]
        same[1:] = tied
    return same


def _fault_problem(
    fault: TilingFault, columns: MetadataColumns, kept: Int64, file_names: Sequence[str]
) -> Problem:  # fmt: skip
    tensors = columns.tensors
    name, rank = tensors.names[fault.tensor], int(tensors.rank[fault.tensor])
    shape = tensors.shape[fault.tensor, : tensors.ndim[fault.tensor]].tolist()
    whose = "" if rank == EVERY_RANK else f" of rank {rank}"
    rows = kept[list(fault.rows)] if fault.rows else np.empty(0, np.int64)
    files = sorted({file_names[int(columns.chunks.file[row])] for row in rows})
    place = f"offsets {list(fault.box.offsets)} sizes {list(fault.box.sizes)}"
    if fault.kind == "hole":
        text = f"{name!r}{whose} of shape {shape} lacks {place}"
        expected, found = "stored boxes that cover it", "none there; next to it are boxes of " + ", ".join(files)
        return Problem("hole", text, keys=(name,), box=fault.box, expected=expected, found=found if files else "none")
    text = f"{name!r}{whose} of shape {shape} is stored in several boxes at {place}"
    if fault.kind == "outside":
        return Problem("contradiction", f"a box of {name!r}{whose} leaves its shape {shape}: {place}", keys=(name,))
    found = f"boxes that differ and overlap, in {', '.join(files)}"
    return Problem("overlap", text, keys=(name,), box=fault.box, expected="each element once", found=found)


class ChunkNames:
    """Finds the names of what lies in a data file, by place.

    Attributes:
        nbytes: Bytes of each chunk. Shape (N,).
        byte_offset: Where each starts in the data section of its file. Shape (N,).

    Args:
        columns: What the checkpoint describes.
        nbytes: See above.
    """

    def __init__(self, columns: MetadataColumns, nbytes: Int64) -> None:
        self._columns = columns
        self.nbytes = nbytes
        self.byte_offset = columns.chunks.byte_offset
        files = columns.chunks.file
        # numpy sorts 16-bit integers by radix, several times faster than wider ones
        key = files.astype(np.uint16) if len(files) and int(files.max()) < 1 << 16 else files
        self._order: Int64 = np.argsort(key, kind="stable")
        self._file = files[self._order]

    def rows_of(self, file: int) -> Int64:
        """The chunks in one file."""
        first, last = np.searchsorted(self._file, [file, file + 1])
        return self._order[first:last]

    def in_range(self, file: int, start: int, stop: int) -> tuple[tuple[str, ...], int]:
        """Names of tensors that have bytes in a range of a file's data section, and how many more there are."""
        rows = self.rows_of(file)
        first = self.byte_offset[rows]
        touched = rows[(first < stop) & (first + self.nbytes[rows] > start)]
        return self.named(touched)

    def named(self, rows: Int64) -> tuple[tuple[str, ...], int]:
        """Names of the tensors of some chunks, and how many more there are."""
        tensors = np.unique(np.searchsorted(self._columns.tensors.row, rows, side="right") - 1)
        return shortened(dict.fromkeys(self._columns.tensors.names[number] for number in tensors.tolist()))

    def objects_in(self, file: int, ordinal: int | None = None) -> tuple[tuple[str, ...], int]:
        """Names of the objects in one file, or of that with one number, and how many more there are."""
        objects = self._columns.objects
        chosen = objects.file == file
        if ordinal is not None:
            chosen &= objects.ordinal == ordinal
        return shortened(dict.fromkeys(objects.names[number] for number in np.flatnonzero(chosen).tolist()))

    def objects_beyond(self, file: int, count: int, name: str) -> list[Problem]:
        """Objects that the description looks for behind the last one of a file that has `count` of them."""
        objects = self._columns.objects
        wrong = np.flatnonzero((objects.file == file) & (objects.ordinal >= count))
        if not len(wrong):
            return []
        keys, more = shortened(dict.fromkeys(objects.names[number] for number in wrong.tolist()))
        return [Problem("contradiction", f"{name} has {count} objects, fewer than are described", name, keys, more)]


def shortened(names: dict[str, None]) -> tuple[tuple[str, ...], int]:
    """The first few of some names, and how many more there are."""
    return tuple(names)[:KEYS_NAMED], max(len(names) - KEYS_NAMED, 0)
