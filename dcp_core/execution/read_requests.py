"""Which pieces of files one call reads, and which calls one thread carries out together: pure.

Goes in: pieces of one file, in the order of reading. Comes out: tasks of neighbouring pieces, each with its calls. One
call reads pieces that touch or nearly touch into as many buffers; the bytes between them go to waste.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcp_core.execution import read_ranges
from dcp_core.metadata import Int64
from dcp_core.planning.span_columns import Mask

TASK_BYTES = 1 << 22
"""What a thread reads before it looks for other work; a call reads at most that. From 1 to 8 MiB all is the same."""

TASK_PIECES = 512
"""Linux fills at most 1,024 buffers a call, pieces and gaps."""

JOINED_BYTES = 1 << 23
"""Calls are joined to one that reaches over no more than this, which object stores answer in one piece."""

ALIGNMENT = 16
"""Where elements of any type may start in a buffer."""


@dataclass(frozen=True, slots=True)
class Task:
    """Neighbouring pieces that one thread reads.

    Attributes:
        first: The first piece.
        last: One past the last piece.
        calls: For each call its first piece and one past its last.
    """

    first: int
    last: int
    calls: tuple[tuple[int, int], ...]


def plan_tasks(start: Int64, stop: Int64, lane: Int64) -> list[Task]:
    """Put pieces together to calls and tasks.

    Args:
        start: Where each piece starts in the file. Pieces need not ascend; those that do can share a call. Shape (P,).
        stop: One past its end. Shape (P,).
        lane: Pieces of different lanes share no task. Shape (P,).

    Returns:
        Tasks that together are all pieces, in their order. The lengths of a task's pieces, each rounded up to
        `ALIGNMENT`, are at most `TASK_BYTES`, unless it has one piece.

    >>> plan_tasks(np.array([0, 10, 30, 99999]), np.array([10, 20, 40, 100000]), np.zeros(4, np.int64))
    [Task(first=0, last=4, calls=((0, 3), (3, 4)))]
    """
    count = len(start)
    if not count:
        return []
    ends = np.cumsum(-(-(stop - start) // ALIGNMENT) * ALIGNMENT)
    is_apart, other_lane = ~_share_call(start, stop), lane[1:] != lane[:-1]
    breaks = [*(np.flatnonzero(is_apart | other_lane) + 1).tolist(), count]
    lane_ends = [*(np.flatnonzero(other_lane) + 1).tolist(), count]
    tasks, first, done = [], 0, 0
    while first < count:
        last = int(np.searchsorted(ends, done + TASK_BYTES, side="right"))
        last = min(max(last, first + 1), first + TASK_PIECES, lane_ends[bisect_left(lane_ends, first + 1)])
        tasks.append(Task(first, last, _calls(breaks, first, last)))
        first, done = last, int(ends[last - 1])
    return tasks


def joined_calls(
    calls: Sequence[tuple[int, int]], start: Sequence[int], nbytes: Sequence[int], gap_bytes: int
) -> Sequence[tuple[int, int]]:
    """Join the calls of a task that lie close together, for storages where each call takes long.

    Args:
        calls: For each call its first piece and one past its last.
        start: Where each piece starts in the file.
        nbytes: Its length.
        gap_bytes: The widest gap that is read over; 0: nothing is joined.

    Returns:
        As `calls`. One that was joined reaches over at most `JOINED_BYTES`.

    >>> joined_calls([(0, 1), (1, 2), (2, 3)], [0, 100, 900], [10, 10, 10], 90)
    [(0, 2), (2, 3)]
    """
    if not gap_bytes:
        return calls
    joined: list[tuple[int, int]] = []
    for low, high in calls:
        if joined:
            first = joined[-1][0]
            gap = start[low] - start[low - 1] - nbytes[low - 1]
            reach = start[high - 1] + nbytes[high - 1] - start[first]
            if 0 <= gap <= gap_bytes and reach <= JOINED_BYTES:
                joined[-1] = first, high
                continue
        joined.append((low, high))
    return joined


def _calls(breaks: list[int], first: int, last: int) -> tuple[tuple[int, int], ...]:
    inner = breaks[bisect_left(breaks, first + 1) : bisect_left(breaks, last)]
    return tuple(zip([first, *inner], [*inner, last], strict=True))


def _share_call(start: Int64, stop: Int64) -> Mask:
    """Whether each piece but the first is read by the call that reads the one before it."""
    gap = start[1:] - stop[:-1]
    touches: Mask = gap == 0
    if touches.all():
        return touches
    stretch = np.concatenate([np.zeros(1, np.int64), np.cumsum(~touches)])
    edges = np.concatenate([[0], np.flatnonzero(~touches) + 1])
    length = np.add.reduceat(stop - start, edges)[stretch]
    shorter, longer = np.minimum(length[:-1], length[1:]), np.maximum(length[:-1], length[1:])
    is_small = gap * read_ranges.GAP_SHARE <= shorter
    is_near = (gap > 0) & (gap <= read_ranges.GAP_BYTES)
    shares: Mask = touches | (is_near & (is_small | (longer < read_ranges.LONG_BYTES)))
    return shares
