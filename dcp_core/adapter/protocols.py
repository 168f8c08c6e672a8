"""What a framework brings: an adapter, with the process group that it knows; and what a foreign tensor type brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from dcp_core.adapter.broadcasts import Broadcasts
from dcp_core.adapter.channels import ChannelSpec, KeyValueChannel
from dcp_core.planning.leaves import LocalTensor, TensorAccess


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The ranks that save or load together.

    Attributes:
        rank: This process in the group.
        world_size: Ranks of the group.
        global_rank: This process in the job.
        channel: How they talk; None for a group of one. Holding it keeps what it goes through: a store that this
            process hosts serves the others for as long.
        key: Names the group within the process: equal for calls on the same group.
        remote: How the background process of this rank talks to those of the other ranks; None where the adapter has
            no channel for them, and for a group of one.
        broadcasts: How buffers travel between the ranks; None where the adapter has no way, and for a group of one.
    """

    rank: int = 0
    world_size: int = 1
    global_rank: int = 0
    channel: KeyValueChannel | None = None
    key: str = "alone"
    remote: ChannelSpec | None = None
    broadcasts: Broadcasts | None = None


class Adapter(TensorAccess, Protocol):
    """One framework: `TensorAccess` (host_array, read_out, copy_into, narrow, writable_problem), and more."""

    name: str
    version: str

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a tensor of this framework; None for a value that is none.

        Raises:
            UnsupportedValueError: A tensor that cannot be stored (a Partial, an unknown subclass).
        """
        ...

    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        """The group of this process: `group`, or the job's default one, or a group of one.

        Makes the CPU channel, once per process and group. Never a collective on the accelerator.

        Args:
            group: What the framework calls a group; None for the job's default one.
            with_channel: False for a caller that only asks which rank this is: nothing is made.
        """
        ...


class Describer(Protocol):
    """One foreign tensor type."""

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a value of the type; None to leave it to others."""
        ...
