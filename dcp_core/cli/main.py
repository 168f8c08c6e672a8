"""Finds the command that was asked for and runs it.

In: arguments. Out: an exit code: 0, all is well; 1, what was looked at is not, or the command failed and said why on
stderr; 2, the arguments make no sense.

A command is a module with two functions: `add_arguments(parser)`, and `run(arguments) -> int`. One line of `COMMANDS`
makes it known; only the module of the command that runs is imported.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from dcp_core import __version__
from dcp_core.cli.storage_options import without_values
from dcp_core.cli.tables import flush_output, write_error
from dcp_core.errors import ArgumentError, DcpError

OK, NOT_WELL, USAGE = 0, 1, 2
_INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        module: Where it is.
        summary: What it does, in one line.
    """

    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    "convert": Command("dcp_core.cli.convert", "convert a checkpoint to another format"),
    "diff": Command("dcp_core.cli.diff", "tell in what two checkpoints differ, whatever their layouts"),
    "inspect": Command("dcp_core.cli.inspect", "show what is in a checkpoint, and who holds what"),
    "plugins": Command("dcp_core.cli.plugins", "list the plugins that are installed, and what is wrong with them"),
    "verify": Command("dcp_core.cli.verify", "tell whether a checkpoint is whole, and all that is wrong with it"),
}
"""Every command by its name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What follows `dcp`; None for those of this process.

    Returns:
        The exit code.
    """
    _prepare_streams()
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except DcpError as error:
        write_error(error)
        return USAGE if isinstance(error, ArgumentError) else NOT_WELL
    except KeyboardInterrupt:
        write_error("interrupted")
        return _INTERRUPTED


def _prepare_streams() -> None:
    """See that whatever is written can be: by a process without stdout, and in any encoding."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # for the whole process
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def _run(arguments: list[str]) -> int:
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = _Parser(prog="dcp", description="Look after checkpoints and plugins.")
    parser.add_argument("--version", action="version", version=f"hyper-dcp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    module = None
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.summary, description=_sentence(command.summary))
        if name == named:
            module = importlib.import_module(command.module)
            module.add_arguments(sub)
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit as ended:  # argparse has said what is wrong, or what there is
        return ended.code if isinstance(ended.code, int) else USAGE
    assert module is not None, "argparse has refused every other name"
    code = int(module.run(parsed))
    flush_output()
    return code


class _Parser(argparse.ArgumentParser):
    """Complains about arguments without showing their values, which may be secrets."""

    def error(self, message: str) -> NoReturn:
        super().error(without_values(message))


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."
