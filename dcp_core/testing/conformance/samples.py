"""Values that the suites try: elements of every type, views of many layouts, conversions, foreign values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.arrays import convert
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, DTYPES, DType, Kind, conversion

Bits = npt.NDArray[Any]

SHAPE = (6, 5)
"""Shape of the tensors whose views are tried."""

View = Callable[[Any], Any]
"""Takes a part of a tensor, or of an array, that shares its memory."""

VIEWS: dict[str, View] = {
    "whole": lambda tensor: tensor[...],
    "rows": lambda tensor: tensor[1:4],
    "columns": lambda tensor: tensor[:, 1:4],
    "every other": lambda tensor: tensor[::2, ::3],
    "transposed": lambda tensor: tensor.T,
    "one row": lambda tensor: tensor[3],
    "one column": lambda tensor: tensor[:, 2],
    "one element": lambda tensor: tensor[2, 3, ...],
    "nothing": lambda tensor: tensor[0:0],
}
"""Views of a tensor of `SHAPE`, by name."""

BOXES = (Box((0, 0), (6, 5)), Box((1, 0), (3, 5)), Box((0, 2), (6, 1)), Box((2, 3), (3, 2)), Box((5, 4), (1, 1)))
"""Parts of such a tensor."""

FOREIGN_VALUES: tuple[Any, ...] = (None, True, 1, 2.5, "text", b"bytes", object(), [1, 2], {"a": 1}, (), int, len)
"""What is no tensor of any framework."""

CASTS: tuple[tuple[DType, DType], ...] = tuple(
    (source, target)
    for source in DTYPES
    for target in DTYPES
    if conversion(source, target) == "lossless"
    or {source.name, target.name} <= {"float64", "float32", "float16", "bfloat16"}
    if source != target
)
"""Conversions that a load asks for: all that lose nothing, and those between the usual floats."""


def random_bits(dtype: DType, shape: tuple[int, ...], seed: int = 0) -> Bits:
    """Any bits at all: NaNs with payloads, infinities, subnormal numbers; booleans are 0 or 1."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    most = 2 if dtype.kind is Kind.BOOL else 256
    raw = np.random.default_rng(seed).integers(0, most, count, np.uint8)
    return raw.view(dtype.bits).reshape(shape)


def small_numbers(dtype: DType, shape: tuple[int, ...]) -> Bits:
    """Bits of the numbers 1, 2, 4 (of booleans 1, 0), which every type with arithmetic holds exactly."""
    count = int(np.prod(shape, dtype=np.int64))
    if dtype.kind is Kind.BOOL:
        return np.resize(np.array([True, False]), count).reshape(shape)
    numbers = np.resize(np.array([1.0, 2.0, 4.0, 2.0]), count).reshape(shape)
    return np.ascontiguousarray(convert(numbers, BY_NAME["float64"], dtype))


def raw(bits: Bits) -> bytes:
    """Bits in row-major order, little-endian, for comparing: equal NaNs are equal then."""
    return np.ascontiguousarray(bits.astype(bits.dtype.newbyteorder("<"), copy=False)).tobytes()
