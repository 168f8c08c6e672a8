"""Which ranks want the same buffer: from all ranks' offers to replica sets, and to the groups that they make up.

Runs on the coordinator. Ranks that want the same are one *class*, whose list is decoded once; all columns are over
classes, not over ranks. Every member of a group wants every buffer of the group, by construction: that is why all its
members can later walk the group's buffers in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dcp_core.errors import CoordinationError
from dcp_core.metadata import Int32, Int64, UInt64
from dcp_core.planning.rank_groups import GroupKey
from dcp_core.planning.shared_offers import Buffers, OfferFrame, decode_wants, parse_offer

ALONE = -1
"""In a `group` column: nobody else wants the buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """All ranks' offers, each distinct list of buffers once.

    Attributes:
        frames: The offers, by ascending rank. Length R.
        position: Where among these the offer at each place of the input stands. Shape (R,).
        of_rank: Class of each rank. Shape (R,).
        members: Positions of each class's ranks, ascending.
        wants: The buffers of each class. Length C.
        start: Where each class's rows start in columns over all classes. Shape (C + 1,).
    """

    frames: tuple[OfferFrame, ...]
    position: Int64
    of_rank: Int64
    members: tuple[Int64, ...]
    wants: tuple[Buffers, ...]
    start: Int64

    @property
    def ranks(self) -> list[int]:
        """The ranks, ascending."""
        return [frame.rank for frame in self.frames]


@dataclass(frozen=True, slots=True, eq=False)
class SharedSets:
    """Distinct buffers, and who wants them.

    Attributes:
        of_row: The set of each row of the classes. Shape (N,).
        nbytes: Bytes of each set. Shape (S,).
        slabs: Into how many slabs it can be cut. Shape (S,).
        group: Its group; ALONE where only one rank wants it. Shape (S,).
        keys: The groups, ascending. Length G.
        member: Positions of the groups' ranks, group after group, ascending within one.
        first: Where each group's members start. Shape (G,).
        count: How many they are, at least 2. Shape (G,).
    """

    of_row: Int64
    nbytes: Int64
    slabs: Int64
    group: Int64
    keys: tuple[GroupKey, ...]
    member: Int64
    first: Int64
    count: Int64


def gather_classes(payloads: Sequence[bytes]) -> Classes:
    """Read all ranks' offers.

    Raises:
        CoordinationError: An offer that cannot be read, or two of one rank.
    """
    frames = [parse_offer(payload) for payload in payloads]
    order = sorted(range(len(frames)), key=lambda index: frames[index].rank)
    laid = tuple(frames[index] for index in order)
    twice = [high.rank for low, high in pairwise(laid) if low.rank == high.rank]
    if twice:
        raise CoordinationError(f"several members of the group say that they are rank {twice[0]} of the job")
    numbers: dict[bytes, int] = {}
    of_rank = np.array([numbers.setdefault(frame.wants, len(numbers)) for frame in laid], dtype=np.int64)
    by_class = np.argsort(of_rank, kind="stable")
    bounds = np.searchsorted(of_rank[by_class], np.arange(1, len(numbers)))
    wants = tuple(decode_wants(blob) for blob in numbers)
    start = np.concatenate([[0], np.cumsum([len(buffers) for buffers in wants], dtype=np.int64)]).astype(np.int64)
    return Classes(laid, np.argsort(order), of_rank, tuple(np.split(by_class, bounds)), wants, start)


