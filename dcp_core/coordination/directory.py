"""A board made of files in one directory: what ranks talk through when they share nothing but storage."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator

from dcp_core.errors import CoordinationError

_NAME = re.compile(r"[A-Za-z0-9-][A-Za-z0-9.-]{0,199}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05
_PAUSES_PER_LISTING = 10
_ABSENT = (errno.ENOENT, errno.ESTALE)
_STALE_TRIES = 6
_STALE_PAUSE_SECONDS = 0.01
_REMOVE_TRIES = 5
_TOUCH_SECONDS = 15.0
_MOST_NBYTES = 1 << 33
"""More than the plans of any job; what claims more is no message."""
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not be waited for

_log = logging.getLogger("dcp.coordination")


class DirectoryChannel:
    """A `KeyValueChannel` over files: a message is a file, whole or absent.

    A message is written under a temporary name and renamed, never fsynced: it need not outlive the job. Waiting polls
    the name, in growing pauses of 1 to 50 ms. Network file systems remember for up to a minute that a name is absent;
    listing the directory now and then makes them look again. So does touching it, now and then in a long wait, which
    also shows whoever cleans up that somebody still waits here.

    No link is followed: every operation opens the directory first, and works in what it has opened.

    Args:
        path: The directory. With `make` its links are resolved once, here; else the last part must be none.
        make: Whether to make it, and those above it, now. `prepare` makes it later.

    Raises:
        OSError: The directory cannot be made; also from `put` and `wait` whatever but "there is no such file".
    """

    def __init__(self, path: str | os.PathLike[str], *, make: bool = True) -> None:
        self.path = os.fspath(path)
        self._listed: frozenset[str] | None = None
        self._listed_at = float("-inf")
        self._touched_at = time.monotonic()
        if make:
            os.makedirs(self.path, exist_ok=True)
            self.path = os.path.realpath(self.path)

    def prepare(self) -> None:
        """Make the directory; it may exist.

        Raises:
            OSError: The one above it is missing, or the name belongs to something else, a link included.
        """
        try:
            os.mkdir(self.path)
        except FileExistsError:
            if os.path.islink(self.path) or not os.path.isdir(self.path):
                raise

    def put(self, name: str, payload: bytes) -> None:
        """Post a message."""
        _check_name(name)
        for attempt in range(_STALE_TRIES):
            try:
                self._write(name, payload)
                return
            except OSError as error:
                if error.errno != errno.ESTALE or attempt == _STALE_TRIES - 1:
                    raise
            time.sleep(_STALE_PAUSE_SECONDS * 2**attempt)
            self._look_again()

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        """Wait for a message and return it; None when it did not come in time.

        However short the time: before it gives up it lists the directory and looks once more.
        """
        _check_name(name)
        deadline = time.monotonic() + timeout_seconds
        pause, pauses = _FIRST_PAUSE_SECONDS, 0
        while True:
            message = self._read(name)
            if message is not None:
                return message
            left = deadline - time.monotonic()
            if left <= 0:
                self._look_again()
                return self._read(name)
            time.sleep(min(pause, left))
            pauses += 1
            if pauses % _PAUSES_PER_LISTING == 0:
                self._look_again()
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def delete(self, name: str) -> None:
        """Remove a message; one that is not there is no error."""
        _check_name(name)
        try:
            with self._opened() as here:
                os.unlink(name, dir_fd=here)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise

    def names(self, max_age_seconds: float = 0.0) -> frozenset[str] | None:
        """List the messages; None when the directory is not there.

        Args:
            max_age_seconds: How old a listing may be that is given again.
        """
        if time.monotonic() - self._listed_at >= max_age_seconds:
            self._look_again()
        return self._listed

    def remove(self, *, only_if_empty: bool = False) -> None:
        """Remove the directory and the messages in it. What is no message stays, and so does the directory then.

        Somebody may post one at the same moment, so this is tried a few times.

        Args:
            only_if_empty: Leave messages, and the directory that holds them, alone.

        Raises:
            OSError: It could not be removed.
        """
        for attempt in range(_REMOVE_TRIES):
            try:
                if not only_if_empty:
                    self._remove_messages()
                os.rmdir(self.path)
                return
            except OSError as error:
                if error.errno in _ABSENT or (only_if_empty and error.errno == errno.ENOTEMPTY):
                    return
                if error.errno != errno.ENOTEMPTY or attempt == _REMOVE_TRIES - 1:
                    raise
            time.sleep(_STALE_PAUSE_SECONDS)

    def _remove_messages(self) -> None:
        with self._opened() as here:
            for name in os.listdir(here):
                if _NAME.fullmatch(name) or _TEMPORARY.fullmatch(name):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=here)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the directory itself, so that nothing that takes its place meanwhile is written to."""
        descriptor = os.open(self.path, _DIRECTORY_FLAGS)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _write(self, name: str, payload: bytes) -> None:
        temporary = f".{secrets.token_hex(8)}.tmp"
        with self._opened() as here:
            descriptor = os.open(temporary, _CREATE_FLAGS, 0o600, dir_fd=here)
            try:
                with open(descriptor, "wb", buffering=0) as file:
                    _write_all(file.fileno(), payload)
                os.replace(temporary, name, src_dir_fd=here, dst_dir_fd=here)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=here)
                raise

    def _read(self, name: str) -> bytes | None:
        """The whole file, or None if it is not there (or went away while it was read)."""
        try:
            with self._opened() as here:
                descriptor = os.open(name, _READ_FLAGS, dir_fd=here)
            try:
                found = os.fstat(descriptor)
                path = os.path.join(self.path, name)
                if not stat.S_ISREG(found.st_mode):
                    number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
                    raise OSError(number, "no message, for it is no regular file", path)
                if found.st_size > _MOST_NBYTES:
                    raise OSError(errno.EFBIG, f"{found.st_size} bytes are more than any message has", path)
                with open(descriptor, "rb", buffering=0, closefd=False) as file:
                    return file.read()
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise

    def _look_again(self) -> None:
        """Make the file system revalidate what it remembers of the directory."""
        now = time.monotonic()
        try:
            if now - self._touched_at > _TOUCH_SECONDS:
                self._touched_at = now
                with self._opened() as here:
                    os.utime(here)
            with self._opened() as here:
                self._listed = frozenset(name for name in os.listdir(here) if not name.startswith("."))
        except OSError as error:
            self._listed = None if error.errno in _ABSENT else frozenset()
            _log.debug("%s could not be listed: %s", self.path, error)
        self._listed_at = now


def _write_all(descriptor: int, payload: bytes) -> None:
    rest = memoryview(payload)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise CoordinationError(f"{name!r} is no name for a message: use letters, digits, '.' and '-'")
