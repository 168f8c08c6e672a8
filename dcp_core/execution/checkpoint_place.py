"""Where a checkpoint is: a path, a `file://` URL, or the URL of an object store; and the storage that is made of it.

Goes in: what a caller named. Comes out: a `Storage`, made anew whenever a save or load turns to it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from dcp_core.errors import ArgumentError, StorageError
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.storage.base import Storage
from dcp_core.storage.fsspec_storage import FsspecStorage, open_fsspec_url
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.storage.urls import is_flattened_url, is_url, redacted

OpenUrl = Callable[[str], Storage | None]
"""Makes the storage of a URL whose scheme is not ``file``; None where no plugin knows the scheme."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_NOWHERE = "where is the checkpoint? Pass checkpoint_id, or a storage object that was given a path"


def is_other_url(checkpoint_id: CheckpointId) -> bool:
    """Whether this is a URL, and none of a file.

    >>> is_other_url("memory://a"), is_other_url("file:///a"), is_other_url("/a")
    (True, False, False)
    """
    if not isinstance(checkpoint_id, str) or not is_url(checkpoint_id):
        return False
    match = _SCHEME.match(checkpoint_id)
    return match is None or match[1].lower() != "file" or "::" in checkpoint_id


def local_path(checkpoint_id: CheckpointId) -> str:
    """Turn what names a checkpoint into a path.

    Args:
        checkpoint_id: A path, or a `file://` URL, which is percent-decoded.

    Raises:
        ArgumentError: No path at all, a URL of another scheme or host, an empty or impossible path.

    >>> local_path("file:///tmp/step%201")
    '/tmp/step 1'
    """
    try:
        path = os.fspath(checkpoint_id)
    except TypeError as error:
        raise ArgumentError(
            f"a checkpoint is named by a path or a URL, got {checkpoint_id!r}, a {type(checkpoint_id).__name__}"
        ) from error
    if not isinstance(path, str) or not path or "\0" in path:
        raise ArgumentError(f"checkpoint_id {path!r} is no path of a directory")
    if is_flattened_url(path):
        raise ArgumentError(
            f"checkpoint_id {redacted(path)!r} is a URL that lost a slash, as pathlib makes it: pass the URL as a str; "
            f"a directory of that name on this machine is {'./' + path!r}"
        )
    if not isinstance(checkpoint_id, str) or not is_url(path):
        return path
    match = _SCHEME.match(path)
    if match is None or match[1].lower() != "file":
        scheme = path.partition("://")[0]
        raise ArgumentError(
            f"checkpoint_id {redacted(path)!r} has the scheme {scheme!r}; expected a path, a file:// URL, or "
            "one whose scheme an installed plugin knows (`dcp plugins` lists them) or fsspec; or pass a "
            "storage_writer or storage_reader that knows it"
        )
    host, slash, rest = path[match.end() :].partition("/")
    if host not in ("", "localhost") or not slash:
        raise ArgumentError(f"checkpoint_id {path!r} names a file on the host {host!r}; expected file:///path")
    decoded = unquote("/" + rest, errors="surrogateescape")
    if "\0" in decoded:
        raise ArgumentError(f"checkpoint_id {path!r} is no path of a directory")
    return decoded


def checked_options(storage_options: object) -> Mapping[str, Any]:
    """Read what was given as storage options; none for None.

    Raises:
        ArgumentError: They are no mapping.
    """
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise ArgumentError(f"storage_options must be a mapping, found {type(storage_options).__name__}")
    return storage_options or {}


def refuse_options(storage_options: object, reason: str) -> None:
    """See that no storage options were given where nobody would look at them. Their values are not shown.

    Args:
        storage_options: What was given.
        reason: Why nobody would: a sentence about the place.

    Raises:
        ArgumentError: There are some, or they are no mapping.
    """
    names = sorted(map(str, checked_options(storage_options)))
    if names:
        raise ArgumentError(
            f"storage_options ({', '.join(names)}) are for URLs that fsspec opens, and {reason}: leave them out, or "
            "check the place"
        )


