"""Draws who holds what of a tensor as an SVG file: boxes to scale, a colour for each holder, offsets along the axes.

In: holdings. Out: the text of the file. It needs no other file, no script and no font. What is too small to be seen is
drawn larger; pieces in the middle of an axis are left out where there are too many, and a grey strip shows where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from xml.sax.saxutils import escape, quoteattr

from dcp_core.inspection.holdings import Axis, Cell, Folding, Holdings, Panel, fold, has_hole
from dcp_core.inspection.palette import colour_of, text_colour_on
from dcp_core.inspection.text_picture import HoldingRun, cell_label, heading, holding_runs, label_of, slice_text

MAX_PIECES = 40
MAX_PANELS = 12
LEGEND_ENTRIES = 64

_LONG, _SHORT = 520.0, 120.0  # sides of a panel, pixels
_WIDEST = 40.0  # of the room that a piece of an axis has at least
_CHAR, _LINE = 6.7, 16.0
_MARGIN = 20.0
_READABLE = 12.0  # height of a box that has its holder's name
_COPIES = 8  # of one box that are drawn
_WIDE = 960.0
_LEFT_OUT = "#e8e8e8"
_HATCHED = "url(#nobody)"
_HATCH = (
    '<defs><pattern id="nobody" width="7" height="7" patternUnits="userSpaceOnUse">'
    '<rect width="7" height="7" fill="#ffffff"/><path d="M0,7 L7,0" stroke="#bbbbbb" stroke-width="1"/>'
    "</pattern></defs>"
)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where the pieces of an axis lie in a panel.

    Attributes:
        axis: The axis.
        at: Pixels from the panel's start of each bound.
    """

    axis: Axis
    at: tuple[float, ...]

    @property
    def length(self) -> float:
        return self.at[-1]


