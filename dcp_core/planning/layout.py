"""Where each region lies in its rank's file.

Regions lie back to back in (name, offsets) order, the order in which loads walk. Those whose byte length is no
multiple of 8 come after all others, so that everything before them stays aligned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcp_core.metadata import Int64

ALIGNMENT = 8


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """Byte spans of regions in their files' data sections.

    Attributes:
        order: Region rows, file after file, each file in the order of its bytes. Shape (W,).
        bounds: Where each file's regions start in `order`. Shape (files + 1,).
        byte_offset: Start of each region in its file's data section. Shape (W,), by region row.
    """

    order: Int64
    bounds: Int64
    byte_offset: Int64


def lay_out(file: Int64, nbytes: Int64, files: int) -> FileLayout:
    """Lay regions into files.

    Args:
        file: The file of each region, in [0, files). Regions are sorted by (name, offsets). Shape (W,).
        nbytes: Bytes of each region. Shape (W,).
        files: Number of files.

    >>> lay_out(np.array([0, 0, 0]), np.array([3, 8, 16]), 1).byte_offset.tolist()
    [24, 0, 8]
    """
    group = file * 2 + (nbytes % ALIGNMENT != 0)
    narrow = group.astype(np.uint16) if files * 2 <= 1 << 16 else group
    order = np.argsort(narrow, kind="stable")
    laid = nbytes[order]
    before = np.cumsum(laid, dtype=np.int64) - laid
    bounds = np.searchsorted(group[order], np.arange(files + 1, dtype=np.int64) * 2)
    starts = np.zeros(files, dtype=np.int64)
    filled = bounds[:-1] < len(order)
    starts[filled] = before[bounds[:-1][filled]]
    byte_offset = np.empty(len(order), dtype=np.int64)
    byte_offset[order] = before - np.repeat(starts, np.diff(bounds))
    return FileLayout(order, bounds, byte_offset)
