"""What planning knows of a value in the state: its boxes, and how to get at its bytes.

Adapters and describers turn framework tensors into `LocalTensor`; planning and execution never see a framework.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from dcp_core.box import Box
from dcp_core.dtype import DType


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
