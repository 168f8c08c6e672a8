"""The MindSpore adapter: what the core asks of a framework, answered for MindSpore.

The answers lie in the modules beside this one: `describers` (which boxes), `elements` (which bytes), `channel` (who
else). Views are raw bits that share host memory, or parts of tensors on a device; each is reached by the access that
`elements.memory_of` gives with it. The adapter itself reaches whole tensors, for planners that pass them.
"""

from __future__ import annotations

from typing import Any

import mindspore
import numpy.typing as npt

from dcp_core.adapter import ProcessGroup
from dcp_core.box import Box
from dcp_core.dtype import DType
from dcp_core.planning.leaves import LocalTensor
from dcp_mindspore import channel, codecs
from dcp_mindspore.describers import describe_tensor
from dcp_mindspore.elements import memory_of


class MindSporeAdapter:
    """`dcp_core.adapter.Adapter` for MindSpore."""

    name = "mindspore"
    version = str(mindspore.__version__)

    def __init__(self) -> None:
        codecs.register_more()

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a MindSpore tensor; None for a value that is no tensor.

        Raises:
            UnsupportedValueError: A tensor that cannot be stored as it is: a Partial, or a dtype that the file format
                lacks.
        """
        return describe_tensor(value, channel.global_rank)

    def host_array(self, view: Any) -> npt.NDArray[Any] | None:
        """The raw bits of a tensor, sharing its memory; None off the host."""
        memory = memory_of(view)
        return memory.access.host_array(memory.view)

    def read_out(self, view: Any) -> npt.NDArray[Any]:
        """The raw bits of a tensor, copied to the host where needed."""
        memory = memory_of(view)
        return memory.access.read_out(memory.view)

    def copy_into(self, view: Any, bits: npt.NDArray[Any], source_dtype: DType) -> None:
        """Write elements into a tensor, in place, converting by the core's rules."""
        memory = memory_of(view)
        memory.access.copy_into(memory.view, bits, source_dtype)

    def narrow(self, view: Any, box: Box) -> Any:
        """The part of a tensor that `box` selects. MindSpore drops what is written to most of its views."""
        memory = memory_of(view)
        return memory.access.narrow(memory.view, box)

    def writable_problem(self, view: Any) -> str | None:
        """Why a tensor cannot be the target of a load (its elements share memory), or None."""
        memory = memory_of(view)
        return memory.access.writable_problem(memory.view)

    def transfers(self, view: Any) -> None:
        """None: copies from and to MindSpore's devices block."""

    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        """The group of this process: `group`, or the job's default one, or a group of one.

        Args:
            group: A `StoreGroup`, the name of a communication group, or None.
            with_channel: False to only learn which rank this is.

        Raises:
            ArgumentError: This process is no member of the group.
            CoordinationError: The group has no way to exchange messages.
        """
        return channel.process_group(group, with_channel=with_channel)
