"""MindSpore ranks for the table of rank faults; they take the states of numpy ranks, and share their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mindspore

import dcp_mindspore
from dcp_mindspore.adapter import MindSporeAdapter
from tests.core.fault_jobs import PATIENT_SECONDS, as_tensors, take_values
from tests.core.rank_fault_table import WatchedSeat
from tests.mindspore.ms_ranks import mindspore_rank

_LEAVING_SECONDS = 2.0


@dataclass(frozen=True)
class MindSporeSeat(WatchedSeat):
    """A rank of a MindSpore job whose first rank hosts the store; background processes talk through files."""

    adapter: ClassVar[type[Any]] = MindSporeAdapter
    use_gloo: ClassVar[bool] = False

    @contextmanager
    def joined(self) -> Iterator[None]:
        directory = self.context.channel_directory / f"job-{self.job}"
        directory.mkdir(exist_ok=True)
        context = replace(self.context, rank=self.rank, world_size=self.world, channel_directory=directory)
        with mindspore_rank(context, leaving_seconds=_LEAVING_SECONDS):
            yield

    def save(self, state: Mapping[str, Any], **arguments: Any) -> None:
        dcp_mindspore.save(_as_mindspore(state), **self._given() | arguments)

    def load(self, state: Mapping[str, Any], **arguments: Any) -> None:
        target = _as_mindspore(state)
        try:
            dcp_mindspore.load(target, **self._given() | arguments)
        finally:
            take_values(state, target)

    def async_save(self, state: Mapping[str, Any], **arguments: Any) -> dcp_mindspore.AsyncSaveResponse:
        given = self._given() | {"use_gloo": self.use_gloo}
        return dcp_mindspore.async_save(_as_mindspore(state), **given | arguments)

    def _given(self) -> dict[str, Any]:
        return {"timeout_seconds": PATIENT_SECONDS}


@dataclass(frozen=True)
class StoreSeat(MindSporeSeat):
    """The same; background processes talk through the store."""

    use_gloo: ClassVar[bool] = True


def _as_mindspore(state: Mapping[str, Any]) -> Any:
    return as_tensors(state, mindspore.Tensor.from_numpy, dcp_mindspore.annotate_shard)
