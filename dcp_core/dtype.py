"""The one table of element types.

Every layer names a dtype by its `DType`; adapters map their framework's types to `DType.name`, which is the
torch spelling ("float32", "bfloat16"). `DType.file_dtype` is what the safetensors header says: types that the
file format lacks are stored under a type of the same bits, with `file_tail` appended to the shape.
`DType.bits` is the numpy type that carries the raw bits where numpy lacks the type itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from dcp_core.errors import UnsupportedValueError


class Kind(Enum):
    """What family of numbers a dtype belongs to."""

    BOOL = "bool"
    SIGNED = "signed"
    UNSIGNED = "unsigned"
    FLOAT = "float"
    COMPLEX = "complex"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. Types are equal when their codes are.

    Attributes:
        code: The number that stands for it in plans and `.metadata`; never reused.
        name: Canonical name, as torch spells it.
        file_dtype: safetensors name.
        file_tail: Dimensions appended to the shape in the safetensors header.
        itemsize: Bytes an element.
        kind: Family.
        mantissa: Explicit mantissa bits (floats), value bits (integers).
        exponent: Exponent bits (floats), else 0.
        numpy: numpy name, or None where plain numpy lacks the type.
        finite: True for floats without infinities (the NaN and range rules differ from IEEE).
        bits: The numpy dtype that carries this type's raw bits, little-endian.
    """

    code: int
    name: str = field(compare=False)
    file_dtype: str = field(compare=False)
    itemsize: int = field(compare=False)
    kind: Kind = field(compare=False)
    mantissa: int = field(default=0, compare=False)
    exponent: int = field(default=0, compare=False)
    numpy: str | None = field(default=None, compare=False)
    file_tail: tuple[int, ...] = field(default=(), compare=False)
    finite: bool = field(default=False, compare=False)
    bits: np.dtype[np.generic] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        carrier = f"u{self.itemsize}" if self.numpy is None else self.numpy
        # By its spelling, which on most machines gives the very object that arrays of that type have.
        object.__setattr__(self, "bits", np.dtype(np.dtype(carrier).newbyteorder("<").str))


_F, _C, _S, _U = Kind.FLOAT, Kind.COMPLEX, Kind.SIGNED, Kind.UNSIGNED

DTYPES: tuple[DType, ...] = (
    DType(1, "bool", "BOOL", 1, Kind.BOOL, 1, 0, "bool"),
    DType(2, "int8", "I8", 1, _S, 7, 0, "int8"),
    DType(3, "int16", "I16", 2, _S, 15, 0, "int16"),
    DType(4, "int32", "I32", 4, _S, 31, 0, "int32"),
    DType(5, "int64", "I64", 8, _S, 63, 0, "int64"),
    DType(6, "uint8", "U8", 1, _U, 8, 0, "uint8"),
    DType(7, "uint16", "U16", 2, _U, 16, 0, "uint16"),
    DType(8, "uint32", "U32", 4, _U, 32, 0, "uint32"),
    DType(9, "uint64", "U64", 8, _U, 64, 0, "uint64"),
    DType(10, "float16", "F16", 2, _F, 10, 5, "float16"),
    DType(11, "bfloat16", "BF16", 2, _F, 7, 8),
    DType(12, "float32", "F32", 4, _F, 23, 8, "float32"),
    DType(13, "float64", "F64", 8, _F, 52, 11, "float64"),
    DType(14, "complex32", "F16", 4, _C, 10, 5, None, (2,)),
    DType(15, "complex64", "C64", 8, _C, 23, 8, "complex64"),
    DType(16, "complex128", "F64", 16, _C, 52, 11, "complex128", (2,)),
    DType(17, "float8_e4m3fn", "F8_E4M3", 1, _F, 3, 4, finite=True),
    DType(18, "float8_e5m2", "F8_E5M2", 1, _F, 2, 5),
    DType(19, "float8_e4m3fnuz", "F8_E4M3FNUZ", 1, _F, 3, 4, finite=True),
    DType(20, "float8_e5m2fnuz", "F8_E5M2FNUZ", 1, _F, 2, 5, finite=True),
    DType(21, "float8_e8m0fnu", "F8_E8M0", 1, _F, 0, 8, finite=True),
    DType(22, "float4_e2m1fn_x2", "U8", 1, Kind.OPAQUE),
)
"""Every type that can be stored. Sources: torch.dtype, safetensors' Dtype enumeration, OCP 8-bit formats."""

BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in DTYPES}
BY_CODE: dict[int, DType] = {dtype.code: dtype for dtype in DTYPES}

_OF_NUMPY: dict[np.dtype[np.generic], DType] = {}

ITEMSIZE = np.zeros(256, dtype=np.int64)
"""Bytes an element, indexed by `DType.code`."""
for _dtype in DTYPES:
    ITEMSIZE[_dtype.code] = _dtype.itemsize


def dtype_named(name: str) -> DType:
    """Look a dtype up by its canonical name.

    Raises:
        UnsupportedValueError: The file format cannot hold that type.

    >>> dtype_named("bfloat16").file_dtype
    'BF16'
    """
    found = BY_NAME.get(name)
    if found is None:
        raise UnsupportedValueError(
            f"elements of type {name} cannot be stored; convert the tensor to one of {', '.join(BY_NAME)}"
        )
    return found


def numpy_dtype(dtype: np.dtype[np.generic]) -> DType | None:
    """Map a numpy dtype (any byte order) to ours, or None if it has no counterpart (strings, objects, records).

    >>> numpy_dtype(np.dtype(">i4")).name
    'int32'
    """
    known = _OF_NUMPY.get(dtype)
    if known is not None:
        return known
    found = BY_NAME.get(dtype.name)  # numpy makes the name anew each time
    if found is None or found.itemsize != dtype.itemsize:
        return None
    return _OF_NUMPY.setdefault(dtype, found)


def conversion(source: DType, target: DType) -> str:
    """Classify a conversion of elements at load.

    Returns:
        "same", "lossless" (every value of `source` is a value of `target`), "lossy" (both floating, or both
        complex), or "refused".

    >>> conversion(BY_NAME["bfloat16"], BY_NAME["float32"]), conversion(BY_NAME["float32"], BY_NAME["int32"])
    ('lossless', 'refused')
    """
    if source == target:
        return "same"
    if Kind.OPAQUE in (source.kind, target.kind):
        return "refused"
    if source.kind is target.kind and source.kind in (Kind.FLOAT, Kind.COMPLEX):
        return "lossless" if _float_fits(source, target) else "lossy"
    if _integer_fits(source, target):
        return "lossless"
    if source.kind is Kind.FLOAT and target.kind is Kind.COMPLEX:
        return "lossless" if _float_fits(source, target) else "refused"
    return "refused"


def _float_fits(source: DType, target: DType) -> bool:
    if target.finite and (source.finite is False or target.exponent <= source.exponent):
        return False
    if source.name == "float8_e8m0fnu":
        return target.exponent >= 8 and not target.finite and target.mantissa > 0
    if source.exponent == target.exponent and source.name.endswith("fnuz"):
        return False
    return target.mantissa >= source.mantissa and target.exponent >= source.exponent


def _integer_fits(source: DType, target: DType) -> bool:
    if source.kind is Kind.BOOL:
        return target.kind in (Kind.SIGNED, Kind.UNSIGNED) or (target.kind is Kind.FLOAT and target.mantissa > 0)
    if source.kind is Kind.UNSIGNED:
        if target.kind in (Kind.SIGNED, Kind.UNSIGNED):
            return target.mantissa >= source.mantissa
        return target.kind is Kind.FLOAT and not target.finite and _significand(target) >= source.mantissa
    if source.kind is Kind.SIGNED:
        if target.kind is Kind.SIGNED:
            return target.mantissa >= source.mantissa
        return target.kind is Kind.FLOAT and not target.finite and _significand(target) >= source.mantissa
    return False


def _significand(dtype: DType) -> int:
    """Bits of integers that a float holds exactly, the implicit bit included, its range allowing."""
    largest_exponent: int = 2 ** (dtype.exponent - 1) - 1
    return min(dtype.mantissa + 1, largest_exponent)
