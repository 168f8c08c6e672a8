"""Columns to bytes and back: the lowest layer of `.metadata`. In go integer arrays and byte strings, out come records.

A block is a run of records without gaps. An integer record is delta coded where asked, reduced by its smallest value,
narrowed, split into byte planes, and compressed where that pays. Reading trusts nothing: a record says how much memory
it will take before any is allocated, and may take `FREE_NBYTES`, or `MAX_EXPANSION` times what is stored.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.errors import CorruptError
from dcp_core.formats.slices import Slices
from dcp_core.metadata import Int64, UInt64

FREE_NBYTES = 1 << 22
"""A record may expand to this much whatever its stored size."""
MAX_EXPANSION = 8
"""Beyond that, to this many times its stored size."""
LARGEST = 2**62 - 1
"""Largest value of a column of sizes or offsets: sums of two never overflow."""

_COMPRESSED, _DELTA = 1, 2
_WIDTHS = (0, 1, 2, 4, 8)
_INTEGERS = struct.Struct("<BBQqq")
_BYTES = struct.Struct("<BQQ")
_COUNT = struct.Struct("<Q")
_WORTH_COMPRESSING_NBYTES = 24
_THOROUGH_NBYTES = 1 << 16


class ColumnWriter:
    """Collects the records of one block."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def count(self, value: int) -> None:
        """Append a plain 64-bit count."""
        self._parts.append(_COUNT.pack(value))

    def integers(self, values: npt.NDArray[Any], *, delta: bool = False) -> None:
        """Append an integer column.

        Args:
            values: Integers that fit 64 signed bits. Shape (N,).
            delta: Code the differences between neighbours.
        """
        column = np.ascontiguousarray(values, dtype=np.int64).view(np.uint64)
        first = int(column[:1].view(np.int64).sum())
        if delta:
            column = np.diff(column)
        base = int(column.view(np.int64).min()) if len(column) else 0
        residual = column - np.uint64(base % 2**64)
        width = _width(residual)
        stored, compressed = _pack(_planes(residual, width))
        coding = (_DELTA if delta else 0) | (_COMPRESSED if compressed else 0)
        self._parts += (_INTEGERS.pack(coding, width, len(stored), first, base), stored)

    def blob(self, raw: bytes) -> None:
        """Append a byte string."""
        stored, compressed = _pack(raw)
        self._parts += (_BYTES.pack(_COMPRESSED if compressed else 0, len(raw), len(stored)), stored)

    def strings(self, values: Sequence[bytes]) -> None:
        """Append byte strings as one: a column of their lengths, then all of them back to back."""
        self.integers(np.fromiter(map(len, values), dtype=np.int64, count=len(values)))
        self.blob(b"".join(values))

    def texts(self, values: Sequence[str]) -> None:
        """Append texts as the byte strings of their UTF-8."""
        joined = "".join(values)
        if not joined.isascii():
            self.strings([text.encode() for text in values])
            return
        self.integers(np.fromiter(map(len, values), dtype=np.int64, count=len(values)))
        self.blob(joined.encode())

    def to_bytes(self) -> bytes:
        """The block."""
        return b"".join(self._parts)


