"""Tables and lines on a terminal: by rich where it is installed, as plain columns where not, or where nobody looks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

_GAP = "  "


def write_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to stdout.

    Args:
        header: Names of the columns.
        rows: One text for each column. The last one may be long.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    rich = _rich() if sys.stdout.isatty() else None
    if rich is None:
        sys.stdout.write(plain_table(header, rows))
        return
    console, table_type, text_type = rich
    table = table_type(*header)
    for row in rows:
        table.add_row(*[text_type(cell) for cell in row])  # as text: what stands in brackets is no markup
    console().print(table)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as columns, left-aligned, two blanks between them.

    >>> print(plain_table(["name", "what"], [["a", "first"], ["long", "second"]]), end="")
    name  what
    a     first
    long  second
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    joined = [_GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "".join(f"{line.rstrip()}\n" for line in joined)


def write_line(*pieces: str | tuple[str, str]) -> None:
    """Write a line to stdout.

    Args:
        pieces: Texts, each alone or with a style, such as "bold red", that shows on a terminal where rich is installed.
    """
    pairs = [(piece, "") if isinstance(piece, str) else piece for piece in pieces]
    parts = [(printable(text), style) for text, style in pairs]
    rich = _rich() if sys.stdout.isatty() else None
    if rich is None:
        sys.stdout.write("".join(text for text, _ in parts).rstrip() + "\n")
        return
    console, _, text_type = rich
    console(highlight=False).print(text_type.assemble(*parts), soft_wrap=True)


def printable(text: str) -> str:
    r"""A text with what controls a terminal spelled out: names in a checkpoint may be a stranger's.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def write_error(error: BaseException) -> None:
    """Write what went wrong to stderr; what controls a terminal is spelled out, line by line."""
    sys.stderr.write("".join(f"{printable(line)}\n" for line in f"dcp: {error}".split("\n")))


def shown_bytes(nbytes: int) -> str:
    """Bytes for people.

    >>> shown_bytes(512), shown_bytes(5 << 30)
    ('512 B', '5.0 GiB')
    """
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"


def _rich() -> tuple[Any, Any, Any] | None:
    """What is needed of rich, or None where it is not installed (the extra `cli` brings it)."""
    try:
        console, table, text = (importlib.import_module(f"rich.{name}") for name in ("console", "table", "text"))
    except ImportError:
        return None
    return console.Console, table.Table, text.Text
