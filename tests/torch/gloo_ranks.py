"""Torch ranks as real processes: `run_gloo`, on top of `dcp_core.testing.ranks.run_ranks`.

The fork server has torch loaded and has run nothing, so a job costs a fork a rank. `DCP_TEST_DEVICE` picks device and
backend. Under `torchrun -m pytest` the ranks are the processes of that job.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # torch lists no exports

from dcp_core.testing import ranks
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks

_PRELOADED = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "dcp_torch.api",
    "torch._dynamo",  # DTensor's first operation imports it
)
_LEAVING_SECONDS = 5.0
ranks.preload(*_PRELOADED)  # at import, so before the first test starts the fork server


@dataclass(frozen=True, slots=True)
class TorchRank:
    """Which rank a process is, and where its tensors live."""

    rank: int
    world_size: int
    device: torch.device
    backend: str


def test_device_type() -> str:
    """What `DCP_TEST_DEVICE` asks for: cpu, cuda or npu."""
    return os.environ.get("DCP_TEST_DEVICE", "cpu")


def local_device(rank: int = 0) -> torch.device:
    """The device of a rank, made current."""
    kind = test_device_type()
    if kind == "cpu":
        return torch.device("cpu")
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        pytest.skip(f"DCP_TEST_DEVICE={kind}, and there is no such device")
    device = torch.device(kind, rank % module.device_count())
    module.set_device(device)
    return device


def default_backend(world_size: int) -> str:
    """The backend for `DCP_TEST_DEVICE`: gloo for host tensors, and NCCL or HCCL where each rank has a device."""
    kind = test_device_type()
    accelerated = {"cuda": "nccl", "npu": "hccl"}.get(kind)
    if accelerated is None or getattr(torch, kind).device_count() < world_size:
        return "gloo"
    return f"cpu:gloo,{kind}:{accelerated}"


def run_gloo(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    backend: str | None = None,
    init: bool = True,
    return_exceptions: bool = False,
) -> list[Any]:
    """Run `function(rank: TorchRank, *args)` in a job of `world_size` torch ranks.

    Args:
        function: A function of a module.
        world_size: How many ranks.
        args: Handed to every rank, pickled.
        timeout_seconds: When ranks that still run are ended.
        backend: What to initialise; by default what `DCP_TEST_DEVICE` asks for.
        init: Whether the default process group is there when the function runs; such a test only runs on ranks that
            are forked for it.
        return_exceptions: Return what a rank raised in the place of its result.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankProcessError: A rank raised, died, or did not finish.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _run_in_torchrun(function, world_size, args, init=init and backend is None)
    with tempfile.TemporaryDirectory(prefix="gloo-") as directory:
        return run_ranks(
            _start,
            world_size,
            _by_reference(function),
            args,
            os.path.join(directory, "store") if init else None,
            backend,
            timeout_seconds=timeout_seconds,
            return_exceptions=return_exceptions,
        )


def _by_reference(function: Callable[..., Any]) -> Callable[..., Any]:
    if "<locals>" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is a closure; ranks need a function of a module")
    return function


def _start(
    context: RankContext, function: Callable[..., Any], args: tuple[Any, ...], store: str | None, backend: str | None
) -> Any:
    with torch_rank(context, store, backend) as rank:
        return function(rank, *args)


@contextlib.contextmanager
def torch_rank(
    context: RankContext,
    store: str | Store | None,
    backend: str | None = None,
    *,
    leaving_seconds: float = _LEAVING_SECONDS,
) -> Iterator[TorchRank]:
    """Make a process of `run_ranks` a torch rank, for as long as the context lasts.

    Args:
        context: Which rank.
        store: The file through which the ranks meet, or a store; None: no process group is made.
        backend: What to initialise; by default what `DCP_TEST_DEVICE` asks for.
        leaving_seconds: How long to wait at the end for others that have not left.
    """
    torch.set_num_threads(1)
    device = local_device(context.rank)
    chosen = backend or default_backend(context.world_size)
    rank = TorchRank(context.rank, context.world_size, device, chosen)
    os.environ.update(RANK=str(rank.rank), WORLD_SIZE=str(rank.world_size), LOCAL_RANK=str(rank.rank))
    if chosen == "hccl" and device.type == "cpu":
        register_hccl_over_gloo()
    if store is None:
        yield rank
        return
    meeting = FileStore(store, rank.world_size) if isinstance(store, str) else store
    dist.init_process_group(
        chosen,
        store=meeting,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=30),
    )
    dist.barrier()  # a rank that ends while others still connect to it would fail them
    try:
        yield rank
    finally:
        _leave_together(meeting, rank.world_size, leaving_seconds)
        if dist.is_initialized():
            dist.destroy_process_group()


def _leave_together(store: Store, world_size: int, seconds: float = _LEAVING_SECONDS) -> None:
    """Wait a while for the other ranks: one may still be connecting within a group that this one has made."""
    deadline = time.monotonic() + seconds
    came = store.add("ranks that leave", 1)
    while came < world_size and time.monotonic() < deadline:
        time.sleep(0.005)
        came = store.add("ranks that leave", 0)


def register_hccl_over_gloo() -> None:
    """Make a backend named hccl for host tensors, so that what selects it is tested without such devices."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("hccl", create, devices=["cpu"])


# -- under torchrun ---------------------------------------------------------------------------------------------------


def _run_in_torchrun(function: Callable[..., Any], world_size: int, args: tuple[Any, ...], *, init: bool) -> list[Any]:
    if int(os.environ["WORLD_SIZE"]) != world_size:
        pytest.skip(f"needs {world_size} ranks, torchrun started {os.environ['WORLD_SIZE']}")
    if not init:
        pytest.skip("starts process groups of its own")
    rank = _torchrun_rank()
    shared = [args]
    dist.broadcast_object_list(shared, src=0)
    result, failure = None, ""
    try:
        result = function(rank, *shared[0])
    except Exception:
        failure = traceback.format_exc()
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, (result, failure))
    failed = [f"rank {number}: {text}" for number, (_, text) in enumerate(gathered) if text]
    if failed:
        raise RankProcessError("\n".join(failed))
    return [found for found, _ in gathered]


@cache
def _torchrun_rank() -> TorchRank:
    """Join torchrun's job, once a process: its store outlives process groups, and torch cannot rejoin there."""
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, backend = local_device(int(os.environ.get("LOCAL_RANK", number))), default_backend(size)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    return TorchRank(number, size, device, backend)


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
