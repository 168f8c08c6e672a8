"""Elements of MindSpore tensors as raw bits, and back.

In: tensors of any dtype, strides and device. Out: for host memory numpy arrays of `DType.bits` that share it, so that
the core moves bytes without MindSpore; for a device's memory, what copies them. Everything here works on plain memory;
what a tensor *means* (shard, layout) is told by `dcp_mindspore.describers`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore.common.api import _pynative_executor

from dcp_core.arrays import ArrayAccess, convert
from dcp_core.box import Box, slices
from dcp_core.dtype import DTYPES, DType, dtype_named
from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.leaves import MemoryRange, TensorAccess

Bits = npt.NDArray[Any]

_SPELLED = {"bool": "bool_"}
_DEVICES = {"ascend": "npu", "gpu": "cuda"}
_CARRIERS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def _types_by_name() -> dict[str, Any]:
    found = {dtype.name: getattr(mindspore, _SPELLED.get(dtype.name, dtype.name), None) for dtype in DTYPES}
    return {name: kind for name, kind in found.items() if kind is not None}


_TO_MINDSPORE: dict[str, Any] = _types_by_name()
_OF_MINDSPORE: dict[str, DType] = {str(kind): dtype_named(name) for name, kind in _TO_MINDSPORE.items()}


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the elements of a tensor lie.

    Attributes:
        view: All of them, in the tensor's shape: raw bits that share host memory, or a `DeviceView`.
        access: How to reach parts of the view (`narrow`) and their elements.
        dtype: Of the elements.
        device: "cpu", "npu" for Ascend, "cuda".
        storage: Equal for two tensors exactly when they are the same elements of the same memory; None without
            elements.
    """

    view: Any
    access: TensorAccess
    dtype: DType
    device: str
    storage: Hashable | None


def dtype_of(kind: Any) -> DType:
    """Map a MindSpore dtype to ours.

    Raises:
        UnsupportedValueError: The file format cannot hold it.

    >>> dtype_of(mindspore.bfloat16).file_dtype
    'BF16'
    """
    found = _OF_MINDSPORE.get(str(kind))
    return found if found is not None else dtype_named(str(kind).lower())


def mindspore_dtype_of(dtype: DType) -> Any:
    """Map our dtype to MindSpore's.

    Raises:
        UnsupportedValueError: This MindSpore lacks it.
    """
    found = _TO_MINDSPORE.get(dtype.name)
    if found is None:
        raise UnsupportedValueError(
            f"mindspore {mindspore.__version__} has no dtype {dtype.name}; read it as an array, or load it with torch"
        )
    return found


def device_of(tensor: Any) -> str:
    """The type of device whose memory holds a tensor: "cpu", "npu" for Ascend, "cuda"."""
    name = str(getattr(tensor, "device", None) or "CPU").partition(":")[0].lower()
    return _DEVICES.get(name, name)


def memory_of(tensor: Any) -> Memory:
    """Where the elements of a MindSpore tensor lie, after waiting for what computes them.

    Raises:
        UnsupportedValueError: The file format cannot hold its dtype, or it has no memory.
    """
    dtype, device = dtype_of(tensor.dtype), device_of(tensor)
    shape = tuple(tensor.shape)
    if device != "cpu":
        view = DeviceView(tensor, Box.whole(shape))
        return Memory(view, DeviceAccess(), dtype, device, _storage(tensor, shape, device))
    bits = host_bits(tensor, dtype)
    return Memory(bits, host_access(dtype), dtype, device, _storage(tensor, shape, device))


def _storage(tensor: Any, shape: tuple[int, ...], device: str) -> Hashable | None:
    if 0 in shape:
        return None
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    return (device, tensor.data_ptr(), shape, strides, str(tensor.dtype))


@functools.cache
def host_access(dtype: DType) -> ArrayAccess:
    """How to reach raw bits in host memory; conversions are the core's."""
    return ArrayAccess(dtype)


def host_bits(tensor: Any, dtype: DType) -> Bits:
    """The raw bits of a tensor in host memory, sharing it, whatever its strides.

    `asnumpy` copies where the tensor is a view of another, and knows no 8-bit floats; there the address tells.
    """
    shape = tuple(tensor.shape)
    if 0 in shape:
        return np.empty(shape, dtype.bits)
    is_known = dtype.numpy is not None or dtype.name == "bfloat16"
    if is_known and tensor.is_contiguous() and tensor.storage_offset() == 0:
        array: Bits = tensor.asnumpy()
        if array.__array_interface__["data"][0] == tensor.data_ptr():
            return array if array.dtype is dtype.bits else array.view(dtype.bits)
    return _at_address(tensor, shape, dtype)


