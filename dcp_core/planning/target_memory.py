"""Which targets of a load reach into each other's memory.

Pure. What one of them is filled with may end in another one, whenever that is read. So its bytes cannot be sent to
others, who expect what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.metadata import Int64
from dcp_core.planning.span_columns import Mask


def overlapping(targets: Sequence[npt.NDArray[Any] | None]) -> Mask:
    """Find targets whose range of memory, from the first byte to the last, meets that of a different one.

    Args:
        targets: Arrays on a target's memory; None for one without elements, or that is not in host memory.

    Returns:
        Shape (N,). Ranges with gaps may meet where no element does. Targets that are the same memory throughout are
        one target.

    >>> row = np.zeros(6)
    >>> overlapping([row[:3], row[3:], row[2:4], None]).tolist()
    [True, True, True, False]
    >>> overlapping([row[:3], row[3:]]).tolist()
    [False, False]
    """
    found: Mask = np.zeros(len(targets), dtype=np.bool_)
    filled = [(row, target) for row, target in enumerate(targets) if target is not None and target.size]
    ranges = [range_of(target) for _, target in filled]
    ascending = sorted(ranges)
    if all(stop <= start for (_, stop), (start, _) in pairwise(ascending)):
        return found
    same: dict[tuple[object, ...], list[int]] = {}
    for (row, target), reach in zip(filled, ranges, strict=True):
        same.setdefault((reach, target.dtype, target.shape, target.strides), []).append(row)
    bounds = np.array([key[0] for key in same], dtype=np.int64).reshape(-1, 2)
    order = np.argsort(bounds[:, 0], kind="stable")
    start, stop = bounds[order, 0], bounds[order, 1]
    furthest: Int64 = np.maximum.accumulate(stop)
    meets = np.zeros(len(order), dtype=np.bool_)
    meets[1:] = start[1:] < furthest[:-1]
    meets[:-1] |= stop[:-1] > start[1:]
    rows = list(same.values())
    for number in order[meets].tolist():
        found[rows[number]] = True
    return found


def range_of(array: npt.NDArray[Any]) -> tuple[int, int]:
    """The addresses of the first byte of an array's elements, and one past the last."""
    start: int = array.__array_interface__["data"][0]
    if array.flags.c_contiguous:
        return start, start + array.nbytes
    reaches = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    low, high = sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches)
    return start + low, start + high + array.itemsize
