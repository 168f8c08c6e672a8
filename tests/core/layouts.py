"""Random ways to cut tensors into boxes and to deal the boxes to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from random import Random
from typing import Any

from dcp_core.box import Box, slices


def at(box: Box) -> Any:
    """The index of a box; of a 0-d array it gives an array too."""
    return (*slices(box), ...)


def random_shape(rng: Random, most_dims: int = 4, largest: int = 6) -> tuple[int, ...]:
    """0-d and empty shapes now and then."""
    shape = [rng.randint(1, largest) for _ in range(rng.randint(0, most_dims))]
    if shape and rng.random() < 0.08:
        shape[rng.randrange(len(shape))] = 0
    return tuple(shape)


def grid_cut(rng: Random, shape: Sequence[int]) -> list[Box]:
    """Cut some dimensions at random places, all the way through."""
    intervals = []
    for size in shape:
        inner = range(1, size) if rng.random() < 0.6 else range(0)
        cuts = sorted(rng.sample(inner, min(len(inner), rng.randint(0, 3))))
        intervals.append(list(pairwise([0, *cuts, size])))
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*intervals)]


def irregular_cut(rng: Random, shape: Sequence[int], pieces: int) -> list[Box]:
    """Cut one random box in two, again and again."""
    boxes = [Box.whole(shape)]
    for _ in range(pieces - 1):
        box = boxes.pop(rng.randrange(len(boxes)))
        wide = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not wide:
            boxes.append(box)
            continue
        dim = rng.choice(wide)
        at = rng.randint(1, box.sizes[dim] - 1)
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + at, sizes[dim] - at
        boxes.append(Box(box.offsets, (*box.sizes[:dim], at, *box.sizes[dim + 1 :])))
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


def random_cut(rng: Random, shape: Sequence[int], pieces: int = 12) -> list[Box]:
    """A tiling of a tensor, regular or not; no box is empty, so an empty tensor has none."""
    if 0 in shape:
        return []
    kind = rng.randrange(4)
    if kind == 0:
        return [Box.whole(shape)]
    return grid_cut(rng, shape) if kind == 1 else irregular_cut(rng, shape, rng.randint(1, pieces))


def deal(rng: Random, boxes: Sequence[Box], ranks: int, copies: float = 0.3) -> list[list[Box]]:
    """Give every box to one rank or, with probability `copies`, to several; each rank's boxes in a random order."""
    hands: list[list[Box]] = [[] for _ in range(ranks)]
    for box in boxes:
        count = rng.randint(1, ranks) if rng.random() < copies else 1
        for rank in rng.sample(range(ranks), count):
            hands[rank].append(box)
    for hand in hands:
        rng.shuffle(hand)
    return hands
