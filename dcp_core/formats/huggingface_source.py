"""The description of a Hugging Face checkpoint, as the planner asks for it: columns made from headers. Pure.

Goes in: what the headers say, how names change, and which tensors are cut otherwise. Comes out: a `MetadataSource`. Its
files have names of their own and no checksums; a tensor is one chunk, or as many as the pieces that it lies in.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128_hexdigest

from dcp_core.dtype import DType
from dcp_core.errors import CorruptError, MissingKeysError
from dcp_core.file_names import TENSOR_FILE
from dcp_core.formats.chunk_checks import shapes_fault
from dcp_core.formats.columns_source import ColumnsSource, MetadataColumns
from dcp_core.formats.cuts import Cut, lay_out
from dcp_core.formats.huggingface_directory import SafetensorsFile, encode_files
from dcp_core.formats.key_map import KeyMap, map_keys
from dcp_core.formats.safetensors_parser import StoredArray, elements_of
from dcp_core.formats.stored_layout import Extent, Layout, Piece
from dcp_core.key_codec import encode_key
from dcp_core.metadata import (
    EVERY_RANK,
    ArrayColumns,
    ChunkColumns,
    FileColumns,
    Int64,
    Nesting,
    ObjectColumns,
    SaveRecord,
    TensorColumns,
    WriterRecord,
)

_log = logging.getLogger("dcp.formats")
_NAMES_SHOWN = 10
_USUAL_DEPTH = 8
_PADDED_NUMBERS = 1 << 24


class HuggingFaceSource(ColumnsSource):
    """A `MetadataSource` over safetensors files.

    Args:
        files: What their headers say.
        key_map: How the names of stored tensors become those of the state.
        cuts: For tensors of the state that are cut otherwise than stored ones, how they are made of those.
        encoded: What `encode_files` makes of the files, where that is known.

    Attributes:
        described: The files.
        encoded: What `encode_files` makes of them.
        is_whole: Whether every tensor is one array of one file: nothing of it can be missing then.
        unusable: Tensors, with their types, that the key map keeps, and that no framework has a type for. They cannot
            be loaded.

    Raises:
        CorruptError: Headers contradict each other.
        ArgumentError: The key map fails.
        MissingKeysError: A cut names a tensor that is not there.
        PlanningError: A cut does not fit the stored tensors.
    """

    def __init__(
        self,
        files: Sequence[SafetensorsFile],
        key_map: KeyMap | None,
        cuts: Mapping[str, Cut],
        encoded: bytes | None = None,
    ) -> None:
        self.described = tuple(files)
        self.encoded = encode_files(files) if encoded is None else encoded
        stored = _StoredTensors(files)
        kept = sorted(map_keys(key_map, stored.unusable).values())
        self.unusable = tuple(f"{name} ({stored.unusable[name]})" for name in kept)
        names = map_keys(key_map, stored.names)
        self.is_whole = not cuts and stored.are_whole
        if self.is_whole:
            columns = _whole_columns({new: stored.place(old) for new, old in names.items()})
        else:
            layouts = {new: stored.layout(old) for new, old in names.items() if new not in cuts}
            layouts |= {key: lay_out(cut, key, partial(stored.part, key=key)) for key, cut in cuts.items()}
            columns = _columns(layouts)
        save = SaveRecord(xxh3_128_hexdigest(self.encoded), "")
        super().__init__(columns, _file_columns(files), save, WriterRecord("safetensors", "", "", 1))


class _Place(NamedTuple):
    """Where an array lies, and what its elements are to us."""

    row: int
    array: StoredArray
    dtype: DType
    shape: Extent


class _StoredTensors:
    """The tensors of some files, by their names there."""

    def __init__(self, files: Sequence[SafetensorsFile]) -> None:
        self._files = files
        self._places: dict[str, list[_Place]] = {}
        self.unusable: dict[str, str] = {}
        for row, file in enumerate(files):
            for array in file.arrays:
                found = elements_of(array)
                if found is None:
                    self.unusable[array.key] = array.file_dtype
                else:
                    self._places.setdefault(array.key, []).append(_Place(row, array, *found))
        self.are_whole = not any(file.offsets for file in files) and all(len(own) == 1 for own in self._places.values())
        if self.unusable:
            shown = ", ".join([f"{name} ({kind})" for name, kind in sorted(self.unusable.items())][:_NAMES_SHOWN])
            _log.warning("%d tensors have types that cannot be loaded, and are left out: %s", len(self.unusable), shown)
        self.layout = lru_cache(maxsize=None)(self._lay_out)

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._places)

    def place(self, name: str) -> _Place:
        """Where a tensor lies, where it is one array."""
        return self._places[name][0]

    def part(self, name: str, key: str) -> Layout:
        """The layout of a tensor that `key` is cut out of.

        Raises:
            MissingKeysError: There is no such tensor.
        """
        if name not in self._places:
            near = get_close_matches(name, list(self._places)[:2000], 1, 0.8)
            hint = f"; there is {near[0]!r}" if near else f"; there are {self.names[:_NAMES_SHOWN]} and others"
            raise MissingKeysError(f"{key!r} is to be made of {name!r}, which the files lack{hint}")
        return self.layout(name)

    def _lay_out(self, name: str) -> Layout:
        places = self._places[name]
        first, dtype = places[0], places[0].dtype
        shape, pieces = list(first.shape), []
        for row, array, own_dtype, own_shape in places:
            if own_dtype != dtype or len(own_shape) != len(shape):
                raise CorruptError(
                    f"{self._files[row].name}: the tensor {name[:200]!a} has {own_dtype.name} of {own_shape}, and in "
                    f"{self._files[first.row].name} {dtype.name} of {first.shape}: these are not shards of one tensor"
                )
            offsets = self._files[row].offsets.get(name, (0,) * len(shape))
            offsets = self._in_elements(array, offsets)
            shape = [max(whole, at + size) for whole, at, size in zip(shape, offsets, own_shape, strict=True)]
            if array.nbytes:
                pieces.append(Piece(offsets, own_shape, row, array.byte_offset, (0,) * len(shape), own_shape))
        return Layout(dtype, tuple(shape), tuple(pieces))

    @staticmethod
    def _in_elements(array: StoredArray, offsets: Extent) -> Extent:
        """Two 4-bit floats are one element."""
        return (*offsets[:-1], offsets[-1] // 2) if array.file_dtype == "F4" and offsets else offsets


def _whole_columns(places: Mapping[str, _Place]) -> MetadataColumns:
    """The columns of tensors that are one array each."""
    names = sorted(places)
    ordered = [places[name] for name in names]
    shapes = [place.shape for place in ordered]
    counts = np.array([place.array.nbytes > 0 for place in ordered], np.int64)
    tensors = _tensor_columns(names, [place.dtype.code for place in ordered], shapes, counts)
    sizes = tensors.shape[counts > 0]
    filled = [place for place in ordered if place.array.nbytes]
    file = np.array([place.row for place in filled], np.int32)
    byte_offset = np.array([place.array.byte_offset for place in filled], np.int64)
    return _without_objects(tensors, ChunkColumns(np.zeros_like(sizes), sizes, file, byte_offset))


def _columns(layouts: Mapping[str, Layout]) -> MetadataColumns:
    names = sorted(layouts)
    ordered = [layouts[name] for name in names]
    pieces = [
        sorted((piece.settled(layout.dtype.itemsize) for piece in layout.pieces), key=lambda piece: piece.offsets)
        for layout in ordered
    ]
    counts = np.array([len(own) for own in pieces], np.int64)
    codes, shapes = [layout.dtype.code for layout in ordered], [layout.shape for layout in ordered]
    tensors = _tensor_columns(names, codes, shapes, counts)
    chunks = _chunk_columns([piece for own in pieces for piece in own], tensors.shape.shape[1])
    return _without_objects(tensors, chunks)


def _tensor_columns(
    names: Sequence[str], codes: Sequence[int], shapes: Sequence[Extent], counts: Int64
) -> TensorColumns:
    """The columns of tensors, each with so many chunks."""
    depth = max(map(len, shapes), default=0)
    rows = max(len(names), int(counts.sum()))
    if depth > _USUAL_DEPTH and rows * depth > _PADDED_NUMBERS:
        _refuse(f"{rows} tensors or shards with up to {depth} dimensions")
    shape, dtype = _padded(shapes, depth, 1), np.array(codes, np.uint8)
    _refuse(shapes_fault(shape, dtype, counts))
    ndim = np.array([len(own) for own in shapes], np.uint8)
    row = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    paths = [encode_key(name) for name in names]
    return TensorColumns(names, paths, np.full(len(names), EVERY_RANK, np.int32), dtype, ndim, shape, row)


def _without_objects(tensors: TensorColumns, chunks: ChunkColumns) -> MetadataColumns:
    nothing = np.empty(0, np.int32)
    objects = ObjectColumns((), (), nothing, nothing.astype(np.uint8), nothing, nothing)
    return MetadataColumns(tensors, chunks, objects, Nesting())


def _chunk_columns(pieces: Sequence[Piece], depth: int) -> ChunkColumns:
    arrays = None
    if any(piece.array_sizes != piece.sizes for piece in pieces):
        arrays = ArrayColumns(
            _padded([piece.array_offsets for piece in pieces], depth, 0),
            _padded([piece.array_sizes for piece in pieces], depth, 1),
        )
    return ChunkColumns(
        _padded([piece.offsets for piece in pieces], depth, 0),
        _padded([piece.sizes for piece in pieces], depth, 1),
        np.array([piece.file for piece in pieces], np.int32),
        np.array([piece.byte_offset for piece in pieces], np.int64),
        arrays,
    )


def _file_columns(files: Sequence[SafetensorsFile]) -> FileColumns:
    count = len(files)
    zeros = np.zeros(count, np.int64)
    return FileColumns(
        rank=np.full(count, -1, np.int32),
        part=zeros.astype(np.int32),
        kind=np.full(count, TENSOR_FILE, np.uint8),
        nbytes=np.array([file.nbytes for file in files], np.int64),
        data_start=np.array([file.data_start for file in files], np.int64),
        field_start=zeros,
        field_nbytes=zeros,
        digest=np.zeros((count, 2), np.uint64),
        names=tuple(file.name for file in files),
    )


def _padded(rows: Sequence[Extent], depth: int, filler: int) -> Int64:
    ndim = np.fromiter(map(len, rows), np.int64, len(rows))
    made = np.full((len(rows), depth), filler, np.int64)
    made[np.arange(depth) < ndim[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64, int(ndim.sum()))
    return made


def _refuse(fault: str | None) -> None:
    if fault is not None:
        raise CorruptError(f"the headers of these safetensors files cannot be true: {fault}")