def _at_address(tensor: Any, shape: tuple[int, ...], dtype: DType) -> Bits:
    """The elements at a tensor's address; the array holds the tensor."""
    _pynative_executor.sync()
    address = int(tensor.data_ptr())
    if not address:
        raise UnsupportedValueError(f"a {shape} tensor of {dtype.name} has no memory yet; run init_data() first")
    strides = tuple(int(stride) * dtype.itemsize for stride in tensor.stride())
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + dtype.itemsize
    memory: Any = (ctypes.c_uint8 * reach).from_address(address)
    memory.tensor = tensor
    return np.ndarray(shape, dtype.bits, buffer=memory, strides=strides)


def read_bits(tensor: Any) -> Bits:
    """The raw bits of a tensor on any device, copied to the host where needed."""
    dtype = dtype_of(tensor.dtype)
    if device_of(tensor) == "cpu":
        return host_bits(tensor, dtype)
    array: Bits = (tensor if dtype.numpy or dtype.name == "bfloat16" else tensor.view(mindspore.uint8)).asnumpy()
    return array.view(dtype.bits)


def tensor_of_bits(bits: Bits, dtype: DType) -> Any:
    """A new tensor of these raw bits, on the host.

    Args:
        bits: dtype `DType.bits`, any shape and strides; copied.
        dtype: What the bits mean.

    Raises:
        UnsupportedValueError: This MindSpore lacks the dtype.
    """
    kind = mindspore_dtype_of(dtype)
    array = np.array(bits, order="C")
    if dtype.numpy is not None:
        return mindspore.Tensor.from_numpy(array)
    return mindspore.Tensor.from_numpy(array.view(_CARRIERS[dtype.itemsize])).view(kind)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceView:
    """A part of a tensor on a device. MindSpore drops what is written to most of its views, so the tensor is kept.

    Attributes:
        tensor: On the device.
        box: The part, in elements of the tensor.
    """

    tensor: Any
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return self.box.sizes

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole tensor."""
        return self.box.sizes == tuple(self.tensor.shape)

    def part(self) -> Any:
        """The part as a tensor, to read from."""
        return self.tensor if self.is_whole else self.tensor[slices(self.box)]


class DeviceAccess:
    """Reaches the elements of `DeviceView`s, by blocking copies (a `TensorAccess`)."""

    def host_array(self, view: DeviceView) -> None:
        """None: the elements do not lie in host memory."""

    def read_out(self, view: DeviceView) -> Bits:
        """The view's raw bits, copied to the host."""
        part = view.part()
        return read_bits(part if part.is_contiguous() else part.contiguous())

    def copy_into(self, view: DeviceView, bits: Bits, source_dtype: DType) -> None:
        """Write elements into the tensor, in place, converted on the host by the core's rules."""
        dtype = dtype_of(view.tensor.dtype)
        source = tensor_of_bits(convert(bits, source_dtype, dtype), dtype)
        if view.is_whole:
            view.tensor.copy_(source)
        else:
            view.tensor[slices(view.box)] = source

    def narrow(self, view: DeviceView, box: Box) -> DeviceView:
        """The part of a view that `box` selects."""
        offsets = tuple(start + more for start, more in zip(view.box.offsets, box.offsets, strict=True))
        return DeviceView(view.tensor, Box(offsets, box.sizes))

    def writable_problem(self, view: DeviceView) -> str | None:
        """Why a view cannot be the target of a load, or None."""
        if 0 in view.tensor.stride() and 0 not in view.tensor.shape:
            return "its elements share memory, as in an expanded tensor; load into a copy of it"
        return None

    def memory_range(self, view: DeviceView) -> MemoryRange | None:
        """Where the elements lie; None for a part of a tensor, and for one that is not contiguous."""
        tensor = view.tensor
        address = int(tensor.data_ptr())
        if not address or not view.is_whole or not tensor.is_contiguous():
            return None
        return str(tensor.device), address, address + math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize, True

    def transfers(self, view: DeviceView) -> None:
        """None: copies from and to MindSpore's devices block."""
