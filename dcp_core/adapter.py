"""The seam: what a framework hands to the core.

An `Adapter` serves one framework: it recognises its tensors, describes them, reaches their elements, and knows the
process group. A `Describer` serves one foreign tensor type on top of an adapter. Both are found through the plugins
of `dcp_core.hookspecs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dcp_core.planning.leaves import LocalTensor, TensorAccess


@runtime_checkable
class KeyValueChannel(Protocol):
    """How ranks exchange bytes: a shared board of named messages, each written once.

    Names are ASCII without separators other than "." and "-". A message is seen whole or not at all.
    """

    def put(self, name: str, payload: bytes) -> None:
        """Post a message."""
        ...

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        """Wait for a message and return it; None when it did not come in time."""
        ...

    def delete(self, name: str) -> None:
        """Remove a message; one that is not there is no error."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The ranks that save or load together.

    Attributes:
        rank: This process in the group.
        world_size: Ranks of the group.
        global_rank: This process in the job.
        channel: How they talk; None for a group of one.
        key: Names the group within the process: equal for calls on the same group.
    """

    rank: int = 0
    world_size: int = 1
    global_rank: int = 0
    channel: KeyValueChannel | None = None
    key: str = "alone"


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


class AdapterSet:
    """The adapters that are active in this process, asked in turn."""

    def __init__(self, adapters: Sequence[Adapter], describers: Sequence[Describer] = ()) -> None:
        self.adapters = tuple(adapters)
        self.describers = tuple(describers)
        self._sources = (*self.describers, *self.adapters)

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a tensor leaf by the first describer or adapter that claims it; None for any other value."""
        for source in self._sources:
            found = source.describe(value)
            if found is not None:
                return found
        return None
