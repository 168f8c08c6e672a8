"""What carries broadcasts in one group of torch ranks: a process group that was given, or one that is made.

A group is made from its backend alone, and is not known to torch.distributed otherwise. `torch.distributed.new_group`
does not serve here. Where only members call it, it names the group by how many groups the process has, which differs
between ranks, and names one again after it is gone, so that ranks meet what the former left in the store. And in a job
that is bound to a device it splits the communicator of the job, for which all ranks would have to call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_GLOO = "gloo"
_OWN_MARGIN_SECONDS = 60.0
_CONNECT_SECONDS = 120.0


class _CheckedWork:
    """A `torch.distributed.Work` of a backend other than gloo, whose `wait` may not raise what went wrong."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        self._work.wait()
        if self._work.exception() is not None:
            raise RuntimeError(str(self._work.exception()))


class Communicator:
    """One group of ranks, for one type of device.

    Args:
        group: A torch process group.
        ranks: Global ranks of its members, in its order.
        is_gloo: Whether gloo carries it.
        is_made: Whether to destroy it at the end.
    """

    def __init__(self, group: Any, ranks: Sequence[int], *, is_gloo: bool, is_made: bool) -> None:
        self.is_gloo = is_gloo
        self.is_made = is_made
        self._group = group
        self._ranks = tuple(ranks)

    @property
    def gives_up_itself(self) -> bool:
        """Whether works end at their timeout by themselves: those of gloo."""
        return self.is_gloo

    def start(self, wire: torch.Tensor, source: int, timeout_seconds: float) -> Any:
        """Start a broadcast.

        Args:
            wire: Bytes to send, or to fill.
            source: Global rank.
            timeout_seconds: When gloo gives up. Others end the process at their timeout, so that stays as it is.

        Returns:
            A `dcp_core.coordination.broadcast_group.CommunicatorWork`.

        Raises:
            RuntimeError: The group cannot be used any more.
        """
        options = dist.BroadcastOptions()
        options.rootRank = self._ranks.index(source)
        options.rootTensor = 0
        options.asyncOp = True
        if self.is_gloo:
            options.timeout = timedelta(seconds=timeout_seconds)
        work = self._group.broadcast([wire], options)
        return work if self.is_gloo else _CheckedWork(work)

    def abort(self) -> None:
        """End what is under way in a group that was made, where the backend can."""
        if self.is_made and self._group is not None:
            with contextlib.suppress(Exception):
                self._group.abort()

    def end(self) -> None:
        """Destroy the group if it was made. Blocks while broadcasts are under way."""
        group, self._group = self._group, None
        if self.is_made and group is not None:
            with contextlib.suppress(Exception):
                group.shutdown()


def can_make(backend: str) -> bool:
    """Whether `make_communicator` knows a backend of this name."""
    if backend == _GLOO:
        return dist.is_gloo_available()
    if backend in ("nccl", "xccl"):
        return bool(getattr(dist, f"is_{backend}_available")())
    return backend.upper() in dist.Backend._plugins


def given_communicator(group: Any, device: str) -> Communicator | None:
    """A group of others; None if it does not carry this type of device."""
    backend = backends_of(group).get(device)
    if backend is None:
        return None
    return Communicator(group, dist.get_process_group_ranks(group), is_gloo=backend == _GLOO, is_made=False)


def backends_of(group: Any) -> dict[str, str]:
    """The name of the backend for each type of device that a group carries."""
    pairs = [pair.partition(":") for pair in dist.get_backend_config(group).split(",")]
    return {device: backend.lower() for device, _, backend in pairs}


def make_communicator(
    backend: str, device: str, store: Any, name: str, ranks: Sequence[int], rank: int, timeout_seconds: float
) -> Communicator:
    """Make a group; its members do so at the same time.

    Args:
        backend: One that `can_make` knows.
        device: The type of device that it shall carry.
        store: For the members alone, new.
        name: Of the group, in logs.
        ranks: Global ranks of the members.
        rank: Global rank of this one.
        timeout_seconds: How long a broadcast may take. All members are here, so that they connect within less.

    Raises:
        RuntimeError: The backend could not be made.
    """
    is_gloo = backend == _GLOO
    seconds = min(timeout_seconds, _CONNECT_SECONDS) if is_gloo else 2 * timeout_seconds + _OWN_MARGIN_SECONDS
    own = list(ranks).index(rank)
    made = _make_backend(backend, store, own, list(ranks), name, timedelta(seconds=seconds))
    group: Any = made
    if not isinstance(made, dist.ProcessGroup):  # a backend written in Python is a whole group already
        kind = dist.Backend.backend_type_map.get(backend, dist.ProcessGroup.BackendType.CUSTOM)
        group = dist.ProcessGroup(store, own, len(ranks))
        group._set_default_backend(kind)
        group._register_backend(torch.device(device), kind, made)
        group._set_group_name(name)
        group._set_group_desc("broadcasts of a load")
    return Communicator(group, ranks, is_gloo=is_gloo, is_made=True)


def _make_backend(backend: str, store: Any, rank: int, ranks: list[int], name: str, timeout: timedelta) -> Any:
    if backend == _GLOO:
        made: Any = dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
        made.options.global_ranks_in_group = ranks
        made.options.group_name = name
        return made
    if backend in ("nccl", "xccl"):
        factory: Any = getattr(dist, f"ProcessGroup{backend.upper()}")
        options = factory.Options()
        options._timeout = timeout
        options.global_ranks_in_group = ranks
        options.group_name = name
        return factory(store, rank, len(ranks), options)
    plugin = dist.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, len(ranks), timeout)
    internals: Any = dist.distributed_c10d
    extended = internals._DistributedBackendOptions()
    extended.store = store
    extended.group_rank = rank
    extended.group_size = len(ranks)
    extended.timeout = timeout
    extended.group_id = name
    extended.global_ranks_in_group = ranks
    return plugin.creator_fn(extended, None)
