"""Checks data files against what the description says: size, header, every block of data, every object.

In: a row of `FileColumns`. Out: problems. A file is opened once; its data goes through in ranges of a few MiB that any
thread may read, into memory that the thread keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from xxhash import xxh3_64

from dcp_core.errors import CorruptError, DcpError, IncompleteError, NewerVersionError, NotFoundError
from dcp_core.execution.data_files import file_facts
from dcp_core.execution.object_files import open_index
from dcp_core.file_names import TENSOR_FILE
from dcp_core.formats.bytes_file import BytesIndex
from dcp_core.formats.checksums import BLOCK_BYTES, ChecksumTable, block_checksum, decode_field, field_digest
from dcp_core.formats.objects import pickled_classes
from dcp_core.formats.safetensors_file import SAVE_ID_START, FileFacts, check_facts, check_save_id, read_checksums
from dcp_core.inspection.description import ChunkNames
from dcp_core.inspection.report import RETRY, Problem, damaged_text
from dcp_core.metadata import FileColumns, SaveRecord
from dcp_core.storage.base import ReadHandle, Storage

RANGE_BYTES = 4 << 20
"""What one thread reads at a time."""

SCANNED_BYTES = 16 << 20
"""Longer objects are compared with their checksums, but nobody looks whether they can be decoded."""

Names = tuple[tuple[str, ...], int]
_NOTHING: Names = ((), 0)
_ID_STOP = SAVE_ID_START + 32


class OpenedFile:
    """A data file that is being checked.

    Attributes:
        row: Which one.
        facts: What the description says about it.
        handle: Open to read.
        table: Checksums of its data.

    It is closed when nobody holds it any more.
    """

    def __init__(self, row: int, facts: FileFacts, handle: ReadHandle, table: ChecksumTable) -> None:
        self.row = row
        self.facts = facts
        self.handle = handle
        self.table = table
        self._left = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Keep it open for one more range."""
        with self._lock:
            self._left += 1

    def release(self) -> None:
        """Close it once nobody holds it."""
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self.handle.close()


@dataclass(frozen=True, slots=True, eq=False)
class DataRange:
    """Consecutive blocks of one file.

    Attributes:
        file: Which.
        first: First block.
        edges: Where the blocks start in the data section, and where the last one ends.
    """

    file: OpenedFile
    first: int
    edges: list[int]


@dataclass(slots=True, eq=False)
class FileFinding:
    """What is known about a file before its data is read.

    Attributes:
        problems: What is wrong.
        opened: For its data; None where that need not be read, or cannot.
        checked_nbytes: Bytes that were compared with checksums.
        classes: Classes of pickled objects in it.
    """

    problems: list[Problem] = field(default_factory=list)
    opened: OpenedFile | None = None
    checked_nbytes: int = 0
    classes: dict[str, None] = field(default_factory=dict)


