"""Jobs of torch ranks over gloo, as real processes that end with the job."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.contestant import ContestantError
from dcp_core.testing import ranks
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks

_PRELOADED = ("torch", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo", "dcp_torch.api")


@dataclass(frozen=True, slots=True)
class Rank:
    """Which rank a process is."""

    rank: int
    world_size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def preload() -> None:
    """Have torch imported once, in the server that forks the ranks; call before the first job."""
    ranks.preload(*_PRELOADED)


def run_job(
    function: Callable[..., Any], world_size: int, *args: Any, directory: str, timeout_seconds: float
) -> list[Any]:
    """Run `function(rank: Rank, *args)` in fresh processes that have a gloo group.

    Args:
        function: A function of a module.
        world_size: How many ranks.
        args: Handed to every rank, pickled.
        directory: Where logs, results and the group's store lie while the job runs.
        timeout_seconds: When ranks that still run are ended.

    Returns:
        What each rank returned.

    Raises:
        ContestantError: A contestant failed on some rank; the other ranks then fail too, as they miss it.
        RankProcessError: A rank raised something else, died, or did not finish.
    """
    with tempfile.TemporaryDirectory(prefix="job-", dir=directory) as place:
        outcomes = run_ranks(
            _start, world_size, function, args, os.path.join(place, "store"), timeout_seconds,
            timeout_seconds=timeout_seconds, directory=place, return_exceptions=True,
        )  # fmt: skip
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for failure in failures:
        if isinstance(failure, ContestantError):
            raise failure
    if failures:
        raise RankProcessError("\n".join(f"{type(failure).__name__}: {failure}" for failure in failures))
    return outcomes


def run_alone(function: Callable[..., Any], *args: Any, directory: str, timeout_seconds: float) -> Any:
    """Run `function(context, *args)` in one fresh process without a group."""
    return run_ranks(function, 1, *args, timeout_seconds=timeout_seconds, directory=directory)[0]


def _meet(path: str, rank: Rank, timeout: timedelta) -> Any:
    """The job's store: rank 0 hosts it on the loopback, as launchers do, and puts its port into a file."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch lists no exports

    if rank.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        Path(f"{path}.tmp").write_text(str(store.port))
        os.rename(f"{path}.tmp", path)
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError("rank 0 made no store")
        time.sleep(0.01)
    return TCPStore("127.0.0.1", int(Path(path).read_text()), wait_for_workers=False, timeout=timeout)


def _start(
    context: RankContext, function: Callable[..., Any], args: tuple[Any, ...], store: str, timeout_seconds: float
) -> Any:
    import torch
    import torch.distributed as dist

    rank = Rank(context.rank, context.world_size)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // rank.world_size))
    size, number = str(rank.world_size), str(rank.rank)
    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)  # as launchers do
    meeting = _meet(store, rank, timedelta(seconds=timeout_seconds))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(meeting.port))
    dist.init_process_group(
        "gloo",
        store=meeting,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    dist.barrier()  # a rank that ends while others still connect to it would fail them
    result = function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    return result
