"""Groups of ranks that share reads: what names one, its bytes, and where it comes from."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise
from operator import itemgetter

from dcp_core.errors import ArgumentError, CoordinationError

_HEAD = struct.Struct("<BI")
_RUN = struct.Struct("<III")


class Origin(Enum):
    """Where a group comes from."""

    GIVEN = 0
    """The caller gave it on all its ranks."""
    EXISTING = 1
    """The framework has it on all its ranks, by one name."""
    MADE = 2
    """It is made for this load, by its ranks alone."""


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """What tells one group from another. Keys sort by ranks, then communicator: the order in which groups are made.

    Attributes:
        ranks: Its ranks in the job, ascending.
        kind: The communicator ("gloo").

    Raises:
        ArgumentError: Ranks that do not ascend, or a communicator that has no name.
    """

    ranks: tuple[int, ...]
    kind: str

    def __post_init__(self) -> None:
        if any(low >= high for low, high in pairwise(self.ranks)):
            raise ArgumentError(f"the ranks of a group are sorted and differ, found {self.ranks}")
        if not self.kind or "\0" in self.kind or len(self.kind.encode()) > 255:
            raise ArgumentError(f"a communicator has a short name, found {self.kind!r}")


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """A group that shares reads.

    Attributes:
        key: Its ranks and communicator.
        origin: Where it comes from.
        name: What the framework calls it, where it exists; else "".
    """

    key: GroupKey
    origin: Origin
    name: str = ""


def encode_group(key: GroupKey) -> bytes:
    """Flatten a key; equal keys give equal bytes. Ranks travel as (start, step, count), so regular groups are short."""
    kind, runs = key.kind.encode(), _runs_of(key.ranks)
    return _HEAD.pack(len(kind), len(runs)) + kind + b"".join(_RUN.pack(*run) for run in runs)


def decode_group(blob: bytes, at: int = 0) -> tuple[GroupKey, int]:
    """Undo `encode_group`; return the key and where the next part starts.

    Raises:
        CoordinationError: The bytes are no group.
    """
    try:
        nbytes, count = _HEAD.unpack_from(blob, at)
        at += _HEAD.size + nbytes
        kind = blob[at - nbytes : at].decode()
        ranks: list[int] = []
        for start, step, length in _RUN.iter_unpack(blob[at : at + count * _RUN.size]):
            ranks.extend(range(start, start + step * length, step))
        return GroupKey(tuple(ranks), kind), at + count * _RUN.size
    except (struct.error, ValueError) as error:
        raise CoordinationError(f"a group from a peer cannot be read: {error}") from error


def _runs_of(ranks: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Cut ascending ranks into arithmetic runs: start, step, count."""
    steps = [high - low for low, high in pairwise(ranks)]
    runs: list[tuple[int, int, int]] = []
    at = 0
    for _, same in groupby(enumerate(steps), itemgetter(1)):
        stretch = [index for index, _ in same]
        if stretch[-1] < at:
            continue  # its only step leads out of the run before
        first = max(stretch[0], at)
        runs.append((ranks[first], steps[first], stretch[-1] + 2 - first))
        at = stretch[-1] + 2
    if at < len(ranks):
        runs.append((ranks[at], 1, 1))
    return runs
