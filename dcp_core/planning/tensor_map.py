"""Device matrix and tensor map: how MindSpore and HyperParallel write down where the shards of a tensor lie.

In: a layout as plain values, a rank, a global shape. Out: cuts, which `planning.cuts` turns into boxes, and the ranks
that hold the same. No framework: the packages of torch and of MindSpore both read their layouts into this.

Devices stand in a matrix, row by row in the order of `rank_list`. The tensor map names, for each dimension of the
tensor, the axes of that matrix which cut it, *counted from the right*: 0 is the last axis, -1 is none. A dimension that
several axes cut has them in a tuple, the first one cutting coarsest.

The last axis may be *interleaved*: it stands for no devices. A dimension that it cuts is cut into as many pieces; each
device holds all of them, and the axes after it in the tuple cut each piece by itself. So what one device holds of such
a dimension may be several ranges of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.cuts import Cut

Axes = tuple[int, ...]

ALL_REPLICAS = -1


@dataclass(frozen=True, slots=True)
class TensorMapLayout:
    """How one tensor is laid out over devices.

    Attributes:
        device_matrix: Devices along each axis; with an interleaved axis, pieces along the last one.
        tensor_map: For each tensor dimension the axes that cut it, counted from the right, coarsest first; none for a
            dimension that is whole. A number or -1 may stand for a tuple of one or none.
        rank_list: Ranks of the devices, row by row; None for 0, 1, 2, and so on. With an interleaved axis it may have
            an entry for each piece too: each rank as often as there are pieces, or the ranks of the devices first, as
            when nobody gave a list.
        interleaved: Whether the last axis is interleaved.
        rounded_up_axes: How cuts that do not come out even are made. None: they are refused. Else those of these axes
            (counted from the left) give parts of equal, rounded-up size, the last ones short or empty; all others give
            parts that differ by one element at most, the first ones longer.
        optimizer_parts: Into how many equal parts a parallel optimizer cuts what a device holds once more, along the
            first dimension: neighbours among the devices that would hold the same have one part each. 1: it does not;
            `ALL_REPLICAS`: as many as there are such devices.

    Raises:
        ArgumentError: Numbers that are no layout: an axis that is not there or cuts twice, a rank list that does not
            fit the matrix, more parts than devices that hold the same.

    Examples:
        >>> TensorMapLayout((2, 2), (0, -1)).tensor_map
        ((0,), ())
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[Any, ...]
    rank_list: tuple[int, ...] | None = None
    interleaved: bool = False
    rounded_up_axes: tuple[int, ...] | None = None
    optimizer_parts: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_matrix", _numbers("device_matrix", self.device_matrix))
        object.__setattr__(self, "tensor_map", tuple(_axes(entry) for entry in _entries(self.tensor_map)))
        if any(size < 1 for size in self.device_matrix) or (self.interleaved and not self.device_matrix):
            raise ArgumentError(f"a device_matrix has at least one device along each axis, found {self.device_matrix}")
        used = [axis for axes in self.tensor_map for axis in axes]
        if any(not 0 <= axis < len(self.device_matrix) for axis in used):
            raise ArgumentError(
                f"the tensor_map {self.tensor_map} names axes that a device_matrix {self.device_matrix} does not have; "
                "they count from the right, from 0 on, and -1 is none"
            )
        if len(set(used)) != len(used):
            raise ArgumentError(f"the tensor_map {self.tensor_map} uses an axis twice; each cuts one dimension, once")
        if self.rounded_up_axes is not None:
            object.__setattr__(self, "rounded_up_axes", _numbers("rounded_up_axes", self.rounded_up_axes))
        object.__setattr__(self, "rank_list", _ranks_of_devices(self))
        object.__setattr__(self, "optimizer_parts", _parts_of_replicas(self))

    @property
    def device_shape(self) -> tuple[int, ...]:
        """The device matrix without the interleaved axis."""
        return self.device_matrix[:-1] if self.interleaved else self.device_matrix

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the devices, row by row, each once."""
        return self.rank_list or ()

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where the device of a rank stands in the matrix; None for a rank that has none."""
        if rank not in self.ranks:
            return None
        return _coordinate(self.ranks.index(rank), self.device_shape)

    def cuts(self, global_shape: Sequence[int], rank: int) -> tuple[Cut, ...] | None:
        """The cuts that lead to what a rank holds, for `planning.cuts.local_layout`.

        Args:
            global_shape: Shape of the whole tensor, as many dimensions as `tensor_map` has.
            rank: A rank.

        Returns:
            The cuts in order; None for a rank outside the layout, which holds nothing.

        Raises:
            UnsupportedValueError: Another number of dimensions, or a dimension that does not come out even where that
                is refused.

        >>> [(cut.dim, cut.chunks, cut.index) for cut in TensorMapLayout((2, 3), ((1, 0), -1)).cuts((12, 4), rank=5)]
        [(0, 2, 1), (0, 3, 2)]
        """
        coordinate = self.coordinate(rank)
        if len(global_shape) != len(self.tensor_map):
            raise UnsupportedValueError(
                f"a tensor of shape {tuple(global_shape)} has another number of dimensions than its tensor_map "
                f"{self.tensor_map}"
            )
        for dim, size in enumerate(global_shape):
            self._check_even(dim, size)
        if coordinate is None:
            return None
        found = [cut for dim in range(len(global_shape)) for cut in self._cuts_of(dim, coordinate)]
        if self.optimizer_parts > 1:
            found.append(Cut(0, self.optimizer_parts, self._optimizer_part(coordinate)))
        return tuple(found)

    def replica_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same as one rank, itself among them, ascending.

        Args:
            rank: A rank of the layout.

        >>> TensorMapLayout((2, 2), (0, -1)).replica_ranks(1)
        (1, 3)
        """
        own = self.coordinate(rank)
        if own is None:
            return ()
        free = self.free_axes
        choices = [range(self.device_shape[axis]) if axis in free else (at,) for axis, at in enumerate(own)]
        part = self._optimizer_part(own)
        alike = [place for place in product(*choices) if self._optimizer_part(place) == part]
        return tuple(sorted(self.ranks[_position(place, self.device_shape)] for place in alike))

    @property
    def free_axes(self) -> tuple[int, ...]:
        """The axes of devices that cut nothing, counted from the left."""
        cutting = {len(self.device_matrix) - 1 - axis for axes in self.tensor_map for axis in axes}
        return tuple(axis for axis in range(len(self.device_shape)) if axis not in cutting)

    def _optimizer_part(self, coordinate: Sequence[int]) -> int:
        """Which part of a parallel optimizer's a device has."""
        free = self.free_axes
        replica = _position([coordinate[axis] for axis in free], [self.device_shape[axis] for axis in free])
        return replica % self.optimizer_parts

    def _cuts_of(self, dim: int, coordinate: tuple[int, ...]) -> list[Cut]:
        found: list[Cut] = []
        pieces = 1
        for axis in self.tensor_map[dim]:
            place = len(self.device_matrix) - 1 - axis
            if place >= len(coordinate):
                pieces = self.device_matrix[place]
                continue
            balanced = self.rounded_up_axes is not None and place not in self.rounded_up_axes
            found.append(Cut(dim, self.device_matrix[place], coordinate[place], pieces, balanced))
        return found

    def _check_even(self, dim: int, size: int) -> None:
        axes = self.tensor_map[dim]
        optimizer_parts = self.optimizer_parts if dim == 0 else 1
        if optimizer_parts == 1 and self.rounded_up_axes is not None and not (self.interleaved and 0 in axes):
            return
        parts = optimizer_parts * math.prod(self.device_matrix[len(self.device_matrix) - 1 - axis] for axis in axes)
        if size % parts:
            raise UnsupportedValueError(
                f"dimension {dim} of {size} elements is cut into {parts} parts by the axes {axes} of a device_matrix "
                f"{self.device_matrix}, and that does not come out even: who holds what is not known here; pad the "
                "dimension, or hand over the local tensors with their places (annotate_shard)"
            )


