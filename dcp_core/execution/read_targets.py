"""Where the elements of a region go: straight into the target's memory, or through a buffer.

Goes in: a target's view and its region. Comes out: memory to read into, or a `Destination` that takes elements as they
come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box, flat_range_to_boxes, intersect, relative, slices
from dcp_core.dtype import DType
from dcp_core.planning.leaves import DeviceTransfers, TensorAccess

Array = npt.NDArray[Any]
Waits = list[Callable[[], None]]
"""What waits for copies that were started; each raises what went wrong with its copy."""


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """Takes the elements of one region out of a buffer.

    Attributes:
        view: The target.
        access: Reaches its elements.
        region: What goes there, in elements from the chunk's start.
        chunk_sizes: Extent of the chunk.
        dtype: Element type as stored.
        host: The target's memory where elements can be assigned as they are.
        transfers: How they travel where it lies on a device that copies by itself.
        takes_chunk: Whether it is given ranges of the chunk, from which it takes what is wanted; else ranges of the
            region.
    """

    view: Any
    access: TensorAccess
    region: Box
    chunk_sizes: tuple[int, ...]
    dtype: DType
    host: Array | None
    transfers: DeviceTransfers | None
    takes_chunk: bool

    def put(self, raw: npt.NDArray[np.uint8], first: int, waits: Waits) -> None:
        """Put a range of elements.

        Args:
            raw: Their bytes; in use until what is added to `waits` has been called, and changed by that.
            first: Where the range starts, in bytes of the chunk or of the region.
            waits: Gets what waits for copies that were started.
        """
        bits = raw.view(self.dtype.bits)
        start = first // self.dtype.itemsize
        stop = start + len(bits)
        position = 0
        for box in flat_range_to_boxes(self.chunk_sizes if self.takes_chunk else self.region.sizes, start, stop):
            whole = bits[position : position + box.numel]
            position += box.numel
            if not self.takes_chunk:
                self._put_box(box, whole.reshape(box.sizes), waits)
                continue
            part = intersect(box, self.region)
            if part is not None:
                wanted = whole.reshape(box.sizes)[_index(relative(part, box.offsets))]
                if self.transfers is not None and not wanted.flags.c_contiguous:
                    wanted = _packed(wanted, whole[: part.numel])
                self._put_box(relative(part, self.region.offsets), wanted, waits)

    def _put_box(self, box: Box, bits: Array, waits: Waits) -> None:
        """Put the elements of a box, in elements from the region's start."""
        if self.host is not None:
            self.host[_index(box)] = bits
            return
        part = self.view if box.sizes == self.region.sizes else self.access.narrow(self.view, box)
        if self.transfers is not None:
            waits.append(self.transfers.start_copy_in(part, bits, self.dtype))
        else:
            self.access.copy_into(part, bits, self.dtype)


def _packed(bits: Array, memory: Array) -> Array:
    """Move elements together, to where a device copies from at full speed; the places may overlap."""
    packed = memory.reshape(bits.shape)
    packed[...] = bits
    return packed


def _index(box: Box) -> Any:
    """What selects a box, and gives an array even without dimensions."""
    return (*slices(box), ...)


def assignable(view: Any, access: TensorAccess, bits: np.dtype[Any]) -> Array | None:
    """The target as a writable host array of the stored bits, if it has that.

    Args:
        view: From the planner, of the stored type.
        access: Reaches its elements.
        bits: What an element of that type is in memory.
    """
    host = access.host_array(view)
    return host if host is not None and host.dtype == bits and host.flags.writeable else None


def memory_of(host: Array) -> memoryview:
    """The bytes of a C-contiguous array that is not empty."""
    return host.data.cast("B")


def contiguous_dim(host: Array) -> int:
    """From which dimension on an array that is not empty is one run of memory; its number of dimensions: from none.

    >>> contiguous_dim(np.zeros((4, 5))), contiguous_dim(np.zeros((4, 5))[:, :3]), contiguous_dim(np.zeros((4, 5)).T)
    (0, 1, 2)
    """
    reach = host.itemsize
    for dim in reversed(range(host.ndim)):
        if host.shape[dim] > 1 and host.strides[dim] != reach:
            return dim + 1
        reach *= host.shape[dim]
    return 0


def runs_of(host: Array, dim: int) -> list[memoryview]:
    """The memory of an array in the runs that it consists of from one dimension on."""
    places: list[Any] = [(*index, ...) for index in np.ndindex(*host.shape[:dim])]
    return [memory_of(host[place]) for place in places]
