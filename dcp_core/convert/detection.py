"""Tells what kind of checkpoint lies at a place, by the names of files and the first byte of a `.metadata`."""

from __future__ import annotations

import os

from dcp_core.convert.places import storage_at
from dcp_core.errors import ArgumentError, NotFoundError
from dcp_core.execution.filesystem import is_other_url, local_path
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.file_names import METADATA_NAME

_HUGGING_FACE = (".safetensors", ".safetensors.index.json")
_TORCH = (".bin", ".pt", ".pth")
_EXPECTED = "expected .metadata, or *.safetensors, or a file of torch.save"
_SHOWN = 4


def checkpoint_format(path: CheckpointId) -> str:
    """Tell what lies at a path, or at a URL whose scheme a plugin knows.

    Returns:
        "dcp", "torch-dcp", "huggingface", or "torch" for a file that `torch.save` wrote.

    Raises:
        ArgumentError: None of these.
    """
    name = str(path) if is_other_url(path) else local_path(path)
    if name.endswith(_HUGGING_FACE) if is_other_url(path) else os.path.isfile(name):
        return "huggingface" if name.endswith(_HUGGING_FACE) else "torch"
    storage = storage_at(path)
    try:
        names = storage.list()
    except NotFoundError:
        raise ArgumentError(f"there is nothing at {name!r}: {_EXPECTED}") from None
    if METADATA_NAME in names:
        return "torch-dcp" if storage.read(METADATA_NAME, 0, 1) == b"\x80" else "dcp"
    if any(file.endswith(_HUGGING_FACE) for file in names):
        return "huggingface"
    if any(file.endswith(_TORCH) for file in names):
        return "torch"
    raise ArgumentError(f"there is no checkpoint that is known at {name!r}: {_EXPECTED}{_hint(name)}")


def _hint(path: str) -> str:
    """What else may be meant."""
    inside = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())[:_SHOWN] if os.path.isdir(path) else []
    return f"; is it one of the directories in it, such as {', '.join(map(repr, inside))}?" if inside else ""
