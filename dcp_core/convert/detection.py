"""Tells what kind of checkpoint lies at a path, by the names of files and the first byte of a `.metadata`."""

from __future__ import annotations

import os

from dcp_core.errors import ArgumentError
from dcp_core.execution.filesystem import local_path
from dcp_core.execution.interfaces import CheckpointId

_SHOWN = 4


def checkpoint_format(path: CheckpointId) -> str:
    """Tell what lies at a path.

    Returns:
        "dcp", "torch-dcp", "huggingface", or "torch" for a file that `torch.save` wrote.

    Raises:
        ArgumentError: None of these.
    """
    local = local_path(path)
    if os.path.isfile(local):
        return "huggingface" if local.endswith((".safetensors", ".safetensors.index.json")) else "torch"
    names = set(os.listdir(local)) if os.path.isdir(local) else set()
    if ".metadata" in names:
        with open(os.path.join(local, ".metadata"), "rb") as file:
            return "torch-dcp" if file.read(1) == b"\x80" else "dcp"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "huggingface"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return "torch"
    what = "there is nothing" if not os.path.exists(local) else "there is no checkpoint that is known"
    inside = sorted(name for name in names if os.path.isdir(os.path.join(local, name)))[:_SHOWN]
    hint = f"; is it one of the directories in it, such as {', '.join(map(repr, inside))}?" if inside else ""
    raise ArgumentError(f"{what} at {local!r}: expected .metadata, or *.safetensors, or a file of torch.save{hint}")
