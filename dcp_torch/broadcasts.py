"""How buffers travel between torch ranks: broadcasts of bytes within groups that are given, found, or made for a load.

Goes in: ranks, and what type of device their buffers lie on. Comes out: a `dcp_core.adapter.BroadcastGroup`. What
carries the bytes is what the job has for that type of device (NCCL, HCCL), and for host memory gloo, which is made
whether the job has it or not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dcp_core.errors import ArgumentError, CoordinationError, CoordinationTimeoutError
from dcp_torch.broadcast_group import REMEDY, TorchBroadcastGroup, first_clause, reason_of, shown
from dcp_torch.communicators import Communicator, backends_of, can_make, given_communicator, make_communicator
from dcp_torch.meeting import Meeting
from dcp_torch.mesh_groups import group_named, groups_of_meshes


class TorchBroadcasts:
    """`dcp_core.adapter.Broadcasts` for torch.

    Args:
        store: Where the members of groups meet; it is cloned where it can be.
        prefix: Goes before every name in it.
        rank: Global rank of this process.
        groups: Process groups that say what carries which type of device: the first that has something.
    """

    def __init__(self, store: Any, prefix: str, rank: int, groups: Sequence[Any]) -> None:
        self.rank = rank
        self._carriers = [backends_of(group) for group in groups]
        self._origin: Any = store
        self._connection: Any = None
        self._prefix = prefix
        self._token = ""
        self._meetings: list[Meeting] = []

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

    def given_groups(self, groups: Mapping[tuple[int, ...], Any]) -> Mapping[tuple[int, ...], Any]:
        """Check the groups that a caller passed: torch process groups or one-dimensional DeviceMeshes.

        Raises:
            ArgumentError: A key is no tuple of ranks, or its group is none, is gone, or has other members.
        """
        found: dict[tuple[int, ...], Any] = {}
        for key, group in groups.items():
            ranks = _sorted_ranks(key)
            if ranks in found:
                raise ArgumentError(f"broadcast_groups has two groups for the ranks {shown(ranks)}; leave one out")
            if self.rank in ranks:
                found[ranks] = _checked_group(ranks, group)
        return found

    def existing_groups(self, values: Iterable[Any]) -> Mapping[tuple[int, ...], str]:
        """Names of the groups of the meshes that DTensors among the values lie on, by ascending ranks."""
        return groups_of_meshes(values)

    def open(
        self, ranks: tuple[int, ...], given: Any | None, timeout_seconds: float, *, token: str, device: str = "cpu"
    ) -> TorchBroadcastGroup:
        """Open a group; see `dcp_core.adapter.Broadcasts`.

        Raises:
            CoordinationError: Members did not come in time, or the group could not be made.
        """
        if self.rank not in ranks or list(ranks) != sorted(set(ranks)):
            raise ArgumentError(
                f"rank {self.rank} opens a group of the ranks {ranks}: they must ascend, this one in them"
            )
        meeting = self._meeting(ranks, token, device)
        try:
            communicator = self._find(ranks, given, device) or self._make(meeting, ranks, device, timeout_seconds)
        except CoordinationError as error:
            with contextlib.suppress(RuntimeError):
                meeting.give_up(first_clause(error))
            raise
        return TorchBroadcastGroup(communicator, meeting, timeout_seconds)

    def give_up(self, ranks: tuple[int, ...], reason: str, *, token: str, device: str = "cpu") -> None:
        """Tell the members of a group that this rank will not open it; see `dcp_core.adapter.Broadcasts`."""
        with contextlib.suppress(RuntimeError):
            meeting = self._meeting(ranks, token, device)
            meeting.give_up(reason)
            meeting.fail(reason)

    def _meeting(self, ranks: tuple[int, ...], token: str, device: str) -> Meeting:
        if token != self._token:
            self._forget_meetings()
            self._token = token
        meeting = Meeting(self._connected(), f"{self._prefix}/{token}", device, ranks, self.rank)
        self._meetings.append(meeting)
        return meeting

    def _find(self, ranks: tuple[int, ...], given: Any | None, device: str) -> Communicator | None:
        if given is None:
            return None
        try:
            return given_communicator(group_named(given) if isinstance(given, str) else given, device)
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise CoordinationError(
                f"rank {self.rank} does not have the group of ranks {shown(ranks)} any more that it had when the load "
                f"began ({error}); let no other thread destroy process groups while a load runs"
            ) from error

    def _make(self, meeting: Meeting, ranks: tuple[int, ...], device: str, timeout_seconds: float) -> Communicator:
        backend = self.kind(device)
        if backend is None:
            raise CoordinationError(f"no backend of this job broadcasts tensors on {device!r}; {REMEDY}")
        what = f"rank {self.rank} could not make a {backend} group of ranks {shown(ranks)}"
        try:
            missing = meeting.gather(timeout_seconds)
            if not missing:
                made = make_communicator(
                    backend, device, meeting.store, meeting.name, ranks, self.rank, timeout_seconds
                )
                meeting.ready()
                return made
        except RuntimeError as error:
            raise CoordinationError(f"{what}: {reason_of(error)}; {REMEDY}") from error
        raise CoordinationTimeoutError(
            f"{what}: ranks {shown(missing)} did not come within {timeout_seconds:g} s; {REMEDY}"
        )

    def _forget_meetings(self) -> None:
        """Remove what this rank left in the store for an earlier load, which every rank has ended by now."""
        meetings, self._meetings = self._meetings, []
        for meeting in meetings:
            with contextlib.suppress(RuntimeError):
                meeting.remove()

    def _connected(self) -> Any:
        """A connection of its own, so that nothing here holds up the trainer's use of the store."""
        if self._connection is None:
            clone = getattr(self._origin, "clone", None)
            self._connection = self._origin if clone is None else clone()
        return self._connection


def _sorted_ranks(key: Any) -> tuple[int, ...]:
    is_ranks = isinstance(key, tuple) and len(key) > 0 and all(type(rank) is int and rank >= 0 for rank in key)
    if not is_ranks or len(set(key)) != len(key):
        raise ArgumentError(
            f"broadcast_groups has the key {key!r}: it must be a tuple of the global ranks of a group, each once"
        )
    return tuple(sorted(key))


def _checked_group(ranks: tuple[int, ...], group: Any) -> Any:
    of_mesh = hasattr(group, "get_group") and getattr(group, "ndim", None) == 1
    found = group.get_group() if of_mesh else group
    what = f"broadcast_groups has for the ranks {shown(ranks)}"
    if not isinstance(found, dist.ProcessGroup):
        raise ArgumentError(f"{what} {group!r}; it must be a torch process group or a 1-d DeviceMesh that they are in")
    try:
        members = tuple(sorted(dist.get_process_group_ranks(found)))
    except (KeyError, ValueError) as error:
        raise ArgumentError(f"{what} a process group that was destroyed; pass one that exists") from error
    if members != ranks:
        raise ArgumentError(f"{what} a group of the ranks {shown(members)}; let the key be the ranks of its members")
    return found
