"""The channel of the background processes: they join the job's store as clients, each with a prefix of its group's own.

In the trainer, `leave_word` says how. In the background process, which imports MindSpore for this and runs nothing of
it, `join_store` does it: it never hosts a store and touches nothing of the trainer's own messages. The store lives in
the process that hosts it; when that ends, background processes fail with a `CoordinationError`, in the last exchange
of a save with an `InDoubtError`; what was committed before stays.
"""

from __future__ import annotations

from dcp_core.adapter import ChannelSpec, PlainArgument
from dcp_core.coordination import remote_channel
from dcp_core.coordination.remote_channel import WORD
from dcp_mindspore.client_store import ClientStore
from dcp_mindspore.store_channel import MindSporeStore

ANSWER_SECONDS = 30.0
"""How long the store may take for the connection and for any call, before it is given up."""


class RemoteChannel(remote_channel.RemoteChannel):
    """`dcp_core.coordination.remote_channel.RemoteChannel` over connections to MindSpore's TCPStore."""

    def connect(self) -> ClientStore:
        """A connection as a client, all of whose keys get the prefix."""
        return ClientStore(*self.address, self.prefix, self.timeout_seconds)


def join_store(
    host: str, port: int, prefix: str, rank: int, world_size: int, timeout_seconds: float = ANSWER_SECONDS
) -> RemoteChannel:
    """Join the job's store from a process beside the job, as a client.

    Args:
        host: Where the store is.
        port: Where the store is.
        prefix: Of the group, in this life: nobody else's names begin with it.
        rank: The rank that this process works for, in its group.
        world_size: Ranks of the group.
        timeout_seconds: How long the store may take for the connection and for any call.

    Returns:
        A channel among the processes that join with the same prefix. Once the store is gone every call fails.

    Raises:
        CoordinationError: Nobody listens there, or no store does, or it is another one. Nothing was posted.
    """
    channel = RemoteChannel(host, port, prefix, rank=rank, world_size=world_size, timeout_seconds=timeout_seconds)
    channel.find_word(True)
    return channel


def leave_word(store: MindSporeStore, prefix: str, rank: int, world_size: int) -> ChannelSpec:
    """Say how the background process of a rank joins those of the others, and leave word where it will.

    Args:
        store: What the ranks of the group talk through.
        prefix: Of the group, in this life.
        rank: This rank in the group.
        world_size: Ranks of the group.

    Raises:
        RuntimeError: The store failed.
    """
    store.set(f"{prefix}/{WORD}", b"")
    arguments: dict[str, PlainArgument] = {
        "host": store.host,
        "port": store.port,
        "prefix": prefix,
        "rank": rank,
        "world_size": world_size,
    }
    return ChannelSpec(__name__, join_store.__name__, {**arguments, "timeout_seconds": ANSWER_SECONDS})
