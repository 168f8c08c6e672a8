"""The entries of a data file's header, one a chunk: as columns, checked, and spelled as JSON.

Goes in: the chunks of one file in file order. Comes out: the texts that stand behind the `__metadata__` of the header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring

import numpy as np

from dcp_core.dtype import BY_CODE, ITEMSIZE, DType
from dcp_core.errors import PlanningError
from dcp_core.metadata import Int64, UInt8


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One chunk of a data file.

    Attributes:
        key: Its name in the file.
        dtype: Element type.
        sizes: Extent in elements.
        byte_offset: Where it starts in the data section.
        nbytes: Its length.
    """

    key: str
    dtype: DType
    sizes: tuple[int, ...]
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class HeaderColumns:
    """The chunks of a data file as columns, in file order.

    Attributes:
        keys: Name of each in the file. Length C.
        dtype: `DType.code`. Shape (C,).
        ndim: Number of dimensions. Shape (C,).
        sizes: Extent, padded on the right with 1. Shape (C, D), elements.
        byte_offset: Where each starts in the data section. Shape (C,).
        nbytes: Length. Shape (C,).
    """

    keys: Sequence[str]
    dtype: UInt8
    ndim: UInt8
    sizes: Int64
    byte_offset: Int64
    nbytes: Int64

    @classmethod
    def of_entries(cls, entries: Sequence[HeaderEntry]) -> HeaderColumns:
        """Make columns of single entries."""
        ndim = [len(entry.sizes) for entry in entries]
        width = max(ndim, default=0)
        padded = [(*entry.sizes, *(1,) * (width - len(entry.sizes))) for entry in entries]
        return cls(
            [entry.key for entry in entries],
            np.array([entry.dtype.code for entry in entries], dtype=np.uint8),
            np.array(ndim, dtype=np.uint8),
            np.array(padded, dtype=np.int64).reshape(len(entries), width),
            np.array([entry.byte_offset for entry in entries], dtype=np.int64),
            np.array([entry.nbytes for entry in entries], dtype=np.int64),
        )


def check_entries(columns: HeaderColumns) -> None:
    """Refuse chunks that no header can describe.

    Raises:
        PlanningError: Chunks that are not back to back, whose length contradicts their dtype and sizes, or whose keys
            repeat or cannot be spelled.
    """
    _check_spans(columns)
    _check_keys(columns.keys)


def _check_spans(columns: HeaderColumns) -> None:
    expected = np.prod(columns.sizes, axis=1, dtype=np.int64) * ITEMSIZE[columns.dtype]
    start = np.cumsum(columns.nbytes) - columns.nbytes
    wrong = np.flatnonzero((columns.byte_offset != start) | (columns.nbytes != expected))
    if len(wrong):
        row = int(wrong[0])
        sizes = tuple(columns.sizes[row, : columns.ndim[row]].tolist())
        raise PlanningError(
            f"{columns.keys[row]!r}: {BY_CODE[int(columns.dtype[row])].name} of {sizes} laid out as "
            f"{columns.nbytes[row]} bytes from byte {columns.byte_offset[row]} on; expected {expected[row]} from "
            f"{start[row]} on"
        )


def _check_keys(keys: Sequence[str]) -> None:
    distinct = set(keys)
    if len(distinct) != len(keys) or "__metadata__" in distinct:
        raise PlanningError("keys of one data file repeat, or one is the reserved __metadata__; spell them apart")
    if "".join(keys).isascii():
        return
    for key in keys:
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise PlanningError(f"{key!a} cannot be a key in a file: it is no valid Unicode text; rename it") from error


def spell_entries(columns: HeaderColumns) -> list[str]:
    """The entry of each chunk; what only type and shape decide is spelled once for each of them."""
    spelled: dict[tuple[int, ...], str] = {}
    kinds = list(zip(columns.dtype.tolist(), columns.ndim.tolist(), *columns.sizes.T.tolist(), strict=True))
    for kind in set(kinds):
        dtype = BY_CODE[kind[0]]
        shape = ",".join(map(str, kind[2 : 2 + kind[1]] + dtype.file_tail))
        spelled[kind] = f':{{"dtype":"{dtype.file_dtype}","shape":[{shape}],"data_offsets":['
    places = list(map(str, np.append(columns.byte_offset, columns.nbytes.sum()).tolist()))
    return [
        f",{key}{spelled[kind]}{start},{stop}]}}"
        for key, kind, start, stop in zip(
            map(encode_basestring, columns.keys), kinds, places, places[1:], strict=False
        )
    ]  # fmt: skip
