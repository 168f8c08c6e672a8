"""Numpy ranks whose tensors lie on simulated devices: whole saves and loads of device tensors, without hardware."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from dcp_core.arrays import storage_of
from dcp_core.box import Box, slices
from dcp_core.errors import ArgumentError
from dcp_core.planning.leaves import LocalTensor
from dcp_core.testing.devices import DeviceArray, SimulatedDevice
from dcp_core.testing.numpy_ranks import NumpyRankAdapter


@dataclass(frozen=True, slots=True, eq=False)
class ShardedDeviceArray:
    """What one rank's device holds of a global array.

    Attributes:
        global_shape: Shape of the global array, elements.
        boxes: Which parts are held here, at least one, none of them empty.
        arrays: For each box an array of its sizes, all on one device.

    Raises:
        ArgumentError: Boxes and arrays don't fit each other.
    """

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    arrays: tuple[DeviceArray, ...]

    def __post_init__(self) -> None:
        found = [array.shape for array in self.arrays]
        if not found or found != [box.sizes for box in self.boxes]:
            raise ArgumentError(f"arrays of shapes {found} don't fit boxes {self.boxes}")
        if len({id(array.device) for array in self.arrays}) > 1:
            raise ArgumentError("the arrays lie on more than one device")

    @classmethod
    def cut(
        cls, device: SimulatedDevice, array: npt.NDArray[Any], boxes: Sequence[Box], dtype_name: str | None = None
    ) -> ShardedDeviceArray:
        """Take boxes out of a global array and put them on a device.

        Args:
            device: This rank's.
            array: The global array, on the host.
            boxes: What this rank holds.
            dtype_name: Where numpy lacks the type, else None.
        """
        indices: list[Any] = [(*slices(box), ...) for box in boxes]
        parts = tuple(device.put(array[index], dtype_name) for index in indices)
        return cls(array.shape, tuple(boxes), parts)

    def describe(self) -> LocalTensor:
        """Describe the boxes."""
        return _described(self.global_shape, self.boxes, self.arrays, is_plain=False)


class DeviceRankAdapter(NumpyRankAdapter):
    """The adapter of numpy ranks that also knows arrays on simulated devices."""

    name = "device-ranks"

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a `DeviceArray`, a `ShardedDeviceArray`, or what `NumpyRankAdapter` describes."""
        if isinstance(value, DeviceArray):
            is_empty = value.nbytes == 0
            boxes, arrays = ((), ()) if is_empty else ((Box.whole(value.shape),), (value,))
            return _described(value.shape, boxes, arrays, is_plain=True, like=value)
        return value.describe() if isinstance(value, ShardedDeviceArray) else super().describe(value)


def _described(
    shape: tuple[int, ...],
    boxes: tuple[Box, ...],
    arrays: tuple[DeviceArray, ...],
    *,
    is_plain: bool,
    like: DeviceArray | None = None,
) -> LocalTensor:
    first = arrays[0] if like is None else like
    storage: Hashable | None = tuple(storage_of(array.memory) for array in arrays) or None
    device = first.device
    return LocalTensor(
        shape, first.dtype, boxes, arrays, device, device=device.name.partition(":")[0], storage=storage, plain=is_plain
    )
