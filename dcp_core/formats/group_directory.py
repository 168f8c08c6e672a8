"""How `.metadata` cuts its tensors and its objects into groups, and the directory that tells which group has a name.

A reader that needs a few names reads the directory and the few groups that hold them.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dcp_core.formats.column_codec import ColumnReader, ColumnWriter, exclusive_sums
from dcp_core.metadata import Int64

GROUP_WEIGHT = 1 << 18
"""A group closes at this weight; a chunk weighs 1, a name `NAME_WEIGHT`."""
NAME_WEIGHT = 64
MAX_GROUPS = 1024
MAX_ROWS = 1 << 27
"""Most tensors, objects or chunks that version 1 of the format holds."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupDirectory:
    """What each of G groups holds.

    Attributes:
        first_names: Name of the first entry of each group, strictly ascending.
        runs: Distinct (name, path) pairs in each group, see `name_table`. Shape (G,).
        entries: Tensors or objects in each group. Shape (G,).
        rows: Chunks in each group, 0 for objects. Shape (G,).
    """

    first_names: Sequence[str]
    runs: Int64
    entries: Int64
    rows: Int64

    def __len__(self) -> int:
        return len(self.first_names)

    def group_of(self, name: str) -> int | None:
        """The only group that can hold a name, or None."""
        found = bisect_right(self.first_names, name) - 1
        return found if found >= 0 else None


def cut_groups(names: Sequence[str], rows: npt.NDArray[np.int64]) -> list[slice]:
    """Cut consecutive entries into groups of about `GROUP_WEIGHT`, never within a name.

    Args:
        names: Name of each entry, sorted. Length T.
        rows: Chunks of each entry. Shape (T,).

    Returns:
        The entries of each group, none empty. A rule of names and rows alone.
    """
    if not names:
        return []
    weight = exclusive_sums(rows + NAME_WEIGHT)
    size = max(GROUP_WEIGHT, -(-int(weight[-1]) // MAX_GROUPS))
    group = weight[:-1] // size
    cuts = (np.flatnonzero(group[1:] != group[:-1]) + 1).tolist()
    bounds = sorted({0, len(names), *(bisect_left(names, names[cut]) for cut in cuts)})
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def encode_directory(directory: GroupDirectory) -> bytes:
    """Write a directory as one block."""
    writer = ColumnWriter()
    writer.count(len(directory))
    writer.texts(directory.first_names)
    writer.integers(directory.runs)
    writer.integers(directory.entries)
    writer.integers(directory.rows)
    return writer.to_bytes()


def decode_directory(block: bytes, name: str) -> GroupDirectory:
    """Read a directory.

    Raises:
        CorruptError: It contradicts itself or the limits of the format.
    """
    reader = ColumnReader(block, name)
    groups = reader.count()
    if groups > MAX_GROUPS:
        raise reader.corrupt(f"{groups} groups are more than {MAX_GROUPS}")
    first_names = list(reader.texts(groups))
    runs = reader.integers(groups, low=1, high=MAX_ROWS)
    entries = reader.integers(groups, low=1, high=MAX_ROWS)
    rows = reader.integers(groups, high=MAX_ROWS)
    reader.finish()
    if not all(map(operator.lt, first_names, first_names[1:])):
        raise reader.corrupt("its names are not in order")
    if np.any(runs > entries) or max(int(entries.sum()), int(rows.sum())) > MAX_ROWS:
        raise reader.corrupt(f"it announces {int(entries.sum())} entries and {int(rows.sum())} chunks")
    return GroupDirectory(first_names, runs, entries, rows)
