"""Which texts among storage options are secrets. All are, but those whose names say that they are harmless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPEN_SECRETS = ("endpoint", "url", "region", "anon", "version", "protocol", "project", "account_name")
_SECRET_NAMES = ("key", "secret", "token", "password")
_SHORTEST_SECRET = 4


def secrets_of(options: Any, name: str = "") -> tuple[str, ...]:
    """Texts among the options that nobody may see: all but those whose names say that they are harmless."""
    if isinstance(options, Mapping):
        return tuple(found for key, value in options.items() for found in secrets_of(value, str(key).lower()))
    if isinstance(options, (list, tuple)):
        return tuple(found for value in options for found in secrets_of(value, name))
    if isinstance(options, int) and any(word in name for word in _SECRET_NAMES):
        options = str(options)
    if not isinstance(options, str) or len(options) < _SHORTEST_SECRET:
        return ()
    return () if any(word in name for word in _OPEN_SECRETS) else (options,)
