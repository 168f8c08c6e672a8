"""The torch adapter: what the core asks of a framework, answered for torch.

The answers lie in the modules beside this one: `describers` (which boxes), `elements` (which bytes), `channel` (who
else). Works with torch_npu as it is: nothing here names a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from dcp_core.adapter import ProcessGroup
from dcp_core.box import Box, slices
from dcp_core.dtype import DType
from dcp_core.planning.leaves import DeviceTransfers, LocalTensor, MemoryRange
from dcp_torch import channel, elements
from dcp_torch.describers import describe_tensor
from dcp_torch.laid_out import describe_laid_out, layout_of
from dcp_torch.transfers import transfers_of


class TorchAdapter:
    """`dcp_core.adapter.Adapter` for torch."""

    name = "torch"
    version = str(torch.__version__)

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a torch tensor, DTensor or ShardedTensor; None for a value that is no tensor.

        A value that is no `torch.Tensor` but has the surface of HyperParallel's DTensor, and torch's memory, is one.

        Raises:
            UnsupportedValueError: A tensor that cannot be stored as it is: a Partial, an unknown subclass, a sparse,
                quantized, nested or meta tensor, or a dtype that the file format lacks.
        """
        if isinstance(value, torch.Tensor):
            return describe_tensor(value, self)
        return describe_laid_out(value, self) if layout_of(value) is not None else None

    def host_array(self, view: torch.Tensor) -> npt.NDArray[Any] | None:
        """The view's raw bits, sharing its memory; None off the host, and for lazily conjugated or negated views."""
        return elements.host_bits(view)

    def read_out(self, view: torch.Tensor) -> npt.NDArray[Any]:
        """The view's raw bits, copied to the host where needed."""
        return elements.read_bits(view)

    def copy_into(self, view: torch.Tensor, bits: npt.NDArray[Any], source_dtype: DType) -> None:
        """Write elements into the view, converting by torch's own rules."""
        elements.assign_bits(view, bits, source_dtype)

    def narrow(self, view: torch.Tensor, box: Box) -> torch.Tensor:
        """The part of a view that `box` selects, sharing its memory."""
        if box.sizes == tuple(view.shape):
            return view
        return view.detach()[slices(box)]

    def writable_problem(self, view: torch.Tensor) -> str | None:
        """Why a view cannot be the target of a load (its elements share memory), or None."""
        return elements.writable_problem(view)

    def transfers(self, view: torch.Tensor) -> DeviceTransfers | None:
        """How parts of a tensor on an accelerator travel to and from page-locked memory; None for host tensors."""
        return transfers_of(view)

    def memory_range(self, view: torch.Tensor) -> MemoryRange | None:
        """Where the elements of a view lie, on any device."""
        return elements.memory_range(view)

    def will_change(self, views: Sequence[torch.Tensor]) -> None:
        """Have autograd notice that a load fills these views: what it keeps of them for a backward is outdated."""
        torch.autograd.graph.increment_version(views)

    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        """The group of this process: `group`, or the job's default one, or a group of one.

        Args:
            group: A torch process group, a one-dimensional DeviceMesh, or None.
            with_channel: False to only learn which rank this is.

        Raises:
            ArgumentError: This process is no member of the group.
            CoordinationError: The group has no way to exchange messages.
        """
        return channel.process_group(group, with_channel=with_channel)
