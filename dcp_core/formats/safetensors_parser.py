"""Any safetensors file's header, read without trust: ours, or one that another library wrote.

Goes in: the bytes before the data section. Comes out: the tensors with their byte spans, or an error that says which
rule of the format is broken.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NoReturn

from dcp_core.dtype import BY_NAME, DTYPES, DType
from dcp_core.errors import CorruptError, IncompleteError
from dcp_core.formats.safetensors_file import MAX_HEADER_BYTES

_BITS = {dtype.file_dtype: 8 * dtype.itemsize // prod(dtype.file_tail) for dtype in DTYPES}
_MAX_NDIM = 64
_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_PLAIN = {dtype.file_dtype: dtype for dtype in DTYPES if not dtype.file_tail and dtype.name != "float4_e2m1fn_x2"}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One tensor as a safetensors header has it: names are the file's, offsets count from the data section."""

    key: str
    file_dtype: str
    shape: tuple[int, ...]
    byte_offset: int
    nbytes: int


def elements_of(array: StoredArray) -> tuple[DType, tuple[int, ...]] | None:
    """What a tensor of any safetensors file is to us: its element type, and its shape in those elements.

    Two 4-bit floats are one element. None for a type that no framework has (6-bit floats), and for 4-bit floats whose
    last dimension is odd.

    >>> dtype, shape = elements_of(StoredArray("w", "F4", (2, 8), 0, 8))
    >>> dtype.name, shape
    ('float4_e2m1fn_x2', (2, 4))
    """
    if array.file_dtype == "F4":
        is_even = bool(array.shape) and array.shape[-1] % 2 == 0
        return (BY_NAME["float4_e2m1fn_x2"], (*array.shape[:-1], array.shape[-1] // 2)) if is_even else None
    dtype = _PLAIN.get(array.file_dtype)
    return None if dtype is None else (dtype, array.shape)


def header_nbytes(prefix: bytes, file_nbytes: int, name: str) -> int:
    """Where the data section of any safetensors file starts.

    Args:
        prefix: The file's first 8 bytes, or fewer if it has fewer.
        file_nbytes: Its size.
        name: The file, for the error.

    Raises:
        IncompleteError: The file ends before its header does.
        CorruptError: A length that safetensors does not allow.
    """
    if len(prefix) < 8:
        raise IncompleteError(f"{name}: {file_nbytes} bytes are too few for a safetensors file")
    length: int = struct.unpack("<Q", prefix[:8])[0]
    if length > MAX_HEADER_BYTES:
        raise CorruptError(f"{name}: claims a header of {length} bytes, more than safetensors allows; not such a file")
    if 8 + length > file_nbytes:
        raise IncompleteError(f"{name}: {file_nbytes} bytes are too few for its header of {length} bytes")
    return 8 + length


def parse_header(header: bytes, file_nbytes: int, name: str) -> tuple[tuple[StoredArray, ...], Mapping[str, str]]:
    """Read the header of any safetensors file, trusting nothing.

    Args:
        header: The file from byte 0 to the start of its data section (`header_nbytes`).
        file_nbytes: Size of the whole file.
        name: The file, for the error.

    Returns:
        Its tensors by byte offset, and its `__metadata__`.

    Raises:
        CorruptError: A header that breaks the format's rules.
        IncompleteError: The data section is shorter than the header says.
    """
    try:
        fields = json.loads(header[8:], object_pairs_hook=unique_fields)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{name}: its header is not valid: {error}") from error
    if not isinstance(fields, dict):
        raise CorruptError(f"{name}: its header is no JSON object")
    notes = fields.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise CorruptError(f"{name}: its __metadata__ does not map strings to strings")
    arrays = sorted((_stored_array(key, entry, name) for key, entry in fields.items()), key=_by_offset)
    position = 0
    for array in arrays:
        if array.byte_offset != position:
            raise CorruptError(f"{name}: {array.key!a} starts at byte {array.byte_offset}, expected {position}")
        position += array.nbytes
    _check_length(position, file_nbytes - len(header), name)
    return tuple(arrays), notes


def _check_length(expected: int, found: int, name: str) -> None:
    if found < expected:
        raise IncompleteError(f"{name}: cut short: {found} bytes of tensors, expected {expected}")
    if found > expected:
        raise CorruptError(f"{name}: {found - expected} bytes behind the last tensor")


def _by_offset(array: StoredArray) -> tuple[int, int]:
    return array.byte_offset, array.nbytes


def unique_fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a JSON object, for `json.loads(..., object_pairs_hook=unique_fields)`; a name may occur once.

    Raises:
        ValueError: One occurs twice.
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _stored_array(key: str, entry: object, name: str) -> StoredArray:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(name, key, "does not have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        _refuse(name, key, f"has the unknown dtype {str(dtype)[:40]!a}")
    if isinstance(shape, list) and len(shape) > _MAX_NDIM:  # before anybody multiplies them
        _refuse(name, key, f"has {len(shape)} dimensions")
    if not _all_counts(shape) or not _all_counts(offsets) or len(offsets) != 2:
        _refuse(name, key, "has a shape or offsets that are no counts")
    start, stop = offsets
    if 8 * (stop - start) != prod(shape) * bits:
        _refuse(name, key, f"has {stop - start} bytes for {dtype} of {shape}")
    return StoredArray(key, dtype, tuple(shape), start, stop - start)


def _all_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _refuse(name: str, key: str, problem: str) -> NoReturn:
    raise CorruptError(f"{name}: the tensor {key[:200]!a} {problem}")
