"""Names of one format to names of another: a prefix, regular expressions, or a function. Pure.

Goes in: what a user gives as `key_map`. Comes out: a function of one name, and a text that is the same on all ranks
that were given the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from dcp_core.errors import ArgumentError

KeyMap: TypeAlias = str | Mapping[str, str | None] | Callable[[str], str | None]
"""How names change.

- A string is put before every name.
- A mapping has regular expressions, and what replaces the part of a name that they match, as `re.sub` understands it;
  None leaves the tensor out. The first one that matches a name is used; a name that none matches stays as it is.
- A function gets a name and gives the new one, or None to leave the tensor out.
"""

KeyFunction: TypeAlias = Callable[[str], str | None]


def key_function(key_map: KeyMap | None) -> KeyFunction:
    r"""Turn a key map into a function of one name.

    Raises:
        ArgumentError: It is none of the three, or a regular expression is not valid.

    >>> key_function({r"^model\.": "", r"^lm_head": "head"})("model.layers.0.weight")
    'layers.0.weight'
    >>> key_function("model.")("lm_head.weight")
    'model.lm_head.weight'
    """
    if key_map is None:
        return lambda name: name
    if isinstance(key_map, str):
        return lambda name: f"{key_map}{name}"
    if isinstance(key_map, Mapping):
        return _by_patterns(key_map)
    if not callable(key_map):
        raise ArgumentError(
            f"key_map must be a prefix, a mapping of regular expressions to replacements, or a function, found "
            f"{key_map!r}"
        )
    return key_map


def map_keys(key_map: KeyMap | None, names: Iterable[str]) -> dict[str, str]:
    """Map names, each to one of its own.

    Args:
        key_map: How.
        names: The old names.

    Returns:
        New name -> old name, for the names that are not left out.

    Raises:
        ArgumentError: Two names become one, or the function fails or gives something that is no name.
    """
    change = key_function(key_map)
    found: dict[str, str] = {}
    for name in names:
        try:
            new = change(name)
        except Exception as error:
            raise ArgumentError(f"key_map failed for {name!r}: {type(error).__name__}: {error}") from error
        if new is None:
            continue
        if not isinstance(new, str):
            raise ArgumentError(f"key_map gives {new!r} for {name!r}; expected a name, or None to leave it out")
        if new in found:
            raise ArgumentError(f"key_map gives {new!r} for {found[new]!r} and for {name!r}; keep names different")
        found[new] = name
    return found


def key_map_text(key_map: KeyMap | None) -> str:
    """A text that tells key maps apart, as far as that can be told: functions are the same that have the same name."""
    if key_map is None or isinstance(key_map, str):
        return repr(key_map)
    if isinstance(key_map, Mapping):
        return repr(list(key_map.items()))
    return f"{getattr(key_map, '__module__', '')}.{getattr(key_map, '__qualname__', type(key_map).__qualname__)}"


def _by_patterns(replacements: Mapping[str, str | None]) -> KeyFunction:
    compiled: list[tuple[re.Pattern[str], str | None]] = []
    for pattern, replacement in replacements.items():
        if not isinstance(pattern, str) or not isinstance(replacement, (str, type(None))):
            raise ArgumentError(f"key_map maps {pattern!r} to {replacement!r}; expected a pattern and a replacement")
        try:
            compiled.append((re.compile(pattern), replacement))
        except re.error as error:
            raise ArgumentError(f"key_map has {pattern!r}, which is no regular expression: {error}") from error

    def change(name: str) -> str | None:
        for pattern, replacement in compiled:
            if pattern.search(name):
                return None if replacement is None else pattern.sub(replacement, name)
        return name

    return change
