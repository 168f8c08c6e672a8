"""What a checkpoint says about itself: the public value types, and the columns behind them.

A checkpoint of a large job has millions of chunks, so the bulk lives in columns (numpy arrays, one row a tensor,
chunk, object or file); `Metadata` is a lazy view that makes the public objects on request. `formats.metadata_file`
turns columns into bytes and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box

if TYPE_CHECKING:
    from dcp_core.dtype import DType
    from dcp_core.state_path import StatePath

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
UInt64 = npt.NDArray[np.uint64]

EVERY_RANK = -1
"""In a `rank` column: the entry belongs to all ranks."""


@dataclass(frozen=True, slots=True)
class MetadataIndex:
    """Names a stored tensor shard or object.

    Attributes:
        fqn: The key in the checkpoint.
        offset: Where the shard starts in the global tensor, in elements; None for an object or a whole tensor.
        index: Position among the tensor's chunks; a hint that takes no part in equality.
    """

    fqn: str
    offset: tuple[int, ...] | None = None
    index: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ChunkStorageMetadata:
    """A stored box: `offsets` and `sizes` in elements of the global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorStorageMetadata:
    """A stored tensor.

    Attributes:
        dtype: Element type.
        shape: Global shape.
        chunks: The stored boxes; they tile the shape.
    """

    dtype: DType
    shape: tuple[int, ...]
    chunks: Sequence[ChunkStorageMetadata]


@dataclass(frozen=True, slots=True)
class BytesStorageMetadata:
    """A stored object (anything that is not a tensor).

    Attributes:
        ranks: Whose value is stored: empty when one value serves every rank.
    """

    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WriterRecord:
    """Who wrote a checkpoint: library version, framework and its version, ranks of the group."""

    library: str
    framework: str
    framework_version: str
    world_size: int


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """Which save it was.

    Attributes:
        save_id: 32 hex digits.
        suffix: What the data files carry between rank and ending: "" or ".<id>".
        rank: None for a collective save; else the rank whose `{rank}.metadata` this is.
    """

    save_id: str
    suffix: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TensorColumns:
    """Stored tensors, sorted by (UTF-8 name, rank).

    Attributes:
        names: Printed name of each tensor, unique but for `rank`.
        paths: Typed path of each, as `state_path.encode_path` writes it.
        rank: `EVERY_RANK`, or the rank whose own value this is. Shape (T,).
        dtype: `DType.code`. Shape (T,).
        ndim: Dimensions. Shape (T,).
        shape: Global shape, padded on the right with 1. Shape (T, D).
        row: First chunk row of each tensor; row[T] is the number of chunks. Shape (T + 1,).
    """

    names: Sequence[str]
    paths: Sequence[bytes]
    rank: Int32
    dtype: UInt8
    ndim: UInt8
    shape: Int64
    row: Int64


@dataclass(frozen=True, slots=True, eq=False)
class ArrayColumns:
    """The stored arrays that chunks are regions of: for chunks that do not lie in one piece in their file.

    Attributes:
        offsets: Where the chunk starts in its array, padded on the right with 0. Shape (N, D), elements.
        sizes: Extent of the array, padded on the right with 1. Shape (N, D), elements.
    """

    offsets: Int64
    sizes: Int64


@dataclass(frozen=True, slots=True, eq=False)
class ChunkColumns:
    """Stored boxes, sorted by (tensor, offsets).

    Attributes:
        offsets: Start of the box, padded on the right with 0. Shape (N, D), elements.
        sizes: Extent, padded on the right with 1. Shape (N, D), elements.
        file: Row in `FileColumns`. Shape (N,).
        byte_offset: From the start of the file's data section: of the chunk, or of its array. Shape (N,).
        arrays: The row-major arrays of which the chunks are regions; None where each is an array by itself, as in all
            that this library writes.
    """

    offsets: Int64
    sizes: Int64
    file: Int32
    byte_offset: Int64
    arrays: ArrayColumns | None = None

    def __len__(self) -> int:
        return len(self.file)

    def part(self, rows: slice | npt.NDArray[np.bool_], ndim: int | None = None) -> ChunkColumns:
        """Some rows, and the first `ndim` dimensions of them (None: all); neighbouring ones share memory."""
        arrays = self.arrays
        if arrays is not None:
            arrays = ArrayColumns(arrays.offsets[rows, :ndim], arrays.sizes[rows, :ndim])
        return ChunkColumns(
            self.offsets[rows, :ndim], self.sizes[rows, :ndim], self.file[rows], self.byte_offset[rows], arrays
        )


