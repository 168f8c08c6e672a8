"""What a checkpoint of `torch.distributed.checkpoint` says about itself, as the columns that planning and reading know.

Goes in: the records of its `.metadata`, and the sizes of its files. Comes out: a `MetadataSource` whose chunks start
where their *entries* do; where the elements start is found out by whoever reads them (`torch_dcp_entries`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from dcp_core.dtype import DType
from dcp_core.errors import CorruptError, IncompleteError, UnsupportedValueError
from dcp_core.formats.columns_source import ColumnsSource, MetadataColumns
from dcp_core.metadata import (
    EVERY_RANK,
    ChunkColumns,
    FileColumns,
    Int64,
    Nesting,
    ObjectColumns,
    SaveRecord,
    TensorColumns,
    WriterRecord,
)
from dcp_core.state_path import PathKey, StatePath, encode_path, position
from dcp_core.storage.base import check_name
from dcp_torch.torch_dcp_pickles import (
    BytesEntry,
    ChunkEntry,
    ElementType,
    IndexEntry,
    PlaceEntry,
    PropertiesEntry,
    TensorEntry,
    is_numbers,
    kind_name,
    load_metadata_record,
    shown,
)

Extent = tuple[int, ...]
_RANK_OF_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_LARGEST = 1 << 62
_LISTED = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry lies.

    Attributes:
        file: Name of its file.
        offset: Its first byte.
        nbytes: Its length.
    """

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: DType
    shape: Extent
    chunks: tuple[tuple[Extent, Extent, Place], ...]


@dataclass(frozen=True, slots=True)
class Description:
    """A `.metadata` that torch wrote, checked.

    Attributes:
        raw: Its bytes.
        tensors: The tensors, by name; chunks without elements are left out.
        objects: Everything else, by name, with its place.
        paths: Where leaves lay in the state, by name, for those that it tells.
        files: Names of the data files, sorted.
    """

    raw: bytes
    tensors: tuple[_Tensor, ...]
    objects: tuple[tuple[str, Place], ...]
    paths: Mapping[str, StatePath] = field(default_factory=dict)
    files: tuple[str, ...] = ()


class TorchSource(ColumnsSource):
    """A `MetadataSource` over a checkpoint of torch DCP.

    Attributes:
        description: What it was made of.
        object_places: Where each object lies, by `StoredObject.ordinal`.
    """

    def __init__(self, description: Description, sizes: Sequence[int], rank: int | None = None) -> None:
        """Make a source.

        Args:
            description: The checkpoint's.
            sizes: Bytes of each file, in order.
            rank: The rank that saved it alone; None: all of a job did.

        Raises:
            IncompleteError: An entry lies outside of its file.
        """
        self.description = description
        self.object_places = tuple(place for _, place in description.objects)
        rows = {name: row for row, name in enumerate(description.files)}
        _check_ends(description, dict(zip(description.files, sizes, strict=True)))
        ranks = [int(match[1]) for match in map(_RANK_OF_FILE.fullmatch, description.files) if match]
        columns, entry_nbytes = _columns(description, rows)
        self._entry_nbytes = entry_nbytes
        save = SaveRecord(xxh3_128_hexdigest(description.raw), "", rank)
        writer = WriterRecord("torch.distributed.checkpoint", "torch", "", max(ranks, default=0) + 1)
        super().__init__(columns, _file_columns(description.files, sizes), save, writer)

    def entry_nbytes(self, file: Int64, byte_offset: Int64) -> Int64:
        """Length of the entries that start at these places. All of shape (N,); -1 where there is none."""
        starts, lengths = self._entries
        if not len(starts):
            return np.full(len(file), -1, np.int64)
        wanted = np.rec.fromarrays([file, byte_offset])
        at = np.minimum(np.searchsorted(starts, wanted), len(starts) - 1)
        found: Int64 = np.where(starts[at] == wanted, lengths[at], -1)
        return found

    @cached_property
    def _entries(self) -> tuple[Any, Int64]:
        """(file, start) of all entries that hold tensors, ascending, and their lengths."""
        chunks = self.columns.chunks
        order = np.lexsort((chunks.byte_offset, chunks.file))
        starts = np.rec.fromarrays([chunks.file[order].astype(np.int64), chunks.byte_offset[order]])
        return starts, self._entry_nbytes[order]


