"""`dcp diff A B`: in what do two checkpoints differ, whatever their layouts? Exit codes are those of diff."""

from __future__ import annotations

import argparse
import sys

from dcp_core.cli.sources import open_reader
from dcp_core.cli.storage_options import add_storage_options, parsed_storage_options
from dcp_core.cli.tables import counted, shown_bytes, write_error, write_json, write_line, write_table
from dcp_core.convert.progress import progress_bar
from dcp_core.errors import ArgumentError, DcpError
from dcp_core.inspection.comparison import Comparison, Difference, compare, compared_nbytes
from dcp_core.inspection.detection import checkpoint_format
from dcp_core.inspection.names import key_matcher
from dcp_core.inspection.scope import Scope, Tolerance
from dcp_core.recipes.places import options_for
from dcp_core.storage.urls import redacted

_SAME, _DIFFERENT, _TROUBLE = 0, 1, 2
_LIMIT = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("a", metavar="A", help="a checkpoint: a directory or URL; or safetensors, or their index")
    parser.add_argument("b", metavar="B", help="the other one; its layout and its format may differ")
    parser.add_argument("--keys", metavar="GLOB", help="only names that match, as B has them")
    parser.add_argument("--common", action="store_true", help="leave out what only one of them has")
    parser.add_argument("--prefix", default="", help="of A, only names under this, without it")
    parser.add_argument(
        "--rename", nargs=2, action="append", default=[], metavar=("PATTERN", "REPLACEMENT"),
        help="what names of A are called in B: a regular expression and what replaces its match; the first that "
        "matches counts",
    )  # fmt: skip
    parser.add_argument(
        "--rank", type=int, metavar="R", help="what this rank would load: its own values, and all ranks'"
    )
    parser.add_argument("--no-values", action="store_true", help="compare names, types and shapes only")
    parser.add_argument("--no-types", action="store_true", help="types may differ, as long as values do not")
    parser.add_argument(
        "--rtol", type=float, default=0.0, metavar="R", help="numbers count as equal that differ by R * |b| at most (0)"
    )
    parser.add_argument("--atol", type=float, default=0.0, metavar="D", help="or by D at most; both add up (0)")
    parser.add_argument("--limit", type=int, default=_LIMIT, metavar="N", help=f"differences shown; 0: all ({_LIMIT})")
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    add_storage_options(parser)
    parser.epilog = "exit codes: 0 nothing differs, 1 something does, 2 trouble"


def run(arguments: argparse.Namespace) -> int:
    """Compare; 0 when nothing differs, 1 when something does, 2 when something cannot be read."""
    if arguments.limit < 0:
        raise ArgumentError("--limit takes a number, 0 or more")
    try:
        found = _compared(arguments)
    except DcpError as error:
        write_error(error)
        return _TROUBLE
    if arguments.json:
        write_json({"a": redacted(arguments.a), "b": redacted(arguments.b), **found.to_values()})
    else:
        _write(found, arguments.limit or len(found.differences))
    if not found.is_sure:
        return _TROUBLE
    return _SAME if found.is_equal else _DIFFERENT


def _compared(arguments: argparse.Namespace) -> Comparison:
    scope = Scope(
        wanted=None if arguments.keys is None else key_matcher(arguments.keys),
        prefix=arguments.prefix,
        rename=dict(arguments.rename) or None,
        rank=arguments.rank,
        only_common=arguments.common,
        values=not arguments.no_values,
        types=not arguments.no_types,
        tolerance=Tolerance(arguments.rtol, arguments.atol),
    )
    paths = arguments.a, arguments.b
    each_options = options_for(parsed_storage_options(arguments), *paths)
    a, b = (
        open_reader(path, checkpoint_format(path, options), options)
        for path, options in zip(paths, each_options, strict=True)
    )
    is_watched = scope.values and sys.stderr.isatty()
    with progress_bar("comparing", compared_nbytes(a, scope) if is_watched else 0) as advance:
        found = compare(a, b, scope, advance=advance)
    if not found.tensors and not found.objects and not found.differences:
        raise ArgumentError(f"nothing was compared: no name is in the scope{_of_keys(arguments.keys)}")
    return found


def _of_keys(keys: str | None) -> str:
    return "" if keys is None else f" of --keys {keys!r}"


def _write(found: Comparison, limit: int) -> None:
    compared = f"{counted(found.tensors, 'tensor')} and {counted(found.objects, 'other value')} in both"
    read = f", {shown_bytes(found.nbytes)} compared" if found.values_compared else "; values were not compared"
    left_out = f"; {found.left_out} only in one of them were left out" if found.left_out else ""
    if found.is_equal:
        write_line(("nothing differs", "bold green"), f": {compared}{read}{left_out}")
        return
    count = len(found.differences)
    write_line((counted(count, "difference"), "bold red"), f": {compared}{read}{left_out}")
    shown = found.differences[:limit]
    write_table(("key", "differs in", "a", "b", "how"), [_row(each) for each in shown])
    if count > len(shown):
        write_line(f"and {count - len(shown)} more (--limit 0 shows all)")


def _row(each: Difference) -> tuple[str, ...]:
    name = each.key if each.rank is None else f"{each.key} (of rank {each.rank})"
    if each.kind == "unreadable":
        side, why = ("a", each.a) if each.a else ("b", each.b)
        return name, each.kind, "?" if side == "a" else "", "?" if side == "b" else "", _one_line(f"{side}: {why}")
    return name, each.kind, _one_line(each.a), _one_line(each.b), _how(each)


def _how(each: Difference) -> str:
    if not each.elements:
        return ""
    parts = [f"{each.elements} of {counted(each.of, 'element')}"]
    if each.max_abs is not None:
        parts.append(f"by at most {each.max_abs:.6g}")
    if each.nans:
        parts.append(f"{each.nans} NaN on one side only")
    if each.first is not None:
        parts.append(f"first at {list(each.first)}")
    return ", ".join(parts)


def _one_line(text: str) -> str:
    return " ".join(text.split())
