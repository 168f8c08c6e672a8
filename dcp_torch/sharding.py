"""Where a shard lies in its global tensor: placements to boxes, as torch lays elements out.

In: placements, mesh shape, the rank's coordinate, global shape: plain values, no mesh, no communication.
Out: the global boxes of the local tensor, and for each the slices of the local tensor that hold it.

A `Shard` cuts the runs of a dimension (see `dcp_core.planning.runs`) as `torch.chunk` does; a `_StridedShard` (FSDP2
over tensor parallelism) first cuts them into `split_factor` pieces, and takes its part of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.runs import Layout, Run, layout_of_runs, length_of_runs, merge_runs, take_runs, whole_runs


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
    runs = [whole_runs(size) for size in global_shape]
    for cut in cuts:
        runs[cut.dim] = cut_runs(runs[cut.dim], cut)
    return layout_of_runs(runs)


def cut_runs(runs: Sequence[Run], cut: Cut) -> list[Run]:
    """The runs that remain after one more cut.

    >>> cut_runs([(0, 5)], Cut(0, 4, 2)), cut_runs([(0, 10)], Cut(0, 2, 0, split_factor=2))
    ([(4, 5)], [(0, 3), (5, 8)])
    """
    length = length_of_runs(runs)
    found: list[Run] = []
    for piece in range(cut.split_factor):
        start, stop = _chunk(length, cut.split_factor, piece)
        begin, end = _chunk(stop - start, cut.chunks, cut.index)
        found.extend(take_runs(runs, start + begin, start + end))
    return merge_runs(found)


def _chunk(length: int, chunks: int, index: int) -> Run:
    """Which part `torch.chunk` gives to `index`: parts of equal, rounded-up size, the last ones short or empty."""
    size = -(-length // chunks)
    return min(size * index, length), min(size * (index + 1), length)
