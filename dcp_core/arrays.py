"""Numpy arrays as tensors: the adapter of a process that has no framework, and the conversions of element types.

The conversions take and give *raw bits* (`DType.bits`). Floats round to nearest, ties to even, from the exact value
(64-bit integers become float64 first). What is out of range becomes, as in torch 2.13, infinity; in types without one
NaN, but in float8_e4m3fn the largest value. Numpy lacks bfloat16 and the 8-bit floats: they go through a carrier type
that numpy has and that holds all their values.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.adapter import ProcessGroup
from dcp_core.box import Box, slices
from dcp_core.dtype import DType, Kind, numpy_dtype
from dcp_core.errors import ArgumentError, DTypeMismatchError, UnsupportedValueError
from dcp_core.planning.leaves import HOST_MEMORY, LocalTensor, MemoryRange, whole_shape, whole_tensor
from dcp_core.planning.target_memory import range_of

Array = npt.NDArray[Any]

_BFLOAT16_HIDDEN = np.uint32(0x7FFF)
_FLOAT32_INFINITY = np.uint32(0x7F800000)
_FLOAT32_MAGNITUDE = np.uint32(0x7FFFFFFF)
_QUIET_BIT = np.uint32(0x00400000)


class ArrayAccess:
    """Reaches the elements of numpy arrays (a `TensorAccess`).

    Args:
        dtype: What the elements are, for arrays of raw bits whose type numpy lacks (bfloat16 as uint16). None: what
            the array says.
    """

    def __init__(self, dtype: DType | None = None) -> None:
        self.dtype = dtype

    def host_array(self, view: Array) -> Array | None:
        """The array's own memory as raw bits; read-only if the array is; None for elements in big-endian order."""
        dtype = self._dtype_of(view)
        return view.view(dtype.bits) if _is_little_endian(view) else None

    def read_out(self, view: Array) -> Array:
        """The array's raw bits, little-endian: shared if it is so already, else a copy."""
        bits = self.host_array(view)
        return view.astype(self._dtype_of(view).bits) if bits is None else bits

    def writable_problem(self, view: Array) -> str | None:
        """Why an array cannot be filled by a load, or None."""
        if not view.flags.writeable:
            return "the array is read-only; pass a writable copy"
        if _may_share_elements(view):
            return "its elements share memory, as in a broadcast array or overlapping windows; pass a copy"
        return None

    def transfers(self, view: Array) -> None:
        """None: arrays lie in host memory."""

    def memory_range(self, view: Array) -> MemoryRange:
        """Where the elements lie."""
        nbytes = view.nbytes
        if view.flags.c_contiguous:
            start: int = view.__array_interface__["data"][0]
            return HOST_MEMORY, start, start + nbytes, True
        start, stop = range_of(view)
        return HOST_MEMORY, start, stop, stop - start == nbytes

    def copy_into(self, view: Array, bits: Array, source_dtype: DType) -> None:
        """Write elements into the array, converting by `convert`.

        Raises:
            UnsupportedValueError: The array is read-only.
            DTypeMismatchError: There is no such conversion.
        """
        if not view.flags.writeable:
            raise UnsupportedValueError("the target array is read-only; load into a writeable one")
        converted = convert(bits, source_dtype, self._dtype_of(view))
        target = self.host_array(view)
        np.copyto(view if target is None else target, converted)

    def narrow(self, view: Array, box: Box) -> Array:
        """The part of the array that `box` selects, sharing its memory."""
        index: Any = (*slices(box), ...)
        narrowed: Array = view[index]
        return narrowed

    def _dtype_of(self, view: Array) -> DType:
        dtype = self.dtype or numpy_dtype(view.dtype)
        if dtype is None or dtype.itemsize != view.dtype.itemsize:
            raise UnsupportedValueError(f"an array of {view.dtype} is no tensor that can be stored")
        return dtype


