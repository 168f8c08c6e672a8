"""What a URL that names a checkpoint says, and how much of it may be shown.

In: text. Out: its schemes, or the same text without what opens doors.
"""

from __future__ import annotations

import re

_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]+://")
_USER = re.compile(r"(?P<before>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^/@:\s]*):(?P<password>[^/\s]*)@")
_QUERY = re.compile(r"(?P<before>[A-Za-z][A-Za-z0-9+.-]*://[^\s?'\"]*)\?[^\s'\":]+")

HIDDEN = "***"


def is_url(text: str) -> bool:
    """Return whether text starts as a URL does; also one that is chained (``simplecache::s3://bucket/step``).

    >>> is_url("s3://bucket/step"), is_url("simplecache::s3://bucket/step"), is_url("a::b"), is_url("step_1")
    (True, True, False, False)
    """
    return _URL.match(text) is not None


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
