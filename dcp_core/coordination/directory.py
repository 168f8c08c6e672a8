"""A board made of files in one directory: what ranks talk through when they share nothing but storage."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time

from dcp_core.errors import CoordinationError

_NAME = re.compile(r"[A-Za-z0-9-][A-Za-z0-9.-]{0,199}")
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05
_PAUSES_PER_LISTING = 10
_ABSENT = (errno.ENOENT, errno.ESTALE)


class DirectoryChannel:
    """A `KeyValueChannel` over files: a message is a file, whole or absent.

    A message is written under a temporary name and renamed, never fsynced: it need not outlive the job. Waiting polls
    the name, in growing pauses of 1 to 50 ms. Network file systems remember for up to a minute that a name is absent;
    listing the directory now and then makes them look again.

    Args:
        path: The directory, made if it is absent.

    Raises:
        OSError: The directory cannot be made; also from `put` and `wait` whatever but "there is no such file".
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        os.makedirs(self.path, exist_ok=True)

    def put(self, name: str, payload: bytes) -> None:
        """Post a message."""
        target = self._file(name)
        temporary = os.path.join(self.path, f".{secrets.token_hex(8)}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                _write_all(file.fileno(), payload)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        """Wait for a message and return it; None when it did not come in time.

        However short the time: before it gives up it lists the directory and looks once more.
        """
        target = self._file(name)
        deadline = time.monotonic() + timeout_seconds
        pause, pauses = _FIRST_PAUSE_SECONDS, 0
        while True:
            message = _read(target)
            if message is not None:
                return message
            left = deadline - time.monotonic()
            if left <= 0:
                self._look_again()
                return _read(target)
            time.sleep(min(pause, left))
            pauses += 1
            if pauses % _PAUSES_PER_LISTING == 0:
                self._look_again()
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def delete(self, name: str) -> None:
        """Remove a message; one that is not there is no error."""
        try:
            os.unlink(self._file(name))
        except OSError as error:
            if error.errno not in _ABSENT:
                raise

    def _file(self, name: str) -> str:
        if _NAME.fullmatch(name) is None:
            raise CoordinationError(f"{name!r} is no name for a message: use letters, digits, '.' and '-'")
        return os.path.join(self.path, name)

    def _look_again(self) -> None:
        """Make the file system revalidate what it remembers of the directory."""
        with contextlib.suppress(OSError):
            os.listdir(self.path)


def _write_all(descriptor: int, payload: bytes) -> None:
    rest = memoryview(payload)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read(path: str) -> bytes | None:
    """The whole file, or None if it is not there (or went away while it was read)."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
            return file.read()
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
