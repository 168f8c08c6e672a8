"""Distributed checkpoints for torch: save a sharded state, load it under any other layout.

>>> import dcp_torch
>>> dcp_torch.save({"model": model}, checkpoint_id="step_1000")    # doctest: +SKIP
>>> dcp_torch.load({"model": model}, checkpoint_id="step_1000")    # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dcp_core import __version__

if TYPE_CHECKING:
    from dcp_core.api import AsyncSaveResponse, DataCopier, allow_pickled, clear_plan_cache, read, wait_all
    from dcp_core.box import Box
    from dcp_core.errors import (
        AdapterError,
        ArgumentError,
        ArgumentsDifferError,
        CoordinationError,
        CoordinationTimeoutError,
        CorruptError,
        CoverageError,
        DcpError,
        DTypeMismatchError,
        FormatError,
        IncompleteError,
        InDoubtError,
        MissingKeysError,
        MissingRendezvousError,
        NewerVersionError,
        NotFoundError,
        OverlapError,
        PlanningError,
        RankFailedError,
        SaveCancelledError,
        ShapeMismatchError,
        StorageError,
        UnsupportedValueError,
        UntrustedObjectError,
    )
    from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
    from dcp_core.execution.huggingface import HuggingFaceReader, Joined, Narrowed, Selected, Stacked
    from dcp_core.execution.interfaces import StorageReader, StorageWriter
    from dcp_core.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
    )
    from dcp_core.planning.items import ReadItem, WriteItem
    from dcp_core.planning.load_plan import LoadPlan
    from dcp_core.planning.planners import LoadPlanner, SavePlanner
    from dcp_core.planning.plans import SavePlan
    from dcp_core.planning.standard_load import StandardLoadPlanner
    from dcp_core.planning.standard_save import StandardSavePlanner
    from dcp_core.state_path import PerRank
    from dcp_torch import offline_transform
    from dcp_torch.annotate import ChunkInfo, annotate_shard
    from dcp_torch.api import async_save, load, save
    from dcp_torch.flat_buffers import split_flat
    from dcp_torch.parts import describe_parts
    from dcp_torch.torch_dcp import TorchDCPReader

__all__ = [
    "AdapterError",
    "ArgumentError",
    "ArgumentsDifferError",
    "AsyncSaveResponse",
    "Box",
    "BytesStorageMetadata",
    "ChunkInfo",
    "ChunkStorageMetadata",
    "CoordinationError",
    "CoordinationTimeoutError",
    "CorruptError",
    "CoverageError",
    "DTypeMismatchError",
    "DataCopier",
    "DcpError",
    "FileSystemReader",
    "FileSystemWriter",
    "FormatError",
    "HuggingFaceReader",
    "InDoubtError",
    "IncompleteError",
    "Joined",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "MissingKeysError",
    "MissingRendezvousError",
    "Narrowed",
    "NewerVersionError",
    "NotFoundError",
    "OverlapError",
    "PerRank",
    "PlanningError",
    "RankFailedError",
    "ReadItem",
    "SaveCancelledError",
    "SavePlan",
    "SavePlanner",
    "Selected",
    "ShapeMismatchError",
    "Stacked",
    "StandardLoadPlanner",
    "StandardSavePlanner",
    "StorageError",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "TorchDCPReader",
    "UnsupportedValueError",
    "UntrustedObjectError",
    "WriteItem",
    "__version__",
    "allow_pickled",
    "annotate_shard",
    "async_save",
    "clear_plan_cache",
    "describe_parts",
    "load",
    "offline_transform",
    "read",
    "save",
    "split_flat",
    "wait_all",
]

_HOMES = {
    "dcp_core.api": (
        "AsyncSaveResponse",
        "DataCopier",
        "allow_pickled",
        "clear_plan_cache",
        "read",
        "wait_all",
    ),
    "dcp_core.box": ("Box",),
    "dcp_core.errors": (
        "AdapterError",
        "ArgumentError",
        "ArgumentsDifferError",
        "CoordinationError",
        "CoordinationTimeoutError",
        "CorruptError",
        "CoverageError",
        "DTypeMismatchError",
        "DcpError",
        "FormatError",
        "InDoubtError",
        "IncompleteError",
        "MissingKeysError",
        "MissingRendezvousError",
        "NewerVersionError",
        "NotFoundError",
        "OverlapError",
        "PlanningError",
        "RankFailedError",
        "SaveCancelledError",
        "ShapeMismatchError",
        "StorageError",
        "UnsupportedValueError",
        "UntrustedObjectError",
    ),
    "dcp_core.execution.filesystem": (
        "FileSystemReader",
        "FileSystemWriter",
    ),
    "dcp_core.execution.huggingface": (
        "HuggingFaceReader",
        "Joined",
        "Narrowed",
        "Selected",
        "Stacked",
    ),
    "dcp_core.execution.interfaces": (
        "StorageReader",
        "StorageWriter",
    ),
    "dcp_core.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
    ),
    "dcp_core.planning.items": (
        "ReadItem",
        "WriteItem",
    ),
    "dcp_core.planning.load_plan": ("LoadPlan",),
    "dcp_core.planning.planners": (
        "LoadPlanner",
        "SavePlanner",
    ),
    "dcp_core.planning.plans": ("SavePlan",),
    "dcp_core.planning.standard_load": ("StandardLoadPlanner",),
    "dcp_core.planning.standard_save": ("StandardSavePlanner",),
    "dcp_core.state_path": ("PerRank",),
    "dcp_torch.annotate": (
        "ChunkInfo",
        "annotate_shard",
    ),
    "dcp_torch.api": (
        "async_save",
        "load",
        "save",
    ),
    "dcp_torch.flat_buffers": ("split_flat",),
    "dcp_torch.parts": ("describe_parts",),
    "dcp_torch.torch_dcp": ("TorchDCPReader",),
}

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: plugin discovery imports this package, and torch is heavy."""
    if name == "offline_transform":
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
