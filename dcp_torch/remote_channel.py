"""The channel of the background processes: they join the job's store as clients, each with a prefix of its group's own.

In the trainer, `leave_word` says how. In the background process, which has no process group and no device, `join_store`
does it: it never hosts a store, runs no collective, and touches nothing of the trainer's own messages.

What can be relied on. The store lives in the process that hosts it: torchrun's agent, else rank 0's trainer, and there
for as long as anything holds the group's channel (`ProcessGroup.channel`), even if the process group is destroyed. Any
other trainer may end or die; the background processes go on. When the host ends, each of them notices within a moment
if its machine is up (the connection breaks), else after the timeout, and fails with a `CoordinationError`, in the last
exchange of a save with an `InDoubtError`; what was committed before stays.

A trainer waits for its background process, and that one, on every rank, drains the channel at the end of a save
(`dcp_core.adapter.drain`): so the host, if it is of the group, ends only when all have read the last answer. A host
that is no member of the group that saves has to outlive the save by the user's own care.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no list of exports

from dcp_core.adapter import ChannelSpec, rendezvous_address
from dcp_core.coordination import remote_channel
from dcp_core.coordination.remote_channel import WORD
from dcp_core.errors import MissingRendezvousError
from dcp_torch.client_store import ClientStore

ANSWER_SECONDS = 30.0
"""How long the store may take for the connection and for any call, before it is given up."""


class RemoteChannel(remote_channel.RemoteChannel):
    """`dcp_core.coordination.remote_channel.RemoteChannel` over connections to a TCPStore."""

    def connect(self) -> ClientStore:
        """A connection as a client, all of whose keys get the prefix."""
        return ClientStore(*self.address, self.prefix, self.timeout_seconds)


def join_store(
    host: str,
    port: int,
    prefix: str,
    rank: int,
    world_size: int,
    timeout_seconds: float = ANSWER_SECONDS,
    is_job_store: bool = True,
) -> RemoteChannel:
    """Join the job's store from a process beside the job, as a client.

    Args:
        host: Where the store is.
        port: Where the store is.
        prefix: Of the group, in this life: nobody else's names begin with it.
        rank: The rank that this process works for, in its group.
        world_size: Ranks of the group.
        timeout_seconds: How long the store may take for the connection and for any call.
        is_job_store: Whether `leave_word` has left word there.

    Returns:
        A channel among the processes that join with the same prefix. Its connections belong to the threads that use
        it. Once the store is gone every call fails.

    Raises:
        CoordinationError: Nobody listens there, or no store does, or it is another one. Nothing was posted.
    """
    channel = RemoteChannel(host, port, prefix, rank=rank, world_size=world_size, timeout_seconds=timeout_seconds)
    channel.find_word(is_job_store)
    return channel


def leave_word(store: Any, prefix: str, rank: int, world_size: int) -> ChannelSpec | None:
    """Say how the background process of a rank joins those of the others, and leave word where it will.

    Args:
        store: What the ranks of the group talk through. If it is a TCPStore, however the job was started, it is the one
            to join; a client of any other kind of store would have to share its host's memory or files, so then it is
            the one at MASTER_ADDR and MASTER_PORT.
        prefix: Of the group, in this life.
        rank: This rank in the group.
        world_size: Ranks of the group.

    Returns:
        How to join; None if there is no TCPStore to join.

    Raises:
        RuntimeError: The store failed.
    """
    job_store = innermost(store)
    is_job_store = isinstance(job_store, TCPStore)
    if is_job_store:
        job_store.set(f"{prefix}/{WORD}", b"")
        host, port = job_store.host, job_store.port
    else:
        try:
            host, port = rendezvous_address()
        except MissingRendezvousError:
            return None
    arguments = {"host": host, "port": port, "prefix": prefix, "rank": rank, "world_size": world_size}
    return ChannelSpec(
        __name__,
        join_store.__name__,
        {**arguments, "timeout_seconds": ANSWER_SECONDS, "is_job_store": is_job_store},
    )


def innermost(store: Any) -> Any:
    """A store without its prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
