"""The names in a group of `.metadata`: printed name and typed path of consecutive entries, found by bisection.

Entries that share name and path (one value per rank) share one row, a run.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, repeat

import numpy as np

from dcp_core.formats.column_codec import ColumnReader, ColumnWriter, exclusive_sums
from dcp_core.metadata import Int32, Int64

BISECTIONS = 64
"""Looking up one name by bisection costs about as much as passing so many rows of a table."""


@dataclass(frozen=True, slots=True, eq=False)
class NameTable:
    """Names of a group's entries.

    Attributes:
        names: Name of each run, in UTF-8 order.
        paths: Encoded typed path of each run.
        start: First entry of each run, and the number of entries. Shape (R + 1,).
    """

    names: Sequence[str]
    paths: Sequence[bytes]
    start: Int64

    @property
    def entries(self) -> int:
        """How many entries the runs cover."""
        return int(self.start[-1])

    def runs_of(self, name: str) -> range:
        """The runs under one name; empty when there is none."""
        names, first = self.names, bisect_left(self.names, name)
        if first == len(names) or names[first] != name:
            return range(first, first)
        is_only = first + 1 == len(names) or names[first + 1] != name
        return range(first, first + 1 if is_only else bisect_right(names, name, first))

    def find_runs(self, names: Sequence[str]) -> tuple[Int64, Int64]:
        """Look many names up.

        Returns:
            The first run under each name, and the number of runs: 0 where there is none, and then the first means
            nothing. Each of shape (N,).

        Complexity:
            One pass over the table, or a bisection a name where the names are few.
        """
        if len(names) * BISECTIONS < len(self.names):
            found = np.array([(r.start, r.stop) for r in map(self.runs_of, names)], dtype=np.int64).reshape(-1, 2)
            return found[:, 0], found[:, 1] - found[:, 0]
        texts = list(self.names)
        last = dict(zip(texts, count(), strict=False))
        run = np.fromiter(map(last.get, names, repeat(-1)), dtype=np.int64, count=len(names))
        runs = (run >= 0).astype(np.int64)
        if len(last) == len(texts):
            return run, runs
        starts = np.flatnonzero([True, *map(operator.ne, texts[1:], texts)])
        first = starts[np.searchsorted(starts, run, side="right") - 1]
        return first, np.where(runs > 0, run - first + 1, 0)

    def entries_of(self, run: int) -> range:
        """The entries of one run."""
        return range(int(self.start[run]), int(self.start[run + 1]))

    def run_of_entries(self) -> list[int]:
        """The run of every entry."""
        runs: list[int] = np.repeat(np.arange(len(self.names)), np.diff(self.start)).tolist()
        return runs


def build_name_table(names: Sequence[str], paths: Sequence[bytes]) -> NameTable:
    """Join consecutive entries of the same name and path into runs."""
    if not names:
        return NameTable((), (), np.zeros(1, dtype=np.int64))
    changes = [True, *map(operator.ne, names[1:], names[:-1])]
    if all(changes):
        return NameTable(names, paths, np.arange(len(names) + 1))
    new_path = [True, *map(operator.ne, paths[1:], paths[:-1])]
    changes = list(map(operator.or_, changes, new_path))
    first = np.flatnonzero(changes)
    rows = first.tolist()
    start = np.append(first, len(names))
    return NameTable([names[row] for row in rows], [paths[row] for row in rows], start)


def write_name_table(writer: ColumnWriter, table: NameTable) -> None:
    """Append a name table to a block: entries of each run, names, paths."""
    writer.integers(np.diff(table.start))
    writer.texts(table.names)
    writer.strings(table.paths)


def read_name_table(reader: ColumnReader, runs: int, entries: int) -> NameTable:
    """Take a name table.

    Args:
        reader: At the table.
        runs: How many runs the directory announced.
        entries: How many entries.

    Raises:
        CorruptError: Counts that do not add up.
    """
    repeats = reader.integers(runs, low=1, high=max(entries, 1))
    start = exclusive_sums(repeats)
    if int(start[-1]) != entries:
        raise reader.corrupt(f"the names cover {int(start[-1])} entries instead of {entries}")
    names = reader.texts(runs)
    return NameTable(names, reader.strings(runs), start)


def repeated_fault(names: NameTable, rank: Int32) -> str | None:
    """Find names out of order, or a name that occurs twice for one rank.

    Args:
        names: Of the entries.
        rank: Of each entry. Shape (entries,).

    Returns:
        What is wrong, or None.
    """
    texts = list(names.names)
    if not all(map(operator.le, texts, texts[1:])):
        return "names are not in order"
    if names.entries < 2:
        return None
    new_name = np.zeros(names.entries, dtype=np.bool_)
    new_name[names.start[:-1]] = [True, *map(operator.ne, texts[1:], texts)]
    wrong = np.flatnonzero((rank[1:] <= rank[:-1]) & ~new_name[1:])
    if len(wrong) == 0:
        return None
    run = int(np.searchsorted(names.start, wrong[0], side="right")) - 1
    return f"{texts[run]!r} occurs twice for one rank, or its ranks are not in order"
