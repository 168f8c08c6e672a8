"""Reads checkpoints that `torch.distributed.checkpoint` wrote, under any layout, as those of this library.

Goes in: a directory with `.metadata` and `.distcp` files. Comes out: what a `StorageReader` gives. Nothing is unpickled
but what a table of known names allows; regions of tensors are read from their places in the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from dcp_core.box import Box, slices
from dcp_core.coordination.frames import pack, unpack
from dcp_core.dtype import DType
from dcp_core.errors import CorruptError, IncompleteError, NotFoundError
from dcp_core.execution.checkpoint_place import OpenUrl
from dcp_core.execution.data_files import TensorFiles
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.interfaces import CheckpointId, ReadContext, ReadTarget
from dcp_core.execution.read_engine import read_tensors
from dcp_core.formats.objects import encode_value
from dcp_core.metadata import Int64, Metadata, SaveRecord, StoredObject
from dcp_core.planning.read_spans import ReadSpan, ReadSpans
from dcp_core.planning.span_columns import PlannedRegion, columns_of
from dcp_core.storage.base import Storage
from dcp_torch.elements import tensor_of_bits
from dcp_torch.torch_dcp_entries import EntryTensor, check_expected, find_tensor
from dcp_torch.torch_dcp_metadata import TorchSource, describe
from dcp_torch.torch_values import load_value

_Place = tuple[int, int]
"""Row of a file, and where an entry starts in it."""

METADATA_NAME = ".metadata"
_PICKLE_MARK = b"\x80"
_MOST_NBYTES = 1 << 32
"""Of a description, and of a value."""


class TorchDCPReader(FileSystemReader):
    """Reads a checkpoint that `torch.distributed.checkpoint` wrote to files.

    Pass it as `storage_reader=` to `load`. The entries' checksums are torch's, which are not looked at when parts of
    them are read; sizes, types and places are checked.

    Args:
        path: The checkpoint's directory, or a URL of it; `checkpoint_id` of a load replaces it.
        storage: A storage to use instead of `path`.
        open_url: Makes storages of URLs that name no file; fsspec makes those of which this knows nothing.
        storage_options: What fsspec gets beside a URL.
    """

    def __init__(
        self,
        path: CheckpointId | None = None,
        *,
        storage: Storage | None = None,
        open_url: OpenUrl | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path, storage=storage, open_url=open_url, storage_options=storage_options)
        self._entries: dict[_Place, EntryTensor] = {}
        self._odd: tuple[_Place, npt.NDArray[np.uint8]] | None = None

    def initialize_reader(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Point the reader at a directory; None keeps the one that it was made with."""
        super().initialize_reader(checkpoint_id)
        self._entries, self._odd = {}, None

    def configure_reader(self, metadata: Metadata, context: ReadContext) -> None:
        """Learn which load comes next."""
        super().configure_reader(metadata, context)
        self._entries, self._odd = {}, None

    def load_metadata(self, rank: int | None = None, header_digest: bytes | None = None) -> Metadata:
        """Read `.metadata`, or `__{rank}.metadata` of a rank that saved alone."""
        storage = self._directory.storage
        name = METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"
        nbytes = storage.size(name)
        if nbytes is None:
            raise NotFoundError(
                f"there is no {name} in {storage.describe()}: torch DCP has completed no checkpoint there; check "
                "the path"
            )
        if not is_torch_dcp(storage.read(name, 0, min(nbytes, len(_PICKLE_MARK)))):
            raise CorruptError(
                f"{name} in {storage.describe()} is not from torch.distributed.checkpoint; load checkpoints of this "
                "library without a TorchDCPReader"
            )
        if nbytes > _MOST_NBYTES:
            raise CorruptError(f"{name} in {storage.describe()} has {nbytes} bytes, more than any description")
        description = describe(storage.read(name), name)
        sizes = []
        for file in description.files:
            size = storage.size(file)
            if size is None:
                raise IncompleteError(f"{file} is missing in {storage.describe()}: restore the file")
            sizes.append(size)
        metadata = Metadata(TorchSource(description, sizes, rank))
        encoded = self.encode_metadata(metadata)
        if header_digest is not None and xxh3_128_digest(encoded) != header_digest:
            raise CorruptError(f"{name} in {storage.describe()} is not the one that the coordinator read")
        return metadata

    def encode_metadata(self, metadata: Metadata) -> bytes:
        """The file as it is, and the sizes of the data files."""
        source = _source_of(metadata)
        return pack(source.description.raw, json.dumps(source.files.nbytes.tolist()).encode())

    def decode_metadata(self, raw: bytes) -> Metadata:
        """Undo `encode_metadata`."""
        blob, sizes = unpack(raw)
        return Metadata(TorchSource(describe(blob, METADATA_NAME), json.loads(sizes)))

    def read_object(self, stored: StoredObject) -> bytes:
        """Read a value, by `torch.load` with `weights_only=True`.

        Raises:
            UntrustedObjectError: It needs a class that torch does not allow.
        """
        assert self._metadata is not None, "configure_reader comes before reading"
        place = _source_of(self._metadata).object_places[stored.ordinal]
        if place.nbytes > _MOST_NBYTES:
            raise CorruptError(f"{stored.name!r} in {place.file} has {place.nbytes} bytes, more than any value")
        blob = self._directory.storage.read(place.file, place.offset, place.nbytes)
        return encode_value(load_value(blob, f"{stored.name!r} in {place.file}"), path=stored.name)

    def _explained(self, save: SaveRecord) -> AbstractContextManager[None]:
        return nullcontext()

    def _read(
        self, spans: Sequence[PlannedRegion], planner: ReadTarget, progress: Callable[[int], None] | None = None
    ) -> None:
        """Find out where elements start, then read as ever; what does not lie in row-major order is read by itself."""
        if not len(spans):
            return
        bases = columns_of(spans).byte_offset
        with self._reading() as source, self._tensor_files(source, verify=False) as files:
            assert isinstance(source, TorchSource)
            entries, which = self._find_entries(files, source, spans)
            is_plain = np.array([entry.ref.is_plain for entry in entries])[which]
            starts = np.array([entry.start for entry in entries], np.int64)[which] + bases
            placed = _with_places(spans, starts)
            odd, rest = np.flatnonzero(~is_plain), np.flatnonzero(is_plain)
            for row in odd.tolist():
                self._read_odd(files, spans[row], int(bases[row]), entries[which[row]], planner)
            if len(odd):
                placed, progress = [placed[row] for row in rest.tolist()], _mapped(progress, rest, len(spans))
            read_tensors(files, self._context, placed, planner, progress)

    def _find_entries(
        self, files: TensorFiles, source: TorchSource, spans: Sequence[PlannedRegion]
    ) -> tuple[list[EntryTensor], npt.NDArray[np.intp]]:
        """The tensor of each entry that regions lie in, and which entry is whose."""
        columns = columns_of(spans)
        files.check_sizes(np.unique(columns.file).tolist())
        keys = np.stack([columns.file, columns.byte_offset], axis=1)
        _, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        places: list[_Place] = list(map(tuple, keys[first].tolist()))
        missing = [number for number, place in enumerate(places) if place not in self._entries]
        lengths = source.entry_nbytes(*(keys[first[missing]].T)) if missing else np.empty(0, np.int64)
        for number, nbytes in zip(missing, lengths.tolist(), strict=True):
            self._entries[places[number]] = _open_entry(files, places[number], nbytes, spans[int(first[number])])
        for place, row in zip(places, first.tolist(), strict=True):
            span = spans[row]
            check_expected(self._entries[place], span.dtype, tuple(span.chunk_sizes), _name_of(files, span))
        return [self._entries[place] for place in places], which.reshape(-1)

    def _read_odd(
        self, files: TensorFiles, span: PlannedRegion, base: int, entry: EntryTensor, planner: ReadTarget
    ) -> None:
        """Read a region of a tensor in another order (channels last, transposed), or conjugated or negated.

        The bytes of the tensor are kept until another such tensor is read, as its other regions may follow.
        """
        place = (span.file, base)
        if self._odd is None or self._odd[0] != place:
            self._odd = None
            memory = np.empty(entry.storage_nbytes, np.uint8)
            files.get(span.file).read(base + entry.storage_start, [memory.data])
            self._odd = place, memory
        ref, item = entry.ref, span.item
        part = _elements(self._odd[1], entry)[slices(Box(item.storage_offsets, item.lengths))]
        bits = np.ascontiguousarray(part).reshape(item.lengths)
        if ref.is_conjugated or ref.is_negated:
            bits = _resolved(bits, ref.is_conjugated, ref.is_negated, span.dtype)
        view = planner.acquire_tensor(item)
        planner.access(item).copy_into(view, bits, span.dtype)
        planner.apply_tensor(item, view)
        if item.lengths == tuple(span.chunk_sizes):
            self._odd = None


