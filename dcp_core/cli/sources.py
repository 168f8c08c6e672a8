"""Readers of checkpoints of any format, for the commands that look into them."""

from __future__ import annotations

import importlib
from typing import Any

from dcp_core.errors import ArgumentError
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.execution.interfaces import StorageReader
from dcp_core.plugins import open_storage

FORMATS = ("dcp", "torch-dcp", "huggingface", "torch")

_TORCH = {"torch-dcp": "dcp_torch.torch_dcp", "torch": "dcp_torch.offline_transform"}


def open_reader(src: str, source: str, key_map: dict[str, str] | None = None) -> StorageReader:
    """Make the reader of a checkpoint.

    Args:
        src: Where it is.
        source: What it is; see `inspection.detection.checkpoint_format`.
        key_map: How names in safetensors become names of tensors.

    Raises:
        ArgumentError: A file of `torch.save`; or a format of torch's, and torch is not installed.
    """
    if source == "dcp":
        return FileSystemReader(src, open_url=open_storage)
    if source == "huggingface":
        return HuggingFaceReader(src, key_map=key_map)
    if source == "torch-dcp":
        reader: StorageReader = torch_module(source).TorchDCPReader(src)
        return reader
    raise ArgumentError(f"{src!r} is a file of torch.save, which is read as a whole: `dcp convert --to dcp` it first")


def torch_module(source: str) -> Any:
    """What reads torch's formats lies in torch's package, which is imported when it is needed."""
    try:
        return importlib.import_module(_TORCH[source])
    except ImportError as error:
        raise ArgumentError(f"{error}: what torch wrote is read with torch; pip install 'hyper-dcp[torch]'") from error
