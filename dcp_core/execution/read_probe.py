"""How fast storage gives what a plan reads: a little of it, read before anybody decides who reads what.

In: open files, and the regions of a plan. Out: bytes a second. What is read is thrown away.
"""

from __future__ import annotations

import time

import numpy as np

from dcp_core.execution.data_files import TensorFiles
from dcp_core.planning.span_columns import SpanColumns

PROBE_BYTES = 2 << 20
"""What one probe reads. Long enough for a rate that says something; 20 ms where storage gives 100 MB/s."""


def probe_rate(files: TensorFiles, columns: SpanColumns, fraction: float) -> float:
    """Read a little, and say how fast that was.

    Args:
        files: The tensor files of the checkpoint.
        columns: What a plan reads.
        fraction: Where: this part of the plan's bytes lies before it, 0 up to 1.

    Returns:
        Bytes a second; 0 where there is too little to read for an answer.
    """
    nbytes = np.prod(columns.sizes, axis=1, dtype=np.int64) * columns.itemsize
    ends = np.cumsum(nbytes)
    if not len(ends) or ends[-1] < PROBE_BYTES:
        return 0.0
    place = int(fraction * int(ends[-1] - 1))
    row = int(np.searchsorted(ends, place, side="right"))
    file = files.get(int(columns.file[row]))
    start = file.facts.data_start + int(columns.byte_offset[row]) + place - int(ends[row] - nbytes[row])
    start = max(min(start, file.facts.nbytes - PROBE_BYTES), file.facts.data_start)
    target = np.ones(min(PROBE_BYTES, file.facts.nbytes - start), dtype=np.uint8)  # touched: the memory is there
    began = time.perf_counter()
    file.read(start, [target.data])
    return len(target) / max(time.perf_counter() - began, 1e-9)
