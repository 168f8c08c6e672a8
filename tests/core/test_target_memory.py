"""Which targets reach into each other's memory, against the addresses of all their elements."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dcp_core.planning.target_memory import overlapping


def bytes_of(array: npt.NDArray[Any]) -> tuple[int, int]:
    """The first byte of an array's elements, and one past the last."""
    places = [array.__array_interface__["data"][0] + 0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        places = [place + index * stride for place in places for index in range(size)]
    return min(places), max(places) + array.itemsize


@pytest.mark.parametrize("seed", range(100))
def test_targets_overlap_where_their_ranges_of_memory_do(seed: int) -> None:
    rng = Random(seed)
    memory = np.zeros((20, 30), rng.choice([np.uint8, np.float32, np.float64]))
    targets: list[npt.NDArray[Any] | None] = []
    for _ in range(rng.randint(0, 7)):
        row, column = rng.randrange(18), rng.randrange(28)
        found = memory[row : row + rng.randint(1, 3), column : column + rng.randint(1, 5)]
        found = found[:: rng.choice([1, -1]), :: rng.choice([1, 2, -1])]
        targets.append(rng.choice([found, found, found.T, found.reshape(-1)[:0], None]))
    ranges = [bytes_of(target) if target is not None and target.size else (0, 0) for target in targets]
    looks = [
        None if target is None else (*place, target.shape, target.strides)
        for target, place in zip(targets, ranges, strict=True)
    ]
    expected = [
        any(low < stop and start < high for other, (low, high) in enumerate(ranges) if looks[other] != looks[number])
        for number, (start, stop) in enumerate(ranges)
    ]
    assert overlapping(targets).tolist() == expected