def describe(raw: bytes, name: str) -> Description:
    """Read a `.metadata` that torch wrote, trusting nothing.

    Args:
        raw: Its bytes.
        name: What to call it in errors.

    Raises:
        CorruptError: It contradicts itself.
        UntrustedObjectError: It names what does not belong there.
        UnsupportedValueError: Entries were written through extensions (compression, encryption), or hold types that
            cannot be stored.
    """
    record = load_metadata_record(raw, name)
    places = _places(record.field("storage_data"), name)
    entries = record.field("state_dict_metadata")
    if not isinstance(entries, dict) or not all(isinstance(key, str) and key for key in entries):
        raise CorruptError(f"{name} does not map names to tensors and values")
    tensors, objects = [], []
    for key in sorted(entries):
        entry = entries[key]
        if isinstance(entry, TensorEntry):
            tensors.append(_tensor(key, entry, places, name))
        elif isinstance(entry, BytesEntry):
            objects.append((key, _place_of(places, key, None, name)))
        else:
            raise CorruptError(f"{name} says of {key!r} neither that it is a tensor nor a value")
    used = [place.file for tensor in tensors for _, _, place in tensor.chunks] + [place.file for _, place in objects]
    return Description(
        raw, tuple(tensors), tuple(objects), _paths(record.field("planner_data")), tuple(sorted(set(used)))
    )


def _places(storage_data: object, name: str) -> dict[tuple[object, object], Place]:
    if not isinstance(storage_data, dict):
        raise CorruptError(f"{name} does not say where its entries lie; another storage than files wrote it")
    found: dict[tuple[object, object], Place] = {}
    for index, place in storage_data.items():
        if not isinstance(index, IndexEntry) or not isinstance(place, PlaceEntry):
            raise CorruptError(f"{name} does not say where its entries lie; another storage than files wrote it")
        file, offset, nbytes = (place.field(key) for key in ("relative_path", "offset", "length"))
        index.checked_key()
        if place.field("transform_descriptors"):
            raise UnsupportedValueError(
                f"{index.field('fqn')!r} was written through {_listed(place.field('transform_descriptors'))}; save the "
                "checkpoint again without extensions"
            )
        if not isinstance(file, str) or not _is_count(offset) or not _is_count(nbytes):
            what = f"{shown(file)} at {shown(offset)}, {shown(nbytes)} bytes"
            raise CorruptError(f"{name} puts {index.field('fqn')!r} into {what}")
        found[index.checked_key()] = Place(check_name(file, CorruptError), offset, nbytes)
    return found


def _place_of(places: Mapping[tuple[object, object], Place], key: str, offsets: Extent | None, name: str) -> Place:
    found = places.get((key, offsets))
    if found is None:
        at = "" if offsets is None else f" at {offsets}"
        raise CorruptError(f"{name} does not say where {key!r}{at} lies")
    return found


def _tensor(
    key: str, entry: TensorEntry, places: Mapping[tuple[object, object], Place], name: str
) -> _Tensor:  # fmt: skip
    properties, shape, chunks = (entry.field(part) for part in ("properties", "size", "chunks"))
    if not isinstance(properties, PropertiesEntry) or not _is_extent(shape) or not isinstance(chunks, list):
        raise CorruptError(f"{name} has no type, shape or chunks for {key!r}")
    dtype = properties.arguments[0] if properties.arguments else properties.field("dtype")
    known = dtype.dtype if isinstance(dtype, ElementType) else None
    if known is None:
        raise UnsupportedValueError(f"{key!r} has elements of type {kind_name(dtype)}; it cannot be read")
    found: dict[Extent, tuple[Extent, Extent, Place]] = {}
    for chunk in chunks:
        offsets, sizes = _box(chunk, shape, f"{name} has a chunk of {key!r}")
        if 0 not in sizes:
            place = _place_of(places, key, offsets, name)
            if prod(sizes) * known.itemsize > place.nbytes:
                raise CorruptError(f"{name}: the chunk of {key!r} at {offsets} does not fit into {place.nbytes} bytes")
            found[offsets] = offsets, sizes, place
    return _Tensor(key, known, shape, tuple(found[offsets] for offsets in sorted(found)))


