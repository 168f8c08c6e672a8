"""Where a tensor's elements lie in an entry of a `.distcp` file, which is what `torch.save` wrote: a zip archive.

Goes in: a function that reads bytes of the entry. Comes out: the start of the elements, and their strides. Records are
stored uncompressed, so that regions of them are read like those of any file.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from dcp_core.dtype import DType
from dcp_core.errors import CorruptError, DcpError
from dcp_torch.torch_dcp_pickles import TensorRef, load_tensor_ref

WINDOW_BYTES = 2048
"""Read of both ends of an entry at first: there lie the pickle and the directory of the archive."""

_LOCAL_HEADER_NBYTES = 30
_LOCAL_MAGIC = b"PK\x03\x04"

ReadEntry = Callable[[int, int], bytes]
"""Gives bytes of an entry; called with (offset, nbytes)."""


@dataclass(frozen=True, slots=True)
class EntryTensor:
    """A tensor in an entry.

    Attributes:
        ref: How its elements lie in its storage.
        storage_start: Where the bytes of the storage start in the entry.
        storage_nbytes: How many there are.
    """

    ref: TensorRef
    storage_start: int
    storage_nbytes: int

    @property
    def start(self) -> int:
        """Where the first element lies in the entry."""
        return self.storage_start + self.ref.start * self.ref.dtype.itemsize


def find_tensor(read: ReadEntry, nbytes: int, name: str) -> EntryTensor:
    """Find the tensor of an entry.

    Args:
        read: Gives bytes of the entry.
        nbytes: Its length.
        name: What to call it in errors.

    Raises:
        CorruptError: It is not what `torch.save` writes for one tensor, or is damaged.
        UntrustedObjectError: Its pickle names what does not belong there.
    """
    entry = _Entry(read, nbytes)
    try:
        with zipfile.ZipFile(entry) as archive:
            records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
            ref = _ref_of(_stored_bytes(entry, records, "data.pkl"))
            if "byteorder" in records and _stored_bytes(entry, records, "byteorder") != b"little":
                raise CorruptError("it was written by a big-endian machine, whose numbers are not converted")
            start, size = _stored_span(entry, records, f"data/{ref.key}")
    except DcpError as error:
        raise type(error)(f"{name}: {error.message}") from error
    except (zipfile.BadZipFile, OSError, ValueError, struct.error, NotImplementedError) as error:
        raise CorruptError(f"{name} is not what torch.save writes: {error}") from error
    found = EntryTensor(ref, start, size)
    _check_reach(found, name)
    return found


def check_expected(found: EntryTensor, dtype: DType, sizes: tuple[int, ...], name: str) -> None:
    """Compare a tensor with what the checkpoint's metadata says.

    Raises:
        CorruptError: They contradict each other.
    """
    if found.ref.dtype != dtype or found.ref.sizes != sizes:
        raise CorruptError(
            f"{name} holds {found.ref.dtype.name} of {found.ref.sizes}; the metadata says {dtype.name} of {sizes}"
        )


@lru_cache(maxsize=1024)
def _ref_of(raw: bytes) -> TensorRef:
    return load_tensor_ref(raw, "its pickle")


def _stored_bytes(entry: _Entry, records: dict[str, zipfile.ZipInfo], record: str) -> bytes:
    start, size = _stored_span(entry, records, record)
    if size > 1 << 24:
        raise CorruptError(f"its record {record!r} of {size} bytes is no pickle of a tensor")
    return entry.at(start, size)


def _stored_span(entry: _Entry, records: dict[str, zipfile.ZipInfo], record: str) -> tuple[int, int]:
    """Start and length of a record's bytes, which must be stored as they are."""
    found = records.get(record)
    if found is None:
        raise CorruptError(f"it has no record {record!r}")
    if found.compress_type != zipfile.ZIP_STORED or found.file_size != found.compress_size:
        raise CorruptError(f"its record {record!r} is compressed; torch.save stores records as they are")
    header = entry.at(found.header_offset, _LOCAL_HEADER_NBYTES)
    if header[:4] != _LOCAL_MAGIC:
        raise CorruptError(f"there is no record {record!r} at byte {found.header_offset}")
    name_nbytes, extra_nbytes = struct.unpack("<HH", header[26:30])
    start = found.header_offset + _LOCAL_HEADER_NBYTES + name_nbytes + extra_nbytes
    if start + found.file_size > entry.nbytes:
        raise CorruptError(f"its record {record!r} does not end inside of it")
    return start, found.file_size


def _check_reach(found: EntryTensor, name: str) -> None:
    """See that all elements lie in the storage."""
    ref = found.ref
    if len(ref.strides) != len(ref.sizes):
        raise CorruptError(f"{name}: sizes {ref.sizes} with strides {ref.strides}")
    if prod(ref.sizes) == 0:
        return
    last = ref.start + sum((size - 1) * stride for size, stride in zip(ref.sizes, ref.strides, strict=True))
    if (last + 1) * ref.dtype.itemsize > found.storage_nbytes:
        raise CorruptError(f"{name}: elements of the tensor lie outside of its {found.storage_nbytes} bytes")


class _Entry(io.RawIOBase):
    """An entry as a file: its two ends are read once, the rest when it is asked for."""

    def __init__(self, read: ReadEntry, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self._read = read
        self._position = 0
        whole = nbytes <= 2 * WINDOW_BYTES
        self._head = read(0, nbytes if whole else WINDOW_BYTES)
        self._tail_start = 0 if whole else nbytes - WINDOW_BYTES
        self._tail = self._head if whole else read(self._tail_start, WINDOW_BYTES)

    def at(self, offset: int, nbytes: int) -> bytes:
        """Bytes at a place; fewer at the end."""
        nbytes = max(0, min(nbytes, self.nbytes - offset))
        if offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        if offset >= self._tail_start:
            return self._tail[offset - self._tail_start : offset - self._tail_start + nbytes]
        return self._read(offset, nbytes)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        if base + offset < 0:
            raise OSError("before the start")
        self._position = base + offset
        return self._position

    def read(self, nbytes: int | None = -1) -> bytes:
        wanted = self.nbytes if nbytes is None or nbytes < 0 else nbytes
        found = self.at(self._position, wanted)
        self._position += len(found)
        return found
