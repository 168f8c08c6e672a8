"""Where each region lies: in which of its rank's files, and at which byte.

A rank that writes much has several files, its *parts*, so that several threads can write them. Regions lie in
(name, offsets) order, the order in which loads walk, part after part. Within a part those whose byte length is no
multiple of 8 come after all others, so that everything before them stays aligned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.metadata import Int64, UInt8

ALIGNMENT = 8
PART_NBYTES = 256 * 1024 * 1024
"""A rank's bytes are cut into a further part for each of these."""
MOST_PARTS = 4
"""Parts that a rank has at most."""


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """Byte spans of regions in their files' data sections.

    Attributes:
        order: Region rows, rank after rank, file after file, each file in the order of its bytes. Shape (W,).
        starts: Where each file's regions start in `order`. Shape (files + 1,).
        first_file: The first file of each rank; ranks without regions have none. Shape (ranks + 1,).
        part: Which of its rank's files each region lies in. Shape (W,), by region row.
        byte_offset: Start of each region in its file's data section. Shape (W,), by region row.
    """

    order: Int64
    starts: Int64
    first_file: Int64
    part: UInt8
    byte_offset: Int64

    @property
    def bounds(self) -> Int64:
        """Where each rank's regions start in `order`. Shape (ranks + 1,)."""
        return self.starts[self.first_file]

    @property
    def parts(self) -> Int64:
        """How many files each rank has. Shape (ranks,)."""
        return np.diff(self.first_file)


def lay_out(rank: Int64, nbytes: Int64, ranks: int) -> FileLayout:
    """Lay regions into files.

    Args:
        rank: The writer of each region, in [0, ranks). Regions are sorted by (name, offsets). Shape (W,).
        nbytes: Bytes of each region. Shape (W,).
        ranks: Number of ranks.

    >>> lay_out(np.array([0, 0, 0]), np.array([3, 8, 16]), 1).byte_offset.tolist()
    [24, 0, 8]
    """
    narrow = rank.astype(np.uint16) if ranks <= 1 << 16 else rank
    order = np.argsort(narrow, kind="stable")
    owner, laid = narrow[order], nbytes[order]
    run = _cut_runs(owner, laid, ranks)
    new = np.ones(len(order), dtype=bool)
    new[1:] = (owner[1:] != owner[:-1]) | (run[1:] != run[:-1])
    starts = np.append(np.flatnonzero(new), len(order))
    first_file = np.searchsorted(owner[starts[:-1]], np.arange(ranks + 1))
    file = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
    part, byte_offset = np.empty(len(order), dtype=np.uint8), np.empty(len(order), dtype=np.int64)
    part[order] = file - first_file[owner]
    loose = laid % ALIGNMENT != 0
    if loose.any():
        group = file * 2 + loose
        again = np.argsort(group.astype(np.uint16) if 2 * len(starts) <= 1 << 16 else group, kind="stable")
        order, laid = order[again], laid[again]
    before = np.cumsum(laid, dtype=np.int64) - laid
    byte_offset[order] = before - before[starts[:-1]][file]
    return FileLayout(order, starts, first_file, part, byte_offset)


def _cut_runs(owner: npt.NDArray[Any], nbytes: Int64, ranks: int) -> UInt8:
    """Cut each rank's regions into runs of about equal bytes, by where a region's middle lies; some may be empty."""
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(nbytes, dtype=np.int64)])
    bounds = ends[np.searchsorted(owner, np.arange(ranks + 1))]
    total = np.diff(bounds)
    wanted = np.clip(total // PART_NBYTES, 1, MOST_PARTS)
    if int(wanted.max(initial=1)) == 1:
        return np.zeros(len(owner), dtype=np.uint8)
    doubled_middle = ends[:-1] + ends[1:] - 2 * bounds[owner]
    run = doubled_middle * wanted[owner] // np.maximum(2 * total, 1)[owner]
    runs: UInt8 = np.minimum(run, wanted[owner] - 1).astype(np.uint8)
    return runs