class NumpyAdapter(ArrayAccess):
    """The adapter of plain numpy arrays, and of a process that is alone.

    An `Adapter`; other adapters' processes use it beside theirs for the arrays in their states.
    """

    name = "numpy"
    version = np.__version__

    def __init__(self) -> None:
        super().__init__(None)

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a plain array as one whole tensor.

        None for everything else: scalars, subclasses (masked arrays, matrices, memory maps), and arrays of strings,
        objects or records, which are stored as objects.
        """
        if type(value) is not np.ndarray:
            return None
        dtype = numpy_dtype(value.dtype)
        if dtype is None:
            return None
        return whole_tensor(whole_shape(value.shape), dtype, value, self, "cpu", storage_of(value))

    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        """A group of one.

        Raises:
            ArgumentError: A group was passed; plain numpy has none.
        """
        if group is not None:
            raise ArgumentError(f"numpy knows no process groups: got {group!r}; call through your framework's package")
        return ProcessGroup()


def _may_share_elements(array: Array) -> bool:
    """Whether two elements may be one place in memory: never so for what slicing and transposing make."""
    if array.flags.c_contiguous:
        return False
    reach = array.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True)):
        if size > 1 and stride < reach and array.size:
            return True
        reach += stride * (size - 1)
    return False


def storage_of(array: Array) -> Hashable | None:
    """Name the memory of an array's elements: equal for two live arrays exactly when they are the same elements."""
    if array.size == 0:
        return None
    strides = None
    if not array.flags.c_contiguous:
        strides = tuple([stride if size > 1 else 0 for size, stride in zip(array.shape, array.strides, strict=True)])
    return array.__array_interface__["data"][0], array.shape, strides, array.dtype


def convert(bits: Array, source: DType, target: DType) -> Array:
    """Convert elements from one type to another.

    Whether a conversion is wanted is for the planner to say (`dtype.conversion`); this does any that has a meaning.

    Args:
        bits: Raw bits of `source`, any shape.
        source: What they are.
        target: What they should become.

    Returns:
        Raw bits of `target`, of the same shape; `bits` itself when the types are the same.

    Raises:
        DTypeMismatchError: One of the types has no arithmetic.

    >>> from dcp_core.dtype import BY_NAME
    >>> convert(np.float32([1.0, -2.5]), BY_NAME["float32"], BY_NAME["bfloat16"]).tolist() == [0x3F80, 0xC020]
    True
    """
    if source == target:
        return bits
    if Kind.OPAQUE in (source.kind, target.kind):
        raise DTypeMismatchError(f"elements of type {source.name} can't be converted to {target.name}")
    with np.errstate(all="ignore"):
        values = _to_carrier(bits.reshape(-1), source)
        if values.dtype.kind == "c" and target.kind is not Kind.COMPLEX:
            values = values.real
        return _from_carrier(values, target).reshape(bits.shape)


def _to_carrier(bits: Array, source: DType) -> Array:
    """The values (1-d), in a numpy type that holds all of them."""
    if source.numpy is not None:
        return bits.view(source.bits)
    if source.name == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if source.name == "complex32":
        halves = np.ascontiguousarray(bits).view("<f2").astype(np.float32)
        return halves.view(np.complex64)
    return _float8_values(source)[bits]


def _from_carrier(values: Array, target: DType) -> Array:
    """Raw bits of the nearest values of a type."""
    if target.numpy is not None:
        return values.astype(target.bits)
    if target.name == "bfloat16":
        return _to_bfloat16(values)
    if target.name == "complex32":
        halves = values.astype(np.complex128).view(np.float64).astype("<f2")
        return halves.view("<u4")
    return _to_float8(values, target)


def _to_bfloat16(values: Array) -> Array:
    wide = _round_to_odd(values) if values.dtype.kind in "iuf" and values.dtype.itemsize > 2 else values
    raw = wide.astype(np.float32).view(np.uint32)
    is_nan = (raw & _FLOAT32_MAGNITUDE) > _FLOAT32_INFINITY
    rounded = raw + (_BFLOAT16_HIDDEN + ((raw >> np.uint32(16)) & np.uint32(1)))
    return (np.where(is_nan, raw | _QUIET_BIT, rounded) >> np.uint32(16)).astype("<u2")


