"""Readers of checkpoints of any format, for the commands that look into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_core.errors import ArgumentError
from dcp_core.execution.interfaces import StorageReader
from dcp_core.recipes.places import dcp_reader, huggingface_reader
from dcp_core.recipes.torch_package import torch_dcp_reader
from dcp_core.storage.urls import redacted

FORMATS = ("dcp", "torch-dcp", "huggingface", "torch")


def open_reader(
    src: str, source: str, options: Mapping[str, Any] | None = None, key_map: dict[str, str] | None = None
) -> StorageReader:
    """Make the reader of a checkpoint.

    Args:
        src: Where it is.
        source: What it is; see `inspection.detection.checkpoint_format`.
        options: What fsspec gets beside a URL.
        key_map: How names in safetensors become names of tensors.

    Raises:
        ArgumentError: A file of `torch.save`; or a format of torch's, and torch is not installed.
    """
    if source == "dcp":
        return dcp_reader(src, options)
    if source == "huggingface":
        return huggingface_reader(src, options, key_map=key_map)
    if source == "torch-dcp":
        return torch_dcp_reader(src, options)
    raise ArgumentError(
        f"{redacted(src)!r} is a file of torch.save, which is read as a whole: `dcp convert --to dcp` it first"
    )
