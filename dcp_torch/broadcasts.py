"""How buffers travel between torch ranks: broadcasts of bytes within groups that are given, found, or made for a load.

What carries the bytes is what the job has for a type of device (NCCL, HCCL), and for host memory gloo, which is made
whether the job has it or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dcp_core.coordination.broadcast_group import shown
from dcp_core.coordination.broadcasts import StoreBroadcasts
from dcp_core.errors import ArgumentError
from dcp_torch.broadcast_group import TorchBroadcastGroup
from dcp_torch.communicators import Communicator, backends_of, can_make, given_communicator, make_communicator
from dcp_torch.meeting import Meeting
from dcp_torch.mesh_groups import group_named, groups_of_meshes


class TorchBroadcasts(StoreBroadcasts[Meeting, TorchBroadcastGroup]):
    """`dcp_core.adapter.Broadcasts` for torch.

    Args:
        store: Where the members of groups meet; it is cloned where it can be.
        prefix: Goes before every name in it.
        rank: Global rank of this process.
        groups: Process groups that say what carries which type of device: the first that has something.
    """

    def __init__(self, store: Any, prefix: str, rank: int, groups: Sequence[Any]) -> None:
        super().__init__(prefix, rank)
        self._carriers = [backends_of(group) for group in groups]
        self._origin: Any = store

    def kind(self, device: str) -> str | None:
        """Name the backend that carries broadcasts of memory on a type of device; None: nothing does.

        An accelerator's own is taken before gloo, which may carry it as well.
        """
        names = [carried[device] for carried in self._carriers if device in carried]
        own = [name for name in names if name != "gloo" and can_make(name)]
        if own:
            return own[0]
        is_gloos = device == "cpu" or (device == "cuda" and "gloo" in names)
        return "gloo" if is_gloos and can_make("gloo") else None

    def carries(self, view: Any) -> bool:
        """Tensors are carried, and nothing else."""
        return isinstance(view, torch.Tensor)

    def existing_groups(self, values: Iterable[Any]) -> Mapping[tuple[int, ...], str]:
        """Names of the groups of the meshes that DTensors among the values lie on, by ascending ranks."""
        return groups_of_meshes(values)

    def connect(self) -> Any:
        """A connection of its own."""
        clone = getattr(self._origin, "clone", None)
        return self._origin if clone is None else clone()

    def meeting(self, store: Any, load: str, device: str, ranks: tuple[int, ...]) -> Meeting:
        """Where the members of a group meet."""
        return Meeting(store, load, device, ranks, self.rank)

    def group(self, communicator: Any, meeting: Meeting, timeout_seconds: float) -> TorchBroadcastGroup:
        """A group over a communicator."""
        return TorchBroadcastGroup(communicator, meeting, timeout_seconds)

    def find(self, given: Any, device: str, meeting: Meeting) -> Communicator | None:
        """What a process group, or one that a mesh's name stands for, carries this type of device by."""
        return given_communicator(group_named(given) if isinstance(given, str) else given, device)

    def make(
        self, backend: str, device: str, meeting: Meeting, ranks: tuple[int, ...], timeout_seconds: float
    ) -> Communicator:
        """Make a group of a backend of torch."""
        return make_communicator(backend, device, meeting.store, meeting.name, ranks, self.rank, timeout_seconds)

    def checked_group(self, ranks: tuple[int, ...], group: Any) -> Any:
        """The torch process group that a caller passed for some ranks, also by a one-dimensional DeviceMesh."""
        of_mesh = hasattr(group, "get_group") and getattr(group, "ndim", None) == 1
        found = group.get_group() if of_mesh else group
        what = f"broadcast_groups has for the ranks {shown(ranks)}"
        if not isinstance(found, dist.ProcessGroup):
            raise ArgumentError(
                f"{what} {group!r}; it must be a torch process group or a 1-d DeviceMesh that they are in"
            )
        try:
            members = tuple(sorted(dist.get_process_group_ranks(found)))
        except (KeyError, ValueError) as error:
            raise ArgumentError(f"{what} a process group that was destroyed; pass one that exists") from error
        if members != ranks:
            raise ArgumentError(
                f"{what} a group of the ranks {shown(members)}; let the key be the ranks of its members"
            )
        return found
