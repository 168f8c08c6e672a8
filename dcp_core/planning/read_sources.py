"""Who reads what for whom: from all ranks' offers to one answer a rank.

Runs on the coordinator, as plain arithmetic: the ranks' offers in, answers out. Of what several ranks want, largest
first, each buffer is read by the member with the fewest bytes so far; a buffer that would lift one reader well above
its group's share is cut by rows between its members. What nobody shares is booked first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcp_core.metadata import Int64
from dcp_core.planning.balance import Assignment, CutRule, assign_writers
from dcp_core.planning.buffer_parts import ALIGNMENT
from dcp_core.planning.rank_groups import GroupKey, Origin, SharedGroup, encode_group
from dcp_core.planning.shared_offers import NOT_NAMED
from dcp_core.planning.shared_sets import ALONE, Classes, SharedSets, find_shared, gather_classes
from dcp_core.planning.source_answers import encode_origin, encode_sources
from dcp_core.planning.worth_sharing import GroupWork, Mask, Measured, worth_sharing

MOST_READERS = 64
"""Nor more ranks than these read parts of one buffer: its pieces are in every answer."""


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """How reads are shared.

    Attributes:
        batch_bytes: Smaller buffers are sent together.
        auto: Share only what repays it; else whatever several ranks want.
        smallest_piece: No piece of a buffer is smaller, bytes.
    """

    batch_bytes: int
    auto: bool = False
    smallest_piece: int = ALIGNMENT


@dataclass(frozen=True, slots=True)
class ReadSources:
    """The outcome.

    Attributes:
        answers: One a rank, in the order of the offers; the same object for ranks that want the same.
        reason: What is shared and why, for the log.
    """

    answers: tuple[bytes, ...]
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Who reads what: for each set the pieces it is cut into; none for a set that is not shared."""

    first: Int64
    count: Int64
    reader: Int64
    stop: Int64


def assign_sources(payloads: Sequence[bytes], options: SharingOptions) -> ReadSources:
    """Choose who reads what, and which groups it travels in.

    Args:
        payloads: What each rank offers, see `shared_offers.encode_offer`.
        options: The same on all ranks.

    Raises:
        CoordinationError: An offer that cannot be read, or two of one rank.
    """
    classes = gather_classes(payloads)
    sets = find_shared(classes)
    origins = _origins_of(classes, sets.keys)
    shared, reason = _choose_shared(classes, sets, origins, options)
    is_shared = sets.group != ALONE
    is_shared[is_shared] = shared[sets.group[is_shared]]
    if not is_shared.any():
        return ReadSources((b"",) * len(payloads), reason)
    pieces = _share_out(classes, sets, np.flatnonzero(is_shared), options.smallest_piece)
    answers = _encode_answers(classes, sets, origins, pieces)
    return ReadSources(tuple([answers[number] for number in classes.of_rank[classes.position].tolist()]), reason)


def _origins_of(classes: Classes, keys: Sequence[GroupKey]) -> list[tuple[Origin, bytes]]:
    """Where each group comes from, and the digest of its name: given by the caller, else existing, else made.

    A group counts as given, or as existing by some name, when all its ranks say so.
    """
    held = Counter(entry for frame in classes.frames for entry in frame.groups)
    names: dict[bytes, list[bytes]] = {}
    for blob, name in sorted(held):
        names.setdefault(blob, []).append(name)
    found = []
    for key in keys:
        blob = encode_group(key)
        whole = [name for name in names.get(blob, ()) if held[blob, name] == len(key.ranks)]
        if NOT_NAMED in whole:
            found.append((Origin.GIVEN, NOT_NAMED))
        else:
            found.append((Origin.EXISTING, whole[0]) if whole else (Origin.MADE, NOT_NAMED))
    return found


