"""How torch ranks exchange control messages: through the store of their job.

In: a torch process group. Out: a `dcp_core.adapter.ProcessGroup` whose channel is a `StoreChannel`. No collective runs,
on no backend: gloo, NCCL and HCCL jobs are served alike, from any thread.

The members of a group agree on its name through the store as well: whoever comes first puts a random one there. So a
process group that is destroyed and made again, in the same processes or new ones, never meets messages of the former.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch lists no exports
    PrefixStore,
    Store,
    TCPStore,
    distributed_c10d,
)

from dcp_core.adapter import ProcessGroup
from dcp_core.coordination.broadcast_group import shown
from dcp_core.coordination.joined_groups import JoinedGroups, group_prefix
from dcp_core.errors import ArgumentError, CoordinationError
from dcp_torch.broadcasts import TorchBroadcasts
from dcp_torch.remote_channel import innermost, leave_word
from dcp_torch.store_channel import StoreChannel

_NEEDED = ("set", "get", "add", "check", "compare_set", "delete_key")


class _Job(JoinedGroups[ProcessGroup]):
    """What this process made for one life of the default process group."""

    def __init__(self, default_group: Any) -> None:
        super().__init__()
        self._default = weakref.ref(default_group, lambda _: self.leave())

    def serves(self, default_group: Any) -> bool:
        """Whether this is still the same process in the same job."""
        return self._default() is default_group and self.process == os.getpid()


_lock = threading.RLock()
_jobs: list[_Job] = []


def process_group(group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
    """The group of this process, its channel made once per process and group.

    Args:
        group: A torch process group, a one-dimensional DeviceMesh, or None for the job's default group. Without a job
            the process is a group of one.
        with_channel: False to only learn which rank this is.

    Raises:
        ArgumentError: This process is no member of the group, or the group does not exist any more.
        CoordinationError: The job's store cannot be used, and no other could be made.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ArgumentError("process_group was given, but torch.distributed is not initialized in this process")
        return ProcessGroup()
    torch_group = _as_torch_group(group)
    ranks = _ranks_of(torch_group)
    global_rank = dist.get_rank()
    if global_rank not in ranks:
        raise ArgumentError(f"rank {global_rank} is no member of the process group of ranks {shown(ranks)}")
    if len(ranks) == 1:
        return ProcessGroup(global_rank=global_rank)
    if not with_channel:
        return ProcessGroup(ranks.index(global_rank), len(ranks), global_rank)
    with _lock:
        job = _current_job(distributed_c10d._get_default_group())
        found = job.groups.get(ranks)
        if found is None:
            found = job.groups[ranks] = _join(torch_group, ranks, global_rank)
        return found


def _as_torch_group(group: Any) -> Any:
    if group is None:
        return distributed_c10d._get_default_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            f"rank {dist.get_rank()} is no member of the process_group it was given; only members save and load with it"
        )
    if isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "get_group") and getattr(group, "ndim", None) == 1:
        return group.get_group()
    raise ArgumentError(f"process_group must be a torch process group or a 1-d DeviceMesh, found {group!r}")


def _ranks_of(group: Any) -> tuple[int, ...]:
    """Global ranks in the order of the group."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError as error:
        raise ArgumentError("the process group was destroyed; pass one that exists") from error


def _current_job(default_group: Any) -> _Job:
    if _jobs and _jobs[0].serves(default_group):
        return _jobs[0]
    while _jobs:
        _jobs.pop().leave()
    _jobs.append(_Job(default_group))
    return _jobs[0]


def _join(group: Any, ranks: tuple[int, ...], global_rank: int) -> ProcessGroup:
    prefix = group_prefix(ranks)
    rank, world_size = ranks.index(global_rank), len(ranks)
    store = _job_store()
    try:
        if store is None:
            store = _own_store(ranks, rank)
        key = _agree_on_name(PrefixStore(prefix, store), rank)
        remote = leave_word(store, f"{prefix}/{key}/background", rank, world_size)
    except RuntimeError as error:
        raise CoordinationError(
            f"rank {global_rank} cannot use the store of the job to talk to ranks {shown(ranks)}: {error}"
        ) from error
    channel = StoreChannel(store, f"{prefix}/{key}", rank=rank, world_size=world_size)
    groups = [distributed_c10d._get_default_group(), group]
    broadcasts = TorchBroadcasts(store, f"{prefix}/{key}/broadcasts", global_rank, groups)
    return ProcessGroup(rank, world_size, global_rank, channel, key, remote, broadcasts)


def _agree_on_name(store: Any, rank: int) -> str:
    """The name of this life of the group: the first member to come sets it.

    A store can outlive a process group (torchrun's does). Each rank counts there how often it came, so that the n-th
    lives of all members meet in the n-th name.
    """
    life = store.add(f"born/{rank}", 1)
    name: bytes = store.compare_set(f"name/{life}", "", secrets.token_hex(6))
    return name.decode()


def _job_store() -> Any:
    """The store that the job was started with, or None if it lacks what a channel needs."""
    try:
        store = distributed_c10d._get_default_store()
    except (AttributeError, KeyError, ValueError):
        return None
    inner = innermost(store)
    usable = type(inner) is not Store and all(_implements(inner, method) for method in _NEEDED)
    return store if usable else None


def _implements(store: Any, method: str) -> bool:
    """Whether a store has a method of its own: the base class, which Python stores derive from, only raises."""
    if type(store).__module__.startswith("torch."):
        return hasattr(store, method)
    return getattr(type(store), method, None) is not getattr(Store, method, None)


def _own_store(ranks: tuple[int, ...], rank: int) -> Any:
    """A store for a job that has none that can be used: the first member hosts it, its address goes over gloo."""
    carrier = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    try:
        address: list[Any] = [None]
        store = None
        if rank == 0:
            host = os.environ.get("MASTER_ADDR") if ranks[0] == 0 else None
            host = host or _own_host()
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            address = [(host, store.port)]
        dist.broadcast_object_list(address, src=ranks[0], group=carrier)
        if store is None:
            host, port = address[0]
            store = TCPStore(host, port, is_master=False)
        return store
    finally:
        dist.destroy_process_group(carrier)


def _own_host() -> str:
    import socket

    return socket.gethostname()
