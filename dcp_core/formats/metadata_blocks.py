"""The blocks of `.metadata`: which columns each holds, in which order, and what must be true of them.

Every pair of functions here writes and reads one kind of block. Reading checks every value, so what comes out is
consistent in itself; nothing is trusted, not even with a right digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.dtype import BY_CODE
from dcp_core.file_names import OBJECT_FILE
from dcp_core.formats.chunk_checks import raise_for, refuse
from dcp_core.formats.column_codec import ColumnReader, ColumnWriter
from dcp_core.formats.name_table import (
    NameTable,
    build_name_table,
    read_name_table,
    repeated_fault,
    write_name_table,
)
from dcp_core.metadata import EVERY_RANK, FileColumns, Int32, Nesting, ObjectColumns, UInt8

_LARGEST_INT32 = 2**31 - 1
_MAX_NDIM = 64
_DIGEST_WORDS = 2
_KNOWN_DTYPE = np.zeros(256, dtype=np.bool_)
_KNOWN_DTYPE[list(BY_CODE)] = True


@dataclass(frozen=True, slots=True, eq=False)
class ObjectGroup:
    """Consecutive objects of `.metadata`; the columns are those of `ObjectColumns`."""

    names: NameTable
    rank: Int32
    per_rank: UInt8
    file: Int32
    ordinal: Int32


def encode_objects(objects: ObjectColumns) -> tuple[bytes, int]:
    """Write a block `objects.<group>`; returns it and its number of name runs.

    Raises:
        PlanningError: A name occurs twice for one rank.
    """
    writer = ColumnWriter()
    names = build_name_table(objects.names, objects.paths)
    refuse(repeated_fault(names, objects.rank))
    write_name_table(writer, names)
    writer.integers(objects.rank)
    writer.integers(objects.per_rank)
    writer.integers(objects.file, delta=True)
    writer.integers(objects.ordinal, delta=True)
    return writer.to_bytes(), len(names.names)


def decode_objects(block: bytes, name: str, runs: int, entries: int, files: FileColumns) -> ObjectGroup:
    """Read a block `objects.<group>`.

    Raises:
        CorruptError: It contradicts itself, the directory or the files.
    """
    reader = ColumnReader(block, name)
    names = read_name_table(reader, runs, entries)
    rank = reader.integers(entries, low=EVERY_RANK, high=_LARGEST_INT32).astype(np.int32)
    per_rank = reader.integers(entries, high=1).astype(np.uint8)
    file = reader.integers(entries, high=_LARGEST_INT32).astype(np.int32)
    ordinal = reader.integers(entries, high=_LARGEST_INT32).astype(np.int32)
    reader.finish()
    raise_for(reader, repeated_fault(names, rank))
    if entries and (int(file.max()) >= len(files) or np.any(files.kind[file] != OBJECT_FILE)):
        raise reader.corrupt("an object lies in a file that is no .bytes file of this checkpoint")
    return ObjectGroup(names, rank, per_rank, file, ordinal)


def encode_nesting(nesting: Nesting) -> bytes:
    """Write the block `nesting`."""
    writer = ColumnWriter()
    writer.count(len(nesting.containers))
    writer.strings([path for path, _ in nesting.containers])
    writer.texts([kind for _, kind in nesting.containers])
    return writer.to_bytes()


def decode_nesting(block: bytes, name: str) -> Nesting:
    """Read the block `nesting`.

    Raises:
        CorruptError: It contradicts itself.
    """
    reader = ColumnReader(block, name)
    count = reader.count()
    paths = reader.strings(count)
    kinds = reader.texts(count)
    reader.finish()
    if len(set(paths)) != count:
        raise reader.corrupt("a container occurs twice")
    return Nesting(tuple(zip(paths, kinds, strict=True)))


def encode_files(files: FileColumns) -> bytes:
    """Write the block `files`."""
    writer = ColumnWriter()
    writer.count(len(files))
    writer.blob(np.ascontiguousarray(files.digest, dtype="<u8").tobytes())
    writer.integers(files.rank, delta=True)
    for column in (files.part, files.kind, files.nbytes, files.data_start, files.field_start, files.field_nbytes):
        writer.integers(column)
    return writer.to_bytes()


def decode_files(block: bytes, name: str) -> FileColumns:
    """Read the block `files`.

    Raises:
        CorruptError: It contradicts itself: a file twice, or sections outside their file.
    """
    reader = ColumnReader(block, name)
    count = reader.count()
    raw_digest = reader.blob()
    if len(raw_digest) != 8 * _DIGEST_WORDS * count:
        raise reader.corrupt(f"{len(raw_digest)} bytes of digests for {count} files")
    rank = reader.integers(count, high=_LARGEST_INT32).astype(np.int32)
    part = reader.integers(count, high=_LARGEST_INT32).astype(np.int32)
    kind = reader.integers(count, high=OBJECT_FILE).astype(np.uint8)
    nbytes, data_start, field_start, field_nbytes = (reader.integers(count) for _ in range(4))
    reader.finish()
    if np.any(field_start > data_start - field_nbytes) or np.any(data_start > nbytes):
        raise reader.corrupt("a file's checksums or data lie outside it")
    if not _is_ascending(rank, kind, part):
        raise reader.corrupt("its files are not in the order of (rank, kind, part)")
    digest = np.frombuffer(raw_digest, dtype="<u8").astype(np.uint64).reshape(count, _DIGEST_WORDS)
    return FileColumns(rank, part, kind, nbytes, data_start, field_start, field_nbytes, digest)


def _is_ascending(*keys: npt.NDArray[Any]) -> bool:
    """Whether rows are strictly ascending, the first key counting most."""
    order = np.lexsort(keys[::-1])
    if np.any(order[1:] < order[:-1]):
        return False
    equal = np.ones(max(len(order) - 1, 0), dtype=np.bool_)
    for key in keys:
        equal &= key[1:] == key[:-1]
    return not equal.any()
