"""Integer columns as flat bytes, for plans that travel between ranks.

A column is sent in the narrowest unsigned width that holds it, and deflated where that makes it smaller. Plans come
from peers of the same job, so decoding checks lengths and nothing more.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.errors import CoordinationError

Array = npt.NDArray[Any]

_HEAD = struct.Struct("<BBBxIIII")
_WIDTHS: tuple[np.dtype[Any], ...] = tuple(np.dtype(name) for name in ("<u1", "<u2", "<u4", "<u8"))
_DEFLATE_FROM = 256


def encode_column(values: npt.NDArray[Any]) -> bytes:
    """Flatten an array of non-negative integers of one or two dimensions.

    A two-dimensional array is written column by column, which deflates better.

    Raises:
        ValueError: A negative number.
    """
    array = np.asarray(values)
    top = int(array.max()) if array.size else 0
    if array.size and int(array.min()) < 0:
        raise ValueError("a plan column holds a negative number")
    width = next(index for index, dtype in enumerate(_WIDTHS) if top < 1 << (8 * dtype.itemsize))
    raw = np.ascontiguousarray(array.T, dtype=_WIDTHS[width]).tobytes()
    body = zlib.compress(raw, 1) if len(raw) >= _DEFLATE_FROM else raw
    deflated = len(body) < len(raw)
    shape = array.shape + (0,) * (2 - array.ndim)
    head = _HEAD.pack(width, array.ndim, deflated, shape[0], shape[1], len(raw), len(body) if deflated else len(raw))
    return head + (body if deflated else raw)


def decode_column(blob: bytes | memoryview, offset: int = 0) -> tuple[Array, int]:
    """Read one column; return it (read-only where it was not deflated) and where the next one starts."""
    try:
        width, ndim, deflated, rows, columns, raw_nbytes, nbytes = _HEAD.unpack_from(blob, offset)
        start = offset + _HEAD.size
        body: bytes | memoryview = memoryview(blob)[start : start + nbytes]
        if deflated:
            body = zlib.decompress(body, bufsize=max(raw_nbytes, 1))
        values = np.frombuffer(body, dtype=_WIDTHS[width], count=raw_nbytes >> width)
    except (struct.error, zlib.error, ValueError, IndexError) as error:
        raise CoordinationError(f"a plan column from a peer cannot be read: {error}") from error
    shaped: Array = values if ndim == 1 else values.reshape(columns, rows).T
    return shaped, start + nbytes
