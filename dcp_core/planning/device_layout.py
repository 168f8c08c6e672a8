"""Layouts by a device matrix and a tensor map, as MindSpore and HyperParallel describe shards.

In: plain values that such a layout is made of, a global shape, a rank. Out: the boxes that the rank holds, and the
ranks that hold the same.

The devices of `rank_list` fill the device matrix row by row. `tensor_map` says for each tensor dimension which axes of
the matrix cut it, counted from the right: -1 is none, `(a, b)` is by `a` into parts and each of them by `b`. All parts
are of equal size.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.runs import Layout, Run, layout_of_runs, length_of_runs, merge_runs, take_runs, whole_runs

ALL_REPLICAS = -1
_UNCUT = -1
_MOST_PARTS = 4096


@dataclass(frozen=True, slots=True, init=False)
class DeviceLayout:
    """How a tensor lies on devices.

    Attributes:
        device_matrix: Devices along each axis.
        tensor_map: For each tensor dimension the axes that cut it, counted from the right, the outermost cut first;
            given as one number or a sequence a dimension, -1 for none. Without any entry nothing is cut.
        rank_list: The rank of each device, row by row; by default 0, 1, 2, ...
        is_interleaved: Whether the last axis of the matrix is no axis of devices: each device holds all parts along
            it, one after the other. `rank_list` then names each device once; where it has an entry for each of these
            parts, a device's entries are equal and adjacent, or the first ones count.
        optimizer_parts: Into how many equal parts along its first dimension a shard is cut once more, between the
            ranks that hold the same (a parallel optimizer); 1 for not at all, `ALL_REPLICAS` for as many as there are.

    Raises:
        ArgumentError: The numbers contradict each other.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    rank_list: tuple[int, ...]
    is_interleaved: bool
    optimizer_parts: int

    def __init__(
        self,
        device_matrix: Sequence[int],
        tensor_map: Sequence[int | Sequence[int]],
        rank_list: Sequence[int] | None = None,
        *,
        is_interleaved: bool = False,
        optimizer_parts: int = 1,
    ) -> None:
        matrix = _whole_numbers("device_matrix", device_matrix, at_least=1)
        if is_interleaved and not matrix:
            raise ArgumentError("an interleaved layout needs a device_matrix with at least one axis, found ()")
        axes = _checked_map(matrix, tensor_map)
        devices = math.prod(matrix[:-1] if is_interleaved else matrix)
        ranks = _checked_ranks(rank_list, devices, matrix[-1] if is_interleaved else 1)
        cut = set(sum(axes, ()))
        free = [size for axis, size in enumerate(matrix) if len(matrix) - 1 - axis not in cut]
        replicas = math.prod(free[:-1] if is_interleaved and 0 not in cut else free)
        parts = replicas if optimizer_parts == ALL_REPLICAS else operator.index(optimizer_parts)
        if parts < 1 or replicas % parts:
            raise ArgumentError(
                f"a parallel optimizer cannot cut a shard into {optimizer_parts} parts: by device_matrix {matrix} and "
                f"tensor_map {axes}, {replicas} ranks hold the same shard, which must be a multiple of that"
            )
        for name, value in zip(
            ("device_matrix", "tensor_map", "rank_list", "is_interleaved", "optimizer_parts"),
            (matrix, axes, ranks, bool(is_interleaved), parts),
            strict=True,
        ):
            object.__setattr__(self, name, value)

    @property
    def interleaved_parts(self) -> int:
        """Parts along the last axis that each device holds; 1 where it is an axis of devices."""
        return self.device_matrix[-1] if self.is_interleaved else 1


@lru_cache(maxsize=_MOST_PARTS)
def device_part(layout: DeviceLayout, global_shape: tuple[int, ...], rank: int) -> Layout | None:
    """What a rank holds of a tensor.

    Args:
        layout: How the tensor lies on devices.
        global_shape: Shape of the whole tensor, elements.
        rank: The rank, as `rank_list` counts.

    Returns:
        Its boxes and where they lie in the local tensor; None for a rank that is not in the layout.

    Raises:
        UnsupportedValueError: The layout does not fit the shape.

    >>> layout = DeviceLayout((2, 2), (-1, 0))
    >>> device_part(layout, (8, 4), 1).boxes
    (Box(offsets=(0, 2), sizes=(8, 2)),)
    """
    if rank not in layout.rank_list:
        return None
    tensor_map = layout.tensor_map or ((),) * len(global_shape)
    if len(tensor_map) != len(global_shape):
        raise UnsupportedValueError(
            f"a tensor of shape {global_shape} has a layout whose tensor_map {layout.tensor_map} is for "
            f"{len(tensor_map)} dimensions; give one entry a dimension"
        )
    coordinate = _coordinate(layout, layout.rank_list.index(rank))
    runs = [
        _device_runs(layout, axes, coordinate, dim, global_shape) if axes else whole_runs(global_shape[dim])
        for dim, axes in enumerate(tensor_map)
    ]
    if layout.optimizer_parts > 1:
        runs = _optimizer_cut(layout, runs, _replica_index(layout, coordinate) % layout.optimizer_parts, global_shape)
    return layout_of_runs(runs)


@lru_cache(maxsize=_MOST_PARTS)
def replica_ranks(layout: DeviceLayout, rank: int) -> tuple[int, ...]:
    """Which ranks hold the same boxes as a rank, in increasing order, itself included; none if it is not in the layout.

    >>> replica_ranks(DeviceLayout((2, 2), (-1, 0), rank_list=[4, 5, 6, 7]), 5)
    (5, 7)
    """
    if rank not in layout.rank_list:
        return ()
    cut = [len(layout.device_matrix) - 1 - axis for axes in layout.tensor_map for axis in axes]
    if layout.is_interleaved:
        cut = [axis for axis in cut if axis < len(layout.device_matrix) - 1]

    def part(device: int) -> tuple[int, ...]:
        coordinate = _coordinate(layout, device)
        return (*(coordinate[axis] for axis in cut), _replica_index(layout, coordinate) % layout.optimizer_parts)

    own = part(layout.rank_list.index(rank))
    return tuple(sorted(other for device, other in enumerate(layout.rank_list) if part(device) == own))


