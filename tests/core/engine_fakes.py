"""Stand-ins for plans and planners, as small as the engines let them be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.arrays import ArrayAccess
from dcp_core.dtype import DType
from dcp_core.metadata import MetadataIndex
from dcp_core.planning.items import ItemType, ReadItem, WriteItem
from dcp_core.planning.leaves import TensorAccess
from dcp_core.storage.base import ReadHandle
from dcp_core.storage.local import LocalStorage

SAVE_ID = "0123456789abcdef" * 2
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Span:
    item: WriteItem
    key: str
    dtype: DType
    byte_offset: int
    nbytes: int
    part: int = 0


@dataclass(frozen=True)
class Region:
    item: ReadItem
    file: int
    byte_offset: int
    chunk_sizes: tuple[int, ...]
    dtype: DType
    target_dtype: DType


class ArraySource:
    """Gives the bits of arrays by name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get_data(self, item: WriteItem) -> Any:
        return self.values[item.index.fqn]


@dataclass
class ViewTarget:
    """Puts regions into the views of the same number."""

    views: Sequence[Any]
    accesses: Sequence[TensorAccess]
    applied: list[int] = field(default_factory=list)

    def acquire_tensor(self, item: ReadItem) -> Any:
        return self.views[item.dest_index.index or 0]

    def access(self, item: ReadItem) -> TensorAccess:
        return self.accesses[item.dest_index.index or 0]

    def apply_tensor(self, item: ReadItem, view: Any) -> None:
        assert view is self.views[item.dest_index.index or 0]
        self.applied.append(item.dest_index.index or 0)


class DeviceAccess(ArrayAccess):
    """Arrays that are out of the host's reach: nothing shares their memory."""

    def host_array(self, view: Array) -> None:
        return None

    def copy_into(self, view: Array, bits: Array, source_dtype: DType) -> None:
        assert view.shape == bits.shape
        assert bits.dtype == source_dtype.bits
        view[...] = bits


class CountingStorage(LocalStorage):
    """Counts the bytes that are read."""

    nbytes_read = 0

    def open_read(self, name: str) -> ReadHandle:
        handle = super().open_read(name)
        inner = handle.read_scattered

        def read_scattered(offset: int, targets: Sequence[memoryview]) -> None:
            self.nbytes_read += sum(map(len, targets))
            inner(offset, targets)

        handle.read_scattered = read_scattered  # type: ignore[method-assign]  # to count
        return handle


def bits_of(shape: tuple[int, ...], dtype: DType, seed: int = 0) -> Array:
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    if dtype.name == "bool":
        raw &= 1
    return raw.view(dtype.bits).reshape(shape)


def spans_of(values: Mapping[str, tuple[Array, DType]]) -> list[Span]:
    position, spans = 0, []
    for key, (array, dtype) in values.items():
        nbytes = array.size * dtype.itemsize
        item = WriteItem(MetadataIndex(key), ItemType.TENSOR, array.shape, nbytes, 0)
        spans.append(Span(item, key, dtype, position, nbytes))
        position += nbytes
    return spans


def same(found: Array, expected: Array) -> bool:
    return found.shape == expected.shape and found.tobytes() == np.ascontiguousarray(expected).tobytes()