def _box(chunk: object, shape: Extent, what: str) -> tuple[Extent, Extent]:
    """Offsets and sizes of a chunk, which must lie in its tensor."""
    offsets: Any = chunk.field("offsets") if isinstance(chunk, ChunkEntry) else None
    sizes: Any = chunk.field("sizes") if isinstance(chunk, ChunkEntry) else None
    if not _is_extent(offsets) or not _is_extent(sizes) or not len(offsets) == len(sizes) == len(shape):
        raise CorruptError(f"{what} that is no box: {shown(offsets)}, {shown(sizes)}")
    if any(start + size > whole for start, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise CorruptError(f"{what} at {offsets} of {sizes}, outside of {shape}")
    return offsets, sizes


def _paths(planner_data: object) -> dict[str, StatePath]:
    """Where leaves lay: what torch's own planner keeps; nothing for what another one keeps."""
    if not isinstance(planner_data, dict):
        return {}
    found: dict[str, StatePath] = {}
    for name, path in planner_data.items():
        if isinstance(name, str) and isinstance(path, tuple) and path and all(map(_is_component, path)):
            found[name] = tuple(
                PathKey("key", part) if isinstance(part, str) else position("list", part) for part in path
            )
    return found


def _is_component(value: object) -> bool:
    return type(value) is str or _is_count(value)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_extent(value: Any) -> bool:
    return is_numbers(value) and all(map(_is_count, value)) and prod(value) < _LARGEST


def _listed(values: object) -> str:
    """What a stranger lists, for an error."""
    return ", ".join(map(shown, values[:_LISTED])) if isinstance(values, (list, tuple)) else shown(values)


def _check_ends(description: Description, sizes: Mapping[str, int]) -> None:
    places = [place for _, place in description.objects]
    places += [place for tensor in description.tensors for _, _, place in tensor.chunks]
    for place in places:
        if place.offset + place.nbytes > sizes[place.file]:
            raise IncompleteError(
                f"{place.file} has {sizes[place.file]} bytes, and the checkpoint an entry up to byte "
                f"{place.offset + place.nbytes}: restore the file, or load another checkpoint"
            )


def _columns(description: Description, rows: Mapping[str, int]) -> tuple[MetadataColumns, Int64]:
    tensors = description.tensors
    chunks = [chunk for tensor in tensors for chunk in tensor.chunks]
    depth = max((len(tensor.shape) for tensor in tensors), default=0)
    counts = np.array([len(tensor.chunks) for tensor in tensors], np.int64)
    tensor_columns = TensorColumns(
        [tensor.name for tensor in tensors],
        [_path(description, tensor.name) for tensor in tensors],
        np.full(len(tensors), EVERY_RANK, np.int32),
        np.array([tensor.dtype.code for tensor in tensors], np.uint8),
        np.array([len(tensor.shape) for tensor in tensors], np.uint8),
        _padded([tensor.shape for tensor in tensors], depth, 1),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
    )
    chunk_columns = ChunkColumns(
        _padded([offsets for offsets, _, _ in chunks], depth, 0),
        _padded([sizes for _, sizes, _ in chunks], depth, 1),
        np.array([rows[place.file] for _, _, place in chunks], np.int32),
        np.array([place.offset for _, _, place in chunks], np.int64),
    )
    objects = description.objects
    object_columns = ObjectColumns(
        [name for name, _ in objects],
        [_path(description, name) for name, _ in objects],
        np.full(len(objects), EVERY_RANK, np.int32),
        np.zeros(len(objects), np.uint8),
        np.array([rows[place.file] for _, place in objects], np.int32),
        np.arange(len(objects), dtype=np.int32),
    )
    entry_nbytes = np.array([place.nbytes for _, _, place in chunks], np.int64)
    return MetadataColumns(tensor_columns, chunk_columns, object_columns, Nesting()), entry_nbytes


def _path(description: Description, name: str) -> bytes:
    return encode_path(description.paths.get(name) or (PathKey("key", name),))


def _padded(extents: Sequence[Extent], depth: int, filler: int) -> Int64:
    return np.array([(*extent, *(filler,) * (depth - len(extent))) for extent in extents], np.int64).reshape(
        len(extents), depth
    )


def _file_columns(names: Sequence[str], sizes: Sequence[int]) -> FileColumns:
    count = len(names)
    nothing = np.zeros(count, np.int64)
    return FileColumns(
        rank=np.full(count, -1, np.int32),
        part=np.zeros(count, np.int32),
        kind=np.zeros(count, np.uint8),
        nbytes=np.array(sizes, np.int64),
        data_start=nothing,
        field_start=nothing,
        field_nbytes=nothing,
        digest=np.zeros((count, 2), np.uint64),
        names=tuple(names),
    )
