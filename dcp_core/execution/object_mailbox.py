"""A mailbox in an object store: what the background processes of a job leave for each other beside a checkpoint.

A message is one object under a key that its reader knows, put once. That the mailbox is there is told by an object of
its own. Listings find newcomers whose keys nobody can know, and what is to be removed; where a store lists late, that
happens later.
"""

from __future__ import annotations

import logging
import re
import time

from dcp_core.errors import CoordinationError, DcpError, NotFoundError, StorageError
from dcp_core.storage.fsspec_storage import FsspecStorage

_NAME = re.compile(r"[A-Za-z0-9-][A-Za-z0-9.-]{0,199}")
_MARKER = ".open"
_FIRST = b"\x01"  # goes before every message: a range of an empty object is an error in some stores
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
_MARKER_SECONDS = 1.0
_MOST_NBYTES = 1 << 33  # more than the plans of any job

_log = logging.getLogger("dcp.background")


class ObjectMailbox:
    """A `MailboxFolder` of single puts.

    Args:
        storage: The checkpoint's directory.
        name: Of the mailbox in it.
    """

    def __init__(self, storage: FsspecStorage, name: str) -> None:
        self._parent = storage
        self._name = name
        self._objects = storage.folder(name)
        self._listed: frozenset[str] | None = None
        self._listed_at = float("-inf")
        self._seen: bool | None = None
        self._seen_at = float("-inf")

    def prepare(self) -> None:
        """Make the mailbox; it may exist."""
        self._parent.prepare()
        self._objects.prepare()
        self._objects.put(_MARKER, _FIRST, temporary=f"{_MARKER}.tmp")
        self._seen, self._seen_at = True, time.monotonic()

    def is_there(self, max_age_seconds: float = _MARKER_SECONDS) -> bool:
        """Return whether the mailbox is there, by one known key.

        Args:
            max_age_seconds: How old an answer may be that is given again.
        """
        if self._seen is None or time.monotonic() - self._seen_at >= max_age_seconds:
            self._seen = self._objects.get(_MARKER, len(_FIRST)) is not None
            self._seen_at = time.monotonic()
        return self._seen

    def put(self, name: str, payload: bytes) -> None:
        """Post a message.

        Raises:
            NotFoundError: The mailbox is not there.
            StorageError: The store refuses.
        """
        _check(name)
        if not self.is_there(0.0):
            raise NotFoundError(f"there is no {self._name} in {self._parent.describe()}")
        self._objects.put(name, _FIRST + payload, temporary=f".{name}.tmp")

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        """Wait for a message and return it; None when it did not come in time. Looks once at least."""
        _check(name)
        deadline = time.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            message = self._objects.get(name, _MOST_NBYTES)
            if message is not None:
                return message[len(_FIRST) :]
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def delete(self, name: str) -> None:
        """Remove a message; one that is not there is no error."""
        _check(name)
        self._objects.remove(name)

    def names(self, max_age_seconds: float = 0.0) -> frozenset[str] | None:
        """List the messages; None when the mailbox is not there."""
        if time.monotonic() - self._listed_at >= max_age_seconds:
            found: frozenset[str] = frozenset()
            try:
                found = frozenset(name for name in self._objects.list() if not name.startswith("."))
            except NotFoundError:
                pass
            except StorageError as error:  # what is looked for by its name is found all the same
                _log.debug("%s cannot be listed: %s", self._objects.describe(), error)
            self._listed = found if found or self.is_there(0.0) else None
            self._listed_at = time.monotonic()
        return self._listed

    def remove(self, *, only_if_empty: bool = False) -> None:
        """Remove the mailbox and its messages, or only if there are none; a missing one is fine."""
        if only_if_empty and self.names():
            return
        self._seen, self._seen_at, self._listed_at = None, float("-inf"), float("-inf")
        self._objects.remove(_MARKER)
        try:
            self._parent.remove_directory(self._name)
        except NotFoundError:
            return
        except DcpError as error:
            raise OSError(f"{self._name} stays in {self._parent.describe()}: {error}") from error


def _check(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise CoordinationError(f"{name!r} is no name for a message: use letters, digits, '.' and '-'")