def opened_url(
    checkpoint_id: CheckpointId, open_plugin_url: OpenUrl | None, storage_options: Mapping[str, Any] | None
) -> Storage | None:
    """Make the storage of a URL that is none of a file: a plugin's, else fsspec's.

    Args:
        checkpoint_id: What names the place.
        open_plugin_url: Makes storages of URLs; fsspec makes those that it does not know.
        storage_options: What fsspec gets beside a URL.

    Returns:
        The storage; None for a path, or where neither knows the URL.

    Raises:
        ArgumentError: There are options, and the place is a path or a plugin's; or fsspec refuses.
    """
    if not is_other_url(checkpoint_id):
        refuse_options(storage_options, f"{str(checkpoint_id)!r} is a path on this machine")
        return None
    url = str(checkpoint_id)
    opened = None if open_plugin_url is None else open_plugin_url(url)
    if opened is None:
        return open_fsspec_url(url, checked_options(storage_options))
    refuse_options(storage_options, f"a plugin opens {redacted(url)!r}")
    return opened


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise ArgumentError(
            f"checkpoint_id {path!r} is relative, and the working directory of this process is gone; pass an absolute "
            "path"
        ) from error


class CheckpointPlace:
    """Which storage a writer or a reader works on.

    Args:
        path: What names the checkpoint; None where a storage is given, or `select` says it later.
        storage: The storage, instead of a path.
        open_plugin_url: Makes storages of URLs; fsspec makes those that it does not know.
        storage_options: What fsspec gets beside a URL.

    Raises:
        ArgumentError: A path and a storage; or options that are no mapping, or that nobody would look at.
    """

    def __init__(
        self,
        path: CheckpointId | None,
        storage: Storage | None,
        open_plugin_url: OpenUrl | None,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        if path is not None and storage is not None:
            raise ArgumentError("a path and a storage were given; one of them says where the checkpoint is")
        if storage is not None:
            refuse_options(storage_options, "a storage was given, which has its own")
        self._open_plugin_url = open_plugin_url
        self._storage_options = checked_options(storage_options)
        self._path: str | None = None
        self._storage = storage
        if path is not None:
            self.select(path)

    def select(self, checkpoint_id: CheckpointId | None) -> None:
        """Turn to another checkpoint; None keeps the present one, but follows its links anew.

        Raises:
            ArgumentError: What names it is no place, or nothing ever did.
        """
        if checkpoint_id is not None:
            opened = opened_url(checkpoint_id, self._open_plugin_url, self._storage_options)
            if opened is not None:
                self._path, self._storage = None, opened
                return
            self._path = _absolute(local_path(checkpoint_id))
        if self._path is not None:
            operations = self._storage.operations if isinstance(self._storage, LocalStorage) else None
            self._storage = LocalStorage(self._path, operations)
        if self._storage is None:
            raise ArgumentError(_NOWHERE)

    @property
    def path(self) -> str | None:
        """Where it is; None for a storage that was given, or that does its operations in a way of its own."""
        is_plain = isinstance(self._storage, LocalStorage) and type(self._storage.operations) is FileOperations
        return self._path if is_plain else None

    @property
    def arguments(self) -> dict[str, Any] | None:
        """What another process makes a writer of the same place from; None where only this one can."""
        storage = self._storage
        if isinstance(storage, FsspecStorage) and not storage.is_in_process:
            options = {"storage_options": dict(storage.options)} if storage.options else {}
            return {"path": storage.url, **options}
        return None if self.path is None else {"path": self.path}

    @property
    def storage(self) -> Storage:
        """The storage; an `ArgumentError` where nobody has said yet which."""
        if self._storage is None:
            raise ArgumentError(_NOWHERE)
        return self._storage

    def refuse_link(self) -> None:
        """See that no link has the name of the directory.

        Raises:
            StorageError: One has.
        """
        if self._path is not None and os.path.islink(self._path):
            raise StorageError(
                f"{self._path!r} is a link, which is not followed here: see who made it, and what lies there"
            )
