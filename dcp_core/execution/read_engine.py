"""Reads regions of chunks into their targets, at the speed of the hardware and in bounded memory.

Goes in: planned regions, each with its file and chunk, and whoever says where it belongs. The calling thread asks the
planner for targets, some hundred regions at a time, and makes tasks of them; a few threads read, check and convert;
then the calling thread tells the planner. Bytes that are contiguous in the file and in host memory are read straight
into their places, many places a call; anything else comes through a few reused buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dcp_core.execution import read_ranges, read_requests
from dcp_core.execution.buffer_ring import BufferRing
from dcp_core.execution.data_files import OpenFile, TensorFiles
from dcp_core.execution.interfaces import ReadContext, ReadTarget
from dcp_core.execution.read_batches import Batch, FileRows
from dcp_core.execution.read_checks import check_before_reading, first_blocks
from dcp_core.execution.read_placing import Acquired, Lane
from dcp_core.execution.read_ranges import hulls_of
from dcp_core.execution.read_tasks import TaskReader, Work, give_back
from dcp_core.execution.read_threads import Crew, usable_threads
from dcp_core.formats import checksums
from dcp_core.metadata import Int64
from dcp_core.planning.leaves import DeviceTransfers
from dcp_core.planning.span_columns import Mask, PlannedRegion, SpanColumns, columns_of

BATCH_ROWS = 1024
BATCH_BYTES = 32 << 20
"""Regions whose targets are asked for at once: so many, of so many bytes together; at least one."""

IN_PLACE_BYTES = 512 << 20
"""The same, where targets are there whether they are asked for or not, and nobody waits for the first regions. Between
two batches the processor's caches are full of what was read: making a batch costs several times what it would."""

TASKS_AHEAD = 8
"""Tasks that wait or run before the calling thread waits for one to be done."""

THREAD_BYTES = 4 << 20
"""A thread is worth its start from so many bytes on."""


