"""Torch tensors as the bytes that a broadcast carries: a tensor's own memory, or packed behind one another.

Goes in: views of tensors, of any dtype, strides and device, and numpy arrays. Comes out: one-dimensional uint8 tensors,
so that whatever carries them need not know the dtype. Elements move by `copy_` alone, between integers of their width,
so that their bits stay as they are; never through a storage, whose format may be the device's own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dcp_core.errors import CoordinationError

View: TypeAlias = "torch.Tensor | npt.NDArray[Any]"

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN_NPU_FORMATS = frozenset({-1, 0, 1, 2, 30})  # undefined, NCHW, NHWC, ND, NCDHW


def wire_of(view: View) -> torch.Tensor | None:
    """A view's own memory as bytes; None where that is not contiguous, or is not the elements as they are."""
    if isinstance(view, np.ndarray):
        is_plain = view.flags.c_contiguous and _is_shareable(view)
        return torch.from_numpy(view.reshape(-1).view(np.uint8)) if is_plain else None
    if not view.is_contiguous() or _is_lazy(view) or not _has_plain_format(view):
        return None
    with torch.inference_mode(view.is_inference()), torch.no_grad():
        return view.detach().view(-1).view(torch.uint8)


def new_wire(nbytes: int, view: View) -> torch.Tensor:
    """Bytes on the device of a view, of undefined content."""
    device = torch.device("cpu") if isinstance(view, np.ndarray) else view.device
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def pack(views: Sequence[View], wire: torch.Tensor) -> None:
    """Copy the raw bits of views, one after the other, row-major, to a wire."""
    with _writing_mode([wire]):
        tensors, arrays = _split(views, wire)
        for array, part in arrays:
            _elements(part, array)[...] = array
        targets, sources = _pairs(tensors)
        _copy_all(targets, sources)


def unpack(wire: torch.Tensor, views: Sequence[View]) -> None:
    """Undo `pack`."""
    tensors, arrays = _split(views, wire)
    for array, part in arrays:
        array[...] = _elements(part, array)
    with _writing_mode([view for view, _ in tensors]):
        sources, targets = _pairs(tensors)
        _copy_all(targets, sources)


def _has_plain_format(view: torch.Tensor) -> bool:
    """Whether elements lie in row-major order where strides say so: on Ascend they may be in tiles."""
    torch_npu = sys.modules.get("torch_npu")
    if torch_npu is None or view.device.type != "npu":
        return True
    return torch_npu.get_npu_format(view) in _PLAIN_NPU_FORMATS


@contextlib.contextmanager
def _writing_mode(targets: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inference tensors can be written to in their own mode only, others in both; autograd sees nothing."""
    with torch.inference_mode(any(target.is_inference() for target in targets)), torch.no_grad():
        yield


def _split(
    views: Sequence[View], wire: torch.Tensor
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[tuple[npt.NDArray[Any], torch.Tensor]]]:
    """Tensors, and arrays that torch cannot share, each with its part of the wire."""
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
    arrays: list[tuple[npt.NDArray[Any], torch.Tensor]] = []
    at = 0
    for view in views:
        part = wire[at : at + view.nbytes]
        at += view.nbytes
        if not isinstance(view, np.ndarray):
            tensors.append((view, part))
        elif _is_shareable(view):
            tensors.append((torch.from_numpy(view), part))
        else:
            arrays.append((view, part))
    if at != wire.numel():
        raise CoordinationError(f"{at} bytes of views do not fit a wire of {wire.numel()} bytes")
    return tensors, arrays


def _pairs(tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For each tensor its part of the wire, and the tensor, of one type and shape."""
    parts: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    for view, part in tensors:
        view = view.detach()
        part = _typed(part, view)
        if not _is_lazy(view):  # what is lazy is copied by value
            part, view = _as_bits(part), _as_bits(view)
        parts.append(part)
        found.append(view)
    return parts, found


def _elements(part: torch.Tensor, view: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A part of a wire as the elements of an array."""
    array: npt.NDArray[Any] = part.numpy()
    return array.view(view.dtype.newbyteorder("<")).reshape(view.shape)


def _is_shareable(view: npt.NDArray[Any]) -> bool:
    """Whether an array's memory may be a tensor's."""
    if not view.flags.writeable or view.dtype != view.dtype.newbyteorder("<"):
        return False
    return view.flags.aligned and all(stride >= 0 and stride % view.itemsize == 0 for stride in view.strides)


def _typed(part: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Bytes as elements of a view's type and shape."""
    return part.view(view.dtype).view(view.shape)


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if len(targets) > 1 and hasattr(torch, "_foreach_copy_") and not any(map(_is_lazy, targets)):
        with contextlib.suppress(NotImplementedError):  # of a device that lacks it
            torch._foreach_copy_(targets, sources)
            return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the memory holds the conjugate or the negative of the values."""
    return tensor.is_conj() or tensor.is_neg()