def _device_sizes(layout: DeviceLayout) -> tuple[int, ...]:
    """The axes of the matrix that are axes of devices."""
    return layout.device_matrix[:-1] if layout.is_interleaved else layout.device_matrix


def _coordinate(layout: DeviceLayout, device: int) -> tuple[int, ...]:
    """Where a device lies in the matrix."""
    at = device
    found: list[int] = []
    for size in reversed(_device_sizes(layout)):
        at, index = divmod(at, size)
        found.append(index)
    return tuple(reversed(found))


def _replica_index(layout: DeviceLayout, coordinate: tuple[int, ...]) -> int:
    """Which one of those that hold the same shard this is: its place along the axes that cut nothing, row by row."""
    cut = {len(layout.device_matrix) - 1 - axis for axes in layout.tensor_map for axis in axes}
    found = 0
    for axis, size in enumerate(_device_sizes(layout)):
        if axis not in cut:
            found = found * size + coordinate[axis]
    return found


def _device_runs(
    layout: DeviceLayout, axes: tuple[int, ...], coordinate: tuple[int, ...], dim: int, shape: tuple[int, ...]
) -> list[Run]:
    """The runs of a dimension that some axes cut; several where the parts of an interleaved axis lie apart."""
    matrix = layout.device_matrix
    positions = [len(matrix) - 1 - axis for axis in axes]
    parts = math.prod(matrix[position] for position in positions)
    size = _equal_part(shape, dim, shape[dim], parts, f"device_matrix {matrix} and tensor_map {layout.tensor_map}")
    repeats = layout.interleaved_parts if layout.is_interleaved and 0 in axes else 1
    runs: list[Run] = []
    for inner in range(repeats):
        place = (*coordinate, inner)
        index = 0
        for position in positions:
            index = index * matrix[position] + place[position]
        if size:
            runs.append((index * size, (index + 1) * size))
    return merge_runs(runs)


def _optimizer_cut(layout: DeviceLayout, runs: list[list[Run]], index: int, shape: tuple[int, ...]) -> list[list[Run]]:
    """Cut a shard once more along its first dimension."""
    if not runs:
        raise UnsupportedValueError(
            f"a 0-d tensor has a layout by which a parallel optimizer cuts it into {layout.optimizer_parts} parts"
        )
    parts = layout.optimizer_parts
    size = _equal_part(shape, 0, length_of_runs(runs[0]), parts, "a parallel optimizer")
    return [take_runs(runs[0], index * size, (index + 1) * size), *runs[1:]]


def _equal_part(shape: tuple[int, ...], dim: int, length: int, parts: int, cutter: str) -> int:
    if length % parts:
        raise UnsupportedValueError(
            f"dimension {dim} of a tensor of shape {shape}: {length} elements cannot be cut into {parts} equal parts, "
            f"as {cutter} say; use annotate_shard() for uneven shards"
        )
    return length // parts


def _whole_numbers(name: str, values: Any, at_least: int) -> tuple[int, ...]:
    try:
        found = tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise ArgumentError(f"{name} of a layout must be a sequence of whole numbers, found {values!r}") from error
    if any(value < at_least for value in found):
        raise ArgumentError(f"{name} of a layout must have no number below {at_least}, found {found}")
    return found


def _checked_map(matrix: tuple[int, ...], tensor_map: Any) -> tuple[tuple[int, ...], ...]:
    """The tensor map with a tuple of axes for each dimension."""
    if isinstance(tensor_map, (str, bytes)) or not hasattr(tensor_map, "__iter__"):
        raise ArgumentError(
            f"tensor_map of a layout must be a sequence with an entry a dimension, found {tensor_map!r}"
        )
    entries = [entry if isinstance(entry, (tuple, list)) else (entry,) for entry in tensor_map]
    axes = tuple(
        tuple(axis for axis in _whole_numbers("tensor_map", entry, at_least=_UNCUT) if axis != _UNCUT)
        for entry in entries
    )
    used = sum(axes, ())
    if any(axis >= len(matrix) for axis in used):
        raise ArgumentError(
            f"tensor_map {axes} of a layout names an axis that a device_matrix {matrix} of {len(matrix)} axes lacks; "
            "they are counted from the right, from 0"
        )
    if len(set(used)) != len(used):
        raise ArgumentError(f"tensor_map {axes} of a layout uses an axis of the device_matrix twice")
    return axes


def _checked_ranks(rank_list: Any, devices: int, interleaved_parts: int) -> tuple[int, ...]:
    """One rank for each device."""
    if rank_list is None:
        return tuple(range(devices))
    ranks = _whole_numbers("rank_list", rank_list, at_least=0)
    if interleaved_parts > 1 and len(ranks) == devices * interleaved_parts:
        groups = [set(ranks[at : at + interleaved_parts]) for at in range(0, len(ranks), interleaved_parts)]
        ranks = ranks[::interleaved_parts] if all(len(group) == 1 for group in groups) else ranks[:devices]
    if len(ranks) != devices or len(set(ranks)) != devices:
        raise ArgumentError(
            f"rank_list of a layout must name {devices} different ranks, one for each device of its device_matrix, "
            f"found {len(ranks)}: {ranks[:16]}{'...' if len(ranks) > 16 else ''}"
        )
    return ranks