def _entries(tensor_map: object) -> Sequence[object]:
    if not isinstance(tensor_map, Sequence) or isinstance(tensor_map, str):
        raise ArgumentError(f"a tensor_map is a sequence with one entry for each dimension, found {tensor_map!r}")
    return tensor_map


def _axes(entry: object) -> Axes:
    """The axes of one entry of a tensor map, without those that stand for none."""
    numbers = _numbers("an entry of tensor_map", entry if isinstance(entry, Sequence) else (entry,))
    return tuple(number for number in numbers if number != -1)


def _numbers(name: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise ArgumentError(f"{name} must be whole numbers, found {values!r}") from error


def _ranks_of_devices(layout: TensorMapLayout) -> tuple[int, ...]:
    """The ranks of the devices, each once, whatever form the list has."""
    devices = math.prod(layout.device_shape)
    if layout.rank_list is None:
        return tuple(range(devices))
    given = _numbers("rank_list", layout.rank_list)
    once = tuple(dict.fromkeys(given))
    if len(given) == devices == len(once):
        return given
    if layout.interleaved and len(given) == math.prod(layout.device_matrix):
        pieces = layout.device_matrix[-1]
        if tuple(rank for rank in once for _ in range(pieces)) == given:
            return once
        if len(once) == len(given):
            return given[:devices]
    raise ArgumentError(
        f"a rank_list of {len(given)} entries, {len(once)} of them different, does not fit the {devices} devices of "
        f"the device_matrix {layout.device_matrix}" + (", whose last axis is interleaved" if layout.interleaved else "")
    )


def _parts_of_replicas(layout: TensorMapLayout) -> int:
    """Into how many parts a parallel optimizer cuts, checked."""
    replicas = math.prod(layout.device_shape[axis] for axis in layout.free_axes)
    parts = replicas if layout.optimizer_parts == ALL_REPLICAS else operator.index(layout.optimizer_parts)
    if parts < 1 or replicas % parts or (parts > 1 and not layout.tensor_map):
        raise ArgumentError(
            f"a parallel optimizer cannot cut into {layout.optimizer_parts} parts what {replicas} devices hold alike "
            f"(device_matrix {layout.device_matrix}, tensor_map {layout.tensor_map}): their number must be a multiple "
            "of it, and the tensor must have a dimension"
        )
    return parts


def _coordinate(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(shape):
        position, at = divmod(position, size)
        found.append(at)
    return tuple(reversed(found))


def _position(coordinate: Sequence[int], shape: Sequence[int]) -> int:
    position = 0
    for at, size in zip(coordinate, shape, strict=True):
        position = position * size + at
    return position
