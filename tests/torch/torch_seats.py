"""Torch ranks for the table of rank faults; they take the states of numpy ranks, and share their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import (  # type: ignore[attr-defined]  # torch lists no exports
    DistNetworkError,
    PrefixStore,
    Store,
    TCPStore,
)

import dcp_torch
from dcp_torch.adapter import TorchAdapter
from dcp_torch.broadcasts import TorchBroadcasts
from tests.core.fault_jobs import PATIENT_SECONDS, as_tensors, take_values
from tests.core.firing import Fuse
from tests.core.rank_fault_table import WatchedSeat
from tests.torch.gloo_ranks import torch_rank

_LEAVING_SECONDS = 1.0
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class TorchSeat(WatchedSeat):
    """A rank of a torch job that meets in a file; background processes talk through the checkpoint's directory."""

    adapter: ClassVar[type[Any]] = TorchAdapter
    use_gloo: ClassVar[bool] = False

    @contextmanager
    def joined(self) -> Iterator[None]:
        context = replace(self.context, rank=self.rank, world_size=self.world)
        with suppress(DistNetworkError), torch_rank(context, self.store(), leaving_seconds=_LEAVING_SECONDS):
            yield  # at the end, the host of the store may be dead

    def store(self) -> Store | str:
        """Where the ranks of the job meet."""
        return str(self.context.channel_directory / f"store-{self.job}")

    @contextmanager
    def watched(self, fuse: Fuse) -> Iterator[None]:
        """Besides the places that others have: "connect broadcast", when all are there to make a group of gloo."""
        make = TorchBroadcasts.make

        def watched_make(self: TorchBroadcasts, *args: Any) -> Any:
            fuse.reach("connect broadcast")
            return make(self, *args)

        with super().watched(fuse), pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchBroadcasts, "make", watched_make)
            yield

    def save(self, state: Mapping[str, Any], **arguments: Any) -> None:
        dcp_torch.save(_as_torch(state), **self._given() | arguments)

    def load(self, state: Mapping[str, Any], **arguments: Any) -> None:
        target = _as_torch(state)
        try:
            dcp_torch.load(target, **self._given() | arguments)
        finally:
            take_values(state, target)

    def async_save(self, state: Mapping[str, Any], **arguments: Any) -> dcp_torch.AsyncSaveResponse:
        return dcp_torch.async_save(_as_torch(state), **self._given() | {"use_gloo": self.use_gloo} | arguments)

    def _given(self) -> dict[str, Any]:
        return {"timeout_seconds": PATIENT_SECONDS}


@dataclass(frozen=True)
class LaunchedSeat(TorchSeat):
    """A rank of a job whose store is in the process that started it, as with torchrun; background processes join it."""

    use_gloo: ClassVar[bool] = True

    def store(self) -> Store:
        store = TCPStore(_HOST, int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
        run = self.context.channel_directory.parent.name
        return PrefixStore(f"{run}-{self.job}", store)


@dataclass(frozen=True)
class HostedSeat(TorchSeat):
    """A rank of a job whose store is in rank 0, as where nothing but MASTER_ADDR and MASTER_PORT starts it."""

    use_gloo: ClassVar[bool] = True

    def store(self) -> Store:
        hosted = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False) if self.rank == 0 else None
        port = self.share(str(hosted.port).encode() if hosted else b"")[0].decode()
        os.environ.update(MASTER_ADDR=_HOST, MASTER_PORT=port)
        return hosted or TCPStore(_HOST, int(port), is_master=False, wait_for_workers=False)


@contextmanager
def launcher() -> Iterator[None]:
    """Host the store of `LaunchedSeat`s in this process."""
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", _HOST)
        patch.setenv("MASTER_PORT", str(store.port))
        yield


def _as_torch(state: Mapping[str, Any]) -> Any:
    return as_tensors(state, torch.from_numpy, dcp_torch.annotate_shard)
