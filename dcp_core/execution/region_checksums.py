"""Checksums of what a plan writes, without writing it.

Goes in: a plan, and whoever gives the bits. Comes out: for each region the checksum that its chunk would have in a data
file. The bytes take the way of a save, so they may be strewn over host memory or lie on a device, and little is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dcp_core.execution.interfaces import WriteSource
from dcp_core.execution.write_runs import RunSource
from dcp_core.execution.write_stream import FileStream
from dcp_core.formats.checksums import make_table
from dcp_core.metadata import UInt64
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.write_items import WrittenRegions
from dcp_core.planning.write_spans import AllSpans, WriteSpans
from dcp_core.storage.base import WriteHandle
from dcp_core.storage.operations import BytesLike


def region_checksums(
    plan: SavePlan, source: WriteSource, rank: int, proceed: Callable[[], None] = lambda: None
) -> UInt64:
    """Take the checksum of each region that a plan writes.

    Args:
        plan: The regions. They are looked at in the order of its write list.
        source: Gives their bits; asked on this thread.
        rank: This process, for errors.
        proceed: Called for every few MiB; raises when there is no point in going on.

    Returns:
        One for each region, in the order of the write list. Equal bits have equal checksums. Shape (W,).

    Raises:
        PlanningError: The planner gives something else than was planned.
    """
    regions = WrittenRegions(plan.table, plan.writes, plan.names)
    if not len(regions):
        return np.zeros(0, np.uint64)
    spans = WriteSpans(AllSpans(regions, np.array([len(regions)])))
    runs = RunSource(spans, spans.columns, source, rank)
    stream = FileStream(_Nowhere(), 0, proceed, durable=False)
    try:
        while (run := runs.take()) is not None:
            stream.send(run)
        stream.finish()
    finally:
        stream.close()
    return make_table(0, regions.nbytes, stream.checksums).chunk


class _Nowhere(WriteHandle):
    """A file that keeps nothing."""

    name = ""
    nbytes = 0

    def write(self, offset: int, buffers: Sequence[BytesLike]) -> None:
        """Let the bytes go."""

    def sync(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Nothing is open."""
