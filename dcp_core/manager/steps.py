"""The checkpoints of a manager by their steps: what they are called, and what stands for one that cannot be called.

In: a number. Out: the name of a directory.
"""

from __future__ import annotations

import os
import re

from dcp_core.errors import ArgumentError
from dcp_core.manager.survey import step_of
from dcp_core.manager.whole_numbers import whole_number

_PREFIX = "step_"
_OURS = re.compile(rf"{_PREFIX}[0-9]{{1,18}}")
_LARGEST_STEP = 10**18 - 1


def step_number(step: object) -> int:
    """Read the number of a step.

    Raises:
        ArgumentError: It is none.
    """
    return whole_number("step", step, f"from 0 to {_LARGEST_STEP}", most=_LARGEST_STEP)


def name_of(step: object) -> str:
    """Name the directory of a step.

    >>> name_of(100)
    'step_100'
    """
    return f"{_PREFIX}{step_number(step)}"


def is_step_name(name: str) -> bool:
    """Whether a manager makes directories of such names.

    >>> is_step_name("step_100"), is_step_name("final_100"), is_step_name("step_100.old")
    (True, False, False)
    """
    return _OURS.fullmatch(name) is not None and step_of(name) is not None


class NoPlace(os.PathLike[str]):
    """Stands for a place that one rank cannot name: a save or load raises its error, and so tells the other ranks.

    Args:
        error: What went wrong.
    """

    def __init__(self, error: ArgumentError) -> None:
        self.error = error

    def __fspath__(self) -> str:
        raise self.error
