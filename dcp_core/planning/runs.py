"""Runs: how the cuts of single dimensions make the boxes of a local tensor.

Along one dimension a local tensor is a list of *runs*, half-open ranges of global indices in local order. Adapters cut
these lists by the rules of their framework; here they become boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from dcp_core.box import Box

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """What one rank holds of one tensor.

    Attributes:
        local_shape: Shape of the local tensor.
        boxes: Its boxes in the global tensor, in the order of the local memory; none when it is empty.
        slices: For each box, where in the local tensor it lies.
    """

    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    slices: tuple[tuple[slice, ...], ...]


def layout_of_runs(runs: Sequence[Sequence[Run]]) -> Layout:
    """Where a local tensor lies.

    Args:
        runs: For each dimension its runs, none of them empty.

    >>> layout_of_runs([[(0, 2), (4, 6)], [(1, 3)]]).boxes
    (Box(offsets=(0, 1), sizes=(2, 2)), Box(offsets=(4, 1), sizes=(2, 2)))
    """
    local_shape = tuple(sum(stop - start for start, stop in of_dim) for of_dim in runs)
    placed = [_place(of_dim) for of_dim in runs]
    boxes: list[Box] = []
    slices: list[tuple[slice, ...]] = []
    for combination in product(*placed):
        sizes = tuple(stop - start for (start, stop), _ in combination)
        boxes.append(Box(tuple(start for (start, _), _ in combination), sizes))
        slices.append(tuple(slice(at, at + size) for (_, at), size in zip(combination, sizes, strict=True)))
    return Layout(local_shape, tuple(boxes), tuple(slices))


def whole_runs(size: int) -> list[Run]:
    """The runs of a dimension that nobody cuts: none where it has no elements."""
    return [(0, size)] if size else []


def length_of_runs(runs: Sequence[Run]) -> int:
    """Elements along the dimension that the runs hold."""
    return sum(stop - start for start, stop in runs)


def take_runs(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The part of concatenated runs between two local positions.

    >>> take_runs([(0, 2), (4, 8)], 1, 4)
    [(1, 2), (4, 6)]
    """
    found: list[Run] = []
    at = 0
    for begin, end in runs:
        low, high = max(start - at, 0), min(stop - at, end - begin)
        if low < high:
            found.append((begin + low, begin + high))
        at += end - begin
    return found


def merge_runs(runs: Sequence[Run]) -> list[Run]:
    """The same elements in the same order, in as few runs as possible.

    >>> merge_runs([(0, 2), (2, 3), (5, 6)])
    [(0, 3), (5, 6)]
    """
    found: list[Run] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _place(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    """Each run with its local position."""
    found: list[tuple[Run, int]] = []
    at = 0
    for start, stop in runs:
        found.append(((start, stop), at))
        at += stop - start
    return found
