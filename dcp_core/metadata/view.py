"""What users see of a description: value types, made from the source on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dcp_core.metadata.columns import EVERY_RANK
from dcp_core.metadata.source import MetadataSource, StoredTensor

if TYPE_CHECKING:
    from dcp_core.dtype import DType


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
