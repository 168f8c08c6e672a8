"""Digests of tensors' values, by which ranks notice that they hold different ones under one key.

In: what a rank holds of a tensor. Out: 128 bits; of a large tensor only samples are looked at.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dcp_core.planning.balance import TINY_NBYTES
from dcp_core.planning.leaves import LocalTensor

_SAMPLES = 8
_SAMPLE_NBYTES = 1024


def tensor_digest(tensor: LocalTensor) -> int:
    """Digest of a tensor's values; equal for equal ones."""
    return xxhash.xxh3_128_intdigest(b"".join([_sample(tensor.access.read_out(view)) for view in tensor.views]))


def _sample(bits: npt.NDArray[Any]) -> bytes:
    """What of a value is compared between ranks: all of a small one, blocks spread evenly over a larger one."""
    if bits.nbytes < TINY_NBYTES:
        return bits.tobytes()
    starts = _sample_starts(bits.size, bits.itemsize)
    if bits.flags.c_contiguous:
        raw = bits.reshape(-1).view(np.uint8).data
        return b"".join([raw[start : start + _SAMPLE_NBYTES] for start in starts])
    flat, size = bits.flat, bits.itemsize
    return b"".join([flat[start // size : (start + _SAMPLE_NBYTES) // size].tobytes() for start in starts])


@lru_cache(maxsize=1024)
def _sample_starts(size: int, itemsize: int) -> tuple[int, ...]:
    """Where the compared blocks of a value of so many elements start, in bytes."""
    starts = np.linspace(0, size - _SAMPLE_NBYTES // itemsize, _SAMPLES).astype(np.int64)
    return tuple((starts * itemsize).tolist())
