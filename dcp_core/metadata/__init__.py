"""What a checkpoint says about itself: the public value types, and the columns behind them.

A checkpoint of a large job has millions of chunks, so the bulk lives in columns (numpy arrays, one row a tensor,
chunk, object or file); `Metadata` is a lazy view that makes the public objects on request. `formats.metadata_file`
turns columns into bytes and back.
"""

from __future__ import annotations

from dcp_core.metadata.columns import (
    EVERY_RANK,
    ArrayColumns,
    ChunkColumns,
    FileColumns,
    Int32,
    Int64,
    ObjectColumns,
    TensorColumns,
    UInt8,
    UInt64,
    box_of,
)
from dcp_core.metadata.records import Nesting, SaveRecord, WriterRecord
from dcp_core.metadata.source import FoundObjects, FoundTensors, MetadataSource, StoredObject, StoredTensor
from dcp_core.metadata.view import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

__all__ = [
    "EVERY_RANK",
    "ArrayColumns",
    "BytesStorageMetadata",
    "ChunkColumns",
    "ChunkStorageMetadata",
    "FileColumns",
    "FoundObjects",
    "FoundTensors",
    "Int32",
    "Int64",
    "Metadata",
    "MetadataIndex",
    "MetadataSource",
    "Nesting",
    "ObjectColumns",
    "SaveRecord",
    "StoredObject",
    "StoredTensor",
    "TensorColumns",
    "TensorStorageMetadata",
    "UInt8",
    "UInt64",
    "WriterRecord",
    "box_of",
]
