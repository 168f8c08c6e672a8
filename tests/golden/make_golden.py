"""Writes a golden checkpoint: `python -m tests.golden.make_golden DIRECTORY`.

One was made for each version of the format and committed; none is ever made anew, or tests would only compare the
code with itself.
"""

from __future__ import annotations

import datetime
import sys
from collections import OrderedDict
from typing import Any

import numpy as np

from dcp_core.api import save
from dcp_core.box import Box
from dcp_core.dtype import DTYPES, DType
from dcp_core.state_path import PerRank
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks

WORLD_SIZE = 2


def bits_of(dtype: DType, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    """Every byte pattern in turn, NaN payloads included; booleans 0 and 1."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = (np.arange(count) * 7 + dtype.code) % 256
    if dtype.name == "bool":
        raw = raw % 2
    return raw.astype(np.uint8).view(dtype.bits).reshape(shape)


def sharded(dtype: DType, shape: tuple[int, ...], boxes: list[Box]) -> ShardedArray:
    """The boxes of a global array of bits."""
    if dtype.numpy is None:
        return ShardedArray.cut(bits_of(dtype, shape), boxes, dtype.name)
    return ShardedArray.cut(bits_of(dtype, shape).view(dtype.numpy), boxes, dtype.name)


def state_of(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank holds: the same global state in any world."""
    tied = np.arange(12, dtype=np.float32).reshape(3, 4)
    types = {d.name: sharded(d, (5, 3), even_boxes((5, 3), world_size, rank)) for d in DTYPES}
    return {
        "types": types,
        "columns": sharded(DTYPES[11], (4, 6), even_boxes((4, 6), world_size, rank, dim=1)),
        "two boxes": sharded(DTYPES[9], (8, 2), [Box((2 * i, 0), (2, 2)) for i in range(4) if i % world_size == rank]),
        "empty": sharded(DTYPES[12], (0, 3), []),
        "scalar": np.array(2.5),
        "tied": {"first": tied, "second": tied},
        "replicated": np.arange(7, dtype=np.int64),
        "a.b": 1,
        "a": {"b": 2, 5: "five", True: None},
        "list": [np.arange(3, dtype=np.uint8), {"x": 1.5}],
        "nothing": {},
        "plain": OrderedDict(when=datetime.date(2026, 11, 29), flags=frozenset({"a", "b"}), raw=b"\0\xff", z=1 + 2j),
        "own": PerRank({"rank": rank}),
        "differs": np.array([rank], dtype=np.int32),
    }


def write(context: RankContext, directory: str) -> str:
    """One rank's part of the save."""
    state = state_of(context.rank, context.world_size)
    return save(state, checkpoint_id=directory, adapter=NumpyRankAdapter(), timeout_seconds=30).save_id


if __name__ == "__main__":
    run_ranks(write, WORLD_SIZE, sys.argv[1])
