"""Tensors for tests of copies: any bits of any type, parts of any strides, and what their bits should become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dcp_core.dtype import DTYPES, DType, conversion
from dcp_core.planning.leaves import DeviceTransfers
from dcp_torch.elements import read_bits, tensor_of_bits

Array = npt.NDArray[Any]

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda whole: whole,
    "transposed": lambda whole: whole.t(),
    "rows": lambda whole: whole[1:4],
    "columns": lambda whole: whole[:, 2:5],
    "steps": lambda whole: whole[::2, ::3],
    "element": lambda whole: whole[2, 3],
    "nothing": lambda whole: whole[2:2],
}


def random_tensor(shape: tuple[int, ...], dtype: DType, seed: int) -> torch.Tensor:
    """Any bits."""
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    if dtype.name == "bool":
        raw &= 1
    return tensor_of_bits(raw.view(dtype.bits).reshape(shape), dtype).clone()


def bits(tensor: torch.Tensor) -> Array:
    """A copy of the raw bits."""
    return read_bits(tensor).copy()


def in_host_memory(moves: DeviceTransfers, values: Array, lead: int = 0) -> Array:
    memory = moves.host_memory(values.nbytes + lead)[lead:]
    memory[...] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return memory.view(values.dtype).reshape(values.shape)


def same(found: Array, expected: Array) -> bool:
    return found.shape == expected.shape and found.tobytes() == expected.tobytes()


CASTS = [
    (source, target)
    for source in DTYPES
    for target in DTYPES
    if conversion(source, target) in ("lossless", "lossy") and "float4" not in source.name + target.name
]
