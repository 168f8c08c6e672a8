"""`dcp plugins`: what is installed, what it registers, and what is wrong with it."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from dcp_core import plugins
from dcp_core.cli.tables import write_json, write_table
from dcp_core.hookspecs import KINDS, Entry
from dcp_core.plugin_checks import weight_problem
from dcp_core.plugin_discovery import PluginRecord

_HEADER = ("plugin", "from", "kind", "name", "made by", "state")


@dataclass(frozen=True, slots=True)
class _EntryReport:
    """One thing that a plugin registers; `problem` is None where none is known, `missing` a framework not installed."""

    kind: str
    name: str
    framework: str | None
    factory: str
    problem: str | None
    missing: str | None


@dataclass(frozen=True, slots=True)
class _PluginReport:
    """One plugin; `problem` says why nothing of it serves, or what is wrong with importing it."""

    name: str
    origin: str
    problem: str | None
    entries: list[_EntryReport]

    @property
    def is_well(self) -> bool:
        return self.problem is None and all(entry.problem is None for entry in self.entries)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.add_argument(
        "--check",
        action="store_true",
        help="import the types and make everything that is registered; imports the frameworks",
    )


def run(arguments: argparse.Namespace) -> int:
    """List the plugins; 1 when something is broken, or claimed twice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the list tells of broken plugins
        reports = [_report(record, check=arguments.check) for record in plugins.plugins()]
    if arguments.json:
        write_json({"plugins": [asdict(report) for report in reports]})
    else:
        write_table(_HEADER, [row for report in reports for row in _rows(report)])
    return 0 if all(report.is_well for report in reports) else 1


def _report(record: PluginRecord, *, check: bool) -> _PluginReport:
    entries = [_entry_report(entry, record, check=check) for entry in record.entries]
    problem = record.problem or (weight_problem(record.module) if check else None)
    return _PluginReport(record.name, record.origin, problem, entries)


def _entry_report(entry: Entry, record: PluginRecord, *, check: bool) -> _EntryReport:
    framework = getattr(entry, "framework", None)
    problem = plugins.problem_of(entry, record, check=check)
    return _EntryReport(
        KINDS[type(entry)], entry.name, framework, entry.factory, problem, plugins.missing(entry, record)
    )


def _rows(report: _PluginReport) -> Iterator[tuple[str, ...]]:
    if report.problem is not None or not report.entries:
        state = "registers nothing" if report.problem is None else f"broken: {report.problem}"
        yield report.name, report.origin, "", "", "", _one_line(state)
    for entry in report.entries:
        yield report.name, report.origin, entry.kind, entry.name, entry.factory, _one_line(_state(entry))


def _state(entry: _EntryReport) -> str:
    if entry.problem is not None:
        return f"broken: {entry.problem}"
    return "ok" if entry.missing is None else f"{entry.missing} is not installed"


def _one_line(text: str) -> str:
    return " ".join(text.split())
