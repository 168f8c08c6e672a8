"""What DTensor placements mean: placements to cuts, as torch lays elements out.

In: placements, mesh shape, the rank's coordinate: plain values, no mesh, no communication. Out: cuts, which
`dcp_core.planning.cuts` turns into boxes. A `Shard` cuts as `torch.chunk` does; a `_StridedShard` (FSDP2 over tensor
parallelism) is a strided cut. A `RaggedShard`, which extensions of DTensor bring, is a range of the flattened tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.cuts import Cut
from dcp_core.planning.ragged import ragged_range


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


def ragged_part(
    placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int], global_shape: Sequence[int]
) -> tuple[int, int] | None:
    """Which range of the flattened tensor a `RaggedShard` leaves here, as extensions of DTensor define it.

    Args:
        placements: One a mesh dimension; a ragged one has `dims` and `local_units`.
        mesh_shape: Ranks along each mesh dimension.
        coordinate: This rank's place on the mesh.
        global_shape: Shape of the whole tensor.

    Returns:
        First element and one past the last; None where no placement is ragged.

    Raises:
        UnsupportedValueError: Units that do not fit, or something else that cuts the tensor besides.
    """
    found = [at for at, placement in enumerate(placements) if hasattr(placement, "local_units")]
    if not found:
        return None
    at, units = found[0], tuple(placements[found[0]].local_units)
    others = [placement for mesh_dim, placement in enumerate(placements) if mesh_dim != at]
    if len(units) != mesh_shape[at] or not all(placement.is_replicate() for placement in others):
        raise UnsupportedValueError(
            f"placements {list(placements)} on a mesh {tuple(mesh_shape)}: a ragged shard is described with as many "
            "units as ranks on its mesh dimension, and Replicate() on all others; redistribute() the tensor"
        )
    return ragged_range(global_shape, tuple(placements[at].dims), units, coordinate[at])
