"""`dcp diff A B`: in what do two checkpoints differ, whatever their layouts? Exit codes are those of diff."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from fnmatch import translate

from dcp_core.cli.sources import open_reader
from dcp_core.cli.tables import shown_bytes, write_error, write_line, write_table
from dcp_core.convert.progress import progress_bar
from dcp_core.errors import DcpError
from dcp_core.inspection.comparison import Comparison, Difference, all_nbytes, compare
from dcp_core.inspection.description import columns_of
from dcp_core.inspection.detection import checkpoint_format

_SAME, _DIFFERENT, _TROUBLE = 0, 1, 2
_LIMIT = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("a", metavar="A", help="a checkpoint: a directory or URL; or safetensors, or their index")
    parser.add_argument("b", metavar="B", help="the other one; its layout and its format may differ")
    parser.add_argument("--keys", metavar="GLOB", help="only names that match, such as 'model.*.weight'")
    parser.add_argument("--no-values", action="store_true", help="compare names, types and shapes only")
    parser.add_argument("--limit", type=int, default=_LIMIT, metavar="N", help=f"differences shown; 0: all ({_LIMIT})")
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.epilog = "exit codes: 0 nothing differs, 1 something does, 2 trouble"


def run(arguments: argparse.Namespace) -> int:
    """Compare; 0 when nothing differs, 1 when something does, 2 when something cannot be read."""
    try:
        found = _compared(arguments)
    except DcpError as error:
        write_error(error)
        return _TROUBLE
    if arguments.json:
        sys.stdout.write(json.dumps({"a": arguments.a, "b": arguments.b, **found.to_values()}, indent=2) + "\n")
    else:
        _write(found, arguments.limit or len(found.differences))
    if not found.is_sure:
        return _TROUBLE
    return _SAME if found.is_equal else _DIFFERENT


def _compared(arguments: argparse.Namespace) -> Comparison:
    wanted = _matcher(arguments.keys)
    readers = [open_reader(path, checkpoint_format(path)) for path in (arguments.a, arguments.b)]
    readers[0].initialize_reader()
    values = not arguments.no_values
    is_watched = values and sys.stderr.isatty()
    total = all_nbytes(columns_of(readers[0].load_metadata().source), wanted) if is_watched else 0
    with progress_bar("comparing", total) as advance:
        return compare(readers[0], readers[1], values=values, wanted=wanted, advance=advance)


def _matcher(pattern: str | None) -> Callable[[str], bool]:
    if pattern is None:
        return lambda name: True
    matches = re.compile(translate(pattern)).match
    return lambda name: matches(name) is not None


def _write(found: Comparison, limit: int) -> None:
    compared = f"{found.tensors} tensors and {found.objects} other values in both"
    read = f", {shown_bytes(found.nbytes)} compared" if found.values_compared else "; values were not compared"
    if found.is_equal:
        write_line(("nothing differs", "bold green"), f": {compared}{read}")
        return
    count = len(found.differences)
    write_line((f"{count} difference{'s' * (count != 1)}", "bold red"), f": {compared}{read}")
    shown = found.differences[:limit]
    write_table(("key", "differs in", "a", "b", "how"), [_row(each) for each in shown])
    if count > len(shown):
        write_line(f"and {count - len(shown)} more (--limit 0 shows all)")


def _row(each: Difference) -> tuple[str, ...]:
    name = each.key if each.rank is None else f"{each.key} (of rank {each.rank})"
    return name, each.kind, _one_line(each.a), _one_line(each.b), _how(each)


def _how(each: Difference) -> str:
    if not each.elements:
        return ""
    parts = [f"{each.elements} of {each.of} elements"]
    if each.max_abs is not None:
        parts.append(f"by at most {each.max_abs:.6g}")
    if each.nans:
        parts.append(f"{each.nans} NaN on one side only")
    if each.first is not None:
        parts.append(f"first at {list(each.first)}")
    return ", ".join(parts)


def _one_line(text: str) -> str:
    return " ".join(text.split())
