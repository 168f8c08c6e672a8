"""A tensor inside an object as plain values: what the codecs of all frameworks' tensors have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.dtype import DType, dtype_named


def plain_tensor(bits: npt.NDArray[Any], dtype: DType, shape: Sequence[int]) -> tuple[str, list[int], bytes]:
    """Flatten a tensor.

    Args:
        bits: Its raw bits, of dtype `DType.bits`.
        dtype: Element type.
        shape: Extent of each dimension.
    """
    return dtype.name, list(shape), np.ascontiguousarray(bits).tobytes()


def tensor_bits(name: Any, shape: Any, raw: Any) -> tuple[npt.NDArray[Any], DType]:
    """Undo `plain_tensor`; the bits are in memory of their own.

    Raises:
        TypeError: A value of another type than `plain_tensor` gives.
        ValueError: Values that it never gives.
    """
    dtype = dtype_named(name)
    if any(size < 0 for size in shape) or (name == "bool" and raw.strip(b"\0\1")):
        raise ValueError("a negative size, or a bool that is neither")
    bits = np.array(np.frombuffer(raw, dtype=dtype.bits) if raw else (), dtype=dtype.bits).reshape(tuple(shape))
    return bits, dtype
