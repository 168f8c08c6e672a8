"""A table of strings as slices of one string: millions of names without an object a name."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar, overload

from dcp_core.metadata import Int64

_Text = TypeVar("_Text", str, bytes)


class Slices(Sequence[_Text]):
    """Consecutive slices of one string, each cut when it is asked for.

    Args:
        joined: The whole string.
        bounds: Where each slice starts, and where the last one ends. Shape (N + 1,).
    """

    def __init__(self, joined: _Text, bounds: Int64) -> None:
        self._joined: _Text = joined
        self._bounds = array("q", bounds.tobytes())

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> _Text: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Text]: ...
    def __getitem__(self, index: int | slice) -> _Text | list[_Text]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = index if 0 <= index < len(self._bounds) - 1 else range(len(self))[index]
        return self._joined[self._bounds[row] : self._bounds[row + 1]]

    def __iter__(self) -> Iterator[_Text]:
        return (self._joined[start:stop] for start, stop in pairwise(self._bounds))
