"""Where a shard lies in its global tensor: placements to boxes, as torch lays elements out.

In: placements, mesh shape, the rank's coordinate, global shape: plain values, no mesh, no communication.
Out: the global boxes of the local tensor, and for each the slices of the local tensor that hold it.

Along one dimension a local tensor is a list of *runs*, half-open ranges of global indices in local order. A `Shard`
cuts that list as `torch.chunk` does; a `_StridedShard` (FSDP2 over tensor parallelism) first cuts it into
`split_factor` pieces, and takes its part of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dcp_core.box import Box
from dcp_core.errors import UnsupportedValueError

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh dimension that cuts one tensor dimension.

    Attributes:
        dim: Tensor dimension.
        chunks: Size of the mesh dimension.
        index: The rank's coordinate on it.
        split_factor: Pieces that are cut one by one; 1 for a plain `Shard`.
    """

    dim: int
    chunks: int
    index: int
    split_factor: int = 1


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


def placement_cuts(
    placements: Sequence[Any],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    ndim: int,
    shard_order: Mapping[int, Sequence[int]] | None = None,
) -> tuple[Cut, ...]:
    """Translate DTensor placements.

    Args:
        placements: One a mesh dimension.
        mesh_shape: Ranks along each mesh dimension.
        coordinate: This rank's place on the mesh.
        ndim: Dimensions of the tensor.
        shard_order: Tensor dimension to the mesh dimensions that cut it, in the order in which they do; by default
            from left to right.

    Returns:
        The cuts in the order in which they apply. Replication is no cut.

    Raises:
        UnsupportedValueError: A `Partial`, or a placement that is not known.
    """
    cuts = {
        mesh_dim: _placement_cut(placement, mesh_shape[mesh_dim], coordinate[mesh_dim], ndim)
        for mesh_dim, placement in enumerate(placements)
    }
    order = {dim: list(mesh_dims) for dim, mesh_dims in (shard_order or {}).items()}
    found: list[Cut] = []
    for mesh_dim, cut in cuts.items():
        if cut is None:
            continue
        queue = order.get(cut.dim)
        ordered = cuts[queue.pop(0)] if queue else cuts[mesh_dim]
        if ordered is not None:
            found.append(ordered)
    return tuple(found)


def _placement_cut(placement: Any, chunks: int, index: int, ndim: int) -> Cut | None:
    # Here, because importing DTensor takes half a second and whoever holds a placement has done it.
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Partial):
        raise UnsupportedValueError(
            f"the tensor has the placement {placement}: each rank holds a partial sum that was not reduced yet, "
            "so no rank holds its values; call redistribute() with Replicate() or Shard() in its place first"
        )
    if not isinstance(placement, (Shard, _StridedShard)):
        raise UnsupportedValueError(
            f"the tensor has the placement {placement!r} of a kind that is not known; redistribute() it to Shard and "
            "Replicate, or register a describer for its type"
        )
    dim = placement.dim if placement.dim >= 0 else placement.dim + ndim
    if not 0 <= dim < ndim:
        raise UnsupportedValueError(f"the placement {placement} cuts dimension {placement.dim} of a {ndim}-d tensor")
    return Cut(dim, chunks, index, int(getattr(placement, "split_factor", 1)))


def local_layout(global_shape: Sequence[int], cuts: Sequence[Cut]) -> Layout:
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
    return Layout(local_shape, tuple(boxes), tuple(slices))


def cut_runs(runs: Sequence[Run], cut: Cut) -> list[Run]:
    """The runs that remain after one more cut.

    >>> cut_runs([(0, 5)], Cut(0, 4, 2)), cut_runs([(0, 10)], Cut(0, 2, 0, split_factor=2))
    ([(4, 5)], [(0, 3), (5, 8)])
    """
    length = sum(stop - start for start, stop in runs)
    found: list[Run] = []
    for piece in range(cut.split_factor):
        start, stop = _chunk(length, cut.split_factor, piece)
        begin, end = _chunk(stop - start, cut.chunks, cut.index)
        found.extend(_take(runs, start + begin, start + end))
    return _merged(found)


def _chunk(length: int, chunks: int, index: int) -> Run:
    """Which part `torch.chunk` gives to `index`: parts of equal, rounded-up size, the last ones short or empty."""
    size = -(-length // chunks)
    return min(size * index, length), min(size * (index + 1), length)


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