@dataclass(frozen=True, slots=True, eq=False)
class ObjectColumns:
    """Stored objects, sorted by (UTF-8 name, rank).

    Attributes:
        names: Printed name of each object.
        paths: Typed path of each.
        rank: `EVERY_RANK`, or the rank whose own value this is. Shape (K,).
        per_rank: 1 where the user asked for `PerRank` (another world size is then an error). Shape (K,).
        file: Row in `FileColumns` of the `.bytes` file. Shape (K,).
        ordinal: Position in that file's index. Shape (K,).
    """

    names: Sequence[str]
    paths: Sequence[bytes]
    rank: Int32
    per_rank: UInt8
    file: Int32
    ordinal: Int32


@dataclass(frozen=True, slots=True, eq=False)
class FileColumns:
    """Data files, sorted by (rank, kind, part). New at every save.

    Files that another program wrote have names of their own. Nothing in them says which save they are of, and there
    are no checksums: where they are read, `field_start`, `field_nbytes` and `digest` are 0, and `rank` is -1.

    Attributes:
        rank: Who wrote it. Shape (F,).
        part: 0, or the number of a further part. Shape (F,).
        kind: 0 for `.safetensors`, 1 for `.bytes`. Shape (F,).
        nbytes: Size of the whole file. Shape (F,).
        data_start: Where the data section starts. Shape (F,).
        field_start: Where the checksum field (safetensors) or the index (`.bytes`) starts. Shape (F,).
        field_nbytes: Its length. Shape (F,).
        digest: xxh3-128 of it, low word first. Shape (F, 2).
        names: Names of files that another program wrote; empty where `data_file_name` spells them. Length F.
    """

    rank: Int32
    part: Int32
    kind: UInt8
    nbytes: Int64
    data_start: Int64
    field_start: Int64
    field_nbytes: Int64
    digest: UInt64
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class Nesting:
    """How the state was nested, beyond what the typed paths of its leaves say.

    Attributes:
        containers: (encoded typed path, container kind) of every container that its leaves' paths do not
            determine: empty ones, and kinds other than dict, list and tuple. Sorted.
    """

    containers: tuple[tuple[bytes, str], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor as the metadata has it, with its own chunks only.

    Attributes:
        name: Printed name.
        path: Typed path.
        rank: `EVERY_RANK` or the rank whose value it is.
        dtype: Element type.
        shape: Global shape, length ndim.
        chunks: Its chunk rows, in the order of offsets; the columns are ndim wide.
    """

    name: str
    path: StatePath
    rank: int
    dtype: DType
    shape: tuple[int, ...]
    chunks: ChunkColumns


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object as the metadata has it."""

    name: str
    path: StatePath
    rank: int
    per_rank: bool
    file: int
    ordinal: int


@dataclass(frozen=True, slots=True, eq=False)
class FoundTensors:
    """Tensors that many names were looked up for, as columns. Each belongs to all ranks and is alone under its name.

    Attributes:
        asked: Position of its name among those that were looked up. Shape (N,).
        paths: Encoded typed path of each. Length N.
        dtype: `DType.code`. Shape (N,).
        ndim: Dimensions. Shape (N,).
        shape: Global shape, padded on the right with 1. Shape (N, D).
        first: First of its rows in `chunks`. Shape (N,).
        count: Number of its rows there. Shape (N,).
        chunks: The chunks of these tensors, and of others, as wide as `shape`.
    """

    asked: Int64
    paths: Sequence[bytes]
    dtype: UInt8
    ndim: UInt8
    shape: Int64
    first: Int64
    count: Int64
    chunks: ChunkColumns


@dataclass(frozen=True, slots=True, eq=False)
class FoundObjects:
    """Objects that many names were looked up for, as columns. Each belongs to all ranks and is alone under its name.

    Attributes:
        asked: Position of its name among those that were looked up. Shape (N,).
        paths: Encoded typed path of each. Length N.
        file: Row in `FileColumns` of the `.bytes` file. Shape (N,).
        ordinal: Position in that file's index. Shape (N,).
    """

    asked: Int64
    paths: Sequence[bytes]
    file: Int32
    ordinal: Int32


class MetadataSource(Protocol):
    """What can answer for a checkpoint's description: columns in memory, or a `.metadata` file read by ranges."""

    @property
    def writer(self) -> WriterRecord:
        """Who wrote it."""
        ...

    @property
    def save(self) -> SaveRecord:
        """Which save wrote it."""
        ...

    @property
    def files(self) -> FileColumns:
        """The data files."""
        ...

    @property
    def nesting(self) -> Nesting:
        """How the state was nested."""
        ...

    def names(self) -> Sequence[str]:
        """Every name, tensors and objects, in UTF-8 order, each once."""
        ...

    def tensors(self, name: str) -> Sequence[StoredTensor]:
        """All tensors under one name: one, or one per rank; empty if there is none."""
        ...

    def objects(self, name: str) -> Sequence[StoredObject]:
        """All objects under one name: one, or one per rank; empty if there is none."""
        ...

    def find_tensors(self, names: Sequence[str]) -> tuple[Sequence[FoundTensors], Sequence[int]]:
        """Look many names up among the tensors, all at once.

        Returns:
            The tensors of those names under which there is exactly one and it belongs to all ranks; and the positions
            of names under which there are several, or one rank's own.
        """
        ...

    def find_objects(self, names: Sequence[str]) -> tuple[Sequence[FoundObjects], Sequence[int]]:
        """Look many names up among the objects; as `find_tensors` does. An object per rank is one rank's own."""
        ...


class _Entries(Mapping[str, "TensorStorageMetadata | BytesStorageMetadata"]):
    """The public mapping; an entry is made when it is asked for."""

    def __init__(self, source: MetadataSource) -> None:
        self._source = source

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        tensors = self._source.tensors(name)
        if tensors:
            return _public_tensor(tensors[0])
        objects = self._source.objects(name)
        if objects:
            return BytesStorageMetadata(tuple(entry.rank for entry in objects if entry.rank != EVERY_RANK))
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.names())

    def __len__(self) -> int:
        return len(self._source.names())