def is_torch_dcp(prefix: bytes) -> bool:
    r"""Whether a `.metadata` that begins so is one of torch's.

    >>> is_torch_dcp(b"\x80\x04")
    True
    """
    return prefix.startswith(_PICKLE_MARK)


def _source_of(metadata: Metadata) -> TorchSource:
    source = metadata.source
    assert isinstance(source, TorchSource), "a reader is given its own descriptions"
    return source


def _open_entry(files: TensorFiles, place: _Place, nbytes: int, span: PlannedRegion) -> EntryTensor:
    file, (row, offset), name = files.get(place[0]), place, _name_of(files, span)
    if nbytes < 0:
        raise CorruptError(f"{name}: the metadata has no entry at byte {offset} of file {row}")

    def read(start: int, count: int) -> bytes:
        target = bytearray(count)
        file.read(offset + start, [memoryview(target)])
        return bytes(target)

    return find_tensor(read, nbytes, name)


def _name_of(files: TensorFiles, span: PlannedRegion) -> str:
    return f"{span.item.storage_index.fqn!r} in {files.facts(span.file).name}"


def _with_places(spans: Sequence[PlannedRegion], byte_offset: Int64) -> Sequence[PlannedRegion]:
    if isinstance(spans, ReadSpans):
        return spans.with_places(byte_offset)
    return [
        ReadSpan(span.item, span.file, start, span.chunk_sizes, span.dtype, span.target_dtype)
        for span, start in zip(spans, byte_offset.tolist(), strict=True)
    ]


