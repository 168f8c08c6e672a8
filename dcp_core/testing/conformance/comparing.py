"""Comparing bits, and saying in words where they differ: pytest would show two long strings of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcp_core.testing.conformance.samples import Bits, raw


def difference(found: Bits | bytes, expected: Bits) -> str | None:
    """Say where bits differ: the first element, the first byte, and how many elements.

    Args:
        found: Raw bits, as an array or in row-major order, little-endian.
        expected: What they should be.

    Returns:
        A clause for a message; None where all bits are the same.

    >>> difference(bytes(2), np.array([[0], [1]], np.uint8))
    'the first difference is at element (1, 0), byte 1 of 2: found 0x00, expected 0x01; 1 of 2 elements differs'
    """
    given = found if isinstance(found, bytes) else raw(found)
    wanted = raw(expected)
    if given == wanted:
        return None
    if len(given) != len(wanted):
        return f"found {len(given)} bytes, expected {len(wanted)}"
    one, other = (np.frombuffer(each, np.uint8).reshape(-1, expected.itemsize) for each in (given, wanted))
    byte = int(np.flatnonzero(one.reshape(-1) != other.reshape(-1))[0])
    elements = np.flatnonzero((one != other).any(axis=1))
    first = int(elements[0])
    place = tuple(int(index) for index in np.unravel_index(first, expected.shape))
    verb = "differs" if len(elements) == 1 else "differ"
    return (
        f"the first difference is at element {place}, byte {byte} of {len(wanted)}: found 0x{_hex(one[first])}, "
        f"expected 0x{_hex(other[first])}; {len(elements)} of {len(one)} elements {verb}"
    )


def _hex(element: Any) -> str:
    """An element's bytes as one number, the highest digit first."""
    return bytes(element)[::-1].hex()


def check_same(found: Bits | bytes, expected: Bits, where: str, usual_cause: str = "") -> None:
    """Fail a test, in words, unless bits are the same.

    Args:
        found: Raw bits, as `difference` takes them.
        expected: What they should be.
        where: Which bits, for the message.
        usual_cause: What is mostly wrong then.
    """
    __tracebackhide__ = True
    problem = told_difference(found, expected, where, usual_cause)
    if problem is not None:
        pytest.fail(problem)


def told_difference(found: Bits | bytes, expected: Bits, where: str, usual_cause: str = "") -> str | None:
    """The message of `check_same`; None where the bits are the same."""
    problem = difference(found, expected)
    if problem is None:
        return None
    return f"{where}: {problem}" + (f" (the usual cause: {usual_cause})" if usual_cause else "")