def _public_tensor(tensor: StoredTensor) -> TensorStorageMetadata:
    columns = zip(tensor.chunks.offsets.tolist(), tensor.chunks.sizes.tolist(), strict=True)
    chunks = tuple(ChunkStorageMetadata(tuple(offsets), tuple(sizes)) for offsets, sizes in columns)
    return TensorStorageMetadata(tensor.dtype, tensor.shape, chunks)


class Metadata:
    """The description of a checkpoint, read as far as it is asked.

    Attributes:
        source: Where the answers come from.
    """

    def __init__(self, source: MetadataSource) -> None:
        self.source = source

    @property
    def state_dict_metadata(self) -> Mapping[str, TensorStorageMetadata | BytesStorageMetadata]:
        """What is stored under each name. A tensor with one value per rank shows the lowest rank's."""
        return _Entries(self.source)

    @property
    def save_id(self) -> str:
        """The id of the save that wrote the checkpoint."""
        return self.source.save.save_id

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return self.source.writer.world_size

    def __repr__(self) -> str:
        return f"Metadata(save_id={self.save_id!r}, world_size={self.world_size}, files={len(self.source.files)})"


def box_of(chunks: ChunkColumns, row: int) -> Box:
    """The box of one chunk row."""
    return Box(tuple(chunks.offsets[row].tolist()), tuple(chunks.sizes[row].tolist()))
