"""How MindSpore ranks exchange control messages: through a TCPStore.

In: a `StoreGroup`, the name of a communication group, or nothing. Out: a `dcp_core.adapter.ProcessGroup` whose channel
is a `StoreChannel`. A job that was started with a TCPStore hands that in, and no collective runs. In any other
(`mindspore.communication.init()` under msrun, `init_process_group`) MindSpore shows no store; then the first member of
a group hosts one of its own, and its address goes round once, as an object, over the host's communication library.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mindspore.mint.distributed import TCPStore

from dcp_core.adapter import ProcessGroup
from dcp_core.coordination.broadcast_group import shown
from dcp_core.coordination.joined_groups import JoinedGroups, group_prefix
from dcp_core.coordination.store import PrefixedStore
from dcp_core.errors import ArgumentError, CoordinationError
from dcp_mindspore import collectives
from dcp_mindspore.broadcasts import MindSporeBroadcasts
from dcp_mindspore.remote_channel import leave_word
from dcp_mindspore.store_channel import MindSporeStore, StoreChannel

_NAME_SECONDS = 60.0
_PAUSE_SECONDS = 0.001
_TRIES = 8
_STORE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class StoreGroup:
    """Ranks that meet in a TCPStore; what `process_group=` takes where no communication is initialised.

    Attributes:
        store: A `mindspore.mint.distributed.TCPStore`; all ranks of the job pass the same one.
        rank: This process in the group.
        world_size: Ranks of the group.
        ranks: Their numbers in the job, in the order of the group; None: as in the group.

    Raises:
        ArgumentError: The numbers do not fit each other, or the store is none.
    """

    store: Any
    rank: int
    world_size: int
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.store, TCPStore):
            raise ArgumentError(f"a StoreGroup needs a mindspore.mint.distributed.TCPStore, found {self.store!r}")
        for name in ("rank", "world_size"):
            if not isinstance(getattr(self, name), int):
                raise ArgumentError(f"{name} must be a whole number, found {getattr(self, name)!r}")
        if self.ranks is not None and not isinstance(self.ranks, Sequence):
            raise ArgumentError(f"ranks must be numbers of ranks in the job, or None, found {self.ranks!r}")
        ranks = tuple(range(self.world_size)) if self.ranks is None else tuple(self.ranks)
        object.__setattr__(self, "ranks", ranks)
        if len(set(ranks)) != self.world_size or not 0 <= self.rank < self.world_size:
            raise ArgumentError(
                f"a StoreGroup of {self.world_size} ranks has rank {self.rank} and the ranks {ranks}: ranks are "
                "counted from 0, and each has a number of its own in the job"
            )


class _Job(JoinedGroups[ProcessGroup]):
    """What this process made for the groups that it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.default: StoreGroup | None = None
        self.rank: int | None = None
        self._stores: list[Any] = []

    def keep(self, store: Any) -> None:
        """Hold a store to the end of the process."""
        self._stores.append(store)


_lock = threading.RLock()
_jobs: list[_Job] = []


def use_store(store: Any, rank: int, world_size: int) -> StoreGroup:
    """Let saves and loads of this process take part in a job whose ranks meet in a TCPStore.

    For jobs that initialise no communication; call it once, on every rank.

    Args:
        store: A `mindspore.mint.distributed.TCPStore`. The process that hosts it ends last.
        rank: This process.
        world_size: Ranks of the job.

    Returns:
        The group, which `process_group=` takes as well.

    Raises:
        ArgumentError: It is no store, or the numbers do not fit each other.
    """
    group = StoreGroup(store, rank, world_size)
    with _lock:
        _current_job().default = group
    return group


