"""What a conversion reads from and writes to: a path, or a URL whose scheme an installed plugin knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_core.execution.checkpoint_place import (
    checked_options,
    is_other_url,
    local_path,
    opened_url,
    refuse_options,
)
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.execution.interfaces import CheckpointId, StorageReader
from dcp_core.formats.cuts import Cut
from dcp_core.formats.key_map import KeyMap
from dcp_core.plugins import open_storage
from dcp_core.storage.base import Storage
from dcp_core.storage.local import LocalStorage


def storage_at(place: CheckpointId | Storage, options: Mapping[str, Any] | None = None) -> Storage:
    """The storage of a directory.

    Args:
        place: A path, a URL, or a storage, which is given back.
        options: What fsspec gets beside a URL.

    Raises:
        ArgumentError: No path, and no URL that anybody knows; or options that nobody would look at.
    """
    if isinstance(place, Storage):
        refuse_options(options, "a storage was given, which has its own")
        return place
    opened = opened_url(place, open_storage, options)
    return LocalStorage(local_path(place)) if opened is None else opened  # local_path says that nobody knows it


def options_for(
    options: Mapping[str, Any] | None, *places: CheckpointId | StorageReader
) -> list[Mapping[str, Any] | None]:
    """Tell which of several places get the storage options: all that are URLs.

    Args:
        options: What fsspec gets beside a URL.
        places: Paths, URLs, and readers, which have options of their own.

    Returns:
        The options of each place, in their order.

    Raises:
        ArgumentError: There are options, and none of the places is a URL.
    """
    is_url = [not isinstance(place, StorageReader) and is_other_url(place) for place in places]
    if not any(is_url):
        shown = [repr(str(place)) for place in places if not isinstance(place, StorageReader)]
        refuse_options(options, f"there is none ({', '.join(shown) or 'a reader has its own'})")
    return [checked_options(options) if each else None for each in is_url]


def dcp_reader(src: CheckpointId, options: Mapping[str, Any] | None = None) -> FileSystemReader:
    """A reader of a checkpoint of this library, wherever it is."""
    return FileSystemReader(src, open_url=open_storage, storage_options=options)


def dcp_writer(options: Mapping[str, Any] | None = None) -> FileSystemWriter:
    """A writer of checkpoints of this library, wherever a save puts them."""
    return FileSystemWriter(open_url=open_storage, storage_options=options)


def huggingface_reader(
    src: CheckpointId,
    options: Mapping[str, Any] | None = None,
    *,
    key_map: KeyMap | None = None,
    cuts: Mapping[str, Cut] | None = None,
) -> HuggingFaceReader:
    """A reader of safetensors files, wherever they are."""
    return HuggingFaceReader(src, key_map=key_map, cuts=cuts, open_url=open_storage, storage_options=options)
