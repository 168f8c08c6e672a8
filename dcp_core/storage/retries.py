"""Tries a request again that failed for a reason that passes: a timeout, a reset, a server that is busy or broken.

In: what makes a request. Out: its result, or the error of the last attempt. Whoever is refused, or asks for what is not
there, is told at once.
"""

from __future__ import annotations

import errno
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from dcp_core.errors import ArgumentError

RETRIES_OPTION = "dcp_retries"
"""Among storage options: how often requests are made. Not fsspec's, which never sees it."""

_LOG = logging.getLogger("dcp.storage")
_Result = TypeVar("_Result")

_FINAL = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
)
_PASSING_ERRNO = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTUNREACH", "EINTR", "ENETDOWN",
        "ENETRESET", "ENETUNREACH", "EPIPE", "EREMOTEIO", "ETIMEDOUT",
    )
    if hasattr(errno, name)
)  # fmt: skip
_PASSING_STATUS = frozenset((408, 409, 425, 429))
_NEVER_STATUS = frozenset((501, 505))
_PASSING_CODES = frozenset(("BadDigest", "IncompleteBody", "RequestTimeout", "SlowDown", "XAmzContentSHA256Mismatch"))
# Clients of stores have classes of their own for these, which share no base; the names say it.
_PASSING_NAMES = (
    "Checksum",
    "Timeout",
    "Connection",
    "Disconnected",
    "IncompleteRead",
    "Payload",
    "HTTPClientError",
    "ResponseParser",
)
_CLIENTS = ("aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "requests", "urllib3")
_MOST_CAUSES = 8
_SLOWEST_BYTES_PER_SECOND = 64 << 10


@dataclass(frozen=True, slots=True)
class Retries:
    """How often, and how soon.

    Attributes:
        attempts: How many times a request is made at most.
        first_pause_seconds: Before the second one; each pause after it is twice as long.
        longest_pause_seconds: No pause is longer. Each is cut by up to a half, at random, so that ranks spread.
        total_seconds: No attempt begins later than this after the first one.
        attempt_seconds: An attempt that reads or writes lasts no longer, but for a second more for each 64 KiB that it
            carries: an answer that trickles in ends, too. Only clients that can be told to stop hold it.
    """

    attempts: int = 10
    first_pause_seconds: float = 0.1
    longest_pause_seconds: float = 5.0
    total_seconds: float = 300.0
    attempt_seconds: float = 120.0

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise ArgumentError(f"attempts must be a whole number, 1 or more, found {self.attempts!r}")
        for name in ("first_pause_seconds", "longest_pause_seconds", "total_seconds", "attempt_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ArgumentError(f"{name} must be a number of seconds, 0 or more, found {value!r}")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Retries:
        """Read what a user wants among storage options, under `RETRIES_OPTION`; what is not named is as by default.

        Raises:
            ArgumentError: It makes no sense.
        """
        wanted = options.get(RETRIES_OPTION, {})
        known = [each.name for each in fields(cls)]
        if not isinstance(wanted, Mapping) or not set(wanted) <= set(known):
            raise ArgumentError(f"{RETRIES_OPTION} must be a mapping with some of {', '.join(known)}, found {wanted!r}")
        return cls(**wanted)

    def run(self, what: str, request: Callable[[], _Result]) -> _Result:
        """Make a request until it succeeds.

        Args:
            what: What it does, in words, for the log; without secrets.
            request: Makes it; may be called several times.

        Raises:
            Exception: What the last attempt raised; what the first one raised, if that does not pass.
        """
        attempt, deadline = 1, time.monotonic() + self.total_seconds
        while True:
            try:
                return request()
            except Exception as error:
                pause = self.pause_seconds(attempt)
                if attempt >= self.attempts or not is_passing(error) or time.monotonic() + pause > deadline:
                    raise
                _LOG.info("%s: %s; attempt %d of %d", what, type(error).__name__, attempt, self.attempts)
            time.sleep(pause)
            attempt += 1

    def once(self) -> Retries:
        """The same limits for one attempt, and no second one."""
        return replace(self, attempts=1)

    def seconds_for(self, nbytes: int) -> float:
        """How long an attempt may last that carries so many bytes."""
        return self.attempt_seconds + nbytes / _SLOWEST_BYTES_PER_SECOND

    def pause_seconds(self, attempt: int) -> float:
        """How long to wait after an attempt, counted from 1."""
        longest: float = min(self.first_pause_seconds * 2.0 ** (attempt - 1), self.longest_pause_seconds)
        return longest * random.uniform(0.5, 1.0)


def is_passing(error: BaseException) -> bool:
    """Return whether the same request may succeed a moment later.

    >>> is_passing(TimeoutError()), is_passing(FileNotFoundError()), is_passing(OSError(5, "broken disk"))
    (True, False, False)
    """
    if isinstance(error, _FINAL):
        return False
    return any(_passes(cause) for cause in _causes(error))


def answer_of(error: BaseException) -> str:
    """What a server answered, as far as an error tells: status and code, such as "503 SlowDown"; else nothing."""
    for cause in _causes(error):
        status = _status(cause)
        if status is not None and 400 <= status < 600:
            return f"{status} {_code(cause)}".rstrip().removesuffix(f" {status}")
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    found: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__


def _passes(error: BaseException) -> bool:
    status = _status(error)
    if status is not None and 400 <= status < 600:
        return (
            (status >= 500 and status not in _NEVER_STATUS)
            or status in _PASSING_STATUS
            or _code(error) in _PASSING_CODES
        )
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNO:
        return True
    kind = type(error)
    return kind.__module__.partition(".")[0] in _CLIENTS and any(name in kind.__name__ for name in _PASSING_NAMES)


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error tells, wherever its client puts it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found: object = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    for name in ("status", "status_code", "code"):
        found = getattr(error, name, None)
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return None


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
