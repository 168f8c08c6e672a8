"""Layouts of MindSpore and HyperParallel, read by their public surface.

In: what a framework calls a layout: an object or a dict with `mesh_shape` or `device_matrix`, `tensor_map` and
`rank_list`; or an object whose `to_dict()` gives one. Out: what a rank holds, and a layout of `planning.tensor_map`. No
type of a framework is looked at, so the packages of all frameworks read their layouts here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.cuts import LocalLayout, local_layout
from dcp_core.planning.ragged import ragged_range
from dcp_core.planning.tensor_map import TensorMapLayout

_MATRIX_NAMES = ("mesh_shape", "device_matrix")
_INTERLEAVED = "interleaved_parallel"
_MOST_LAYOUTS = 4096


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of one tensor: a cut of its dimensions, or a range of the flattened tensor.

    Attributes:
        cut: Where the local tensor lies; None for a ragged shard.
        flat_range: First element of the flattened tensor, and one past the last, where the local tensor is flat.
        replica_ranks: Ranks that hold the same, this one among them, ascending.
    """

    cut: LocalLayout | None
    flat_range: tuple[int, int] | None
    replica_ranks: tuple[int, ...]


def is_layout(value: object) -> bool:
    """Tell whether a value has the surface of a layout."""
    has = (
        functools.partial(operator.contains, value) if isinstance(value, Mapping) else functools.partial(hasattr, value)
    )
    return has("tensor_map") and has("rank_list") and any(map(has, _MATRIX_NAMES))


def read_layout(layout: Any) -> TensorMapLayout:
    """Read a layout.

    Args:
        layout: What `is_layout` accepts, or something with a `to_dict()` that returns it.

    Raises:
        UnsupportedValueError: It is not placed for a tensor yet, or its numbers are no layout.
    """
    read = _reader(layout)
    matrix = next((found for found in map(read, _MATRIX_NAMES) if found is not None), None)
    tensor_map = read("tensor_map")
    if matrix is None or tensor_map is None:
        raise UnsupportedValueError(
            f"the layout {layout!r} says nothing of a tensor: its device matrix is {matrix!r} and its tensor_map "
            f"{tensor_map!r}; call it with the names of the axes, layout('dp', 'None'), and use the result"
        )
    ranks, uneven = read("rank_list"), read("uneven_shard_mesh_dims")
    interleaved = read(_INTERLEAVED)
    if interleaved is None:
        interleaved = _INTERLEAVED in (read("alias_name") or ())
    return _layout(
        _hashable(matrix),
        _hashable(tensor_map),
        None if ranks is None or not len(ranks) else _hashable(ranks),
        bool(interleaved),
        None if uneven is None else _hashable(uneven),
    )


def refuse_partial(layout: Any, placements: Iterable[Any] | None = None) -> None:
    """Refuse what is not reduced yet.

    Args:
        layout: What `is_layout` accepts.
        placements: Placements of the tensor, where it has such a list of its own.

    Raises:
        UnsupportedValueError: Ranks hold partial sums, so nobody holds the values.
    """
    read = _reader(layout)
    unreduced = [op for op in read("partial") or () if op is not None]
    placed = [*(read("placements") or ()), *(placements or ())]
    unreduced += [placement for placement in placed if _is_partial(placement)]
    asked = read("is_partial")
    if unreduced or (callable(asked) and asked()):
        named = f" ({unreduced[0]!r})" if unreduced else ""
        raise UnsupportedValueError(
            f"the tensor is Partial{named}: each rank holds a partial result that was not reduced yet, so no rank "
            "holds its values; call reduce_partial(), or redistribute() it to Shard and Replicate, first"
        )


def holding(layout: Any, global_shape: Sequence[int], rank: int) -> Holding | None:
    """What a rank holds of a tensor.

    Args:
        layout: What `is_layout` accepts; where it has a `ragged_shard`, that counts.
        global_shape: Shape of the whole tensor.
        rank: A rank of the job.

    Returns:
        None for a rank outside the layout.

    Raises:
        UnsupportedValueError: The layout does not fit the shape, or cuts it in a way that is not known.
    """
    ragged = _reader(layout)("ragged_shard")
    found = read_layout(layout)
    shape = tuple(int(size) for size in global_shape)
    if ragged is None:
        return cut_holding(found, shape, rank)
    mesh_dim, placement = ragged
    return _ragged_holding(found, shape, rank, mesh_dim, tuple(placement.dims), tuple(placement.local_units))


@functools.lru_cache(_MOST_LAYOUTS)
def cut_holding(layout: TensorMapLayout, shape: tuple[int, ...], rank: int) -> Holding | None:
    """What a rank holds of a tensor whose dimensions are cut; computed once for all tensors that are laid out alike.

    Args:
        layout: The layout.
        shape: Global shape.
        rank: A rank of the job.

    Returns:
        None for a rank outside the layout.

    Raises:
        UnsupportedValueError: The layout does not fit the shape.
    """
    cuts = layout.cuts(shape, rank)
    return None if cuts is None else Holding(local_layout(shape, cuts), None, layout.replica_ranks(rank))


@functools.lru_cache(_MOST_LAYOUTS)
def _ragged_holding(
    layout: TensorMapLayout, shape: tuple[int, ...], rank: int, axis: int, dims: tuple[int, ...], units: tuple[int, ...]
) -> Holding | None:
    if any(layout.tensor_map) or not 0 <= axis < len(layout.device_shape) or len(units) != layout.device_shape[axis]:
        raise UnsupportedValueError(
            f"a ragged shard of units {units} along axis {axis} of a device matrix {layout.device_matrix} needs as "
            f"many units as devices there, and a tensor_map that cuts nothing besides; found {layout.tensor_map}"
        )
    coordinate = layout.coordinate(rank)
    if coordinate is None:
        return None
    cut_by_axis = replace(layout, tensor_map=(len(layout.device_matrix) - 1 - axis,))
    return Holding(None, ragged_range(shape, dims, units, coordinate[axis]), cut_by_axis.replica_ranks(rank))


@functools.lru_cache(_MOST_LAYOUTS)
def _layout(matrix: Any, tensor_map: Any, ranks: Any, interleaved: bool, uneven: Any) -> TensorMapLayout:
    try:
        return TensorMapLayout(matrix, tensor_map, ranks, interleaved, uneven)
    except ArgumentError as error:
        raise UnsupportedValueError(str(error)) from error


def _reader(layout: Any) -> Callable[[str], Any]:
    """A function that reads one name of a layout; None for what it does not have."""
    if not is_layout(layout) and callable(getattr(layout, "to_dict", None)):
        try:
            layout = layout.to_dict()
        except ValueError as error:
            raise UnsupportedValueError(f"the layout {layout!r} cannot be read: {error}") from error
    return layout.get if isinstance(layout, Mapping) else lambda name: getattr(layout, name, None)


def _hashable(values: Any) -> Any:
    """Lists in place of tuples, at any depth."""
    return tuple(map(_hashable, values)) if isinstance(values, (list, tuple)) else values


def _is_partial(placement: Any) -> bool:
    asked = getattr(placement, "is_partial", None)
    return bool(asked()) if callable(asked) else type(placement).__name__ in ("Partial", "_Partial")
