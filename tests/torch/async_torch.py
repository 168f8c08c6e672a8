"""Jobs for tests of background saves in torch: ranks that meet in a store at MASTER_ADDR, and the ways to agree."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch lists no exports

import dcp_torch
from tests.background_processes import check_none_left, mark
from tests.core.async_writers import Gate, GatedWriter
from tests.torch.gloo_ranks import TorchRank, _leave_together, free_port, run_gloo
from tests.torch.states import raised

RESULT_SECONDS = 60.0
PATIENT_SECONDS = 60.0
SOON_SECONDS = 10.0
IS_LAUNCHED = "TORCHELASTIC_RUN_ID" in os.environ
"""Whether this process is a rank itself, as under `torchrun -m pytest`; it then keeps its background processes."""

HIT = "Hit final plan and metadata cache."


@dataclass(frozen=True)
class Mode:
    """A way for ranks to agree.

    Attributes:
        save: Arguments of a save.
        load: Arguments of a load of what it saved.
    """

    save: Mapping[str, Any]
    load: Mapping[str, Any]


MODES = {
    "mailbox": Mode({}, {}),
    "gloo": Mode({"use_gloo": True}, {}),
    "alone": Mode({"use_collectives": False}, {"use_collectives": False}),
}


@contextmanager
def no_process_left() -> Iterator[None]:
    """See that no background process of this test run is left afterwards."""
    mark()
    with tempfile.TemporaryDirectory(prefix="logs-") as logs, pytest.MonkeyPatch.context() as patch:
        if not IS_LAUNCHED:
            patch.setenv("DCP_BACKGROUND_LOG_DIR", logs)  # those of killed processes stay
        yield
        if not IS_LAUNCHED:
            check_none_left()


def run_job(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Run `function(rank: TorchRank, *args)` in a job whose first rank hosts the store, or in that of torchrun."""
    if IS_LAUNCHED:
        return run_gloo(function, world_size, *args)
    with tempfile.TemporaryDirectory(prefix="leaving-") as directory:
        return run_gloo(
            _join_and_call, world_size, free_port(), f"{directory}/store", function, args, init=False, **options
        )


def _join_and_call(
    rank: TorchRank, port: int, leaving: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(rank.backend, rank=rank.rank, world_size=rank.world_size, timeout=timedelta(seconds=30))
    dist.barrier()
    try:
        return function(rank, *args)
    finally:
        _leave_together(FileStore(leaving, rank.world_size), rank.world_size)
        if dist.is_initialized():
            dist.destroy_process_group()


def async_save(state: Mapping[Any, Any], directory: str | os.PathLike[str] | None, **options: Any) -> Any:
    """Begin a save on all ranks of the job."""
    given: dict[str, Any] = {"timeout_seconds": PATIENT_SECONDS, "durable": False, "checkpoint_id": directory}
    return dcp_torch.async_save(state, **given | options)


def async_raised(state: Mapping[Any, Any], directory: str | os.PathLike[str] | None, **options: Any) -> tuple[str, str]:
    """Save in the background, wait, and report class and text of the error, wherever it is raised."""
    return raised(lambda: async_save(state, directory, **options).get_result(RESULT_SECONDS))


def begin_at_gate(state: Mapping[Any, Any], directory: Path, *orders: str, **options: Any) -> tuple[Gate, Any]:
    """Begin a save that stops at its gate."""
    gate = Gate(directory).close(*orders)
    dist.barrier()
    return gate, async_save(state, directory, storage_writer=GatedWriter(), **options)
