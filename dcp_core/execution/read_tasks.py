"""Carries out one task: read its pieces, check them, empty its buffer. Any thread may do that.

Goes in: a task of a batch, and where its buffer comes from. Comes out: bytes in the targets, or what is left to do for
them: copies to await, or elements that only the calling thread may put.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp_core.errors import IncompleteError, StorageError
from dcp_core.execution.buffer_ring import BufferRing
from dcp_core.execution.read_batches import Batch
from dcp_core.execution.read_checks import contradiction, refusal
from dcp_core.execution.read_requests import ALIGNMENT, Task, joined_calls
from dcp_core.execution.read_targets import Waits
from dcp_core.formats.checksums import block_checksum

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class Work:
    """A task on its way.

    Attributes:
        batch: Whose it is.
        task: Which pieces.
        ring: Where its buffer comes from; None: it needs none.
        is_blocking: Whether the calling thread empties the buffer, by `empty`.
        buffer: The buffer, while it is in use.
        filled: What lies in the buffer, from its start: (row, first byte as its destination counts, start, stop).
    """

    batch: Batch
    task: Task
    ring: BufferRing | None = None
    is_blocking: bool = False
    buffer: Bytes | None = None
    filled: Sequence[tuple[int, int, int, int]] = ()


class TaskReader:
    """Carries out tasks.

    Args:
        scratch: Where bytes go that nobody wants; threads share it. As long as the largest gap that is read over.
        key_of: Name of the stored tensor of a row.
        rank: Who reads.
        gap_bytes: Calls that lie no further apart become one, where a call costs that much; 0: none do.
    """

    def __init__(self, scratch: memoryview, key_of: Callable[[int], str], rank: int, *, gap_bytes: int = 0) -> None:
        self._scratch = scratch
        self._gap_bytes = gap_bytes
        self._key_of = key_of
        self._rank = rank

    def carry_out(self, work: Work) -> Callable[[], None] | None:
        """Read and check a task's pieces; empty its buffer, unless the calling thread must do that.

        Returns:
            What awaits the copies that were started and gives the buffer back; None when the task is done, or its
            buffer is to be emptied by the calling thread.

        Raises:
            CorruptError: Bytes contradict their checksum.
            IncompleteError, StorageError: What the storage says, with key and rank.
        """
        if work.ring is None:
            self._read(work, work.batch.memory[work.task.first : work.task.last])  # type: ignore[arg-type]  # all there
            return None
        work.buffer = work.ring.take()
        try:
            self._read(work, _laid_out(work, work.buffer))
        except BaseException:
            give_back(work)
            raise
        return None if work.is_blocking else self.empty(work)

    def empty(self, work: Work) -> Callable[[], None] | None:
        """Put what lies in a task's buffer in its places.

        Returns:
            As `carry_out`.
        """
        waits: Waits = []
        assert work.buffer is not None
        try:
            for row, first, start, stop in work.filled:
                work.batch.destinations[row].put(work.buffer[start:stop], first, waits)
        except BaseException:
            _await_all(waits)
            give_back(work)
            raise
        if not waits:
            give_back(work)
            return None

        def settle() -> None:
            try:
                while waits:
                    waits[0]()
                    waits.pop(0)
            except BaseException:
                _await_all(waits)
                raise
            finally:
                give_back(work)

        return settle

    def _read(self, work: Work, memory: Sequence[memoryview]) -> None:
        batch, first = work.batch, work.task.first
        start, nbytes = batch.start, batch.nbytes
        for low, high in joined_calls(work.task.calls, start, nbytes, self._gap_bytes):
            targets = memory[low - first : high - first]
            end = start[high - 1] + nbytes[high - 1]
            if end - start[low] > sum(nbytes[low:high]):
                targets = self._with_gaps(batch, low, high, targets)
            try:
                batch.file.read(start[low], targets)
            except (StorageError, IncompleteError) as error:
                keys = [self._key_of(row) for row in batch.row[low:high]]
                raise refusal(error, keys, self._rank) from error
        expected = batch.expected
        for index, piece in enumerate(memory, first):
            wanted = expected[index]
            if wanted is not None and block_checksum(piece) != wanted:
                key = self._key_of(batch.row[index])
                raise contradiction(key, batch.file, start[index], nbytes[index], self._rank)

    def _with_gaps(self, batch: Batch, low: int, high: int, targets: Sequence[memoryview]) -> list[memoryview]:
        """Targets of a call, and between them places for the bytes that nobody wants."""
        filled = [targets[0]]
        position = batch.start[low] + batch.nbytes[low]
        for index in range(low + 1, high):
            gap = batch.start[index] - position
            if gap:
                filled.append(self._scratch[:gap])
            filled.append(targets[index - low])
            position = batch.start[index] + batch.nbytes[index]
        return filled


def give_back(work: Work) -> None:
    """Give a task's buffer back, if it has one."""
    buffer, work.buffer = work.buffer, None
    if buffer is not None and work.ring is not None:
        work.ring.give_back(buffer)


def _await_all(waits: Waits) -> None:
    """Await copies after something failed, whatever they say: their memory is in use until then."""
    while waits:
        with suppress(BaseException):
            waits[0]()
        waits.pop(0)


def _laid_out(work: Work, buffer: Bytes) -> list[memoryview]:
    """What each piece is read into: its own memory, or its part of the buffer. Notes what will lie in the buffer."""
    batch, view = work.batch, buffer.data
    memory: list[memoryview] = []
    filled: list[tuple[int, int, int, int]] = []
    for index in range(work.task.first, work.task.last):
        own = batch.memory[index]
        if own is not None:
            memory.append(own)
            continue
        row, at, nbytes = batch.row[index], batch.at[index], batch.nbytes[index]
        last_row, first, start, stop = filled[-1] if filled else (-1, 0, 0, 0)
        if row == last_row and first + stop - start == at:
            filled[-1] = (row, first, start, stop + nbytes)
        else:
            stop += -stop % ALIGNMENT
            filled.append((row, at, stop, stop + nbytes))
        memory.append(view[stop : stop + nbytes])
    work.filled = filled
    return memory