def _round_to_odd(values: Array) -> Array:
    """Values as float32 whose last bit says whether they are exact, so that rounding them again rounds only once.

    Source: S. Boldo and G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding
    to odd", IEEE Transactions on Computers, 2008.
    """
    if values.dtype.kind == "f" and values.dtype.itemsize == 4:
        return values
    exact = values.astype(np.float64)
    near = exact.astype(np.float32)
    away = np.abs(near.astype(np.float64)) > np.abs(exact)
    is_exact = (near == exact) | np.isnan(exact)
    raw = near.view(np.uint32)
    odd = (raw - away.astype(np.uint32)) | np.uint32(1)
    return np.where(is_exact, raw, odd).view(np.float32)


@functools.cache
def _float8_values(dtype: DType) -> npt.NDArray[np.float32]:
    """The 256 values of an 8-bit float, by code. Source: OCP 8-bit Floating Point Specification, OCP Microscaling."""
    codes = np.arange(256)
    if dtype.name == "float8_e8m0fnu":
        values = np.ldexp(1.0, codes - 127)
        values[255] = np.nan
        return values.astype(np.float32)
    is_unsigned_zero = dtype.name.endswith("fnuz")
    bias = 2 ** (dtype.exponent - 1) - (0 if is_unsigned_zero else 1)
    exponent = (codes & 127) >> dtype.mantissa
    fraction = (codes & (1 << dtype.mantissa) - 1) / (1 << dtype.mantissa)
    values = np.ldexp(fraction + (exponent > 0), np.maximum(exponent, 1) - bias)
    if dtype.name == "float8_e4m3fn":
        values[127::128] = np.nan
    elif not dtype.finite:
        top = exponent == (1 << dtype.exponent) - 1
        values[top] = np.where(fraction[top] > 0, np.nan, np.inf)
    values[128:] *= -1
    if is_unsigned_zero:
        values[128] = np.nan
    return values.astype(np.float32)


@functools.cache
def _float8_halfway(dtype: DType) -> tuple[npt.NDArray[np.float64], int]:
    """The midpoints between neighbouring magnitudes (the last: where overflow begins), and the code of the overflow."""
    values = _float8_values(dtype).astype(np.float64)
    positive = values if dtype.name == "float8_e8m0fnu" else values[:128]
    finite = positive[np.isfinite(positive)]
    step = finite[-1] - finite[-2]
    following = np.append(finite[1:], finite[-1] * 2 if dtype.mantissa == 0 else finite[-1] + step)
    beyond = 128 if dtype.name.endswith("fnuz") else len(finite) - (dtype.name == "float8_e4m3fn")
    return (finite + following) / 2, beyond


def _to_float8(values: Array, target: DType) -> Array:
    """Codes of the nearest values: the lower neighbour's code is even, or the midpoint goes up.

    float8_e8m0fnu has powers of two only: ties go up (as in torch), 0 becomes the smallest, negative values NaN.
    """
    exact = values.astype(np.float64)
    magnitude = np.abs(exact)
    halfway, beyond = _float8_halfway(target)
    codes = np.searchsorted(halfway, magnitude, side="left")
    is_tie = halfway[np.minimum(codes, len(halfway) - 1)] == magnitude
    codes += is_tie & ((codes & 1 == 1) | (target.mantissa == 0))
    is_beyond = codes >= len(halfway)
    codes[is_beyond] = beyond
    if target.mantissa == 0:
        codes[np.isnan(exact) | (exact < 0)] = 255
        return codes.astype(np.uint8)
    return _with_sign(codes, exact, target)


def _with_sign(codes: Array, exact: npt.NDArray[np.float64], target: DType) -> Array:
    is_negative = np.signbit(exact)
    if target.name.endswith("fnuz"):
        codes[np.isnan(exact)] = 128
        is_negative &= (codes > 0) & (codes < 128)
    else:
        codes[np.isnan(exact)] = 127
    signed: Array = codes | (is_negative.astype(codes.dtype) << 7)
    return signed.astype(np.uint8)


def _is_little_endian(array: Array) -> bool:
    is_native: bool = array.dtype.isnative
    return is_native == np.little_endian or array.dtype.itemsize == 1
