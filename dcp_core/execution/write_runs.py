"""Asks the planner for the bits of one file's chunks, a run at a time.

Goes in: chunks in file order, and whoever gives their bits. Comes out: *runs*, chunks that lie one after another in the
file; checked against the plan, none of their memory touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcp_core.execution.interfaces import WriteSource
from dcp_core.execution.planner_answers import Bits, RegionBits
from dcp_core.formats.checksums import BLOCK_BYTES
from dcp_core.planning.leaves import DeviceBits, DeviceTransfers
from dcp_core.planning.write_columns import PlannedChunk, WriteColumns

RUN_BYTES = 4 << 20
"""Small chunks share a run up to this size; a larger chunk is a run of its own."""

RUN_CHUNKS = 512
"""No run has more chunks."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Chunks that follow one another in a file.

    Attributes:
        chunks: Their bits, in file order.
        nbytes: Bytes of them all.
        is_plain: Whether each is contiguous host memory of at most one block, and not empty.
        transfers: Of each chunk, how its parts travel, where it lies on a device; empty where none does.
    """

    chunks: Sequence[Bits]
    nbytes: int
    is_plain: bool
    transfers: Sequence[DeviceTransfers | None] = ()


class RunSource:
    """Gives the runs of one file. Calls the planner, so it belongs to the thread that called the engine.

    Args:
        spans: The chunks of the file, in file order.
        columns: The same as columns.
        source: Gives their bits.
        rank: This process, for errors.
    """

    def __init__(self, spans: Sequence[PlannedChunk], columns: WriteColumns, source: WriteSource, rank: int) -> None:
        self._bits = RegionBits(spans, columns.dtype, columns.ndim, columns.sizes, source, rank)
        self._next = 0
        self._nbytes = columns.nbytes
        self._ends = np.cumsum(columns.nbytes, dtype=np.int64)

    @property
    def next_nbytes(self) -> int:
        """What the next run has at most, in bytes."""
        return max(RUN_BYTES, int(self._nbytes[self._next]) if self._next < len(self._nbytes) else 0)

    def take(self) -> Run | None:
        """Ask for the next run; None at the end.

        Raises:
            PlanningError: The planner gives something else than was planned.
        """
        first, stop = self._next, self._end_of_run()
        if first == stop:
            return None
        self._next = stop
        chunks, only_arrays = self._bits.ask(first, stop)
        nbytes = self._nbytes[first:stop]
        is_plain = (
            only_arrays
            and int(nbytes.min()) > 0
            and int(nbytes.max()) <= BLOCK_BYTES
            and all(chunk.flags.c_contiguous for chunk in chunks)
        )
        return Run(chunks, int(nbytes.sum()), is_plain, () if only_arrays else [_transfers_of(bits) for bits in chunks])

    def _end_of_run(self) -> int:
        """The row behind the next run: as many chunks as fit, at least one."""
        first = self._next
        limit = (int(self._ends[first - 1]) if first else 0) + RUN_BYTES
        fitting = int(np.searchsorted(self._ends, limit, side="right"))
        return min(max(fitting, first + 1), first + RUN_CHUNKS, len(self._nbytes))


def _transfers_of(bits: Bits) -> DeviceTransfers | None:
    """Asked on the calling thread, since copies wait for what that thread has queued on the device."""
    return bits.access.transfers(bits.view) if isinstance(bits, DeviceBits) else None
