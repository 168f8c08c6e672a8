"""How buffers travel between MindSpore ranks: broadcasts of bytes within groups that are given, or made for a load.

Host memory goes through the job's store, and by MCCL in groups that a caller gave; an Ascend device's memory by HCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mindspore
import xxhash
from mindspore.communication import management

from dcp_core.coordination.broadcast_group import Communicator, shown
from dcp_core.coordination.broadcasts import StoreBroadcasts
from dcp_core.coordination.meeting import Meeting
from dcp_core.coordination.store import Store
from dcp_core.coordination.store_communicator import StoreCommunicator
from dcp_core.errors import ArgumentError
from dcp_mindspore import collectives
from dcp_mindspore.broadcast_group import MindSporeBroadcastGroup
from dcp_mindspore.communicators import CollectiveCommunicator
from dcp_mindspore.elements import DeviceView

_STORE = "store"
_CARRIED = {"hccl": "npu", "mccl": "cpu", "nccl": "cuda"}


class MindSporeBroadcasts(StoreBroadcasts[Meeting, MindSporeBroadcastGroup]):
    """`dcp_core.adapter.Broadcasts` for MindSpore.

    Args:
        store: Where the members of groups meet.
        prefix: Goes before every name in it.
        rank: Global rank of this process.
    """

    def __init__(self, store: Store, prefix: str, rank: int) -> None:
        super().__init__(prefix, rank)
        self._store = store

    def kind(self, device: str) -> str | None:
        """Name what carries memory on a type of device: the store for host memory, HCCL for Ascend, or nothing."""
        if device == "cpu":
            return _STORE
        is_carried = collectives.is_initialized() and _CARRIED.get(collectives.backend()) == device
        return collectives.backend() if is_carried else None

    def carries(self, view: Any) -> bool:
        """Tensors are carried, and views of those on a device."""
        return isinstance(view, (mindspore.Tensor, DeviceView))

    def existing_groups(self, values: Iterable[Any]) -> Mapping[tuple[int, ...], str]:
        """None: tensors bring no groups along."""
        return {}

    def connect(self) -> Store:
        """The store: its calls never wait."""
        return self._store

    def meeting(self, store: Store, load: str, device: str, ranks: tuple[int, ...]) -> Meeting:
        """Where the members of a group meet."""
        return Meeting(store, load, device, ranks, self.rank)

    def group(self, communicator: Communicator, meeting: Meeting, timeout_seconds: float) -> MindSporeBroadcastGroup:
        """A group over a communicator."""
        return MindSporeBroadcastGroup(communicator, meeting, timeout_seconds)

    def find(self, given: Any, device: str, meeting: Meeting) -> Communicator | None:
        """A communication group of a caller, if its library carries this type of device."""
        if _CARRIED.get(_library_of(given)) != device:
            return None
        ranks = collectives.ranks_of(given)
        return CollectiveCommunicator(given, ranks, self.rank, self._store, meeting.name)

    def make(
        self, backend: str, device: str, meeting: Meeting, ranks: tuple[int, ...], timeout_seconds: float
    ) -> Communicator:
        """Make a group: over the store, or a communication group of its members."""
        if backend == _STORE:
            made = StoreCommunicator(self._store, f"{meeting.name}/bytes", ranks, self.rank)
            meeting.leftovers.append(made.remove)
            return made
        name = f"{backend}_dcp_{xxhash.xxh3_64_hexdigest(meeting.name.encode())}"
        management.create_group(name, list(ranks))
        return CollectiveCommunicator(name, ranks, self.rank, self._store, meeting.name, is_made=True)

    def checked_group(self, ranks: tuple[int, ...], group: Any) -> str:
        """The name of a communication group that a caller passed for some ranks."""
        what = f"broadcast_groups has for the ranks {shown(ranks)}"
        if not isinstance(group, str) or not collectives.is_initialized():
            raise ArgumentError(f"{what} {group!r}; it must be the name of a communication group that they are in")
        members = tuple(sorted(collectives.ranks_of(group)))
        if members != ranks:
            remedy = "let the key be the ranks of its members"
            raise ArgumentError(f"{what} a group of the ranks {shown(members)}; {remedy}")
        return group


def _library_of(name: str) -> str:
    """The communication library of a group: that of the job, but for groups made by `new_group(backend="mccl")`."""
    own = name.partition("_")[0]
    return own if own in _CARRIED else collectives.backend()
