"""Distributed checkpoints for MindSpore: not in this release.

The package itself can be imported, since its plugin module lives in it; every public name of the API to come raises an
`ImportError` that says what works today.
"""

from __future__ import annotations

from typing import NoReturn

_TO_COME = frozenset(
    (
        *("save", "async_save", "load", "read", "wait_all", "AsyncSaveResponse", "allow_pickled", "clear_plan_cache"),
        *("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("WriteItem", "ReadItem", "SavePlan", "LoadPlan", "SavePlanner", "LoadPlanner"),
        *("StandardSavePlanner", "StandardLoadPlanner", "StorageWriter", "StorageReader"),
        *("FileSystemWriter", "FileSystemReader", "HuggingFaceReader", "DataCopier", "PerRank", "ChunkInfo"),
        *("annotate_shard", "latest_checkpoint", "CheckpointManager"),
    )
)


def __getattr__(name: str) -> NoReturn:
    if name in _TO_COME:
        raise ImportError(
            f"dcp_mindspore.{name} is not available: this release of hyper-dcp has no MindSpore support yet; it comes "
            "with a later version. What works today: dcp_core, without a framework, and dcp_torch "
            "(pip install 'hyper-dcp[torch]')",
            name=__name__,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
