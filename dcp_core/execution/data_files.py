"""Opens a checkpoint's data files, each only after it has proven to be the one that the metadata means.

Goes in: a row of the metadata's `FileColumns`. Comes out: an open file with the checksums of its chunks.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from types import TracebackType

from dcp_core.errors import IncompleteError, NotFoundError, StorageError
from dcp_core.file_names import data_file_name
from dcp_core.formats.checksums import ChecksumTable
from dcp_core.formats.safetensors_file import SAVE_ID_START, FileFacts, check_facts, check_save_id, read_checksums
from dcp_core.metadata import FileColumns, SaveRecord
from dcp_core.storage.base import ReadHandle, Storage

OPEN_FILES = 16
"""Files that are kept open at once."""


class OpenFile:
    """A data file that is the right one. Several threads may read from it at a time.

    Attributes:
        facts: What the metadata says about it.
        checksums: Of its data; None when nothing is to be checked, or another program wrote the file.

    Args:
        storage: Where it lies.
        facts: What the metadata says about it.
        verify: Whether its checksums are wanted.

    Raises:
        IncompleteError: It is gone, or of another size.
        CorruptError: It is another save's file, or its header has been changed.
    """

    def __init__(self, storage: Storage, facts: FileFacts, *, verify: bool) -> None:
        self.facts = facts
        self._storage = storage
        self._verify = verify
        self._lock = Lock()
        self._stale: ReadHandle | None = None
        self._handle, self.checksums = self._open()

    def read(self, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill targets one after another from the byte at `offset`.

        A handle that a file server has forgotten is replaced once, if the name still belongs to the same file.

        Args:
            offset: Byte position in the file.
            targets: Contiguous, writable bytes (format "B").
        """
        handle = self._handle
        try:
            handle.read_scattered(offset, targets)
        except StorageError as error:
            if error.errno != errno.ESTALE or not self._is_replaced(handle):
                raise
            self._handle.read_scattered(offset, targets)

    def close(self) -> None:
        """Close the file; twice is fine."""
        self._handle.close()
        if self._stale is not None:
            self._stale.close()

    def _is_replaced(self, handle: ReadHandle) -> bool:
        """Open the file anew, unless another thread has done so; False when that was in vain already."""
        with self._lock:
            if self._handle is handle:
                if self._stale is not None:
                    return False
                self._handle, self._stale = self._open()[0], handle  # others may be reading from it: closed at the end
            return True

    def _open(self) -> tuple[ReadHandle, ChecksumTable | None]:
        try:
            handle = self._storage.open_read(self.facts.name)
        except NotFoundError as error:
            where = self._storage.describe()
            raise IncompleteError(f"{self.facts.name} was removed from {where} during the load; load again") from error
        try:
            return handle, self._identify(handle)
        except BaseException:
            handle.close()
            raise

    def _identify(self, handle: ReadHandle) -> ChecksumTable | None:
        facts = self.facts
        _compare_size(self._storage, facts, handle.nbytes)
        if facts.save_id is None:
            return None
        if self._verify:
            header = bytearray(facts.data_start)
            handle.read_into(0, memoryview(header))
            return read_checksums(bytes(header), facts)
        found = bytearray(32)
        handle.read_into(SAVE_ID_START, memoryview(found))
        check_save_id(bytes(found), facts.save_id, facts.name)
        return None


def file_facts(files: FileColumns, save: SaveRecord, row: int) -> FileFacts:
    """What the metadata says about the data file in one row."""
    nbytes, start = int(files.nbytes[row]), int(files.data_start[row])
    if files.names:
        return FileFacts(files.names[row], None, nbytes, start, 0, 0, 0)
    name = data_file_name(int(files.rank[row]), int(files.part[row]), int(files.kind[row]), save.suffix)
    low, high = files.digest[row].tolist()
    return FileFacts(
        name, save.save_id, nbytes, start, int(files.field_start[row]), int(files.field_nbytes[row]), high << 64 | low
    )


def check_size(storage: Storage, facts: FileFacts) -> None:
    """Compare a file's size with what the metadata says.

    Raises:
        IncompleteError: It is missing, or of another size.
    """
    _compare_size(storage, facts, storage.size(facts.name))


def _compare_size(storage: Storage, facts: FileFacts, found: int | None) -> None:
    if found == facts.nbytes:
        return
    problem = "is missing" if found is None else f"has {found} bytes, expected {facts.nbytes}"
    raise IncompleteError(
        f"{facts.name} {problem} in {storage.describe()}: restore the file, or load another checkpoint"
    )


class TensorFiles:
    """The tensor files of one checkpoint, opened when they are asked for; a context manager that closes them."""

    def __init__(self, storage: Storage, files: FileColumns, save: SaveRecord, *, verify: bool) -> None:
        self._storage = storage
        self._files = files
        self._save = save
        self._verify = verify
        self._open: OrderedDict[int, OpenFile] = OrderedDict()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def facts(self, row: int) -> FileFacts:
        """What the metadata says about one file."""
        return file_facts(self._files, self._save, row)

    def check_sizes(self, rows: Iterable[int]) -> None:
        """Find missing and short files before anything is read.

        Raises:
            IncompleteError: A file is missing, or of another size.
            CorruptError: The metadata says what no file can be.
        """
        all_facts = [self.facts(row) for row in rows]
        for facts in all_facts:
            check_facts(facts)
        for facts, found in zip(all_facts, self._storage.sizes([facts.name for facts in all_facts]), strict=True):
            _compare_size(self._storage, facts, found)

    @property
    def requests_at_once(self) -> int:
        """How many reads the storage wants at a time at least."""
        return self._storage.requests_at_once

    @property
    def gap_bytes(self) -> int:
        """How many bytes the storage rather reads over than to be asked twice; 0: as in files."""
        return self._storage.gap_bytes

    @property
    def next_to_close(self) -> OpenFile | None:
        """The file that `get` closes before it opens another; it must not be in use then."""
        return next(iter(self._open.values())) if len(self._open) >= OPEN_FILES else None

    def get(self, row: int) -> OpenFile:
        """Open a file, or find it open. The one that was asked for longest ago is closed where there are too many.

        Raises:
            IncompleteError: It is gone, or of another size.
            CorruptError: It is another save's file, or its header has been changed.
        """
        found = self._open.get(row)
        if found is not None:
            self._open.move_to_end(row)
            return found
        while len(self._open) >= OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        facts = self.facts(row)
        check_facts(facts)
        opened = OpenFile(self._storage, facts, verify=self._verify)
        self._open[row] = opened
        return opened
