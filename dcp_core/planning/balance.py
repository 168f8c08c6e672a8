"""Which holder writes which replica set: largest first, to the holder with the fewest bytes so far.

Pure arithmetic on columns; knows neither tensors nor names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp_core.metadata import Int64

TINY_NBYTES = 64 * 1024
"""Replicated values below this go to their lowest holder, and no cut leaves a piece below it."""

_OVERSHOOT = 1.02


@dataclass(frozen=True, slots=True)
class Cut:
    """A replica set shared out by rows.

    Attributes:
        box: Which of the unique boxes.
        holders: Position of each writer among the box's holders, ascending.
        bounds: Row bounds, one more than there are holders; the first is 0.
    """

    box: int
    holders: tuple[int, ...]
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CutRule:
    """When a replica set is cut, and how finely.

    Attributes:
        share: The bytes that a holder of each box should end with; a box that would lift it above is cut. Shape (U,).
        smallest: No piece is smaller, bytes.
        most: No box has more pieces.
    """

    share: npt.NDArray[np.float64]
    smallest: int
    most: int


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The outcome: for each unique box the position of its writer among its holders; and the cuts."""

    writer: Int64
    cuts: tuple[Cut, ...]


def assign_writers(
    holder: Int64, first: Int64, count: Int64, nbytes: Int64, rows: Int64, ranks: int,
    *, to_minimum_rank: bool = False, rule: CutRule | None = None,
) -> Assignment:  # fmt: skip
    """Choose a writer for every unique box.

    Args:
        holder: Holders of all boxes, ascending within a box; boxes may have theirs in common. Values in [0, ranks).
        first: Where each box's holders start. Shape (U,).
        count: How many they are, at least 1. Shape (U,).
        nbytes: Bytes of each box. Shape (U,).
        rows: Into how many slabs of whole rows the box can be cut. Shape (U,).
        ranks: Number of ranks.
        to_minimum_rank: Give every box to its lowest holder.
        rule: When to cut; None: by a fair share of all bytes, into pieces that are not tiny.

    Returns:
        The assignment. The largest booking exceeds the mean by about 2 % at most, as far as the holders of the
        replica sets allow.

    Complexity:
        O(holders) plus a sort of the replica sets.
    """
    writer = np.zeros(len(first), dtype=np.int64)
    if to_minimum_rank:
        return Assignment(writer, ())
    fair_share = float(nbytes.sum()) / ranks
    settled = (count == 1) | _kept_together(holder[first], nbytes, fair_share)
    booked = np.bincount(holder[first[settled]], weights=nbytes[settled], minlength=ranks).astype(np.float64)
    open_boxes = np.flatnonzero(~settled)
    order = open_boxes[np.argsort(-nbytes[open_boxes], kind="stable")]
    if not len(order):
        return Assignment(writer, ())
    if rule is None:
        rule = CutRule(np.full(len(first), fair_share), TINY_NBYTES, ranks)
    cuts = _book_largest_first(writer, order, holder, first, count, nbytes, rows, booked, rule)
    return Assignment(writer, tuple(cuts))


def _kept_together(lowest: Int64, nbytes: Int64, fair_share: float) -> npt.NDArray[np.bool_]:
    """Tiny boxes that their lowest holder takes, smallest first, until they make up half of its fair share."""
    kept = np.zeros(len(nbytes), dtype=bool)
    tiny = np.flatnonzero(nbytes < TINY_NBYTES)
    order = tiny[np.lexsort((nbytes[tiny], lowest[tiny]))]
    new = np.ones(len(order), dtype=bool)
    new[1:] = lowest[order][1:] != lowest[order][:-1]
    total = np.cumsum(nbytes[order])
    before = (total - nbytes[order])[new]
    kept[order] = total - np.repeat(before, np.diff(np.append(np.flatnonzero(new), len(order)))) <= fair_share / 2
    return kept


def _book_largest_first(
    writer: Int64, order: Int64, holder: Int64, first: Int64, count: Int64, nbytes: Int64, rows: Int64,
    booked: npt.NDArray[np.float64], rule: CutRule,
) -> list[Cut]:  # fmt: skip
    """Book the replica sets in order; fill in `writer`, return the cuts."""
    level: list[float] = booked.tolist()
    level_of = level.__getitem__
    cuts: list[Cut] = []
    chosen: list[int] = []
    holders_of = holder.tolist()
    columns = zip(
        order.tolist(), first[order].tolist(), count[order].tolist(), nbytes[order].tolist(), rows[order].tolist(),
        (rule.share[order] * _OVERSHOOT).tolist(), strict=True,
    )  # fmt: skip
    for box, start, held_by, size, box_rows, limit in columns:
        group = holders_of[start : start + held_by]
        best = min(group, key=level_of)
        position = group.index(best)
        if level[best] + size > limit and size >= 2 * rule.smallest and box_rows > 1:
            cut = _share_out(box, group, [level[rank] for rank in group], size, box_rows, rule)
            if len(cut.holders) > 1:
                cuts.append(cut)
                for index, rows_from, rows_to in zip(cut.holders, cut.bounds, cut.bounds[1:], strict=False):
                    level[group[index]] += size * (rows_to - rows_from) / box_rows
                chosen.append(cut.holders[0])
                continue
            position = cut.holders[0]
            best = group[position]
        level[best] += size
        chosen.append(position)
    writer[order] = chosen
    return cuts


def _share_out(box: int, group: list[int], levels: list[float], nbytes: int, rows: int, rule: CutRule) -> Cut:
    """Cut a box by rows so that its least booked holders end at one level."""
    by_level = sorted(range(len(group)), key=lambda index: (levels[index], group[index]))
    most = max(1, min(len(group), rows, rule.most, nbytes // rule.smallest))
    total, sharing, target = 0.0, 0, 0.0
    for index in by_level[:most]:
        reached = (total + levels[index] + nbytes) / (sharing + 1)
        if sharing and reached - levels[index] < rule.smallest:
            break
        total, sharing, target = total + levels[index], sharing + 1, reached
    writers = sorted(by_level[:sharing])
    bounds, filled = [0], 0.0
    kept: list[int] = []
    for index in writers:
        filled += target - levels[index]
        bound = min(rows, round(filled / nbytes * rows))
        if bound > bounds[-1]:
            kept.append(index)
            bounds.append(bound)
    bounds[-1] = rows
    return Cut(box, tuple(kept), tuple(bounds))
