"""What a URL that names a checkpoint says, and how much of it may be shown.

In: text. Out: its schemes, or the same text without what opens doors.
"""

from __future__ import annotations

import re

_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]+://")
_FLATTENED = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_SCHEMES = re.compile(r"(?:^|(?<=::))[A-Za-z][A-Za-z0-9+.-]*(?=://|::)")
_USER = re.compile(r"(?P<before>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^/@:\s]*):(?P<password>[^/\s]*)@")
_QUERY = re.compile(r"(?P<before>[A-Za-z][A-Za-z0-9+.-]*://[^\s?'\"]*)\?[^\s'\":]+")

HIDDEN = "***"


def is_url(text: str) -> bool:
    """Return whether text starts as a URL does; also one that is chained (``simplecache::s3://bucket/step``).

    >>> is_url("s3://bucket/step"), is_url("simplecache::s3://bucket/step"), is_url("a::b"), is_url("step_1")
    (True, True, False, False)
    """
    return _URL.match(text) is not None


def is_flattened_url(path: str) -> bool:
    """Return whether a path is what `pathlib`, or a typing error, makes of a URL: a scheme with one slash.

    >>> is_flattened_url("s3:/bucket/step"), is_flattened_url("s3://bucket/step"), is_flattened_url("./s3:/bucket")
    (True, False, False)
    """
    return _FLATTENED.match(path) is not None


def normalised(url: str) -> str:
    """Write a URL's schemes in lower case, and leave out slashes at its end.

    >>> normalised("S3://Bucket/Step//"), normalised("memory://"), normalised("Dir::FILE:///A/")
    ('s3://Bucket/Step', 'memory://', 'dir::file:///A')
    """
    lowered = _SCHEMES.sub(lambda found: found[0].lower(), url)
    trimmed = lowered.rstrip("/")
    return f"{trimmed}//" if trimmed.endswith(":") else trimmed


def inside(url: str, name: str) -> str:
    """Name what lies in the directory that a URL names.

    >>> inside("s3://bucket/run/", "step_1"), inside("memory://", "step_1")
    ('s3://bucket/run/step_1', 'memory://step_1')
    """
    start = normalised(url)
    return f"{start}{name}" if start.endswith("/") else f"{start}/{name}"


def schemes_of(url: str) -> tuple[str, ...]:
    """List the schemes of a URL in lower case, the outermost first.

    >>> schemes_of("simplecache::S3://bucket/step")
    ('simplecache', 's3')
    """
    return tuple(part.partition("://")[0].lower() for part in url.split("::"))


def passwords_in(url: str) -> tuple[str, ...]:
    """List the passwords that a URL carries.

    >>> passwords_in("sftp://me:secret@host/step")
    ('secret',)
    """
    return tuple(match["password"] for match in _USER.finditer(url) if match["password"])


def redacted(text: str) -> str:
    """Hide passwords and query strings, which may hold signatures, of all URLs in a text.

    >>> redacted("sftp://me:secret@host/step")
    'sftp://me:***@host/step'
    >>> redacted("abfs://box@account/step?sig=secret")
    'abfs://box@account/step?***'
    """
    return _QUERY.sub(rf"\g<before>?{HIDDEN}", _USER.sub(rf"\g<before>\g<user>:{HIDDEN}@", text))
