"""Plan items: the objects that custom planners and storages see.

Plans live in columns (`planning.columns`); an item is made when somebody asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dcp_core.dtype import DType
from dcp_core.metadata import MetadataIndex


class ItemType(Enum):
    """Whether an item moves an object or a region of a tensor."""

    BYTES = "bytes"
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One thing that this rank writes.

    Attributes:
        index: What it is; for a tensor, `index.offset` is where the written region starts in the global tensor.
        type: Object or tensor.
        sizes: Extent of the region in elements; () for an object.
        nbytes: Its bytes (0 for an object: known once it is encoded).
        leaf: Position of the value among this rank's leaves.
        box: Which of the leaf's boxes.
        start: Where in that box the region starts, in elements.
        dtype: Element type; None for an object.
        global_shape: Shape of the whole tensor; () for an object.
    """

    index: MetadataIndex
    type: ItemType
    sizes: tuple[int, ...]
    nbytes: int
    leaf: int
    box: int = 0
    start: tuple[int, ...] = ()
    dtype: DType | None = None
    global_shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One region that this rank reads, or one object.

    Attributes:
        type: Object or tensor.
        dest_index: The wanted shard: name, and where the shard starts in the global tensor.
        dest_offsets: Where in that shard the region lands, in elements.
        storage_index: The stored chunk: name, and where the chunk starts in the global tensor.
        storage_offsets: Where in that chunk the region starts, in elements.
        lengths: Extent of the region, in elements.
        source: The rank that reads it for all that want it; None: this rank reads it itself.
    """

    type: ItemType
    dest_index: MetadataIndex
    dest_offsets: tuple[int, ...]
    storage_index: MetadataIndex
    storage_offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    source: int | None = None
