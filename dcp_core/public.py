"""The names that every framework's package offers beside its own `save`, `async_save`, `load` and `annotate_shard`."""

from __future__ import annotations

from dcp_core import __version__
from dcp_core.api import AsyncSaveResponse, DataCopier, allow_pickled, clear_plan_cache, read, verify, wait_all
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
    ReplicasDifferError,
    SaveCancelledError,
    ShapeMismatchError,
    StorageError,
    UnsupportedValueError,
    UntrustedObjectError,
)
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.execution.huggingface import HuggingFaceReader, Joined, Narrowed, Selected, Stacked
from dcp_core.execution.interfaces import StorageReader, StorageWriter
from dcp_core.inspection.report import VerifyReport
from dcp_core.manager.survey import FoundCheckpoint, RootSurvey, SkippedCheckpoint
from dcp_core.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from dcp_core.planning.chunk_info import ChunkInfo
from dcp_core.planning.items import ReadItem, WriteItem
from dcp_core.planning.load_plan import LoadPlan
from dcp_core.planning.planners import LoadPlanner, SavePlanner
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.state_path import PerRank

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
    "FoundCheckpoint",
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
    "ReplicasDifferError",
    "RootSurvey",
    "SaveCancelledError",
    "SavePlan",
    "SavePlanner",
    "Selected",
    "ShapeMismatchError",
    "SkippedCheckpoint",
    "Stacked",
    "StandardLoadPlanner",
    "StandardSavePlanner",
    "StorageError",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "UnsupportedValueError",
    "UntrustedObjectError",
    "VerifyReport",
    "WriteItem",
    "__version__",
    "allow_pickled",
    "clear_plan_cache",
    "read",
    "verify",
    "wait_all",
]