def _choose_shared(
    classes: Classes, sets: SharedSets, origins: Sequence[tuple[Origin, bytes]], options: SharingOptions
) -> tuple[Mask, str]:
    """Which groups share their reads, and why."""
    groups, mine = len(sets.keys), sets.group != ALONE
    if not options.auto:
        reason = f"all that several ranks want is read once: {int(mine.sum())} buffers in {groups} groups of ranks"
        return np.ones(groups, dtype=np.bool_), reason
    numbers: dict[bytes, int] = {}
    host = np.array([numbers.setdefault(frame.host, len(numbers)) for frame in classes.frames], dtype=np.int64)
    group_of = np.repeat(np.arange(groups), sets.count)
    pairs = np.unique(group_of * max(len(numbers), 1) + host[sets.member])
    of_group = sets.group[mine]
    work = GroupWork(
        members=sets.count,
        hosts=np.bincount(pairs // max(len(numbers), 1), minlength=groups),
        nbytes=np.bincount(of_group, weights=sets.nbytes[mine], minlength=groups).astype(np.int64),
        buffers=np.bincount(of_group, minlength=groups),
        exists=np.array([origin is not Origin.MADE for origin, _ in origins], dtype=np.bool_),
        kind=[key.kind for key in sets.keys],
    )
    verdict = worth_sharing(work, _measured(classes), options.batch_bytes)
    return verdict.shared, f"auto: {verdict.reason}"


def _measured(classes: Classes) -> Measured:
    """What the ranks have seen: the medians of those that know."""
    columns = [[f.same_rate for f in classes.frames], [f.own_rate for f in classes.frames]]
    return Measured(*(float(np.median(seen)) if (seen := [rate for rate in column if rate > 0]) else 0.0
                      for column in columns))  # fmt: skip


def _share_out(classes: Classes, sets: SharedSets, shared: Int64, smallest_piece: int) -> _Pieces:
    """Choose the readers of shared sets."""
    ranks = len(classes.frames)
    booked = _booked_alone(classes, sets, shared)
    group, nbytes = sets.group[shared], sets.nbytes[shared]
    own = np.bincount(group, weights=nbytes, minlength=len(sets.keys))
    own += np.add.reduceat(booked[sets.member].astype(np.float64), sets.first)
    even = (float(booked.sum()) + float(nbytes.sum())) / ranks
    share = np.maximum(own / sets.count, even)  # where a group has more to read than others, that is its measure
    assignment = assign_writers(
        np.concatenate([np.arange(ranks), sets.member]),
        np.concatenate([np.arange(ranks), ranks + sets.first[group]]),
        np.concatenate([np.ones(ranks, dtype=np.int64), sets.count[group]]),
        np.concatenate([booked, nbytes]),
        np.concatenate([np.ones(ranks, dtype=np.int64), sets.slabs[shared]]),
        ranks,
        rule=CutRule(np.concatenate([np.zeros(ranks), share[group]]), max(smallest_piece, 1), MOST_READERS),
    )
    return _pieces_of(assignment, ranks, sets, shared)


def _booked_alone(classes: Classes, sets: SharedSets, shared: Int64) -> Int64:
    """Bytes that each rank reads for itself, whatever is shared out."""
    is_shared = np.zeros(len(sets.nbytes), dtype=np.bool_)
    is_shared[shared] = True
    apart = np.where(is_shared, 0, sets.nbytes)[sets.of_row]
    total = np.concatenate([[0], np.cumsum(apart)])
    of_class = total[classes.start[1:]] - total[classes.start[:-1]]
    booked: Int64 = of_class[classes.of_rank] + np.array([frame.alone_nbytes for frame in classes.frames], np.int64)
    return booked


def _pieces_of(assignment: Assignment, ranks: int, sets: SharedSets, shared: Int64) -> _Pieces:
    """The pieces of all sets, from the readers of shared ones; the first `ranks` boxes of the assignment are none."""
    count = np.zeros(len(sets.nbytes), dtype=np.int64)
    count[shared] = 1
    for cut in assignment.cuts:
        count[shared[cut.box - ranks]] = len(cut.holders)
    first = np.cumsum(count) - count
    reader, stop = np.zeros(int(count.sum()), dtype=np.int64), np.zeros(int(count.sum()), dtype=np.int64)
    reader[first[shared]], stop[first[shared]] = assignment.writer[ranks:], sets.slabs[shared]
    for cut in assignment.cuts:
        rows = slice(at := int(first[shared[cut.box - ranks]]), at + len(cut.holders))
        reader[rows], stop[rows] = cut.holders, cut.bounds[1:]
    return _Pieces(first, count, reader, stop)


def _encode_answers(
    classes: Classes, sets: SharedSets, origins: Sequence[tuple[Origin, bytes]], pieces: _Pieces
) -> list[bytes]:
    """One answer a class."""
    blobs: dict[int, bytes] = {}
    answers = []
    for start, end in zip(classes.start.tolist(), classes.start[1:].tolist(), strict=False):
        own = sets.of_row[start:end]
        count = pieces.count[own]
        shared = np.flatnonzero(count)
        if not len(shared):
            answers.append(b"")
            continue
        own, count = own[shared], count[shared]
        groups, index = np.unique(sets.group[own], return_inverse=True)
        column = np.zeros(end - start, dtype=np.int64)
        column[shared] = index.reshape(-1) + 1
        last = np.cumsum(count)
        rows = np.arange(int(last[-1])) + np.repeat(pieces.first[own] - (last - count), count)
        inner = np.delete(pieces.stop[rows], last - 1)
        table = []
        for number in groups.tolist():
            if number not in blobs:
                origin, digest = origins[number]
                blobs[number] = encode_origin(SharedGroup(sets.keys[number], origin), digest)
            table.append(blobs[number])
        answers.append(encode_sources(table, column, count, pieces.reader[rows], inner))
    return answers
