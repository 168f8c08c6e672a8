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

import time
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no list of exports

from dcp_core.adapter import ChannelSpec, rendezvous_address
from dcp_core.errors import CoordinationError, MissingRendezvousError
from dcp_torch.client_store import ClientStore
from dcp_torch.store_channel import StoreChannel

ANSWER_SECONDS = 30.0
"""How long the store may take for the connection and for any call, before it is given up."""

_DRAIN_SECONDS = 5.0
_DRAIN_PAUSE_SECONDS = 0.002
_WORD = "word"


class RemoteChannel(StoreChannel):
    """A `StoreChannel` over connections that this process makes as a client.

    Names begin with what they belong to (the save's id), up to a dot. What this rank posted for one save and nobody
    has removed (notes to ranks that never came, say) goes when it first posts for another: every rank has ended the
    earlier save by then, since no save starts on any rank before. A connection that was lost during one save fails
    whatever is left of that at once, and is made anew for another.

    Args:
        host: Where the store is.
        port: Where the store is.
        prefix: Goes before every name.
        rank: This rank in the group.
        world_size: Ranks of the group.
        timeout_seconds: How long the store may take for the connection and for any call.
    """

    def __init__(
        self, host: str, port: int, prefix: str, *, rank: int, world_size: int, timeout_seconds: float
    ) -> None:
        super().__init__(None, prefix, rank=rank, world_size=world_size)
        self._address = (host, port)
        self._timeout_seconds = timeout_seconds
        self._topic = ""
        self._left: dict[str, None] = {}

    def put(self, name: str, payload: bytes) -> None:
        """Post a message; the first one of another save removes what this rank left of the one before."""
        topic = self._enter(name)
        with self._lock:
            old = [] if topic == self._topic else list(self._left)
            self._topic = topic
            self._left[name] = None
        for left in old:
            self.delete(left)
        super().put(name, payload)

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        """Wait for a message and return it; None when it did not come in time. Looks once at least."""
        self._enter(name)
        return super().wait(name, timeout_seconds)

    def delete(self, name: str) -> None:
        """Remove a message; one that is not there is no error."""
        super().delete(name)
        with self._lock:
            self._left.pop(name, None)

    def drain(self, timeout_seconds: float = _DRAIN_SECONDS) -> None:
        """Wait until all ranks have read what the first one posted last, or the time is up.

        On every rank, for any of them may work for the trainer that hosts the store; in the thread that has read it.
        The first rank sees who has read, and then removes its messages; the others see that.
        """
        deadline = time.monotonic() + timeout_seconds
        if self.rank:
            name, _ = getattr(self._local, "last_read", ("", 0))
            pause = max(_DRAIN_PAUSE_SECONDS, self._fair_pause)
            while name and self._store().check([name]) and time.monotonic() < deadline:
                time.sleep(pause)
            return
        super().drain(timeout_seconds)
        with self._lock:
            posted = list(self._posted)
        for name in posted:
            if self._is_read(self._store(), name):
                self.delete(name)

    def _enter(self, name: str) -> str:
        """What a message belongs to; where this thread's connection was lost over something else, it gets another."""
        topic = name.partition(".")[0]
        if topic != getattr(self._local, "topic", ""):
            self._local.topic = topic
            if self._store().is_lost:
                del self._local.store
        return topic

    def find_word(self, is_job_store: bool) -> None:
        """Make sure that all ranks are at this store: one of them has left word here.

        Args:
            is_job_store: Whether the trainers did, before. Otherwise the first rank does now.

        Raises:
            CoordinationError: There is none.
        """
        store, (host, port) = self._store(), self._address
        if self.rank == 0 and not is_job_store:
            store.set(_WORD, b"")
        elif not self._await(store, _WORD, 0 if is_job_store else self._timeout_seconds):
            told = "its trainer" if is_job_store else "rank 0"
            raise CoordinationError(
                f"rank {self.rank} joined a store at {host}:{port}, where {told} has left no word: it is another "
                "job's, or rank 0 does not come. Let MASTER_ADDR and MASTER_PORT be those of this job on all ranks; or "
                "save with use_gloo=False, which talks through files in the checkpoint's directory"
            )

    def _connect(self) -> ClientStore:
        return ClientStore(*self._address, self.prefix, self._timeout_seconds)


def join_store(
    host: str,
    port: int,
    prefix: str,
    rank: int,
    world_size: int,
    timeout_seconds: float = ANSWER_SECONDS,
    is_job_store: bool = True,
) -> StoreChannel:
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
        job_store.set(f"{prefix}/{_WORD}", b"")
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
