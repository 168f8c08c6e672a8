"""Reads the numbers that a manager is given: steps, and how many of something."""

from __future__ import annotations

import operator

import numpy as np

from dcp_core.errors import ArgumentError


def whole_number(name: str, value: object, expected: str, *, least: int = 0, most: int | None = None) -> int:
    """Read a whole number, numpy's and a tensor's included; no bool.

    Args:
        name: What it is, for the error.
        value: What was given.
        expected: Which ones are good, in words.
        least: The smallest one that is good.
        most: The largest one; None: there is none.

    Raises:
        ArgumentError: It is none of those.
    """
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        raise ArgumentError(f"{name} must be a whole number, {expected}, found {value!r}")
    return number
