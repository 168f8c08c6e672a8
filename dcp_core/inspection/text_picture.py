"""Draws who holds what of a tensor with characters: a box on the screen for each stored box, offsets along the axes.

In: holdings. Out: lines, each of pieces that know their holder, so that a terminal can colour them. Every piece of an
axis gets the same room, however long it is; what is too much for the screen is left out in the middle, as dots show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from dcp_core.inspection.holdings import Axis, Cell, Folding, Holdings, Panel, fold
from dcp_core.metadata import Int64

Piece = tuple[str, int | None]
"""Text, and the holder whose colour it has; None: none."""

MAX_ROWS = 16
MAX_PANELS = 6
LEGEND_LINES = 16

_OUTSIDE, _LEFT_OUT, _HOLE = -1, -2, -3
# By which of the four arms (up, down, left, right) a junction has: the character.
_JUNCTIONS = {
    (0, 0, 0, 0): " ", (0, 1, 0, 1): "┌", (0, 1, 1, 0): "┐", (1, 0, 0, 1): "└", (1, 0, 1, 0): "┘",
    (1, 1, 0, 1): "├", (1, 1, 1, 0): "┤", (0, 1, 1, 1): "┬", (1, 0, 1, 1): "┴", (1, 1, 1, 1): "┼",
    (1, 1, 0, 0): "│", (0, 0, 1, 1): "─", (1, 0, 0, 0): "│", (0, 1, 0, 0): "│", (0, 0, 1, 0): "─", (0, 0, 0, 1): "─",
}  # fmt: skip

LINES = "".join(sorted(set(_JUNCTIONS.values()) - {" "}))
"""The characters that lines are made of."""

_ASCII = str.maketrans({line: {"│": "|", "─": "-"}.get(line, "+") for line in LINES})


def draw_text(holdings: Holdings, *, width: int = 100, is_ascii: bool = False) -> list[list[Piece]]:
    """Draw a tensor.

    Args:
        holdings: Who holds what.
        width: Characters of a line at most.
        is_ascii: Draw lines with the characters of ASCII only.
    """
    title, *lines = _drawn(holdings, width)  # the title has the tensor's name, which stays as it is
    if is_ascii:
        lines = [[(text.translate(_ASCII), holder) for text, holder in line] for line in lines]
    return [title, *lines, *_legend(holdings)]


def _drawn(holdings: Holdings, width: int) -> Iterator[list[Piece]]:
    names = [label_of(holdings, holder) for holder in range(len(holdings.holders))]
    longest = len(_joined(names, range(min(3, len(names)))))
    room = max([longest + 2, *(len(str(size)) + 1 for size in holdings.shape), 6])
    left = max((len(str(size)) for size in holdings.shape), default=1) + 2
    most = max(3, (width - left - 1) // (room + 1))
    folding = fold(holdings, max_rows=MAX_ROWS, max_columns=most, max_panels=MAX_PANELS)
    for line in heading(holdings, folding):
        yield [(line, None)]
    for panel in folding.panels:
        if panel.slices:
            yield [(slice_text(panel), None)]
        yield from _panel(panel, folding, names, room, left)
    if folding.more_panels:
        yield [(f"and {folding.more_panels} more slices", None)]


def heading(holdings: Holdings, folding: Folding) -> list[str]:
    """What is drawn, in words."""
    lines = [f"{holdings.name}  {holdings.dtype} {list(holdings.shape)}  {boxes_text(len(holdings.holder))}"]
    axes = []
    if folding.rows.dim is not None:
        axes.append(f"down: dimension {folding.rows.dim}")
    if folding.columns.dim is not None:
        axes.append(f"across: dimension {folding.columns.dim}")
    if folding.whole_dims:
        axes.append("not cut: " + ", ".join(map(str, folding.whole_dims)))
    return lines + (["  ".join(axes)] if axes else [])


def boxes_text(count: int) -> str:
    """How many boxes, in words."""
    return f"{count} box" if count == 1 else f"{count} boxes"


def slice_text(panel: Panel) -> str:
    """Which slice a panel is."""
    return ", ".join(f"dimension {dim}: {start} to {stop}" for dim, start, stop in panel.slices)


def label_of(holdings: Holdings, holder: int) -> str:
    """A holder's short name: the number of a rank, or # and a number that the legend explains."""
    kind, _, number = holdings.holders[holder].partition(" ")
    return number if kind == "rank" and number.isdecimal() else f"#{holder}"


def cell_label(names: Sequence[str], cell: Cell) -> str:
    """Who holds a box, in short: several have copies."""
    return _joined(names, cell.holders)


def _joined(names: Sequence[str], holders: Sequence[int]) -> str:
    if len(holders) <= 3:
        return "+".join(names[holder] for holder in holders)
    return f"{names[holders[0]]}+..x{len(holders)}"


def _panel(panel: Panel, folding: Folding, names: Sequence[str], room: int, left: int) -> Iterator[list[Piece]]:
    rows, columns = folding.rows, folding.columns
    grid = _grid(panel, rows, columns)
    yield [(_axis_line(columns, room, left), None)]
    bounds = rows.bounds if rows.dim is not None else None
    for row in range(len(rows.shown) + 1):
        yield [((str(bounds[row]) if bounds else "").rjust(left - 1) + " ", None), (_border(grid, row, room), None)]
        if row < len(rows.shown):
            yield [(" " * left, None), *_content(grid, row, panel, names, room)]


