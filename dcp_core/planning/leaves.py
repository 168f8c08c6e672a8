"""What planning knows of a value in the state: its boxes, and how to get at its bytes.

Adapters and describers turn framework tensors into `LocalTensor`; planning and execution never see a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box
from dcp_core.dtype import DType


class DeviceTransfers(Protocol):
    """How parts of one device's tensors travel to and from host memory while the host does something else."""

    def host_memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory that the device copies to and from at full speed, page-locked where there is such a thing."""
        ...

    def start_copy_out(self, view: Any, target: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Start copying a view's raw bits, in row-major order, to host memory.

        Args:
            view: A part of a tensor on the device.
            target: As many bytes of `host_memory`; in use until the copy is awaited.

        Returns:
            Waits until the bits are there; raises what went wrong.
        """
        ...

    def start_copy_in(self, view: Any, bits: npt.NDArray[Any], source_dtype: DType) -> Callable[[], None]:
        """Start writing elements into a view, converting from `source_dtype` as `TensorAccess.copy_into` does.

        Args:
            view: A part of a tensor on the device.
            bits: Raw bits of the view's shape, in `host_memory`; in use until the copy is awaited.
            source_dtype: What the bits mean.

        Returns:
            Waits until the elements are there and `bits` may be used again; raises what went wrong.
        """
        ...


class TensorAccess(Protocol):
    """How to reach the elements of a view: the part of an adapter that execution needs."""

    def host_array(self, view: Any) -> npt.NDArray[Any] | None:
        """The view's raw bits as a numpy array on the host that *shares its memory*, or None if it has none there.

        dtype is `DType.bits`; any strides. Writes land in the view.
        """
        ...

    def read_out(self, view: Any) -> npt.NDArray[Any]:
        """The view's raw bits as a numpy array, copied to the host where needed. dtype is `DType.bits`."""
        ...

    def copy_into(self, view: Any, bits: npt.NDArray[Any], source_dtype: DType) -> None:
        """Write elements into the view, converting from `source_dtype` by the framework's own rules.

        Args:
            view: Destination, in the destination tensor's storage.
            bits: Raw bits of the source, of the view's shape; dtype is `source_dtype.bits`.
            source_dtype: What the bits mean.
        """
        ...

    def narrow(self, view: Any, box: Box) -> Any:
        """The part of a view that `box` selects, sharing its memory; coordinates relative to the view."""
        ...

    def writable_problem(self, view: Any) -> str | None:
        """Why a view cannot be filled by a load (read-only, elements that share memory), or None."""
        ...

    def transfers(self, view: Any) -> DeviceTransfers | None:
        """How parts of the view travel; None where its elements lie in host memory, or only blocking copies exist."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBits:
    """The raw bits of a region that lies on a device, not copied yet. `numpy.asarray` copies them.

    Attributes:
        view: The region.
        access: How to reach its elements.
        shape: Its shape.
        dtype: Of the bits, `DType.bits`.
    """

    view: Any
    access: TensorAccess
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Copy the bits to the host."""
        bits = self.access.read_out(self.view)
        return bits if dtype is None or dtype == bits.dtype else bits.astype(dtype)


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """What one rank holds of one tensor.

    Attributes:
        global_shape: Shape of the whole tensor, elements.
        dtype: Element type.
        boxes: The global boxes held here, in the order of the local memory. Empty boxes are left out.
        views: For each box the framework's view of its elements, shaped like `box.sizes`.
        access: How to reach the views' elements.
        device: Device type, "cpu" for host memory.
        storage: Equal for two values of a rank exactly when they are the same elements of the same memory;
            None when that cannot be told.
        plain: True for a whole, unsharded value: every rank that has the key is expected to hold the same.
        ragged: True for cuts that change from save to save; switches plan caching off.
        replica_ranks: Ranks known to hold the same boxes, if the framework says so.
    """

    global_shape: tuple[int, ...]
    dtype: DType
    boxes: tuple[Box, ...]
    views: tuple[Any, ...]
    access: TensorAccess
    device: str = "cpu"
    storage: Hashable | None = None
    plain: bool = False
    ragged: bool = False
    replica_ranks: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the boxes held here."""
        return sum(box.numel for box in self.boxes) * self.dtype.itemsize
