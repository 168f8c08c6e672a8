"""Tells what kind of checkpoint lies at a path, by the names of files and the first bytes of a `.metadata`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from urllib.parse import urlsplit

from dcp_core.errors import ArgumentError
from dcp_core.execution.filesystem import local_path
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.file_names import (
    INTENT_PREFIX,
    MAILBOX_PREFIX,
    METADATA_NAME,
    parse_data_file_name,
    parse_rank_metadata_name,
)
from dcp_core.formats.block_container import FIRST_READ_NBYTES, foreign_kind
from dcp_core.storage.leftovers import parse_temporary_name

_SAFETENSORS = (".safetensors", ".safetensors.index.json")


def checkpoint_format(path: CheckpointId) -> str:
    """Tell what lies at a path.

    Returns:
        "dcp", also for what a save left that was not completed; "torch-dcp", "huggingface", or "torch" for a file that
        `torch.save` wrote.

    Raises:
        ArgumentError: None of these.
    """
    if is_remote(path):
        return "dcp"  # what plugins' storages hold
    local = local_path(path)
    if os.path.isfile(local):
        return "huggingface" if local.endswith(_SAFETENSORS) else "torch"
    names = set(os.listdir(local)) if os.path.isdir(local) else set()
    if METADATA_NAME in names:
        return "torch-dcp" if foreign_kind(_first_bytes(os.path.join(local, METADATA_NAME))) == "a pickle" else "dcp"
    if has_traces(names):
        return "dcp"
    if any(name.endswith(_SAFETENSORS) for name in names):
        return "huggingface"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return "torch"
    what = "there is nothing" if not os.path.exists(local) else "there is no checkpoint that is known"
    raise ArgumentError(f"{what} at {local!r}: expected .metadata, or *.safetensors, or a file of torch.save")


def is_remote(path: CheckpointId) -> bool:
    """Whether a path is a URL of something else than a file."""
    return isinstance(path, str) and "://" in path and urlsplit(path).scheme.lower() not in ("", "file")


def has_traces(names: Iterable[str]) -> bool:
    """Whether some of these are names that only saves of this library give."""
    return any(
        parse_data_file_name(name) is not None
        or parse_rank_metadata_name(name) is not None
        or parse_temporary_name(name) is not None
        or name.startswith((INTENT_PREFIX, MAILBOX_PREFIX))
        for name in names
    )


def _first_bytes(path: str) -> bytes:
    if not os.path.isfile(path):
        return b""  # a pipe, for instance: whoever opens it says so
    with open(path, "rb") as file:
        return file.read(FIRST_READ_NBYTES)
