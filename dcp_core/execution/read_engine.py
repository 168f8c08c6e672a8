"""Reads regions of chunks into their targets.

Goes in: planned regions, each with its file and chunk, and whoever says where it belongs. A run of bytes that is
contiguous in the chunk and in a host target is read straight into it; anything else comes through one reused buffer.
Blocks that are read whole are checked against their checksums right after reading, while they are in cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box, contains, flat_range_to_boxes, intersect, relative, slices
from dcp_core.dtype import DType
from dcp_core.errors import CorruptError, IncompleteError, PlanningError, ShapeMismatchError
from dcp_core.execution.data_files import OpenFile, TensorFiles
from dcp_core.execution.interfaces import PlannedRegion, ReadContext, ReadTarget
from dcp_core.execution.read_ranges import element_ranges, widen
from dcp_core.formats.checksums import BLOCK_BYTES, block_checksum
from dcp_core.planning.leaves import TensorAccess

SEGMENT_BYTES = 4 * BLOCK_BYTES
"""Size of the buffer for what cannot be read straight into its target."""


def read_tensors(files: TensorFiles, context: ReadContext, spans: Sequence[PlannedRegion], target: ReadTarget) -> None:
    """Read regions.

    Args:
        files: The checkpoint's tensor files.
        context: Which load, and what to check.
        spans: Regions, best file after file and by byte offset.
        target: Says where each belongs.

    Raises:
        IncompleteError: A file is missing or of another size; then no target has been touched.
        PlanningError: A region or chunk that its chunk or file cannot hold; then no target has been touched.
        CorruptError: Bytes contradict their checksum; targets are undefined from then on.
        StorageError: The storage refused.
    """
    _check_spans(files, spans)
    engine = _ReadEngine(files, context, target)
    for span in spans:
        engine.read(span)


def _check_spans(files: TensorFiles, spans: Sequence[PlannedRegion]) -> None:
    rows = {span.file for span in spans}
    files.check_sizes(sorted(rows))
    room = {row: files.facts(row).data_nbytes for row in rows}
    for span in spans:
        item, sizes = span.item, span.chunk_sizes
        if len(sizes) != len(item.lengths) or len(sizes) != len(item.storage_offsets):
            raise PlanningError(f"{item.storage_index.fqn}: a region of another rank than its chunk of {sizes}")
        for start, length, size in zip(item.storage_offsets, item.lengths, sizes, strict=True):
            if start < 0 or length < 0 or start + length > size:
                raise PlanningError(
                    f"{item.storage_index.fqn}: the region of {item.lengths} from {item.storage_offsets} on lies "
                    f"outside of its chunk of {sizes}"
                )
        if span.byte_offset < 0 or span.byte_offset + prod(sizes) * span.dtype.itemsize > room[span.file]:
            raise IncompleteError(
                f"{item.storage_index.fqn}: its chunk lies outside of {files.facts(span.file).name}, "
                f"whose data has {room[span.file]} bytes"
            )


class _ReadEngine:
    def __init__(self, files: TensorFiles, context: ReadContext, target: ReadTarget) -> None:
        self._files = files
        self._context = context
        self._target = target
        self._segment = np.empty(0, np.uint8)

    def read(self, span: PlannedRegion) -> None:
        """Read one region into its target."""
        item = span.item
        view = self._target.acquire_tensor(item)
        region = Box(item.storage_offsets, item.lengths)
        if not region.is_empty:
            destination = _Destination(view, self._target.access(item), span, region)
            chunk = _ChunkBytes(self._files.get(span.file), span, self._context)
            memory = destination.memory(region) if region.sizes == chunk.sizes else None
            if memory is not None:
                chunk.read_into(0, memory)
            else:
                self._read_ranges(span, chunk, destination)
        self._target.apply_tensor(item, view)

    def _read_ranges(self, span: PlannedRegion, chunk: _ChunkBytes, destination: _Destination) -> None:
        itemsize = chunk.dtype.itemsize
        ranges = element_ranges(span.chunk_sizes, destination.region, itemsize)
        if self._context.verify == "full" and len(ranges) > 1:
            ranges = widen(ranges, BLOCK_BYTES // itemsize, prod(span.chunk_sizes))
        for start, stop in ranges:
            self._read_range(chunk, destination, start, stop)

    def _read_range(self, chunk: _ChunkBytes, destination: _Destination, start: int, stop: int) -> None:
        """Read a flat range of a chunk's elements, and put what of it is wanted in its place."""
        boxes = flat_range_to_boxes(chunk.sizes, start, stop)
        itemsize = chunk.dtype.itemsize
        direct = destination.memory(boxes[0]) if len(boxes) == 1 else None
        if direct is not None:
            chunk.read_into(start * itemsize, direct)
            return
        for low, high in _pieces(start, stop, SEGMENT_BYTES // itemsize):
            raw = self._buffer((high - low) * itemsize)
            chunk.read_into(low * itemsize, raw.data)
            _scatter(raw.view(chunk.dtype.bits), flat_range_to_boxes(chunk.sizes, low, high), destination)

    def _buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        if len(self._segment) < nbytes:
            self._segment = np.empty(nbytes, np.uint8)
        return self._segment[:nbytes]


def _pieces(start: int, stop: int, granule: int) -> Iterator[tuple[int, int]]:
    """Cut a range at the multiples of `granule`."""
    while start < stop:
        end = min(stop, (start // granule + 1) * granule)
        yield start, end
        start = end


def _index(box: Box, origin: tuple[int, ...]) -> Any:
    """What selects a box, and gives an array even without dimensions."""
    return (*slices(box, origin), ...)


def _scatter(bits: npt.NDArray[Any], boxes: Sequence[Box], destination: _Destination) -> None:
    """Put the wanted parts of boxes that lie back to back in `bits` in their places."""
    position = 0
    for box in boxes:
        part = intersect(box, destination.region)
        if part is not None:
            whole = bits[position : position + box.numel].reshape(box.sizes)
            destination.put(part, whole[_index(part, box.offsets)])
        position += box.numel


class _Destination:
    """Where the elements of one region go; boxes are in elements from the chunk's start."""

    def __init__(self, view: Any, access: TensorAccess, span: PlannedRegion, region: Box) -> None:
        self.region = region
        self._view = view
        self._access = access
        self._dtype = span.dtype
        self._host = _host_of(view, access, span) if span.dtype == span.target_dtype else None

    def memory(self, box: Box) -> memoryview | None:
        """The target's own memory for a box, if it is one run of bytes on the host."""
        if self._host is None or (box is not self.region and not contains(self.region, box)):
            return None
        part = self._host if box is self.region else self._host[_index(box, self.region.offsets)]
        return part.reshape(-1).view(np.uint8).data if part.flags.c_contiguous else None

    def put(self, box: Box, bits: npt.NDArray[Any]) -> None:
        """Write elements into the target."""
        if self._host is not None:
            self._host[_index(box, self.region.offsets)] = bits
            return
        part = self._view if box == self.region else self._access.narrow(self._view, self._inside(box))
        self._access.copy_into(part, bits, self._dtype)

    def _inside(self, box: Box) -> Box:
        return relative(box, self.region.offsets)


def _host_of(view: Any, access: TensorAccess, span: PlannedRegion) -> npt.NDArray[Any] | None:
    """The target as a writable host array of the stored bits, if it has that."""
    host = access.host_array(view)
    if host is None or not host.flags.writeable or host.dtype != span.dtype.bits:
        return None
    if host.shape != span.item.lengths:
        raise ShapeMismatchError(
            f"{span.item.dest_index.fqn}: the planner's acquire_tensor gives the shape {host.shape}, expected "
            f"{span.item.lengths}"
        )
    return host


class _ChunkBytes:
    """The bytes of one chunk, checked as they are read."""

    def __init__(self, file: OpenFile, span: PlannedRegion, context: ReadContext) -> None:
        self.sizes: tuple[int, ...] = span.chunk_sizes
        self.dtype: DType = span.dtype
        self._file = file
        self._key = span.item.storage_index.fqn
        self._nbytes = prod(self.sizes) * self.dtype.itemsize
        self._start = file.facts.data_start + span.byte_offset
        self._context = context
        self._checksums: list[int] | None = None
        if file.checksums is not None:
            self._checksums = file.checksums.blocks_of(span.byte_offset, self._nbytes)
            if self._checksums is None:
                raise CorruptError(
                    f"{self._key}: {file.facts.name} has no chunk of {self._nbytes} bytes at byte {span.byte_offset}; "
                    "the metadata contradicts the file"
                )

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the chunk's bytes from `start` on."""
        if self._checksums is None:
            self._file.handle.read_into(self._start + start, target)
            return
        stop = start + target.nbytes
        for index in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            low, high = max(start, index * BLOCK_BYTES), min(stop, (index + 1) * BLOCK_BYTES)
            self._read_block(index, low, target[low - start : high - start], self._checksums[index])

    def _read_block(self, index: int, low: int, target: memoryview, expected: int) -> None:
        """Read a block or a part of it that starts at byte `low` of the chunk."""
        first = index * BLOCK_BYTES
        length = min(BLOCK_BYTES, self._nbytes - first)
        if target.nbytes == length:
            self._file.handle.read_into(self._start + first, target)
            self._check(first, target, expected)
        elif self._context.verify == "full":
            whole = memoryview(bytearray(length))
            self._file.handle.read_into(self._start + first, whole)
            self._check(first, whole, expected)
            target[:] = whole[low - first : low - first + target.nbytes]
        else:
            self._file.handle.read_into(self._start + low, target)

    def _check(self, first: int, block: memoryview, expected: int) -> None:
        if block_checksum(block) != expected:
            raise CorruptError(
                f"{self._key}: bytes {self._start + first} to {self._start + first + block.nbytes} of "
                f"{self._file.facts.name}, read on rank {self._context.rank}, contradict their checksum. Targets are "
                "undefined now: restore the file, or load another checkpoint"
            )
