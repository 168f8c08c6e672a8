"""Tables and lines on a terminal: by rich where it is installed, as plain columns where not, or where nobody looks."""

from __future__ import annotations

import importlib
import json
import os
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

from dcp_core.errors import StorageError

_GAP = "  "
_WIDEST = 60  # of a plain column: what is longer moves only its own row
_SHORT = 24  # what is no longer is never broken into lines
_FRAME = 3  # what a frame takes of the width, for each column


def write_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to stdout.

    Args:
        header: Names of the columns.
        rows: One text for each column.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    rich = _rich() if sys.stdout.isatty() else None
    console = None if rich is None else rich[0]()
    widths = [max(map(width_of, column)) for column in zip(header, *rows, strict=True)]
    if rich is None or console is None or sum(min(width, _SHORT) + _FRAME for width in widths) > console.width:
        write_text(plain_table(header, rows))
        return
    _, table_type, text_type = rich
    table = table_type()
    for name, width in zip(header, widths, strict=True):  # long cells are broken into lines, none is cut short
        table.add_column(name, no_wrap=width <= _SHORT, overflow="fold")
    for row in rows:
        table.add_row(*[text_type(cell) for cell in row])  # as text: what stands in brackets is no markup
    _print(console, table)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as columns, left-aligned, two blanks between them.

    >>> print(plain_table(["name", "what"], [["a", "first"], ["long", "second"]]), end="")
    name  what
    a     first
    long  second
    """
    lines = [list(header), *map(list, rows)]
    widths = [min(max(width_of(line[column]) for line in lines), _WIDEST) for column in range(len(header))]
    joined = [_GAP.join(map(_padded, line, widths)) for line in lines]
    return "".join(f"{line.rstrip()}\n" for line in joined)


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - width_of(cell))


def width_of(text: str) -> int:
    """How many columns of a terminal a text takes.

    >>> width_of("abc"), width_of("\u5c64")
    (3, 2)
    """
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(unicodedata.combining(each) > 0 for each in text)


def write_line(*pieces: str | tuple[str, str]) -> None:
    """Write a line to stdout.

    Args:
        pieces: Texts, each alone or with a style, such as "bold red", that shows on a terminal where rich is installed.
    """
    pairs = [(piece, "") if isinstance(piece, str) else piece for piece in pieces]
    parts = [(printable(text), style) for text, style in pairs]
    rich = _rich() if sys.stdout.isatty() else None
    if rich is None:
        write_text("".join(text for text, _ in parts).rstrip() + "\n")
        return
    console, _, text_type = rich
    _print(console(highlight=False), text_type.assemble(*parts), soft_wrap=True)


def write_json(values: Any) -> None:
    """Write one JSON value to stdout."""
    write_text(json.dumps(values, indent=2) + "\n")


def write_text(text: str) -> None:
    """Write a text to stdout as it stands.

    Raises:
        StorageError: It cannot be written, because the disk is full, say. Where whoever read it has left, as `head`
            does, nothing is raised, and all that follows goes nowhere: a command still ends with its own exit code.
    """
    try:
        sys.stdout.write(text)
    except OSError as error:
        _give_up_output(error)


def flush_output() -> None:
    """Write what is waiting to be written to stdout.

    Raises:
        StorageError: See `write_text`.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        _give_up_output(error)


def write_error(error: object) -> None:
    """Write one line to stderr that says what is wrong."""
    sys.stderr.write(f"dcp: {printable(' '.join(str(error).split()))}\n")


def _print(console: Any, *pieces: Any, **options: Any) -> None:
    try:
        console.print(*pieces, **options)
    except OSError as error:
        _give_up_output(error)


def _give_up_output(error: OSError) -> None:
    """Send what is still to be written nowhere, so that the end of the process does not fail at it once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        raise StorageError(f"cannot write the output: {error.strerror or error}") from error


def can_be_written(text: str) -> bool:
    """Whether stdout's encoding has all characters of a text."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    r"""A text with what controls a terminal spelled out: names in a checkpoint may be a stranger's.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def counted(count: int, one: str, several: str = "") -> str:
    """A number of things, in words.

    >>> counted(1, "tensor"), counted(2, "tensor"), counted(0, "box", "boxes")
    ('1 tensor', '2 tensors', '0 boxes')
    """
    return f"{count} {one if count == 1 else several or one + 's'}"


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
