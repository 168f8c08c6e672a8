"""Tells what kind of checkpoint lies at a place, by the names of files and the first bytes of a `.metadata`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from dcp_core.errors import ArgumentError, DcpError, NotFoundError
from dcp_core.execution.checkpoint_place import is_other_url, local_path, opened_url
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.file_names import (
    INTENT_PREFIX,
    MAILBOX_PREFIX,
    METADATA_NAME,
    parse_data_file_name,
    parse_rank_metadata_name,
)
from dcp_core.formats.block_container import FIRST_READ_NBYTES, foreign_kind
from dcp_core.recipes.places import storage_at
from dcp_core.storage.base import Storage
from dcp_core.storage.leftovers import parse_temporary_name
from dcp_core.storage.urls import redacted

_SAFETENSORS = (".safetensors", ".safetensors.index.json")
_TORCH = (".bin", ".pt", ".pth")
_FILES = "*.safetensors, or a file of torch.save"
_EXPECTED = f"expected .metadata, or {_FILES}"
_SHOWN = 4


def checkpoint_format(path: CheckpointId, options: Mapping[str, Any] | None = None) -> str:
    """Tell what lies at a path or URL.

    Args:
        path: Where.
        options: What fsspec gets beside a URL.

    Returns:
        "dcp", also for what a save left that was not completed; "torch-dcp", "huggingface", or "torch" for a file that
        `torch.save` wrote.

    Raises:
        ArgumentError: None of these; or there are options for a path.
    """
    is_url = is_other_url(path)
    if not is_url:
        opened_url(path, None, options)  # refuses them
    name = redacted(str(path)) if is_url else local_path(path)
    if name.endswith(_SAFETENSORS) if is_url else os.path.isfile(name):
        return "huggingface" if name.endswith(_SAFETENSORS) else _format_of_file(name)
    storage = storage_at(path, options)
    try:
        names = storage.list()
    except NotFoundError:
        raise ArgumentError(f"there is nothing at {name!r}: {_EXPECTED}") from None
    if METADATA_NAME in names:
        return "torch-dcp" if foreign_kind(_first_bytes(storage)) == "a pickle" else "dcp"
    if has_traces(names):
        return "dcp"
    if any(file.endswith(_SAFETENSORS) for file in names):
        return "huggingface"
    if any(file.endswith(_TORCH) for file in names):
        return "torch"
    raise ArgumentError(f"there is no checkpoint that is known at {name!r}: {_EXPECTED}{_hint(name)}")


def _format_of_file(path: str) -> str:
    """What a single file is that is no safetensors."""
    name = os.path.basename(path)
    if name == METADATA_NAME or has_traces((name,)):
        raise ArgumentError(
            f"{path!r} is a file of a checkpoint; name the directory that it lies in: {os.path.dirname(path) or '.'!r}"
        )
    if name.endswith(_TORCH):
        return "torch"
    try:
        with open(path, "rb") as file:
            first = file.read(FIRST_READ_NBYTES)
    except OSError:
        return "torch"  # whoever opens it says what is wrong
    if not foreign_kind(first):
        raise ArgumentError(f"{path!r} is a file of no kind that is known: expected a directory, or {_FILES}")
    return "torch"


def has_traces(names: Iterable[str]) -> bool:
    """Whether some of these are names that only saves of this library give."""
    return any(
        parse_data_file_name(name) is not None
        or parse_rank_metadata_name(name) is not None
        or parse_temporary_name(name) is not None
        or name.startswith((INTENT_PREFIX, MAILBOX_PREFIX))
        for name in names
    )


def _first_bytes(storage: Storage) -> bytes:
    try:
        nbytes = storage.size(METADATA_NAME)
        return storage.read(METADATA_NAME, 0, min(nbytes or 0, FIRST_READ_NBYTES))
    except DcpError:
        return b""  # a pipe, for instance: whoever opens it says so


def _hint(path: str) -> str:
    """What else may be meant."""
    try:
        inside = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())[:_SHOWN]
    except OSError:
        return ""
    return f"; is it one of the directories in it, such as {', '.join(map(repr, inside))}?" if inside else ""