def find_shared(classes: Classes) -> SharedSets:
    """Group equal buffers, and the sets that the same ranks want.

    Sets are numbered in the order in which they first occur; within a class that is the order all ranks walk them in.

    Complexity:
        A sort of the rows of all classes; then work per set and per group, not per rank.
    """
    digest = np.concatenate([np.zeros((0, 2), np.uint64), *(buffers.digest for buffers in classes.wants)])
    order, first = _equal_runs(digest)
    arrival = np.argsort(order[first], kind="stable")  # sets by their first row
    count = np.diff(np.append(first, len(order)))
    of_row = np.empty(len(order), dtype=np.int64)
    of_row[order] = np.repeat(np.argsort(arrival), count)
    first, count = first[arrival], count[arrival]
    row = order[first]
    class_of = np.repeat(np.arange(len(classes.wants), dtype=np.int32), np.diff(classes.start))
    ranks_of_class = np.fromiter(map(len, classes.members), dtype=np.int64, count=len(classes.members))
    laid = class_of[order]
    wanted_by = _sums_of_runs(ranks_of_class[laid], first, count)
    candidates = np.flatnonzero(wanted_by > 1)
    kinds, kind = _kinds_of(classes)
    group, keys, members = _groups_of(classes, laid, first[candidates], count[candidates], kind[row[candidates]], kinds)
    every = np.full(len(first), ALONE, dtype=np.int64)
    every[candidates] = group
    sizes = np.fromiter(map(len, members), dtype=np.int64, count=len(members))
    return SharedSets(
        of_row, _column(classes, "nbytes")[row], _column(classes, "slabs")[row], every, keys,
        np.concatenate([np.zeros(0, np.int64), *members]), np.cumsum(sizes) - sizes, sizes,
    )  # fmt: skip


def _equal_runs(digest: UInt64) -> tuple[Int64, Int64]:
    """Order rows so that equal digests are neighbours, stably; return the order, and where each run starts in it."""
    high, low = digest[:, 0], digest[:, 1]
    order = np.argsort(high, kind="stable")
    same_high = high[order[1:]] == high[order[:-1]]
    same = same_high & (low[order[1:]] == low[order[:-1]])
    if not np.array_equal(same, same_high):
        order = np.lexsort((low, high))
        same = (digest[order[1:]] == digest[order[:-1]]).all(axis=1)
    return order, np.flatnonzero(np.concatenate([np.ones(min(len(order), 1), dtype=np.bool_), ~same]))


def _sums_of_runs(values: Int64, first: Int64, count: Int64) -> Int64:
    total = np.concatenate([[0], np.cumsum(values)])
    sums: Int64 = total[first + count] - total[first]
    return sums


def _column(classes: Classes, name: str) -> Int64:
    """A column of all classes' rows."""
    return np.concatenate([np.zeros(0, np.int64), *(getattr(buffers, name) for buffers in classes.wants)])


def _kinds_of(classes: Classes) -> tuple[list[str], Int64]:
    """All communicators, ascending, and that of each row of the classes."""
    kinds = sorted({kind for buffers in classes.wants for kind in buffers.kinds})
    number = {kind: index for index, kind in enumerate(kinds)}
    parts = [np.array([number[kind] for kind in own.kinds], dtype=np.int64)[own.kind] for own in classes.wants]
    return kinds, np.concatenate([np.zeros(0, np.int64), *parts])


def _groups_of(
    classes: Classes, laid: Int32, first: Int64, count: Int64, kind: Int64, kinds: Sequence[str]
) -> tuple[Int64, tuple[GroupKey, ...], list[Int64]]:
    """The group of each set, the groups' keys, ascending, and the positions of their ranks.

    Classes have no rank in common, so the list of classes tells groups apart.
    """
    raw, numbers = laid.astype("<i4").tobytes(), dict[bytes, int]()
    lists = np.array(
        [numbers.setdefault(raw[4 * start : 4 * (start + length)], len(numbers))
         for start, length in zip(first.tolist(), count.tolist(), strict=True)], dtype=np.int64,
    )  # fmt: skip
    found, group = np.unique(lists * len(kinds) + kind, return_inverse=True)
    ranks, blobs = np.array(classes.ranks, dtype=np.int64), list(numbers)
    keys: list[GroupKey] = []
    members: list[npt.NDArray[np.int64]] = []
    for number in found.tolist():
        own = np.frombuffer(blobs[number // len(kinds)], dtype="<i4").tolist()
        members.append(np.sort(np.concatenate([classes.members[index] for index in own])))
        keys.append(GroupKey(tuple(ranks[members[-1]].tolist()), kinds[number % len(kinds)]))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    place = np.argsort(np.array(order, dtype=np.int64))
    return place[group.reshape(-1)], tuple(keys[index] for index in order), [members[index] for index in order]
