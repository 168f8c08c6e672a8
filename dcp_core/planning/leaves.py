"""What planning knows of a value in the state: its boxes, and how to get at its bytes.

Adapters and describers turn framework tensors into `LocalTensor`; planning and execution never see a framework.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box
from dcp_core.dtype import DType


class DeviceTransfers(Protocol):
    """How parts of one device's tensors travel to and from host memory while the host does something else."""

    def host_memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory that the device copies to and from at full speed, page-locked where there is such a thing."""
        ...

    def register_memory(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None] | None:
        """Let the device copy to memory that others made as it does to `host_memory`.

        Whoever calls it must go without: an adapter may lack the method.

        Args:
            memory: Contiguous; stays where it is until that is undone.

        Returns:
            What undoes it, to be called before the memory is unmapped; None where there is no such thing, and then
            nothing has changed.
        """
        ...

    def start_copy_out(self, view: Any, target: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Start copying a view's raw bits, in row-major order, to host memory.

        Args:
            view: A part of a tensor on the device.
            target: As many bytes of `host_memory`, or of registered memory; in use until the copy is awaited.

        Returns:
            Waits until the bits are there; raises what went wrong.
        """
        ...

    def start_copy_in(self, view: Any, bits: npt.NDArray[Any], source_dtype: DType) -> Callable[[], None]:
        """Start writing elements into a view, converting from `source_dtype` as `TensorAccess.copy_into` does.

        Args:
            view: A part of a tensor on the device.
            bits: Raw bits of the view's shape, in `host_memory`; in use until the copy is awaited. Best contiguous:
                others may block.
            source_dtype: What the bits mean.

        Returns:
            Waits until the elements are there and `bits` may be used again; raises what went wrong.
        """
        ...


MemoryRange: TypeAlias = tuple[Hashable, int, int, bool]
"""Where elements lie: space of addresses, first byte, one past the last, and whether each byte is an element's."""

HOST_MEMORY = "host"
"""The space of addresses of host memory, whatever framework it belongs to."""


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

        Parts of a view that lies in host memory (`host_array` is not None) may be written on several threads at a time;
        any other view is written on the thread that loads. The same goes for the `narrow` before it, which happens on
        any thread where the view has `transfers` too.

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
        """How parts of the view travel; None where its elements lie in host memory, or only blocking copies exist.

        Called on the thread that saves or loads: copies that are started later, on any thread, come after what that
        thread has queued on the device by now.
        """
        ...


class KnowsMemory(Protocol):
    """What a `TensorAccess` may tell besides, so that targets that overlap are found fast, and on a device at all.

    Whoever calls it must go without: an adapter may lack the method.
    """

    def memory_range(self, view: Any) -> MemoryRange | None:
        """Where the elements of a view lie; None where that cannot be told. Copies nothing, waits for nothing."""
        ...


class NotesChanges(Protocol):
    """What a `TensorAccess` may want to know besides; an adapter may lack the method."""

    def will_change(self, views: Sequence[Any]) -> None:
        """Take note that a load is about to fill these views, past the framework's own operations."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBits:
    """The raw bits of a region that no host memory holds as they are, not copied yet. `numpy.asarray` copies them.

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


Place = Callable[[Sequence[str], Sequence[Any], Sequence[LocalTensor | None]], Sequence[LocalTensor | None]]
"""Takes the names, values and descriptions of all leaves of a state; gives the descriptions that count."""


@dataclass(frozen=True, slots=True)
class WholeShape:
    """What all whole, unsharded values of a shape have in common.

    Attributes:
        shape: The shape, elements.
        boxes: The box of all elements; none where there are no elements.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


_WHOLE_SHAPES: dict[tuple[int, ...], WholeShape] = {}
_MOST_SHAPES = 4096


def whole_shape(shape: tuple[int, ...]) -> WholeShape:
    """Find, or make, what values of a shape have in common.

    Args:
        shape: A framework's shape of a tensor: whole numbers, none of them negative.
    """
    found = _WHOLE_SHAPES.get(shape)
    if found is None:
        if len(_WHOLE_SHAPES) >= _MOST_SHAPES:
            _WHOLE_SHAPES.clear()
        box = Box.whole(shape)
        found = _WHOLE_SHAPES[box.sizes] = WholeShape(box.sizes, () if box.is_empty else (box,))
    return found


def known_whole_shape(shape: tuple[int, ...]) -> WholeShape | None:
    """What `whole_shape` made of a shape before, if it did."""
    return _WHOLE_SHAPES.get(shape)


def whole_tensor(
    whole: WholeShape, dtype: DType, view: Any, access: TensorAccess, device: str, storage: Hashable | None
) -> LocalTensor:
    """Make the description of a plain, whole value: what `LocalTensor` would make, at a quarter of its price.

    Args:
        whole: Of the value's shape.
        dtype: Element type.
        view: The value's elements.
        access: How to reach them.
        device: Device type.
        storage: What `LocalTensor.storage` says; left out where there are no elements.
    """
    boxes = whole.boxes
    views, memory = ((view,), storage) if boxes else ((), None)
    return _made(_Fields(whole.shape, dtype, boxes, views, access, device, memory, plain=True))


def part_tensor(
    shape: tuple[int, ...],
    box: Box,
    dtype: DType,
    view: Any,
    access: TensorAccess,
    device: str,
    storage: Hashable | None,
) -> LocalTensor:
    """Make the description of a value of which this rank holds one box, as cheaply as `whole_tensor`.

    Args:
        shape: Shape of the whole tensor.
        box: What is held; with elements.
        dtype: Element type.
        view: The elements of the box.
        access: How to reach them.
        device: Device type.
        storage: What `LocalTensor.storage` says.
    """
    return _made(_Fields(shape, dtype, (box,), (view,), access, device, storage, plain=False))


def _made(settable: Any) -> LocalTensor:
    settable.__class__ = LocalTensor
    return cast(LocalTensor, settable)


class _Fields:
    """The fields of a `LocalTensor` while they can still be set. A frozen class sets each by a slow call."""

    __slots__ = tuple(field.name for field in fields(LocalTensor))

    def __init__(
        self,
        shape: Any,
        dtype: DType,
        boxes: Any,
        views: Any,
        access: TensorAccess,
        device: str,
        storage: Any,
        *,
        plain: bool,
    ) -> None:
        self.global_shape = shape
        self.dtype = dtype
        self.boxes = boxes
        self.views = views
        self.access = access
        self.device = device
        self.storage = storage
        self.plain = plain
        self.ragged = False
        self.replica_ranks = None
