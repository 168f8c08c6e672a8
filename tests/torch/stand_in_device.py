"""Host memory in the place of a device: all of `dcp_torch.transfers` but the accelerator's own stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import torch

from dcp_core.dtype import DType
from dcp_core.planning.leaves import LocalTensor
from dcp_core.testing.streams import Pace, WorkStream
from dcp_torch.adapter import TorchAdapter
from dcp_torch.transfers import Register, TorchTransfers


class StandInStream:
    """A `CopyStream` that does its copies late, at once, or by a thread."""

    def __init__(self, pace: Pace = "late") -> None:
        self.work = WorkStream(pace)
        self.followed = 0
        self.queued = 0

    def follow(self) -> None:
        self.followed += 1

    def queue(self, work: Callable[[], None], view: torch.Tensor) -> Callable[[], None]:
        assert isinstance(view, torch.Tensor)
        self.queued += 1
        return self.work.queue(work)


class StandInAdapter(TorchAdapter):
    """The torch adapter, for which host tensors lie on a device: their elements only move by copies.

    Attributes:
        stream: Where they do.
        blocking_copies: How many did not go there.
    """

    name = "torch-stand-in"

    def __init__(self, pace: Pace = "late", register: Register | None = None) -> None:
        self.stream = StandInStream(pace)
        self.blocking_copies = 0
        self._transfers = TorchTransfers(self.stream, register or (lambda memory: None))

    def describe(self, value: Any) -> LocalTensor | None:
        found = super().describe(value)
        return None if found is None else replace(found, device="stand-in")

    def host_array(self, view: torch.Tensor) -> npt.NDArray[Any] | None:
        return None

    def read_out(self, view: torch.Tensor) -> npt.NDArray[Any]:
        self.blocking_copies += 1
        return super().read_out(view).copy()

    def copy_into(self, view: torch.Tensor, bits: npt.NDArray[Any], source_dtype: DType) -> None:
        self.blocking_copies += 1
        super().copy_into(view, bits, source_dtype)

    def transfers(self, view: torch.Tensor) -> TorchTransfers | None:
        self._transfers.follow()
        return None if view.is_conj() or view.is_neg() else self._transfers

    def close(self) -> None:
        self.stream.work.close()
