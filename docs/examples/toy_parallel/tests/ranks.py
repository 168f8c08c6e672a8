"""Starts ranks: real processes with a gloo group, forked from a server that has torch loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch lists no exports

from dcp_core.testing.ranks import RankContext, preload, run_ranks

preload("torch", "torch.distributed.tensor", "dcp_torch.api")


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(rank, ranks, *arguments)` on each of some ranks, and return what they return, by rank."""
    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(_start, ranks, Path(directory) / "store", function, arguments, timeout_seconds=60)


def _start(context: RankContext, store: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    meeting = FileStore(str(store), context.world_size)
    ranks, deadline = context.world_size, timedelta(seconds=30)
    dist.init_process_group("gloo", store=meeting, rank=context.rank, world_size=ranks, timeout=deadline)
    try:
        found = function(context.rank, context.world_size, *arguments)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()