class ColumnReader:
    """Takes the records of one block in the order in which they were written.

    Args:
        block: The whole block, its digest already checked.
        name: What to call it in errors, such as "block 'files' of .metadata".
    """

    def __init__(self, block: bytes, name: str) -> None:
        self._view = memoryview(block)
        self._position = 0
        self.name = name

    def count(self) -> int:
        """Take a plain count; its size is not checked here, but by the column that it counts."""
        (value,) = self._header(_COUNT)
        return int(value)

    def integers(self, count: int, low: int = 0, high: int = LARGEST) -> Int64:
        """Take an integer column of a known length.

        Args:
            count: How many values; comes from the file too, so it is checked against what is stored.
            low: Smallest value allowed.
            high: Largest value allowed.

        Returns:
            The values. Shape (count,).

        Raises:
            CorruptError: The record contradicts itself, its block, `count` or the range.
        """
        coding, width, stored_nbytes, first, base = self._header(_INTEGERS)
        if coding & ~(_COMPRESSED | _DELTA) or width not in _WIDTHS:
            raise self.corrupt(f"integer coding {coding} with width {width} is unknown")
        delta = bool(coding & _DELTA)
        length = max(count - 1, 0) if delta else count
        self._check_expansion(length * max(width, 1), stored_nbytes)
        raw = self._take(stored_nbytes, length * width, bool(coding & _COMPRESSED))
        values = _widen(raw, width, length, np.uint64(base % 2**64))
        if delta:
            values = _accumulate(values, count, np.uint64(first % 2**64))
        column = values.view(np.int64)
        if count and (column.min() < low or column.max() > high):
            raise self.corrupt(f"a value lies outside {low}..{high}: found {column.min()}..{column.max()}")
        return column

    def blob(self) -> bytes:
        """Take a byte string.

        Raises:
            CorruptError: The record contradicts itself or its block.
        """
        coding, raw_nbytes, stored_nbytes = self._header(_BYTES)
        if coding & ~_COMPRESSED:
            raise self.corrupt(f"byte string coding {coding} is unknown")
        self._check_expansion(raw_nbytes, stored_nbytes)
        return self._take(stored_nbytes, raw_nbytes, bool(coding & _COMPRESSED))

    def strings(self, count: int) -> Sequence[bytes]:
        """Take byte strings written by `ColumnWriter.strings`.

        Raises:
            CorruptError: The lengths do not add up.
        """
        bounds, joined = self._bounds_and_blob(count)
        return Slices(joined, bounds)

    def texts(self, count: int) -> Sequence[str]:
        """Take texts written by `ColumnWriter.texts`.

        Raises:
            CorruptError: The lengths do not add up, or the bytes are no UTF-8.
        """
        bounds, joined = self._bounds_and_blob(count)
        try:
            if joined.isascii():
                return Slices(joined.decode(), bounds)
            return [name.decode() for name in Slices(joined, bounds)]
        except UnicodeDecodeError as error:
            raise self.corrupt("a name is not UTF-8") from error

    def finish(self) -> None:
        """Check that nothing is left.

        Raises:
            CorruptError: The block goes on.
        """
        left = len(self._view) - self._position
        if left:
            raise self.corrupt(f"{left} bytes follow the last record")

    def corrupt(self, reason: str) -> CorruptError:
        """Make the error for a contradiction in this block."""
        return CorruptError(f"{self.name} is corrupt: {reason}")

    def _bounds_and_blob(self, count: int) -> tuple[Int64, bytes]:
        lengths = self.integers(count)
        joined = self.blob()
        if count and int(lengths.max()) > len(joined):
            raise self.corrupt("a string is longer than the table that holds it")
        bounds = exclusive_sums(lengths)
        if int(bounds[-1]) != len(joined):
            raise self.corrupt(f"the strings' lengths sum to {int(bounds[-1])}, but {len(joined)} bytes are there")
        return bounds, joined

    def _header(self, layout: struct.Struct) -> tuple[Any, ...]:
        if self._position + layout.size > len(self._view):
            raise self.corrupt("it ends in the middle of a record")
        fields = layout.unpack_from(self._view, self._position)
        self._position += layout.size
        return fields

    def _check_expansion(self, expanded_nbytes: int, stored_nbytes: int) -> None:
        left = len(self._view) - self._position
        if stored_nbytes > left:
            raise self.corrupt(f"a record of {stored_nbytes} bytes is announced, but {left} bytes are left")
        if expanded_nbytes > max(FREE_NBYTES, MAX_EXPANSION * stored_nbytes):
            raise self.corrupt(f"a record of {stored_nbytes} bytes claims to hold {expanded_nbytes} bytes")

    def _take(self, stored_nbytes: int, raw_nbytes: int, compressed: bool) -> bytes:
        stored = self._view[self._position : self._position + stored_nbytes]
        self._position += stored_nbytes
        raw = self._inflate(stored, raw_nbytes) if compressed else stored.tobytes()
        if len(raw) != raw_nbytes:
            raise self.corrupt(f"a record holds {len(raw)} bytes instead of {raw_nbytes}")
        return raw

    def _inflate(self, stored: memoryview, raw_nbytes: int) -> bytes:
        inflater = zlib.decompressobj()
        try:
            raw = inflater.decompress(stored, raw_nbytes + 1)
        except zlib.error as error:
            raise self.corrupt(f"a compressed record is broken ({error})") from error
        if not inflater.eof or inflater.unused_data:
            raise self.corrupt("a compressed record does not end where it should")
        return raw


def exclusive_sums(lengths: Int64) -> Int64:
    """Where each of consecutive runs starts, and where the last one ends. Shape (N + 1,).

    >>> exclusive_sums(np.array([2, 3])).tolist()
    [0, 2, 5]
    """
    sums = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=sums[1:])
    return sums


def _width(residual: UInt64) -> int:
    largest = int(residual.max()) if len(residual) else 0
    width = next(width for width in _WIDTHS if largest < 1 << (8 * width))
    return max(width, 1) if len(residual) > FREE_NBYTES else width


def _planes(residual: UInt64, width: int) -> bytes:
    if width == 0:
        return b""
    narrow = residual.astype(f"<u{width}")
    return narrow.view(np.uint8).reshape(len(residual), width).T.tobytes()


def _pack(raw: bytes) -> tuple[bytes, bool]:
    """Compress where it pays and the reader's limit on expansion allows it."""
    if len(raw) < _WORTH_COMPRESSING_NBYTES:
        return raw, False
    compressed = zlib.compress(raw, 6 if len(raw) <= _THOROUGH_NBYTES else 1)
    allowed = len(raw) <= max(FREE_NBYTES, MAX_EXPANSION * len(compressed))
    return (compressed, True) if allowed and len(compressed) < len(raw) else (raw, False)


def _widen(raw: bytes, width: int, length: int, base: np.uint64) -> UInt64:
    if width == 0 or length == 0:
        return np.full(length, base, dtype=np.uint64)
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(width, length)
    narrow = np.ascontiguousarray(planes.T).reshape(-1).view(f"<u{width}")
    values = narrow.astype(np.uint64)
    values += base
    return values


def _accumulate(steps: UInt64, count: int, first: np.uint64) -> UInt64:
    values = np.empty(count, dtype=np.uint64)
    values[:1] = first
    values[1:] = steps
    return np.cumsum(values, out=values)
