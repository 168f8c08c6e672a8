"""Hashes and writes the chunks of one file, back to back.

Goes in: runs of chunks, in file order. Comes out: bytes in the file, and the checksum of every block. Each block is
hashed right before it is written, while it is in the cache of the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dcp_core.execution.planner_answers import Bits
from dcp_core.execution.staging import Staging
from dcp_core.execution.write_runs import Run
from dcp_core.formats.checksums import BLOCK_BYTES, block_checksum
from dcp_core.planning.leaves import DeviceBits, DeviceTransfers
from dcp_core.storage.base import WriteHandle

CALL_BYTES = 2 << 20
"""About so many bytes are hashed and then written by one call; see docs/decisions/0015."""

WRITE_BACK_BYTES = 16 << 20
"""The disk is told to begin whenever so many bytes are new; see docs/decisions/0015."""

_COPIED_BYTES = 256 << 10  # beside chunks that must be staged, smaller ones are copied too: cheaper than a call each


class FileStream:
    """The data section of one file. One thread uses it.

    Attributes:
        checksums: Of the blocks so far, in file order; empty for a file that has none.
    """

    def __init__(
        self,
        handle: WriteHandle,
        position: int,
        proceed: Callable[[], None],
        *,
        durable: bool,
        has_checksums: bool = True,
    ) -> None:
        """Start at a place in a file.

        Args:
            handle: The file.
            position: Where the data section starts.
            proceed: Called before every write; raises when there is no point in going on.
            durable: Whether the disk should begin early.
            has_checksums: False for a file of another format, which has none.
        """
        self.checksums: list[int] = []
        self._handle = handle
        self._position = position
        self._proceed = proceed
        self._durable = durable
        self._has_checksums = has_checksums
        self._written_back = position
        self._staging: Staging | None = None

    def send(self, run: Run) -> None:
        """Write a run of chunks, or take it over: what is staged follows later."""
        if run.is_plain and (self._staging is None or self._staging.is_empty):
            self._put_small(cast("Sequence[npt.NDArray[Any]]", run.chunks), run.nbytes)
            return
        for bits, transfers in zip(run.chunks, run.transfers or repeat(None), strict=False):
            self._send_chunk(bits, transfers)

    def finish(self) -> None:
        """Write all that was sent."""
        if self._staging is not None:
            self._staging.flush()

    def close(self) -> None:
        """Let go of everything, written or not."""
        if self._staging is not None:
            self._staging.close()

    def _send_chunk(self, bits: Bits, transfers: DeviceTransfers | None) -> None:
        if isinstance(bits, DeviceBits):
            self._staging_over(transfers).add(bits)
        elif bits.flags.c_contiguous and bits.nbytes > _COPIED_BYTES:
            self.finish()
            self._put_contiguous(bits)
        else:
            (self._staging or self._staging_over(None)).add(bits)

    def _staging_over(self, transfers: DeviceTransfers | None) -> Staging:
        """The staging for a device, or for the host; one at a time, to bound the memory."""
        if self._staging is None or self._staging.transfers is not transfers:
            self.finish()
            self.close()
            self._staging = Staging(transfers, self._put)
        return self._staging

    def _put_small(self, arrays: Sequence[npt.NDArray[Any]], nbytes: int) -> None:
        """Write contiguous arrays of at most one block, some of them with each call."""
        try:
            blocks = [array.data.cast("B") for array in arrays]
        except TypeError:  # complex numbers
            blocks = [_raw(array) for array in arrays]
        step = -(-len(blocks) // -(-nbytes // CALL_BYTES))
        for first in range(0, len(blocks), step):
            some = blocks[first : first + step]
            self._put(some, sum(map(len, some)))

    def _put_contiguous(self, array: npt.NDArray[Any]) -> None:
        raw = _raw(array)
        for start in range(0, len(raw), CALL_BYTES):
            piece = raw[start : start + CALL_BYTES]
            self._put([piece[at : at + BLOCK_BYTES] for at in range(0, len(piece), BLOCK_BYTES)], len(piece))

    def _put(self, blocks: Sequence[memoryview], nbytes: int) -> None:
        """Hash and write blocks that follow one another in the file."""
        self._proceed()
        if self._has_checksums:
            self.checksums += map(block_checksum, blocks)
        self._handle.write(self._position, blocks)
        self._position += nbytes
        if self._durable and self._position - self._written_back >= WRITE_BACK_BYTES:
            self._handle.write_back(self._written_back, self._position - self._written_back)
            self._written_back = self._position


def _raw(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of contiguous memory that is not empty."""
    if array.dtype.kind == "c":  # memoryview knows no complex numbers
        return array.reshape(-1).view(np.uint8).data
    return array.data.cast("B")
