"""What can answer for a description, and what it answers with when names are looked up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dcp_core.metadata.columns import ChunkColumns, FileColumns, Int32, Int64, UInt8
from dcp_core.metadata.records import Nesting, SaveRecord, WriterRecord

if TYPE_CHECKING:
    from dcp_core.dtype import DType
    from dcp_core.state_path import StatePath


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
