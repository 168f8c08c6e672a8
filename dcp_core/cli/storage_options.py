"""`--storage-option KEY=VALUE`: what the client of a store gets beside a URL. A value may be a secret: none is shown.

In: texts of a command line. Out: the `storage_options` that functions take.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from dcp_core.errors import ArgumentError
from dcp_core.storage.urls import HIDDEN

_TEXTS = ("key", "secret", "token", "password", "credential")
_ASSIGNED = re.compile(r"=.*", re.DOTALL)


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Declare the option."""
    parser.add_argument(
        "--storage-option", dest="storage_options", action="append", default=[], metavar="KEY=VALUE",
        help="what fsspec gets beside a URL; again for each one. VALUE is JSON where it can be read so, else text. "
        "Others on this machine can see it: leave secrets to the environment",
    )  # fmt: skip


def parsed_storage_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read the options of a command line.

    Raises:
        ArgumentError: One is no KEY=VALUE, or a key comes twice.
    """
    options: dict[str, Any] = {}
    for number, text in enumerate(arguments.storage_options, 1):
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ArgumentError(f"--storage-option number {number} is no KEY=VALUE")
        if key in options:
            raise ArgumentError(f"--storage-option {key} is given twice")
        options[key] = _value(key, value)
    return options


def without_values(message: str) -> str:
    """A complaint about arguments, without what follows an equals sign in each of them.

    >>> without_values("unrecognized arguments: --storage-optoin secret=abc")
    'unrecognized arguments: --storage-optoin secret=***'
    """
    return " ".join(_ASSIGNED.sub(f"={HIDDEN}", word) for word in message.split(" "))


def _value(key: str, text: str) -> Any:
    """A value as JSON; a secret of digits is a text, as its name tells."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return text if is_number and any(word in key.lower() for word in _TEXTS) else value
