"""What a conversion reads from and writes to: a path, or a URL whose scheme an installed plugin knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_core.execution.checkpoint_place import is_other_url, local_path
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.huggingface import HuggingFaceReader
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.formats.cuts import Cut
from dcp_core.formats.key_map import KeyMap
from dcp_core.plugins import open_storage
from dcp_core.storage.base import Storage
from dcp_core.storage.fsspec_storage import open_fsspec_url
from dcp_core.storage.local import LocalStorage


def storage_at(place: CheckpointId | Storage, options: Mapping[str, Any] | None = None) -> Storage:
    """The storage of a directory.

    Args:
        place: A path, a URL, or a storage, which is given back.
        options: What fsspec gets beside a URL.

    Raises:
        ArgumentError: No path, and no URL that anybody knows.
    """
    if isinstance(place, Storage):
        return place
    if not is_other_url(place):
        return LocalStorage(local_path(place))
    opened = open_storage(str(place)) or open_fsspec_url(str(place), options)
    return LocalStorage(local_path(place)) if opened is None else opened  # local_path says that nobody knows it


def dcp_reader(src: CheckpointId) -> FileSystemReader:
    """A reader of a checkpoint of this library, wherever it is."""
    return FileSystemReader(src, open_url=open_storage)


def huggingface_reader(
    src: CheckpointId, *, key_map: KeyMap | None = None, cuts: Mapping[str, Cut] | None = None
) -> HuggingFaceReader:
    """A reader of safetensors files, wherever they are."""
    return HuggingFaceReader(src, key_map=key_map, cuts=cuts, open_url=open_storage)
