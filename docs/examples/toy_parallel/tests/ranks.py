"""Starts ranks: real processes with a gloo group, forked from a server that has torch loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch lists no exports

from dcp_core.testing.ranks import RankContext, preload, run_ranks

preload("torch", "torch.distributed.tensor", "dcp_torch.api")


@contextmanager
def gloo_group(context: RankContext) -> Iterator[None]:
    """Join the job of all ranks, and leave it together."""
    torch.set_num_threads(1)
    ranks, deadline = context.world_size, timedelta(seconds=30)
    meeting = FileStore(str(context.channel_directory / "gloo"), ranks)
    dist.init_process_group("gloo", store=meeting, rank=context.rank, world_size=ranks, timeout=deadline)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(rank, ranks, *arguments)` on each of some ranks, and return what they return, by rank."""
    return run_ranks(_start, ranks, function, arguments, timeout_seconds=60)


def _start(context: RankContext, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    with gloo_group(context):
        return function(context.rank, context.world_size, *arguments)