def _grid(panel: Panel, rows: Axis, columns: Axis) -> Int64:
    """Which cell is where, in a frame of what is outside."""
    grid = np.full((len(rows.shown) + 2, len(columns.shown) + 2), _OUTSIDE, np.int64)
    inner = grid[1:-1, 1:-1]
    inner[...] = _HOLE
    inner[np.array(rows.shown) < 0, :] = _LEFT_OUT
    inner[:, np.array(columns.shown) < 0] = _LEFT_OUT
    for number, cell in enumerate(panel.cells):
        inner[slice(*cell.rows), slice(*cell.columns)] = number
    return grid


def _axis_line(axis: Axis, room: int, left: int) -> str:
    """The offsets above the borders; those that would touch are left out, but for the last."""
    if axis.dim is None:
        return ""
    line = [" "] * (left + (room + 1) * len(axis.shown) + 24)
    free, last = 0, len(axis.bounds) - 1
    final = left + last * (room + 1)
    for position, bound in enumerate(axis.bounds):
        start, text = left + position * (room + 1), str(bound)
        if start < free or (position < last and start + len(text) >= final):
            continue
        line[start : start + len(text)] = text
        free = start + len(text) + 1
    return "".join(line).rstrip()


def _border(grid: Int64, row: int, room: int) -> str:
    """The line above a row of cells."""
    above, below = grid[row].tolist(), grid[row + 1].tolist()
    is_edge = [int(one != other) for one, other in zip(above, below, strict=True)]
    parts = []
    for column in range(len(above) - 1):
        up, down = int(above[column] != above[column + 1]), int(below[column] != below[column + 1])
        parts.append(_JUNCTIONS[up, down, is_edge[column], is_edge[column + 1]])
        if column + 1 < len(above) - 1:
            parts.append(("─" if is_edge[column + 1] else " ") * room)
    return "".join(parts)


def _content(grid: Int64, row: int, panel: Panel, names: Sequence[str], room: int) -> Iterator[Piece]:
    """A row of cells; a cell that covers several is named where it starts."""
    numbers = grid[row + 1, 1:-1].tolist()
    yield "│", None
    column = 0
    for number, run in groupby(numbers):
        count = len(list(run))
        wide = count * (room + 1) - 1
        cell = panel.cells[number] if number >= 0 else None
        if cell is not None:
            is_first = cell.rows[0] == row and cell.columns[0] == column
            label = cell_label(names, cell) if is_first else ""
            yield f" {label}".ljust(wide)[:wide], cell.holders[0]
        else:
            yield ("..." if number == _LEFT_OUT else "nobody").center(wide)[:wide], None
        yield "│", None
        column += count


def _legend(holdings: Holdings) -> Iterator[list[Piece]]:
    runs = holding_runs(holdings, LEGEND_LINES)
    for run in runs[:LEGEND_LINES]:
        yield [(f" {run.label} ".rjust(6), run.first if run.label else None), (f" {run.text}", None)]
    if len(runs) > LEGEND_LINES:
        yield [(f"and {len(holdings.holders) - runs[LEGEND_LINES].first} more", None)]


@dataclass(frozen=True, slots=True)
class HoldingRun:
    """Holders, one after the other, that hold as much as each other.

    Attributes:
        first: Position of the first one.
        last: Position of the last one.
        label: What it is called in a picture; "" for several, whose text says it.
        text: Who they are and what each of them holds, in words.
    """

    first: int
    last: int
    label: str
    text: str


def holding_runs(holdings: Holdings, most: int) -> list[HoldingRun]:
    """Say what holders hold: each for itself if they are so many at most, else those together that hold the same."""
    boxes, nbytes = holdings.all_held()
    names, count = holdings.holders, len(holdings.holders)
    is_first: npt.NDArray[np.bool_] = np.ones(count, np.bool_)
    if count > most:
        is_first[1:] = (boxes[1:] != boxes[:-1]) | (nbytes[1:] != nbytes[:-1])
    runs = []
    for first, end in pairwise([*np.flatnonzero(is_first).tolist(), count]):
        held = f"{boxes_text(int(boxes[first]))}, {int(nbytes[first]):,} bytes"
        if end - first == 1:
            runs.append(HoldingRun(first, first, label_of(holdings, first), f"{names[first]}: {held}"))
            continue
        labels = label_of(holdings, first), label_of(holdings, end - 1)
        who = f"{labels[0]} to {labels[1]}"
        are_ranks = all(label.isdecimal() for label in labels) and int(labels[1]) - int(labels[0]) == end - 1 - first
        who = f"ranks {who}" if are_ranks else f"{who}, {end - first} holders, from {names[first]} to {names[end - 1]}"
        runs.append(HoldingRun(first, end - 1, "", f"{who}: {held} each"))
    return runs


def as_text(lines: Sequence[Sequence[Piece]]) -> str:
    """A drawing without colours."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)
