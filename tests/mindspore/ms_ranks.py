"""MindSpore ranks as real processes: `run_mindspore`, on top of `dcp_core.testing.ranks.run_ranks`.

The fork server has MindSpore loaded and has run nothing, so a job costs a fork a rank. Its ranks meet in a TCPStore;
only where a test asks for it, MCCL is initialised, which costs seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from dcp_core.testing import ranks
from dcp_core.testing.ranks import RankContext, run_ranks

_PRELOADED = (
    "mindspore",
    "mindspore.mint.distributed",
    "mindspore.parallel",
    "dcp_mindspore.api",
    "dcp_mindspore.adapter",
)
_MEETING_SECONDS = 30.0
_LEAVING_SECONDS = 10.0
ranks.preload(*_PRELOADED)  # at import, so before the first test starts the fork server
os.environ.setdefault("GLOG_v", "3")  # MindSpore's C++ code says what is routine, otherwise


@dataclass(frozen=True, slots=True)
class MindSporeRank:
    """Which rank a process is.

    Attributes:
        rank: Its number.
        world_size: How many there are.
        store: The TCPStore that they meet in; None without one.
    """

    rank: int
    world_size: int
    store: Any = None


def run_mindspore(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    start: str = "store",
    timeout_seconds: float = 60.0,
    return_exceptions: bool = False,
) -> list[Any]:
    """Run `function(rank: MindSporeRank, *args)` in a job of `world_size` ranks.

    Args:
        function: A function of a module.
        world_size: How many ranks.
        args: Handed to every rank, pickled.
        start: "store": a TCPStore, which saves and loads use; "mccl": the communication library is initialised, and
            saves and loads find out by themselves; "alone": nothing.
        timeout_seconds: When ranks that still run are ended.
        return_exceptions: Return what a rank raised in the place of its result.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankProcessError: A rank raised, died, or did not finish.
    """
    return run_ranks(
        _start,
        world_size,
        function,
        args,
        start,
        timeout_seconds=timeout_seconds,
        return_exceptions=return_exceptions,
    )


@contextmanager
def mindspore_rank(context: RankContext, *, leaving_seconds: float = _LEAVING_SECONDS) -> Iterator[Any]:
    """Be a rank of a job that meets in a TCPStore, until all ranks are done, or for a while longer; gives the store."""
    import mindspore

    import dcp_mindspore

    mindspore.set_device("CPU")
    store = _meet(context)
    os.environ.update(MASTER_ADDR=str(store.host), MASTER_PORT=str(store.port))  # what use_gloo=True asks for
    dcp_mindspore.use_store(store, context.rank, context.world_size)
    try:
        yield store
    finally:
        _leave_together(context, leaving_seconds)


def _start(context: RankContext, function: Callable[..., Any], args: tuple[Any, ...], start: str) -> Any:
    import mindspore

    if start == "store":
        with mindspore_rank(context) as store:
            return function(MindSporeRank(context.rank, context.world_size, store), *args)
    mindspore.set_device("CPU")
    if start == "alone":
        return function(MindSporeRank(context.rank, context.world_size), *args)
    store = _meet(context)
    os.environ.update(MASTER_ADDR=str(store.host), MASTER_PORT=str(store.port))
    from mindspore.communication import management

    seconds = timedelta(seconds=60)
    management._init_with_store(
        backend="mccl", timeout=seconds, world_size=context.world_size, rank=context.rank, store=store
    )
    try:
        return function(MindSporeRank(context.rank, context.world_size, store), *args)
    finally:
        _leave_together(context)


def _meet(context: RankContext) -> Any:
    """The job's store: rank 0 hosts it on a port that is free, and leaves word where."""
    from mindspore.mint.distributed import TCPStore

    from dcp_mindspore.channel import host_store

    file = context.channel_directory / "store"
    if context.rank == 0:
        hosted = host_store("127.0.0.1", context.world_size)
        file.with_suffix(".new").write_text(str(hosted.port))
        file.with_suffix(".new").rename(file)
        return hosted
    _await(file.exists, _MEETING_SECONDS)
    seconds = timedelta(seconds=20)
    return TCPStore("127.0.0.1", int(file.read_text()), context.world_size, is_master=False, timeout=seconds)


def _leave_together(context: RankContext, seconds: float = _LEAVING_SECONDS) -> None:
    """Wait a while for the other ranks: the store lives in rank 0."""
    directory: Path = context.channel_directory
    (directory / f"leaves-{context.rank}").touch()
    _await(lambda: all((directory / f"leaves-{rank}").exists() for rank in range(context.world_size)), seconds)


def _await(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
