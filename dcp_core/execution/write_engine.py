"""Writes one rank's data files.

Goes in: chunks with their byte spans, and whoever gives their bytes. Comes out: a file, and its record. The layout is
known before the first byte: the file is created with its full size, blocks are hashed right before they are written,
and the header, with the checksums and the save's id in it, comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.box import flat_range_to_boxes, slices
from dcp_core.errors import DcpError, DTypeMismatchError, ShapeMismatchError, UnsupportedValueError
from dcp_core.execution.interfaces import FileRecord, PlannedChunk, WriteContext, WriteSource
from dcp_core.file_names import OBJECT_FILE, TENSOR_FILE, data_file_name
from dcp_core.formats.bytes_file import build_bytes_file
from dcp_core.formats.checksums import BLOCK_BYTES, block_checksum
from dcp_core.formats.safetensors_file import HeaderEntry, build_header, fill_header
from dcp_core.planning.items import WriteItem
from dcp_core.storage.base import Storage, WriteHandle

GATHERED_BUFFERS = 512


def write_tensors(
    storage: Storage, context: WriteContext, spans: Sequence[PlannedChunk], source: WriteSource
) -> FileRecord:
    """Write a tensor file.

    Contiguous arrays are written from their own memory, others packed one block at a time.

    Args:
        storage: Where.
        context: Which save.
        spans: Chunks in file order, back to back.
        source: Gives each chunk's bits; an array must stay as it is until this function returns.

    Raises:
        PlanningError: The chunks cannot be one file, or the source gives something else than was planned.
        StorageError: The storage refused.
    """
    entries = [HeaderEntry(span.key, span.dtype, span.item.sizes, span.byte_offset, span.nbytes) for span in spans]
    layout = build_header(entries)
    name = data_file_name(context.rank, 0, TENSOR_FILE, context.suffix)
    checksums: list[int] = []
    with _new_file(storage, name, layout.nbytes) as handle:
        gather = _Gather(handle, layout.data_start)
        for span in spans:
            _send(_bits_of(source, span, context.rank), gather, checksums)
        gather.flush()
        header, digest = fill_header(layout, context.save_id, checksums)
        handle.write(0, [header])
        if context.durable:
            handle.sync()
    fields = (layout.nbytes, layout.data_start, layout.field_start, layout.field_nbytes, digest)
    return FileRecord(context.rank, 0, TENSOR_FILE, *fields)


def write_objects(
    storage: Storage, context: WriteContext, items: Sequence[WriteItem], source: WriteSource
) -> FileRecord:
    """Write a `.bytes` file.

    Args:
        storage: Where.
        context: Which save.
        items: Objects in the order of the index.
        source: Gives each object's bytes.

    Raises:
        UnsupportedValueError: The source gives something else than bytes.
        StorageError: The storage refused.
    """
    values = [_bytes_of(source, item, context.rank) for item in items]
    layout = build_bytes_file(values)
    name = data_file_name(context.rank, 0, OBJECT_FILE, context.suffix)
    with _new_file(storage, name, layout.nbytes) as handle:
        handle.write(0, [layout.header])
        gather = _Gather(handle, layout.data_start)
        for value in values:
            gather.add(memoryview(value))
        gather.flush()
        if context.durable:
            handle.sync()
    fields = (layout.nbytes, layout.data_start, layout.field_start, layout.field_nbytes, layout.digest)
    return FileRecord(context.rank, 0, OBJECT_FILE, *fields)


@contextmanager
def _new_file(storage: Storage, name: str, nbytes: int) -> Iterator[WriteHandle]:
    """Create a file, and remove it again when filling it fails."""
    handle = storage.create(name, nbytes)
    try:
        with handle:
            yield handle
    except BaseException:
        with suppress(DcpError):
            storage.remove(name)
        raise


class _Gather:
    """Writes buffers back to back, small ones together."""

    def __init__(self, handle: WriteHandle, position: int) -> None:
        self._handle = handle
        self._position = position
        self._pending: list[memoryview] = []
        self._pending_nbytes = 0

    def add(self, buffer: memoryview) -> None:
        self._pending.append(buffer)
        self._pending_nbytes += buffer.nbytes
        if self._pending_nbytes >= BLOCK_BYTES or len(self._pending) >= GATHERED_BUFFERS:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            self._handle.write(self._position, self._pending)
        self._position += self._pending_nbytes
        self._pending, self._pending_nbytes = [], 0


def _send(bits: npt.NDArray[Any], gather: _Gather, checksums: list[int]) -> None:
    """Hash and write one chunk."""
    if bits.flags.c_contiguous or bits.nbytes <= BLOCK_BYTES:
        raw = np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data
        for start in range(0, raw.nbytes, BLOCK_BYTES):
            block = raw[start : start + BLOCK_BYTES]
            checksums.append(block_checksum(block))
            gather.add(block)
        return
    for block in _packed_blocks(bits):
        checksums.append(block_checksum(block))
        gather.add(block)
        gather.flush()


def _packed_blocks(bits: npt.NDArray[Any]) -> Iterator[memoryview]:
    """The blocks of an array that is not contiguous, each in the same memory as the one before."""
    block = np.empty(BLOCK_BYTES // bits.itemsize, bits.dtype)
    for start in range(0, bits.size, block.size):
        stop = min(start + block.size, bits.size)
        position = 0
        for box in flat_range_to_boxes(bits.shape, start, stop):
            block[position : position + box.numel].reshape(box.sizes)[...] = bits[slices(box)]
            position += box.numel
        yield block[:position].view(np.uint8).data


def _bits_of(source: WriteSource, span: PlannedChunk, rank: int) -> npt.NDArray[Any]:
    bits = source.get_data(span.item)
    name = span.item.index.fqn
    if not isinstance(bits, np.ndarray):
        raise UnsupportedValueError(
            f"{name} on rank {rank}: the planner's get_data gives {type(bits).__name__}, expected a numpy array"
        )
    if bits.dtype != span.dtype.bits:
        raise DTypeMismatchError(
            f"{name} on rank {rank}: the planner's get_data gives {bits.dtype}, expected the bits of {span.dtype.name} "
            f"as {span.dtype.bits}"
        )
    if bits.shape != span.item.sizes:
        raise ShapeMismatchError(
            f"{name} on rank {rank}: the planner's get_data gives the shape {bits.shape}, expected {span.item.sizes}"
        )
    return bits


def _bytes_of(source: WriteSource, item: WriteItem, rank: int) -> bytes:
    value = source.get_data(item)
    if not isinstance(value, bytes):
        raise UnsupportedValueError(
            f"{item.index.fqn} on rank {rank}: the planner's get_data gives {type(value).__name__}, expected bytes"
        )
    return value
