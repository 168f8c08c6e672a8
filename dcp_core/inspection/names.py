"""Finds names that somebody means. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import translate

_SEARCHED = 20_000
"""Among more names nobody looks for those that are like another one: it would take seconds."""


def key_matcher(pattern: str | None) -> Callable[[str], bool]:
    """Make a test of names: a pattern of the shell matches them, or is one itself; None: every name passes.

    >>> [key_matcher("a[0]")(name) for name in ("a[0]", "a0", "b")]
    [True, True, False]
    """
    if pattern is None:
        return lambda name: True
    matches = re.compile(translate(pattern)).match
    return lambda name: name == pattern or matches(name) is not None


def like_names(name: str, names: Sequence[str]) -> list[str]:
    """The names that are most like one that is not there, at most three; of very many names none.

    >>> like_names("model.weigth", ["model.weight", "step"])
    ['model.weight']
    """
    if len(names) > _SEARCHED:
        return []
    ending = [each for each in names if each.endswith(f".{name}")][:3]
    return ending or get_close_matches(name, names, 3)
