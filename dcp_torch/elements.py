"""Elements of torch tensors as raw bits, and back.

In: strided torch tensors of any dtype and device. Out: numpy arrays of `DType.bits`. Everything here works on plain
memory; what a tensor *means* (shard, DTensor) is told by `dcp_torch.describers`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dcp_core.dtype import DTYPES, DType, dtype_named
from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.leaves import HOST_MEMORY, MemoryRange

_OF_TORCH: dict[torch.dtype, DType] = {
    getattr(torch, dtype.name): dtype for dtype in DTYPES if isinstance(getattr(torch, dtype.name, None), torch.dtype)
}
_TO_TORCH: dict[DType, torch.dtype] = {dtype: torch_type for torch_type, dtype in _OF_TORCH.items()}
_BITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SCANNED_ELEMENTS = 1 << 20


def dtype_of(torch_dtype: torch.dtype) -> DType:
    """Map a torch dtype to ours.

    Raises:
        UnsupportedValueError: The file format cannot hold it.

    >>> dtype_of(torch.bfloat16).file_dtype
    'BF16'
    """
    found = _OF_TORCH.get(torch_dtype)
    return found if found is not None else dtype_named(str(torch_dtype).removeprefix("torch."))


def torch_dtype_of(dtype: DType) -> torch.dtype:
    """Map our dtype to torch's.

    Raises:
        UnsupportedValueError: This torch lacks it.
    """
    found = _TO_TORCH.get(dtype)
    if found is None:
        raise UnsupportedValueError(f"torch {torch.__version__} has no dtype {dtype.name}; load it with a newer torch")
    return found


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the memory holds the conjugate or the negative of the values."""
    return tensor.is_conj() or tensor.is_neg()