def _elements(memory: npt.NDArray[np.uint8], entry: EntryTensor) -> npt.NDArray[Any]:
    """The tensor's raw bits in the memory of its storage."""
    ref, itemsize = entry.ref, entry.ref.dtype.itemsize
    start = ref.start * itemsize
    strides = tuple(stride * itemsize for stride in ref.strides)
    return np.ndarray(ref.sizes, ref.dtype.bits, memory, start, strides)


def _resolved(bits: npt.NDArray[Any], is_conjugated: bool, is_negated: bool, dtype: DType) -> npt.NDArray[Any]:
    """The values of raw bits that are conjugated or negated."""
    tensor = tensor_of_bits(bits, dtype)
    tensor = tensor.conj() if is_conjugated else tensor
    tensor = tensor.neg() if is_negated else tensor
    values: npt.NDArray[Any] = tensor.resolve_conj().numpy()
    return values.view(dtype.bits)


def _mapped(
    progress: Callable[[int], None] | None, rest: npt.NDArray[np.intp], count: int
) -> Callable[[int], None] | None:  # fmt: skip
    """Tell of all regions, where only the rest of them is read: the others are in already."""
    if progress is None:
        return None
    return lambda rows: progress(int(rest[rows]) if rows < len(rest) else count)


__all__ = ["TorchDCPReader", "is_torch_dcp"]
