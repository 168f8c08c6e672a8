"""MindSpore tensors as the bytes that a broadcast carries: a tensor's own memory, or packed behind one another.

Goes in: views of tensors as `dcp_mindspore.elements` makes them. Comes out: for host memory arrays of bytes, for a
device's memory `DeviceWire`s, whose parts stay one tensor: MindSpore drops what a collective receives into a view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import mint

from dcp_core.box import slices
from dcp_core.errors import CoordinationError
from dcp_mindspore.elements import DeviceView, dtype_of

HostWire = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWire:
    """A part of a one-dimensional tensor of bytes on a device."""

    tensor: Any
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.stop - self.start

    def __getitem__(self, part: slice) -> DeviceWire:
        start, stop, step = part.indices(self.nbytes)
        if step != 1:
            raise CoordinationError("parts of a wire are contiguous")
        return DeviceWire(self.tensor, self.start + start, self.start + max(start, stop))

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole tensor."""
        return self.nbytes == int(self.tensor.shape[0])

    def to_send(self) -> Any:
        """The part as a tensor of its own."""
        return self.tensor if self.is_whole else self.tensor[self.start : self.stop].copy()

    def to_fill(self) -> Any:
        """A tensor to receive the part into."""
        return self.tensor if self.is_whole else mint.empty((self.nbytes,), dtype=mindspore.uint8)

    def take(self, received: Any) -> None:
        """Take what was received into `to_fill`."""
        if received is not self.tensor:
            self.tensor[self.start : self.stop] = received


def wire_of(view: Any) -> HostWire | None:
    """A view's own memory as bytes; None where that is not contiguous host memory."""
    if isinstance(view, DeviceView) or not view.flags.c_contiguous or not view.flags.writeable:
        return None
    if view.dtype != view.dtype.newbyteorder("<"):
        return None
    wire: HostWire = view.reshape(-1).view(np.uint8)
    return wire


def new_wire(nbytes: int, view: Any) -> HostWire | DeviceWire:
    """Bytes where a view lies, of undefined content."""
    if isinstance(view, DeviceView):
        return DeviceWire(mint.zeros((nbytes,), dtype=mindspore.uint8), 0, nbytes)
    return np.empty(nbytes, np.uint8)


def pack(views: Sequence[Any], wire: Any) -> None:
    """Copy the raw bits of views, one after the other, row-major, to a wire."""
    for view, part in _pairs(views, wire):
        if isinstance(view, DeviceView):
            elements = view.part().contiguous().view(-1)
            part.take(elements.view(mindspore.uint8))
        else:
            _elements(part, view)[...] = view


def unpack(wire: Any, views: Sequence[Any]) -> None:
    """Undo `pack`."""
    for view, part in _pairs(views, wire):
        if isinstance(view, DeviceView):
            elements = part.to_send().view(view.tensor.dtype).view(view.shape)
            view.tensor[slices(view.box)] = elements
        else:
            view[...] = _elements(part, view)


def _elements(part: HostWire, view: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A part of a wire as the elements of an array."""
    return part.view(view.dtype.newbyteorder("<")).reshape(view.shape)


def _pairs(views: Sequence[Any], wire: Any) -> Iterator[tuple[Any, Any]]:
    """Each view, and its part of a wire."""
    sizes = [_nbytes(view) for view in views]
    if sum(sizes) != wire.nbytes:
        raise CoordinationError(f"{sum(sizes)} bytes of views do not fit a wire of {wire.nbytes} bytes")
    at = 0
    for view, nbytes in zip(views, sizes, strict=True):
        yield view, wire[at : at + nbytes]
        at += nbytes


def _nbytes(view: Any) -> int:
    if isinstance(view, DeviceView):
        return view.box.numel * dtype_of(view.tensor.dtype).itemsize
    return int(view.nbytes)