def host_bits(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    """The raw bits as a numpy array that shares the tensor's memory.

    Args:
        tensor: Any strides; may require grad, be 0-d, empty or expanded.

    Returns:
        An array of the tensor's shape and strides, dtype `DType.bits`; None when the values do not lie in host memory
        as they are (on a device, or conjugated or negated lazily).
    """
    if not tensor.is_cpu:
        return None
    dtype = _OF_TORCH.get(tensor.dtype) or dtype_of(tensor.dtype)
    plain = tensor.detach() if tensor.requires_grad else tensor
    if dtype.numpy is None:
        if _is_lazy(tensor):
            return None
        plain = plain.view(_BITS[dtype.itemsize])
    try:
        array: npt.NDArray[Any] = plain.numpy()
    except RuntimeError:  # what torch says of a lazy tensor; most are not, so they are not asked before
        if _is_lazy(tensor):
            return None
        raise
    return array if array.dtype is dtype.bits else array.view(dtype.bits)


def read_bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The raw bits as a numpy array, copied to the host where needed.

    Conjugated and negated views are resolved. A device tensor goes through `cpu()`, never through its storage, whose
    format may be the device's own.
    """
    bits = host_bits(tensor)
    if bits is None:
        bits = host_bits(tensor.detach().resolve_conj().resolve_neg().cpu())
    if bits is None:
        raise UnsupportedValueError(f"a tensor on {tensor.device} does not become a host tensor by cpu()")
    return bits


def tensor_of_bits(bits: npt.NDArray[Any], dtype: DType) -> torch.Tensor:
    """A host tensor of these raw bits, sharing their memory where torch can.

    Args:
        bits: dtype `DType.bits`, any shape and strides. What torch cannot share (read-only memory, negative or odd
            strides, elements that are not aligned to their size) is copied.
        dtype: What the bits mean.
    """
    itemsize = dtype.itemsize
    is_aligned = bits.__array_interface__["data"][0] % itemsize == 0  # numpy lets complex numbers be aligned by halves
    shareable = bits.flags.writeable and is_aligned and all(s >= 0 and s % itemsize == 0 for s in bits.strides)
    array = bits if shareable else np.array(bits, order="C")
    if dtype.numpy is None:
        return torch.from_numpy(array.view(f"<i{itemsize}" if itemsize > 1 else "u1")).view(torch_dtype_of(dtype))
    return torch.from_numpy(array)


def assign_bits(tensor: torch.Tensor, bits: npt.NDArray[Any], source_dtype: DType) -> None:
    """Write elements into a tensor, converting by torch's own rules.

    Bits of the tensor's own dtype arrive unchanged, NaN payloads included.

    Args:
        tensor: Destination; any device and strides, may require grad.
        bits: Raw bits of the tensor's shape; dtype is `source_dtype.bits`.
        source_dtype: What the bits mean.
    """
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        target, source = tensor.detach(), tensor_of_bits(bits, source_dtype)
        width = _BITS.get(source_dtype.itemsize)
        if dtype_of(tensor.dtype) == source_dtype and width is not None and not _is_lazy(target):
            target, source = target.view(width), source.view(width)
        target.copy_(source)


def storage_identity(tensor: torch.Tensor) -> Hashable | None:
    """Equal for two tensors exactly when they are the same elements of the same memory.

    Strides of dimensions that are not walked play no part.

    Returns:
        A key, or None for a tensor without elements.
    """
    if tensor.numel() == 0:
        return None
    shape, strides = tuple(tensor.shape), None
    if not tensor.is_contiguous():
        strides = tuple([stride if size > 1 else 0 for size, stride in zip(shape, tensor.stride(), strict=True)])
    return (tensor.device, tensor.data_ptr(), shape, strides, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def contiguous_identity(tensor: torch.Tensor, shape: tuple[int, ...]) -> Hashable:
    """`storage_identity` of a contiguous tensor with elements, neither conjugated nor negated lazily.

    Args:
        tensor: The tensor.
        shape: Its shape.
    """
    return (tensor.device, tensor.data_ptr(), shape, None, tensor.dtype, False, False)


def memory_range(tensor: torch.Tensor) -> MemoryRange | None:
    """Where the elements of a tensor lie; None for one that has no address.

    >>> rows = torch.zeros(4, 6)
    >>> space, start, stop, is_dense = memory_range(rows[1:3])
    >>> space, start - rows.data_ptr(), stop - start, is_dense
    ('host', 24, 48, True)
    """
    start, nbytes = tensor.data_ptr(), tensor.nbytes
    if not start:
        return None
    space: Hashable = HOST_MEMORY if tensor.is_cpu else tensor.device
    if tensor.is_contiguous():
        return space, start, start + nbytes, True
    reach = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    stop = start + (reach + 1) * tensor.itemsize
    return space, start, stop, stop - start == nbytes


def writable_problem(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be a load's target, or None.

    A tensor whose elements share memory (an expanded one, overlapping windows) has no place for all values.

    >>> writable_problem(torch.zeros(1, 3).expand(2, 3)) is None, writable_problem(torch.zeros(2, 3)) is None
    (False, True)
    """
    if tensor.is_contiguous():
        return None
    walked = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    if tensor.numel() == 0 or not walked:
        return None
    reach = 0
    for stride, size in walked:
        if stride <= reach and not _elements_are_apart(tensor, walked):
            return (
                f"elements of a {tuple(tensor.shape)} tensor with strides {tuple(tensor.stride())} share memory, "
                "as in an expanded tensor; load into a clone() of it, or into the tensor it was expanded from"
            )
        reach += stride * (size - 1)
    return None


def _elements_are_apart(tensor: torch.Tensor, walked: list[tuple[int, int]]) -> bool:
    """Settle by counting addresses what strides do not show; too large a tensor counts as overlapping."""
    if walked[0][0] == 0 or tensor.numel() > _SCANNED_ELEMENTS:
        return False
    addresses = np.zeros(1, dtype=np.int64)
    for stride, size in walked:
        addresses = (addresses[:, None] + stride * np.arange(size)).reshape(-1)
    return len(np.unique(addresses)) == len(addresses)
