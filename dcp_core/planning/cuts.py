"""Where a shard lies in its global tensor: cuts to boxes.

In: the cuts that lead from the global tensor to the local one, in order. Out: the global boxes of the local tensor, and
for each the slices of the local tensor that hold it. Plain values, no mesh, no framework: what a framework's layout
means in cuts is told by its package, or by `planning.tensor_map`.

Along one dimension a local tensor is a list of *runs*, half-open ranges of global indices in local order. A cut takes
one part of that list. A strided cut first cuts the list into `split_factor` pieces, and takes its part of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from dcp_core.box import Box

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh dimension that cuts one tensor dimension.

    Attributes:
        dim: Tensor dimension.
        chunks: Size of the mesh dimension.
        index: The rank's coordinate on it.
        split_factor: Pieces that are cut one by one; 1 for a plain cut.
        balanced: What does not come out even: False for parts of equal, rounded-up size, the last ones short or empty,
            as `torch.chunk` does it; True for parts that differ by one element at most, the first ones longer.
    """

    dim: int
    chunks: int
    index: int
    split_factor: int = 1
    balanced: bool = False


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """What one rank holds of one tensor.

    Attributes:
        local_shape: Shape of the local tensor.
        boxes: Its boxes in the global tensor, in the order of the local memory; none when it is empty.
        slices: For each box, where in the local tensor it lies.
    """

    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    slices: tuple[tuple[slice, ...], ...]


def local_layout(global_shape: Sequence[int], cuts: Sequence[Cut]) -> LocalLayout:
    """Where the local tensor of a rank lies.

    Args:
        global_shape: Shape of the whole tensor.
        cuts: What cuts it, in order.

    >>> local_layout((8, 2), [Cut(0, 2, 1, split_factor=2)]).boxes
    (Box(offsets=(2, 0), sizes=(2, 2)), Box(offsets=(6, 0), sizes=(2, 2)))
    """
    runs: list[list[Run]] = [[(0, size)] if size else [] for size in global_shape]
    for cut in cuts:
        runs[cut.dim] = cut_runs(runs[cut.dim], cut)
    local_shape = tuple(sum(stop - start for start, stop in of_dim) for of_dim in runs)
    placed = [_place(of_dim) for of_dim in runs]
    boxes: list[Box] = []
    slices: list[tuple[slice, ...]] = []
    for combination in product(*placed):
        sizes = tuple(stop - start for (start, stop), _ in combination)
        boxes.append(Box(tuple(start for (start, _), _ in combination), sizes))
        slices.append(tuple(slice(at, at + size) for (_, at), size in zip(combination, sizes, strict=True)))
    return LocalLayout(local_shape, tuple(boxes), tuple(slices))


def cut_runs(runs: Sequence[Run], cut: Cut) -> list[Run]:
    """The runs that remain after one more cut.

    >>> cut_runs([(0, 5)], Cut(0, 4, 2)), cut_runs([(0, 10)], Cut(0, 2, 0, split_factor=2))
    ([(4, 5)], [(0, 3), (5, 8)])
    >>> cut_runs([(0, 5)], Cut(0, 4, 2, balanced=True))
    [(3, 4)]
    """
    length = sum(stop - start for start, stop in runs)
    part_of = _balanced_chunk if cut.balanced else _chunk
    found: list[Run] = []
    for piece in range(cut.split_factor):
        start, stop = _chunk(length, cut.split_factor, piece)
        begin, end = part_of(stop - start, cut.chunks, cut.index)
        found.extend(_take(runs, start + begin, start + end))
    return _merged(found)


def _chunk(length: int, chunks: int, index: int) -> Run:
    """Which part `torch.chunk` gives to `index`: parts of equal, rounded-up size, the last ones short or empty."""
    size = -(-length // chunks)
    return min(size * index, length), min(size * (index + 1), length)


def _balanced_chunk(length: int, chunks: int, index: int) -> Run:
    """Which part `index` has when parts differ by one element at most, the first ones longer."""
    size, longer = divmod(length, chunks)
    start = size * index + min(index, longer)
    return start, start + size + (index < longer)


def _take(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The part of concatenated runs between two local positions."""
    found: list[Run] = []
    at = 0
    for begin, end in runs:
        low, high = max(start - at, 0), min(stop - at, end - begin)
        if low < high:
            found.append((begin + low, begin + high))
        at += end - begin
    return found


def _merged(runs: Sequence[Run]) -> list[Run]:
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
