"""What reads torch's own formats, for those that have no torch: it lies in torch's package, imported when needed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

from dcp_core.errors import ArgumentError
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.plugins import open_storage


def torch_package_module(name: str) -> Any:
    """Import a module of `dcp_torch`.

    Args:
        name: Which one: "offline_transform", "torch_dcp".

    Raises:
        ArgumentError: torch is not installed.
    """
    try:
        return importlib.import_module(f"dcp_torch.{name}")
    except ImportError as error:
        raise ArgumentError(f"{error}: what torch wrote is read with torch; pip install 'hyper-dcp[torch]'") from error


def torch_dcp_reader(src: CheckpointId, options: Mapping[str, Any] | None = None) -> FileSystemReader:
    """A reader of a checkpoint of torch DCP, wherever it is.

    Raises:
        ArgumentError: torch is not installed.
    """
    made = torch_package_module("torch_dcp").TorchDCPReader(src, open_url=open_storage, storage_options=options)
    return cast(FileSystemReader, made)