def draw_svg(holdings: Holdings) -> str:
    """Draw a tensor.

    Args:
        holdings: Who holds what.

    Returns:
        The content of an SVG file, UTF-8.
    """
    folding = fold(holdings, max_rows=MAX_PIECES, max_columns=MAX_PIECES, max_panels=MAX_PANELS)
    names = [label_of(holdings, holder) for holder in range(len(holdings.holders))]
    shown = {holder for panel in folding.panels for cell in panel.cells for holder in cell.holders}
    vertical, horizontal = _scales(folding, _CHAR * max((len(names[holder]) for holder in shown), default=0) + 5)
    left = _MARGIN + _LINE + max((_CHAR * len(str(bound)) for bound in vertical.axis.bounds), default=0.0) + 10
    across = left + horizontal.length + _MARGIN + _CHAR * len(str(horizontal.axis.bounds[-1])) / 2
    down = vertical.length + 4.2 * _LINE
    columns = max(1, min(len(folding.panels), int(1200 // across))) if folding.panels else 1
    titles = [_clean(line) for line in heading(holdings, folding)]
    parts = [_text(_MARGIN, _MARGIN + _LINE * (row + 0.8), line, bold=row == 0) for row, line in enumerate(titles)]
    top = _MARGIN + _LINE * (len(titles) + 0.5)
    for number, panel in enumerate(folding.panels):
        x, y = left + across * (number % columns), top + down * (number // columns) + 2 * _LINE
        parts += _panel(panel, x, y, vertical, horizontal, names)
    bottom = top + down * ceil(len(folding.panels) / columns)
    if folding.more_panels:
        parts.append(_text(_MARGIN, bottom + _LINE, f"and {folding.more_panels} more slices"))
        bottom += 1.5 * _LINE
    longest = max([_CHAR * len(line) + 2 * _MARGIN for line in titles])
    width = max(
        across * columns + _MARGIN, longest, _WIDE if len(holding_runs(holdings, LEGEND_ENTRIES)) > 16 else _WIDE / 2
    )
    legend, height = _legend(holdings, folding, bottom, width)
    return _document(width, height + _MARGIN, [*parts, *legend])


def _scales(folding: Folding, room: float) -> tuple[_Scale, _Scale]:
    """Both axes in proportion, as far as that can be looked at: a piece has the room of a label, in pixels."""
    tall, wide = _extent(folding.rows), _extent(folding.columns)
    high, broad = _LONG, _LONG
    if folding.rows.dim is None:
        high = _SHORT / 2
    elif tall <= wide:
        high = max(_LONG * tall / max(wide, 1), _SHORT)
    else:
        broad = max(_LONG * wide / max(tall, 1), _SHORT)
    return _scale(folding.rows, high, _READABLE + 1), _scale(folding.columns, broad, min(room, _WIDEST))


def _extent(axis: Axis) -> int:
    return axis.edges[-1] if axis.dim is not None else 1


def _scale(axis: Axis, length: float, least: float) -> _Scale:
    bounds = axis.bounds
    sizes: list[float] = [stop - start for start, stop in pairwise(bounds)]
    shown = [size for size, piece in zip(sizes, axis.shown, strict=True) if piece >= 0]
    usual = sum(shown) / len(shown)
    sizes = [size if piece >= 0 else 1.5 * usual for size, piece in zip(sizes, axis.shown, strict=True)]
    total = sum(sizes)
    pixels = [max(least, length * size / total if total else length / len(sizes)) for size in sizes]
    at = [0.0]
    for each in pixels:
        at.append(at[-1] + each)
    return _Scale(axis, tuple(at))


def _panel(
    panel: Panel, x: float, y: float, vertical: _Scale, horizontal: _Scale, names: Sequence[str]
) -> Iterator[str]:  # fmt: skip
    if panel.slices:
        yield _text(x, y - 1.6 * _LINE, slice_text(panel))
    yield _rect(x, y, horizontal.length, vertical.length, _HATCHED, "nobody holds this")
    for scale, is_row in ((vertical, True), (horizontal, False)):
        if -1 in scale.axis.shown:
            gap = scale.axis.shown.index(-1)
            start, extent = scale.at[gap], scale.at[gap + 1] - scale.at[gap]
            box = (x, y + start, horizontal.length, extent) if is_row else (x + start, y, extent, vertical.length)
            yield _rect(*box, _LEFT_OUT, "pieces that are left out")
    for cell in panel.cells:
        yield from _cell(cell, x, y, vertical, horizontal, names)
    yield from _ticks(x, y, vertical, horizontal)


def _cell(
    cell: Cell, x: float, y: float, vertical: _Scale, horizontal: _Scale, names: Sequence[str]
) -> Iterator[str]:  # fmt: skip
    top, bottom = vertical.at[cell.rows[0]], vertical.at[cell.rows[1]]
    first, last = horizontal.at[cell.columns[0]], horizontal.at[cell.columns[1]]
    about = f"{cell_label(names, cell)}: offsets {list(cell.offsets)}, sizes {list(cell.sizes)}"
    copies = cell.holders[:_COPIES]  # side by side
    share = (last - first) / len(copies)
    for number, holder in enumerate(copies):
        left, colour, name = x + first + share * number, colour_of(holder), names[holder]
        yield _rect(left, y + top, share, bottom - top, colour, about)
        if _CHAR * len(name) + 4 <= share and bottom - top >= _READABLE:
            middle = (left + share / 2, y + (top + bottom) / 2 + 4)
            yield _text(*middle, name, anchor="middle", colour=text_colour_on(colour))


def _ticks(x: float, y: float, vertical: _Scale, horizontal: _Scale) -> Iterator[str]:
    """Offsets at the borders, as many as there is room for; the first and the last always."""
    if horizontal.axis.dim is not None:
        widest = max(_CHAR * len(str(bound)) for bound in horizontal.axis.bounds) + 6
        for at, bound in _spaced(horizontal, widest):
            yield f'<line x1="{x + at:.1f}" y1="{y - 4:.1f}" x2="{x + at:.1f}" y2="{y:.1f}" stroke="#000"/>'
            yield _text(x + at, y - 7, str(bound), anchor="middle")
    if vertical.axis.dim is not None:
        for at, bound in _spaced(vertical, _LINE - 3):
            yield f'<line x1="{x - 4:.1f}" y1="{y + at:.1f}" x2="{x:.1f}" y2="{y + at:.1f}" stroke="#000"/>'
            yield _text(x - 7, y + at + 4, str(bound), anchor="end")


def _spaced(scale: _Scale, least: float) -> Iterator[tuple[float, int]]:
    bounds, last = scale.axis.bounds, len(scale.at) - 1
    free = -least
    for number, at in enumerate(scale.at):
        if number == last or (at - free >= least and scale.length - at >= least) or number == 0:
            yield at, bounds[number]
            free = at


def _legend(holdings: Holdings, folding: Folding, top: float, width: float) -> tuple[list[str], float]:
    """The holders with their colours, in columns; and where it ends."""
    runs = holding_runs(holdings, LEGEND_ENTRIES)
    entries = [(colour_of(run.first) if run.label else None, _clean(_entry_text(run))) for run in runs[:LEGEND_ENTRIES]]
    if any(has_hole(panel, folding) for panel in folding.panels):
        entries.append((_HATCHED, "nobody holds this"))
    longest = max((_CHAR * len(text) + 40 for _, text in entries), default=1.0)
    columns = max(1, int((width - 2 * _MARGIN) // longest))
    parts = []
    for number, (colour, text) in enumerate(entries):
        x, y = _MARGIN + longest * (number % columns), top + _LINE * (1.2 * (number // columns) + 0.5)
        if colour is not None:
            parts.append(_rect(x, y, 12, 12, colour, text))
        parts.append(_text(x + 18 if colour else x, y + 10, text))
    bottom = top + _LINE * (1.2 * ceil(len(entries) / columns) + 0.5)
    if len(runs) > LEGEND_ENTRIES:
        left = len(holdings.holders) - runs[LEGEND_ENTRIES].first
        parts.append(_text(_MARGIN, bottom + _LINE * 0.8, f"and {left} more"))
        bottom += _LINE
    return parts, bottom


def _entry_text(run: HoldingRun) -> str:
    """What a run is, with the label that it has in the picture where that does not tell by itself."""
    return f"{run.label} {run.text}" if run.label.startswith("#") else run.text


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11">'
    )
    background = f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>'
    return "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', head, _HATCH, background, *parts, "</svg>", ""])


def _rect(x: float, y: float, width: float, height: float, fill: str, about: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill={quoteattr(fill)} '
        f'stroke="#333333" stroke-width="0.8"><title>{escape(_clean(about))}</title></rect>'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#000000", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight} xml:space="preserve">'
        f"{escape(_clean(text))}</text>"
    )


def _clean(text: str) -> str:
    """A text without what XML cannot hold: names in a checkpoint may be a stranger's."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
