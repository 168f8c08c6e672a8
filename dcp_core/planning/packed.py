"""Buffers that several tensors are packed into: which elements of whose a range of such a buffer has.

In: the range, and the tensors with their shapes, in the order in which they are packed. Out: for each tensor the part
of the range that is its. Pure; adapter packages take their buffers apart by it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_core.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class PackedPart:
    """What a range of a buffer has of one tensor.

    Attributes:
        start: Its first element, counted in the range.
        stop: One past its last; `start` where there is none.
        offset: Which element of the flattened tensor comes first.
        shape: Global shape of the tensor.
    """

    start: int
    stop: int
    offset: int
    shape: tuple[int, ...]


def packed_parts(
    start: int, numel: int, shapes: Mapping[str, Sequence[int]], begins: Mapping[str, int] | None = None
) -> dict[str, PackedPart]:
    """Find the part of each tensor in a range of the buffer.

    Args:
        start: Which element of the whole buffer comes first in the range.
        numel: Elements of the range.
        shapes: For each tensor its name and its global shape, in the order in which they are packed.
        begins: For each tensor where it begins in the whole buffer; None: they follow each other without a gap.

    Returns:
        By name, in the order of `shapes`.

    Raises:
        ArgumentError: What should be a whole number that is not negative is none, or `begins` names other tensors.

    >>> packed_parts(4, 5, {"a": (2, 3), "b": (4,)})["b"]
    PackedPart(start=2, stop=5, offset=0, shape=(4,))
    """
    first = _count("start", start)
    sizes = {name: _shape(name, shape) for name, shape in _by_name("shapes", shapes).items()}
    found: dict[str, PackedPart] = {}
    for name, begin in _begins(sizes, begins).items():
        end = begin + math.prod(sizes[name])
        low = min(max(begin, first), end)
        high = max(min(end, first + numel), low)
        within = (low - first, high - first) if low < high else (0, 0)
        found[name] = PackedPart(*within, low - begin, sizes[name])
    return found


def _begins(sizes: Mapping[str, tuple[int, ...]], begins: Mapping[str, int] | None) -> dict[str, int]:
    """Where each tensor begins in the whole buffer."""
    if begins is None:
        found, at = {}, 0
        for name, shape in sizes.items():
            found[name] = at
            at += math.prod(shape)
        return found
    begins = _by_name("begins", begins)
    if set(begins) != set(sizes):
        raise ArgumentError(
            f"begins must name the tensors that shapes names; these are only in one of them: "
            f"{', '.join(sorted(set(begins) ^ set(sizes)))}"
        )
    return {name: _count(f"the begin of {name}", begins[name]) for name in sizes}


def _by_name(what: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise ArgumentError(f"{what} must map names of tensors, found {found!r}")
    if not all(isinstance(name, str) for name in found):
        raise ArgumentError(f"{what} must map names of tensors, which are str, found {found!r}")
    return found


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    if isinstance(shape, (str, bytes, Mapping)) or not isinstance(shape, Iterable):
        raise ArgumentError(f"the shape of {name} must be a sequence of whole numbers, found {shape!r}")
    return tuple([_count(f"the shape of {name}", size) for size in shape])


def _count(name: str, value: Any) -> int:
    try:
        found = operator.index(value)
    except TypeError as error:
        raise ArgumentError(f"{name} must be made of whole numbers, found {value!r}") from error
    if found < 0:
        raise ArgumentError(f"{name} must not be negative, found {found}")
    return found
