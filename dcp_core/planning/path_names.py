"""Plain names of many encoded paths at once.

In: encoded paths, as tables of leaves hold them. Out: what `state_path.plain_name` says of each. Paths of short ASCII
strings, which nearly all are, are read together, level by level; other paths one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dcp_core.metadata import Int64, UInt8
from dcp_core.state_path import plain_names

_STR, _DOT = b"s."
_SHORT = 0x80
"""Bytes from here on belong to text that is not ASCII, or to lengths of more than one byte."""

Mask = npt.NDArray[np.bool_]


def names_of_paths(paths: Sequence[bytes]) -> list[str]:
    """The plain name of each encoded path.

    Raises:
        CorruptError: Bytes that are no path.

    >>> from dcp_core.state_path import encode_path, key_path
    >>> names_of_paths([encode_path(key_path("model", "layers", "0"))])
    ['model.layers.0']
    """
    lengths = np.fromiter(map(len, paths), dtype=np.int64, count=len(paths))
    joined, name_lengths, is_read = _join_components(np.frombuffer(b"".join(paths), dtype=np.uint8), lengths)
    bounds = [0, *np.cumsum(name_lengths).tolist()]
    names = [joined[start:stop] for start, stop in pairwise(bounds)]
    odd = np.flatnonzero(~is_read).tolist()
    for row, name in zip(odd, plain_names([paths[row] for row in odd]), strict=True):
        names[row] = name
    return names


def _join_components(paths: UInt8, lengths: Int64) -> tuple[str, Int64, Mask]:
    """Put dots between the components of all paths.

    Args:
        paths: The bytes of all paths.
        lengths: How many are whose. Shape (N,).

    Returns:
        The names of the paths that could be read, back to back; the length of each, 0 for the others; and which
        could be.
    """
    text, ends = paths.copy(), np.cumsum(lengths)
    at, left_out, is_kept = ends - lengths, np.zeros(len(lengths), dtype=np.int64), np.ones(len(text), dtype=bool)
    is_read = lengths > 0
    is_read[np.searchsorted(ends, np.flatnonzero(text >= _SHORT), side="right")] = False
    rows, is_first = np.flatnonzero(is_read), True
    while len(rows):
        start = at[rows]
        stop = start + 2 + text[np.minimum(start + 1, len(text) - 1)]
        good = (text[start] == _STR) & (stop <= ends[rows])
        is_read[rows[~good]] = False
        rows, start, stop = rows[good], start[good], stop[good]
        is_kept[start], is_kept[start + 1], text[start + 1] = False, not is_first, _DOT
        left_out[rows] += 1 + is_first
        at[rows] = stop
        rows, is_first = rows[stop < ends[rows]], False
    is_kept &= np.repeat(is_read, lengths)
    return text[is_kept].tobytes().decode(), np.where(is_read, lengths - left_out, 0), is_read