class DataChecker:
    """Checks the data files of one checkpoint. Any thread may call it.

    Args:
        storage: Where they are.
        files: What the description says about them.
        save: Which save it is.
        names: Finds names; None where the description cannot be read in full.
        is_quick: Leave the checksums of data out.
    """

    def __init__(
        self, storage: Storage, files: FileColumns, save: SaveRecord, names: ChunkNames | None, *, is_quick: bool
    ) -> None:
        self._storage = storage
        self._files = files
        self._save = save
        self._names = names
        self._is_quick = is_quick
        self._memory = threading.local()

    def open(self, row: int) -> FileFinding:
        """Check all of a file but the data of tensors. Never raises a `DcpError`."""
        facts = file_facts(self._files, self._save, row)
        finding = FileFinding()
        try:
            if self._has_size(row, facts, finding):
                if int(self._files.kind[row]) == TENSOR_FILE:
                    self._open_tensors(row, facts, finding)
                else:
                    self._check_objects(row, facts, finding)
        except DcpError as error:
            finding.problems.append(self._refused(row, facts, error))
        return finding

    def _has_size(self, row: int, facts: FileFacts, finding: FileFinding) -> bool:
        nbytes = self._storage.size(facts.name)
        if nbytes == facts.nbytes:
            return True
        if nbytes is None:
            keys, more = self._all_in(row)
            finding.problems.append(
                Problem("missing file", f"{facts.name} is missing", facts.name, keys, more,
                        expected=f"{facts.nbytes} bytes", found="no file")
            )  # fmt: skip
            return False
        keys, more = self._range_names(row, nbytes - facts.data_start, facts.data_nbytes)
        what = "was cut short" if nbytes < facts.nbytes else "has more bytes than were written"
        finding.problems.append(
            Problem("wrong size", f"{facts.name} {what}", facts.name, keys, more, byte_offset=min(nbytes, facts.nbytes),
                    nbytes=abs(facts.nbytes - nbytes), expected=f"{facts.nbytes} bytes", found=f"{nbytes} bytes")
        )  # fmt: skip
        return False

    def _refused(self, row: int, facts: FileFacts, error: DcpError) -> Problem:
        keys, more = self._all_in(row)
        if isinstance(error, NewerVersionError):
            return Problem("newer version", str(error), facts.name, keys, more, remedy="use a newer version")
        if isinstance(error, NotFoundError):
            return Problem("missing file", str(error), facts.name, keys, more)
        if isinstance(error, IncompleteError):
            return Problem("wrong size", str(error), facts.name, keys, more)
        if isinstance(error, CorruptError):
            return Problem("damaged header", str(error), facts.name, keys, more)
        return Problem("unreadable", str(error), facts.name, keys, more, remedy=RETRY)

    # --- tensors -------------------------------------------------------------------------------------

    def _open_tensors(self, row: int, facts: FileFacts, finding: FileFinding) -> None:
        check_facts(facts)
        handle = self._storage.open_read(facts.name)
        try:
            table = self._identify(handle, row, facts, finding)
        except BaseException:
            handle.close()
            raise
        if table is None:
            handle.close()
            return
        finding.problems += self._contradictions(row, facts, table)
        finding.opened = OpenedFile(row, facts, handle, table)

    def _identify(
        self, handle: ReadHandle, row: int, facts: FileFacts, finding: FileFinding
    ) -> ChecksumTable | None:  # fmt: skip
        """See whose file it is, and check its header; gives the checksums of its data, if these can be trusted."""
        header = bytearray(_ID_STOP if self._is_quick else facts.data_start)
        handle.read_into(0, memoryview(header))
        raw = bytes(header)
        try:
            if self._is_quick:
                check_save_id(raw[SAVE_ID_START:_ID_STOP], facts.save_id or "", facts.name)
                return None
            table = read_checksums(raw, facts)
            finding.checked_nbytes += facts.data_start
            return table
        except CorruptError as error:
            spared = None if self._is_quick else self._table_in_spite(raw, facts)
            is_other = spared is None and raw[SAVE_ID_START:_ID_STOP] != (facts.save_id or "").encode()
            keys, more = self._all_in(row)
            finding.problems.append(
                Problem("another save's file" if is_other else "damaged header", str(error), facts.name, keys, more,
                        byte_offset=0, nbytes=facts.data_start)
            )  # fmt: skip
            return spared

    @staticmethod
    def _table_in_spite(header: bytes, facts: FileFacts) -> ChecksumTable | None:
        """The checksums in a header that is damaged elsewhere, so that all other damage is found, too."""
        field_bytes = header[facts.field_start : facts.field_start + facts.field_nbytes]
        if len(field_bytes) != facts.field_nbytes or field_digest(field_bytes) != facts.digest:
            return None
        try:
            return decode_field(field_bytes, facts.data_nbytes, facts.name)
        except CorruptError:
            return None

    def _contradictions(self, row: int, facts: FileFacts, table: ChecksumTable) -> list[Problem]:
        """Chunks of the description that the file does not have."""
        if self._names is None:
            return []
        rows = self._names.rows_of(row)
        start, nbytes = self._names.byte_offset[rows], self._names.nbytes[rows]
        wrong = rows[(table.first_blocks_of(start, nbytes) < 0) & (nbytes > 0)]
        if not len(wrong):
            return []
        keys, more = self._names.named(wrong)
        text = f"{len(wrong)} boxes do not lie in {facts.name} where the description says"
        return [Problem("contradiction", text, facts.name, keys, more)]

    def ranges(self, opened: OpenedFile) -> Iterator[DataRange]:
        """Cut the data of a file into ranges of whole blocks."""
        table = opened.table
        count = np.diff(table.first_block)
        number = np.arange(len(table.block)) - np.repeat(table.first_block[:-1], count)
        edges = np.append(np.repeat(table.byte_offset[:-1], count) + number * BLOCK_BYTES, table.byte_offset[-1])
        first = 0
        while first < len(table.block):
            last = int(np.searchsorted(edges, edges[first] + RANGE_BYTES, side="right")) - 1
            last = max(last, first + 1)
            yield DataRange(opened, first, edges[first : last + 1].tolist())
            first = last

    def check_range(self, part: DataRange) -> list[Problem]:
        """Read blocks and compare them with their checksums. Never raises a `DcpError`."""
        file, edges = part.file, part.edges
        start, nbytes = edges[0], edges[-1] - edges[0]
        view = self._buffer(nbytes)
        try:
            file.handle.read_into(file.facts.data_start + start, view)
        except DcpError as error:
            keys, more = self._range_names(file.row, start, edges[-1])
            problem = Problem("unreadable", str(error), file.facts.name, keys, more, file.facts.data_start + start,
                              nbytes, remedy=RETRY)  # fmt: skip
            return [problem]
        expected = file.table.block[part.first : part.first + len(edges) - 1].tolist()
        return [
            self._damaged(file, low, high)
            for (low, high), checksum in zip(pairwise(edges), expected, strict=True)
            if block_checksum(view[low - start : high - start]) != checksum
        ]

    def _damaged(self, file: OpenedFile, low: int, high: int) -> Problem:
        keys, more = self._range_names(file.row, low, high)
        start = file.facts.data_start + low
        text = damaged_text(file.facts.name, start, high - low)
        return Problem("damaged data", text, file.facts.name, keys, more, start, high - low)

    def _buffer(self, nbytes: int) -> memoryview:
        memory: bytearray | None = getattr(self._memory, "buffer", None)
        if memory is None:
            memory = self._memory.buffer = bytearray(RANGE_BYTES)
        return memoryview(memory)[:nbytes]

    # --- objects -------------------------------------------------------------------------------------

    def _check_objects(self, row: int, facts: FileFacts, finding: FileFinding) -> None:
        index = open_index(self._storage, facts)
        if self._names is not None:
            finding.problems += self._names.objects_beyond(row, len(index), facts.name)
        if self._is_quick:
            return
        finding.checked_nbytes += facts.data_start
        with self._storage.open_read(facts.name) as handle:
            for ordinal in range(len(index)):
                self._check_object(handle, row, facts, index, ordinal, finding)

    def _check_object(
        self, handle: ReadHandle, row: int, facts: FileFacts, index: BytesIndex, ordinal: int, finding: FileFinding
    ) -> None:
        start, nbytes = int(index.offsets[ordinal]), int(index.nbytes[ordinal])
        keys, more = self._names.objects_in(row, ordinal) if self._names is not None else _NOTHING
        whose = f"object {ordinal} of {facts.name}"
        digest = xxh3_64()
        kept = bytearray()
        for at in range(start, start + nbytes, RANGE_BYTES):
            view = self._buffer(min(RANGE_BYTES, start + nbytes - at))
            handle.read_into(at, view)
            digest.update(view)
            if nbytes <= SCANNED_BYTES:
                kept += view
        finding.checked_nbytes += nbytes
        if digest.intdigest() != int(index.digests[ordinal]):
            text = f"{whose} contradicts its checksum"
            finding.problems.append(Problem("damaged object", text, facts.name, keys, more, start, nbytes))
        elif nbytes <= SCANNED_BYTES:
            try:
                finding.classes.update(dict.fromkeys(pickled_classes(bytes(kept))))
            except DcpError as error:
                text = f"{whose} has the right checksum, and is no value: {error}"
                finding.problems.append(Problem("damaged object", text, facts.name, keys, more, start, nbytes))

    # --- names ---------------------------------------------------------------------------------------

    def _all_in(self, row: int) -> Names:
        if self._names is None:
            return _NOTHING
        if int(self._files.kind[row]) == TENSOR_FILE:
            return self._names.named(self._names.rows_of(row))
        return self._names.objects_in(row)

    def _range_names(self, row: int, start: int, stop: int) -> Names:
        if self._names is None or int(self._files.kind[row]) != TENSOR_FILE:
            return self._all_in(row)
        return self._names.in_range(row, start, stop)
