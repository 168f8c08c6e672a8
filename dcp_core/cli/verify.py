"""`dcp verify PATH`: is a checkpoint whole? Lists everything that is wrong with it."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from dcp_core.cli.storage_options import add_storage_options, parsed_storage_options
from dcp_core.cli.tables import counted, shown_bytes, write_error, write_json, write_line, write_table
from dcp_core.convert.progress import Advance, progress_bar
from dcp_core.errors import ArgumentError, DcpError, NotFoundError
from dcp_core.inspection.report import Problem, VerifyReport, keys_text
from dcp_core.inspection.text_picture import boxes_text
from dcp_core.inspection.verify import verify
from dcp_core.recipes.places import options_for
from dcp_core.storage.urls import redacted

_WHOLE, _DAMAGED, _NO_CHECKPOINT = 0, 1, 2
_SHOWN_PROBLEMS = 100
_SHOWN_STRAYS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="a checkpoint: a directory or URL; or safetensors, or their index"
    )
    parser.add_argument("--quick", action="store_true", help="leave the checksums of data out: reads next to nothing")
    parser.add_argument("--json", action="store_true", help="write one JSON object; of several paths, an array of them")
    add_storage_options(parser)
    parser.epilog = "exit codes: 0 whole, 1 not whole, 2 no checkpoint, or wrong arguments; of several, the highest"


def run(arguments: argparse.Namespace) -> int:
    """Verify; 0 when the checkpoints are whole, 1 when one is not, 2 when there is none."""
    given = parsed_storage_options(arguments)
    each_options = options_for(given, *arguments.paths)
    codes, values = [], []
    for path, options in zip(arguments.paths, each_options, strict=True):
        try:
            with _Bar() as bar:
                report = verify(path, quick=arguments.quick, progress=bar, storage_options=options)
        except DcpError as error:
            write_error(error)
            codes.append(_NO_CHECKPOINT if isinstance(error, (NotFoundError, ArgumentError)) else _DAMAGED)
            values.append({"place": redacted(path), "error": str(error)})
            continue
        codes.append(_WHOLE if report.is_whole else _DAMAGED)
        values.append(report.to_values())
        if not arguments.json:
            _write(report)
    if arguments.json and len(values) > 1:
        write_json(values)
    elif arguments.json and "error" not in values[0]:
        write_json(values[0])
    return max(codes)


def _write(report: VerifyReport) -> None:
    count = len(report.problems) + report.more_problems
    if report.is_whole:
        verdict = ("whole", "bold green") if not report.is_quick else ("whole, as far as a quick look tells", "green")
    else:
        verdict = (counted(count, "problem"), "bold red")
    write_line((f"{report.place}: ", "bold"), verdict)
    for save_id in report.save_ids[:1]:
        more = f" and {len(report.save_ids) - 1} more" if len(report.save_ids) > 1 else ""
        write_line(f"  save {save_id}{more}")
    if report.format != "none":
        tensors, values = counted(report.tensors, "tensor"), counted(report.objects, "other value")
        write_line(f"  {tensors} in {boxes_text(report.chunks)}, {values}")
        write_line(f"  {counted(report.files, 'data file')}, {shown_bytes(report.nbytes)}; {_checked(report)}")
    for note in report.notes:
        write_line("  note: ", note)
    for problem in report.problems[:_SHOWN_PROBLEMS]:
        _write_problem(problem)
    if count > _SHOWN_PROBLEMS:
        write_line(f"and {count - _SHOWN_PROBLEMS} more problems (--json lists up to {len(report.problems)})")
    if report.strays:
        harm = "which does no harm" if len(report.strays) == 1 else "which do no harm"
        write_line(f"{counted(len(report.strays), 'other name')} in the directory, {harm}:")
        rows = [
            (stray.name, stray.kind, "" if stray.nbytes is None else shown_bytes(stray.nbytes), stray.text)
            for stray in report.strays[:_SHOWN_STRAYS]
        ]
        write_table(("name", "kind", "size", "what it is"), rows)
        if len(report.strays) > _SHOWN_STRAYS:
            write_line(f"and {len(report.strays) - _SHOWN_STRAYS} more")


def _checked(report: VerifyReport) -> str:
    if report.format != "dcp":
        return "no checksums to compare with"
    if report.is_quick:
        return "not compared with checksums"
    return f"{shown_bytes(report.checked_nbytes)} compared with checksums in {report.seconds:.1f} s"


def _write_problem(problem: Problem) -> None:
    place = problem.file
    if problem.byte_offset is not None and problem.nbytes is not None:
        place += f"  bytes {problem.byte_offset} to {problem.byte_offset + problem.nbytes}"
    write_line((f"{problem.kind}", "bold red"), f"  {place}" if place else "")
    lines = [
        ("what", problem.text),
        ("keys", keys_text(problem.keys, problem.more_keys)),
        ("expected", problem.expected),
        ("found", problem.found),
        ("remedy", problem.remedy),
    ]
    for label, text in lines:
        if text:
            write_line((f"  {label:10}", "dim"), " ".join(text.split()))


class _Bar:
    """A bar on stderr, from the moment on when it is known how much there is to do."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._advance: Advance | None = None
        self._done = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def __call__(self, done: int, total: int) -> None:
        if self._advance is None:
            self._advance = self._stack.enter_context(progress_bar("verifying", total))
        self._advance(done - self._done)
        self._done = done
