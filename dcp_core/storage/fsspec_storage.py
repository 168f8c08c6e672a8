"""A storage over any file system of fsspec: object stores first of all, by the few requests that all of them know.

A file is one object that appears whole. A name gets a new content by one put; nothing is renamed, appended to or
locked, and what lies there is found by its name: listings serve to clean up alone. Requests that fail for a reason
that passes are made again, a few times.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from dcp_core.errors import ArgumentError, CorruptError, DcpError, NotFoundError, StorageError
from dcp_core.file_names import MAILBOX_PREFIX, parse_data_file_name
from dcp_core.storage.base import Names, ReadHandle, Storage, WriteHandle, check_name, storage_error
from dcp_core.storage.fsspec_client import KEYS_ONLY, Entry, FsspecClient, time_of
from dcp_core.storage.fsspec_packages import knows_scheme
from dcp_core.storage.fsspec_reads import READS_AT_ONCE, SHORT_READS, HeldHandle, RangedHandle
from dcp_core.storage.fsspec_uploads import PARTS_IN_FLIGHT, open_upload
from dcp_core.storage.operations import BytesLike
from dcp_core.storage.retries import RETRIES_OPTION, Retries
from dcp_core.storage.urls import inside, is_url, normalised, redacted, schemes_of

GAP_BYTES = 1 << 20
"""What arrives in the time that another request takes: some ten milliseconds at some ten MiB a second."""

HELD_BYTES = 16 << 20
"""A smaller file that may be replaced is read whole when it is opened, so that no reader sees two contents of it."""

_LOG = logging.getLogger("dcp.storage")
_SIZE_SECONDS = 30.0


def open_fsspec_url(url: str, options: Mapping[str, Any] | None = None) -> FsspecStorage | None:
    """Make the storage of a URL; None where fsspec does not know its scheme either.

    Args:
        url: ``scheme://...``, or several of them chained by ``::``.
        options: What fsspec calls storage options; credentials among them are better left to the environment.

    Raises:
        ArgumentError: fsspec is not installed, or a package that it needs for this scheme.
    """
    return FsspecStorage(url, options) if is_url(url) and knows_scheme(url) else None


class FsspecStorage(Storage):
    """A directory of a file system that fsspec knows.

    Args:
        url: The directory; it need not exist yet.
        options: What fsspec calls storage options; `dcp_retries` among them are the fields of a `Retries`.
        retries: How often a request is made that fails for a reason that passes; by default what the options say.

    Raises:
        ArgumentError: The URL or the options cannot be understood, or a package is missing.
    """

    is_object_store = True
    requests_at_once = READS_AT_ONCE
    gap_bytes = GAP_BYTES

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, retries: Retries | None = None) -> None:
        if not isinstance(url, str) or not is_url(url) or "\0" in url:
            raise ArgumentError(f"{url!r} is no URL of a directory: expected scheme://...")
        place = normalised(url)
        if place.endswith("//") and schemes_of(place)[-1] in KEYS_ONLY:
            raise ArgumentError(
                f"{redacted(url)!r} names no bucket: expected {schemes_of(place)[-1]}://bucket/directory"
            )
        self._options = dict(options or {})
        self.retries = retries or Retries.from_options(self._options)
        own = {name: value for name, value in self._options.items() if name != RETRIES_OPTION}
        self._client = FsspecClient(place, own, self.retries)
        self._room = threading.BoundedSemaphore(PARTS_IN_FLIGHT)
        self._seen: dict[str, tuple[int, float]] = {}

    @property
    def url(self) -> str:
        """The directory, without slashes at its end."""
        return self._client.url

    @property
    def options(self) -> Mapping[str, Any]:
        """The storage options, as they were given."""
        return self._options

    @property
    def is_in_process(self) -> bool:
        """Whether other processes cannot see what lies here (``memory://``)."""
        return self._client.is_in_process

    def folder(self, name: str) -> FsspecStorage:
        """The storage of a directory inside this one."""
        return FsspecStorage(inside(self.url, check_name(name)), self.options, retries=self.retries)

    # --- the directory -------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return the URL, without a password."""
        return self._client.shown

    def prepare(self) -> None:
        """Make the directory where there are directories. No bucket is made."""
        self._client.make_directory()

    def list(self) -> Names:
        """List all names, sorted."""
        found = self._client.entries()
        if found is None and self._client.knows_directories:
            raise NotFoundError(f"there is no directory {self.describe()}")
        return sorted(found or ())

    def list_directories(self) -> Names:
        """List the directories in this one, sorted; on object stores what is the beginning of names."""
        found = self._client.entries()
        if found is None and self._client.knows_directories:
            raise NotFoundError(f"there is no directory {self.describe()}")
        return sorted(name for name, entry in (found or {}).items() if entry.get("type") == "directory")

    def hurry(self) -> None:
        """From now on make requests once, while the store does not answer."""
        self._client.hurry()

    def sync(self) -> None:
        """Nothing is left to do: an object that was put is there."""

    # --- what is known of a name ---------------------------------------------------------------------

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, None when there is none."""
        found = self._client.look_up(check_name(name))
        nbytes = None if found is None else self._size_of(name, found)
        if nbytes is not None and _is_unique(name):
            self._seen[name] = nbytes, time.monotonic()
        return nbytes

    def sizes(self, names: Sequence[str]) -> Sequence[int | None]:
        """Return the sizes of many files, by several requests at once."""
        if len(names) < 2:
            return [self.size(name) for name in names]
        with ThreadPoolExecutor(min(READS_AT_ONCE, len(names)), thread_name_prefix="dcp-look-up") as pool:
            return list(pool.map(self.size, names))

    def modified_seconds(self, name: str) -> float | None:
        """Return when a name was last written; of a directory, when the newest file in it was."""
        found = self._client.look_up(check_name(name))
        if found is not None and found.get("type") != "directory":
            return time_of(found) or 0.0
        is_folder = found is not None or name.startswith(MAILBOX_PREFIX)  # what needs no listing gets none
        inner = self._client.entries(name) if is_folder else None
        if not inner:
            return None if found is None else time_of(found) or 0.0
        return max(time_of(entry) or 0.0 for entry in inner.values())

    def _size_of(self, name: str, found: Entry) -> int:
        if found.get("type") == "directory" or found.get("size") is None:
            raise CorruptError(f"{name!r} in {self.describe()} is no regular file")
        return int(found["size"])

    # --- content -------------------------------------------------------------------------------------

    def open_read(self, name: str) -> ReadHandle:
        """Open a file to read."""
        nbytes, seen_at = self._seen.pop(name, (None, 0.0))
        if time.monotonic() - seen_at > _SIZE_SECONDS:
            nbytes = self.size(name)
        if nbytes is not None and (parse_data_file_name(name) is not None or nbytes > HELD_BYTES):
            return RangedHandle(self._client, name, nbytes)
        content: bytes | None = b""
        for _ in range(SHORT_READS):  # other sizes are those of other contents, or of an answer that was cut short
            content = self._client.get(name, 0, HELD_BYTES) if nbytes else b""
            if nbytes is None or content is None:
                raise self._absent(name)
            if len(content) == nbytes:
                break
            nbytes = self.size(name)
        return HeldHandle(self.describe(), name, content or b"")

    def get(self, name: str, most_nbytes: int = HELD_BYTES) -> bytes | None:
        """Read a small file that is not empty by one request; None when there is none."""
        return self._client.get(check_name(name), 0, most_nbytes)

    def create(self, name: str, nbytes: int) -> WriteHandle:
        """Begin a file of known size. Of several who begin one name at the same moment the last one wins."""
        check_name(name)
        if nbytes < 0:
            raise ArgumentError(f"a file of {nbytes} bytes cannot be created: {name!r}")
        if self._client.look_up(name) is not None:
            raise storage_error("create", name, self.describe(), FileExistsError(errno.EEXIST, "File exists"))
        return open_upload(self._client, name, nbytes, self._room)

    def put(
        self,
        name: str,
        content: BytesLike,
        *,
        temporary: str,
        durable: bool = True,
        ready: Callable[[], None] | None = None,
    ) -> None:
        """Give a name a content by one put; only where files are seen half it comes by a rename."""
        check_name(name)
        self._client_put(check_name(temporary) if self._client.renames else name, content, ready)
        if self._client.renames:
            self._client.rename(temporary, name)

    def _client_put(self, name: str, content: BytesLike, ready: Callable[[], None] | None) -> None:
        whole = bytes(memoryview(content).cast("B"))
        if ready is not None:
            ready()
        try:
            self._client.put(name, whole)
        except StorageError:
            if not self._holds(name, whole):  # the answers may have been lost, and not the content
                raise

    def _holds(self, name: str, content: bytes) -> bool:
        with suppress(DcpError):
            return bool(content) and self._client.get(name, 0, len(content) + 1) == content
        return False

    def publish(self, temporary: str, name: str) -> None:
        """Give a finished file its final name: its content is put there, then the file is removed."""
        check_name(name)
        content = self.read(temporary)
        self.put(name, content, temporary=f"{temporary}.tmp")
        self.remove(temporary)

    def remove(self, name: str) -> None:
        """Remove a file; a missing one is fine."""
        self._client.remove(check_name(name))

    def remove_directory(self, name: str) -> None:
        """Remove what lies in a directory; a missing one is fine."""
        self._client.remove_directory(check_name(name))

    def remove_empty_directory(self, name: str) -> bool:
        """Remove a directory if nothing is left in it; whether it is gone."""
        return self._client.remove_empty_directory(check_name(name))

    def remove_unfinished(self, is_removable: Callable[[str], bool]) -> None:
        """Remove the parts of files that nobody will put together; whoever may not list them leaves them there."""
        try:
            for name, upload_id in self._client.unfinished():
                if is_removable(name):
                    self._client.call_s3("abort_multipart_upload", name, UploadId=upload_id)
        except StorageError as error:
            _LOG.debug("%s", error)

    def touch(self, name: str) -> None:
        """Put a file's content once more, which gives it the time of now."""
        content = self.read(name)
        self.put(name, content, temporary=f"{name}.touch.tmp")

    def _absent(self, name: str) -> NotFoundError:
        return NotFoundError(f"there is no {name!r} in {self.describe()}")


def _is_unique(name: str) -> bool:
    """Whether a name is never used for another content, so that what was seen of it a moment ago holds."""
    parsed = parse_data_file_name(name)
    return parsed is not None and bool(parsed[3])