def read_tensors(
    files: TensorFiles,
    context: ReadContext,
    spans: Sequence[PlannedRegion],
    target: ReadTarget,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Read regions.

    Args:
        files: The checkpoint's tensor files.
        context: Which load, and what to check.
        spans: Regions, best file after file and by byte offset.
        target: Says where each belongs. Called on the calling thread only, in the order of the regions; several are
            acquired before the first of them is applied.
        progress: Called now and then on the calling thread, with how many regions, from the first on, are in.

    Raises:
        IncompleteError: A file is missing or of another size; then no target has been touched.
        PlanningError: A region or chunk that its chunk or file cannot hold; then no target has been touched.
        CorruptError: Bytes contradict their checksum; targets are undefined from then on.
        StorageError: The storage refused.
    """
    if not len(spans):
        return
    columns = columns_of(spans)
    check_before_reading(files, spans, columns)
    engine = _ReadEngine(files, context, spans, columns, target, progress)
    try:
        engine.run()
    finally:
        engine.close()


class _ReadEngine:
    def __init__(
        self,
        files: TensorFiles,
        context: ReadContext,
        spans: Sequence[PlannedRegion],
        columns: SpanColumns,
        target: ReadTarget,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._progress = progress
        self._rows_in = 0
        self._files = files
        whole_blocks: Mask | None = getattr(spans, "whole_blocks", None)
        self._whole_blocks = np.zeros(len(spans), np.bool_) if whole_blocks is None else whole_blocks
        if context.verify == "full":
            self._whole_blocks = np.ones(len(spans), np.bool_)
        self._spans = spans
        self._columns = columns
        self._hulls = hulls_of(columns)
        self._target = target
        most_threads = max(usable_threads(), files.requests_at_once)
        threads = min(most_threads, int(self._hulls.nbytes.sum()) // THREAD_BYTES)
        is_in_place = progress is None and getattr(target, "fills_in_place", False)
        self._batch_bytes = max(BATCH_BYTES, IN_PLACE_BYTES) if is_in_place else BATCH_BYTES
        self._batch_rows = BATCH_ROWS
        if getattr(spans, "share_memory", False):
            threads = 0  # of targets that share memory the last one wins, as it is read last
            self._batch_rows = 1  # and each is checked before the next one is read over it
        scratch = memoryview(bytearray(max(read_ranges.GAP_BYTES, files.gap_bytes)))
        self._reader = TaskReader(
            scratch, lambda row: spans[row].item.storage_index.fqn, context.rank, gap_bytes=files.gap_bytes
        )
        self._crew = Crew(self._reader.carry_out, threads)
        self._rings = _Rings(2 * max(threads, 1))
        self._open: deque[Batch] = deque()

    def run(self) -> None:
        """Read all, and tell the planner."""
        file, is_full = self._columns.file, self._whole_blocks
        changes = (file[1:] != file[:-1]) | (is_full[1:] != is_full[:-1])
        edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(file)]
        for first, last in pairwise(edges):
            rows = self._rows_of(self._file(int(file[first])), first, last)
            for start, stop in _batches(rows.hulls.nbytes, self._batch_rows, self._batch_bytes):
                batch = rows.batch(start, stop, self._acquire(first + start, first + stop))
                self._open.append(batch)
                self._hand_in(batch)
        while self._crew.in_flight:
            self._advance(wait=True)
        self._apply()

    def close(self) -> None:
        """Let what has begun end; nothing is in use afterwards."""
        self._rings.close()
        for work in self._crew.stop():
            give_back(work)

    def _file(self, row: int) -> OpenFile:
        """Open a file, once nobody reads from the one that is closed for it."""
        closed = self._files.next_to_close
        while closed is not None and any(batch.left and batch.file is closed for batch in self._open):
            self._advance(wait=True)
        return self._files.get(row)

    def _rows_of(self, file: OpenFile, first: int, last: int) -> FileRows:
        columns, hulls = self._columns.part(first, last), self._hulls.part(first, last)
        spans = self._spans
        return FileRows(
            file,
            first,
            columns,
            hulls,
            first_blocks(file, columns, hulls.chunk_nbytes, lambda row: spans[first + row].item.storage_index.fqn),
            bool(self._whole_blocks[first]) and file.checksums is not None,
            lambda row: spans[row].item.dest_index.fqn,
        )

    def _acquire(self, first: int, last: int) -> Acquired:
        """The targets of some rows."""
        target = self._target
        if hasattr(target, "acquire_batch"):
            found: Acquired = target.acquire_batch(self._spans[first:last])
            return found
        items = [self._spans[row].item for row in range(first, last)]
        return [(target.acquire_tensor(item), target.access(item)) for item in items]

    def _hand_in(self, batch: Batch) -> None:
        for task, lane in zip(batch.tasks, batch.lanes, strict=True):
            ring = None if lane is None else self._ring(lane)
            self._crew.hand_in(Work(batch, task, ring, lane is not None and lane.is_blocking))
            while self._advance(wait=self._crew.in_flight >= TASKS_AHEAD):
                pass

    def _ring(self, lane: Lane) -> BufferRing:
        """The ring of a lane's buffers; only one device has one at a time."""
        if not self._rings.fits(lane.transfers):
            while self._crew.in_flight:
                self._advance(wait=True)
        return self._rings.of(lane.transfers)

    def _advance(self, *, wait: bool) -> bool:
        """Take note of a task that is done; False when there is none."""
        work = self._crew.next_done(wait=wait)
        if work is None:
            return False
        if work.buffer is not None:
            self._reader.empty(work)
        work.batch.left -= 1
        self._apply()
        return True

    def _apply(self) -> None:
        """Tell the planner of the regions that are in, in order."""
        while self._open and not self._open[0].left:
            batch = self._open.popleft()
            first, last = batch.first_row, batch.first_row + len(batch.views)
            if hasattr(self._target, "apply_batch"):
                self._target.apply_batch(self._spans[first:last], batch.views)
            else:
                for row, view in zip(range(first, last), batch.views, strict=True):
                    self._target.apply_tensor(self._spans[row].item, view)
            self._rows_in = last
        if self._progress is not None:
            self._progress(self._rows_in)


class _Rings:
    """The rings of buffers: one of ordinary memory, one of a device's."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._nbytes = max(read_requests.TASK_BYTES, checksums.BLOCK_BYTES)
        self._host: BufferRing | None = None
        self._device: BufferRing | None = None
        self._transfers: DeviceTransfers | None = None

    def fits(self, transfers: DeviceTransfers | None) -> bool:
        """Whether `of` leaves all buffers that are in use alone."""
        return transfers is None or self._transfers is None or self._transfers is transfers

    def of(self, transfers: DeviceTransfers | None) -> BufferRing:
        """The ring of ordinary memory, or of a device; that of another device is closed."""
        if transfers is None:
            if self._host is None:
                self._host = BufferRing(_plain_memory, buffer_nbytes=self._nbytes, count=self._count)
            return self._host
        if self._device is None or self._transfers is not transfers:
            if self._device is not None:
                self._device.close()
            self._device = BufferRing(transfers.host_memory, buffer_nbytes=self._nbytes, count=self._count)
            self._transfers = transfers
        return self._device

    def close(self) -> None:
        """Wake who waits for a buffer: there are no more."""
        for ring in (self._host, self._device):
            if ring is not None:
                ring.close()


def _plain_memory(nbytes: int) -> Any:
    return np.empty(nbytes, np.uint8)


def _batches(nbytes: Int64, most_rows: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut rows into batches."""
    ends, first, done = np.cumsum(nbytes), 0, 0
    while first < len(nbytes):
        last = int(np.searchsorted(ends, done + most_bytes, side="right"))
        last = min(max(last, first + 1), first + most_rows, len(nbytes))
        yield first, last
        first, done = last, int(ends[last - 1])