def process_group(group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
    """The group of this process, its channel made once per process and group.

    Args:
        group: A `StoreGroup`, the name of a communication group, or None for that of `use_store`, or the world of
            `mindspore.communication`. Without any the process is a group of one.
        with_channel: False to only learn which rank this is.

    Raises:
        ArgumentError: This process is no member of the group, or there is no such group.
        CoordinationError: The store cannot be used, or none could be made.
    """
    with _lock:
        job = _current_job()
        found = _find(job, group, with_channel)
        job.rank = found.global_rank
        return found


def global_rank() -> int:
    """This process in the job, as the call that runs, or the latest one, knows it; before any, as the job does."""
    with _lock:
        job = _current_job()
        return _find(job, None, with_channel=False).global_rank if job.rank is None else job.rank


def _find(job: _Job, group: Any, with_channel: bool) -> ProcessGroup:
    chosen = group if group is not None else job.default
    if isinstance(chosen, StoreGroup):
        return _of_store(job, chosen, with_channel)
    if chosen is not None and not isinstance(chosen, str):
        raise ArgumentError(
            f"process_group must be a dcp_mindspore.StoreGroup or the name of a communication group, found {group!r}"
        )
    if not collectives.is_initialized():
        if chosen is not None:
            raise ArgumentError(f"process_group is {chosen!r}, but mindspore.communication is not initialised")
        return ProcessGroup()
    return _of_name(job, chosen or collectives.world_group(), with_channel)


def _current_job() -> _Job:
    if not _jobs or _jobs[0].process != os.getpid():
        _jobs[:] = [_Job()]
    return _jobs[0]


def _of_store(job: _Job, group: StoreGroup, with_channel: bool) -> ProcessGroup:
    ranks = group.ranks or ()
    global_rank = ranks[group.rank]
    if group.world_size == 1:
        return ProcessGroup(global_rank=global_rank)
    if not with_channel:
        return ProcessGroup(group.rank, group.world_size, global_rank)
    key = (id(group.store), group.rank, ranks)
    found = job.groups.get(key)
    if found is None:
        job.keep(group.store)
        found = job.groups[key] = _join(MindSporeStore(group.store), group.rank, ranks)
    return found


def _of_name(job: _Job, name: str, with_channel: bool) -> ProcessGroup:
    ranks, global_rank = collectives.ranks_of(name), collectives.global_rank()
    if global_rank not in ranks:
        raise ArgumentError(f"rank {global_rank} is no member of the group {name!r} of ranks {shown(ranks)}")
    rank = ranks.index(global_rank)
    if len(ranks) == 1:
        return ProcessGroup(global_rank=global_rank)
    if not with_channel:
        return ProcessGroup(rank, len(ranks), global_rank)
    found = job.groups.get((name, ranks))
    if found is None:
        store = _own_store(name, ranks, rank)
        job.keep(store)
        found = job.groups[name, ranks] = _join(MindSporeStore(store), rank, ranks)
    return found


def _join(store: MindSporeStore, rank: int, ranks: tuple[int, ...]) -> ProcessGroup:
    prefix = group_prefix(ranks)
    try:
        key = _agree_on_name(PrefixedStore(prefix, store), rank)
        remote = leave_word(store, f"{prefix}/{key}/background", rank, len(ranks))
    except RuntimeError as error:
        raise CoordinationError(
            f"rank {ranks[rank]} cannot use the store of the job to talk to ranks {shown(ranks)}: {error}"
        ) from error
    channel = StoreChannel(store, f"{prefix}/{key}", rank=rank, world_size=len(ranks))
    broadcasts = MindSporeBroadcasts(store, f"{prefix}/{key}/broadcasts", ranks[rank])
    return ProcessGroup(rank, len(ranks), ranks[rank], channel, key, remote, broadcasts)


def _agree_on_name(store: PrefixedStore, rank: int) -> str:
    """The name of this life of the group: the first member to come sets it.

    A store can outlive the processes of a job. Each rank counts there how often it came, so that the n-th lives of all
    members meet in the n-th name.
    """
    life = store.add(f"born/{rank}", 1)
    name = f"name/{life}"
    if store.add(f"{name}/claimed", 1) == 1:
        store.set(name, secrets.token_hex(6))
    deadline = time.monotonic() + _NAME_SECONDS
    while not store.check([name]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the rank that came first has not named the group within {_NAME_SECONDS:g} s")
        time.sleep(_PAUSE_SECONDS)
    return store.get(name).decode()


def _own_store(name: str, ranks: tuple[int, ...], rank: int) -> Any:
    """A store for a group that has none: the first member hosts it, and tells the others where."""
    store, told, problem = None, "", ""
    if rank == 0:
        try:
            store = host_store(_own_address())
            told = f"{store.host}:{store.port}"
        except (RuntimeError, OSError) as error:
            problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    first = collectives.gather_objects(name, ranks, [told, problem])[0]
    told, problem = (str(part) for part in first)
    if not told:
        raise CoordinationError(f"rank {ranks[0]} could not host a TCPStore for the group {name!r}: {problem}")
    if store is not None:
        return store
    host, _, port = told.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_STORE_SECONDS))
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise CoordinationError(
            f"rank {ranks[rank]} cannot reach the TCPStore that rank {ranks[0]} hosts at {told}: {reason}; let the "
            "hosts of the job reach each other, or hand in a store by dcp_mindspore.use_store()"
        ) from error


def host_store(address: str, world_size: int = 1) -> Any:
    """A TCPStore in this process, on a port that is free: MindSpore does not choose one.

    Args:
        address: An IPv4 address of this host.
        world_size: How many ranks the job has; only what initialises communication with the store asks for it.

    Raises:
        RuntimeError: There is no such address, or no port.
    """
    for attempt in range(_TRIES):
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        try:
            timeout = timedelta(seconds=_STORE_SECONDS)
            return TCPStore(address, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        except RuntimeError:  # somebody else has taken it meanwhile
            if attempt == _TRIES - 1:
                raise
    raise AssertionError("not reached")


def _own_address() -> str:
    """The IPv4 address by which this host reaches where the job meets; else that of its name; else the loopback."""
    for variable in ("MS_SCHED_HOST", "MASTER_ADDR"):
        meeting = os.environ.get(variable, "").strip()
        if meeting:
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((meeting, 9))  # sends nothing
                return str(probe.getsockname()[0])
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
