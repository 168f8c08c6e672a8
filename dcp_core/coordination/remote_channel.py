"""The channel of background processes over a job's store: what is left of an earlier save goes, lost connections too.

In the background process, which has no process group and no device. It never hosts a store, runs no collective, and
touches nothing of the trainer's own messages.
"""

from __future__ import annotations

import time
from typing import Protocol, cast

from dcp_core.coordination.store import Store
from dcp_core.coordination.store_channel import StoreChannel
from dcp_core.errors import CoordinationError

WORD = "word"
"""What is set at a store that background processes will join, so that they know it is the right one."""

_DRAIN_SECONDS = 5.0
_DRAIN_PAUSE_SECONDS = 0.002


class _Connection(Store, Protocol):
    """What a `RemoteChannel` asks of its connections: `client_store.ClientStore` is one."""

    @property
    def is_lost(self) -> bool:
        """Whether every later call fails at once."""
        ...


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
        super().__init__(prefix, rank=rank, world_size=world_size)
        self.address = (host, port)
        self.timeout_seconds = timeout_seconds
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
            name = next(reversed(self._parts_read()), "")
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
            if cast(_Connection, self._store()).is_lost:
                del self._local.store
        return topic

    def find_word(self, is_job_store: bool) -> None:
        """Make sure that all ranks are at this store: one of them has left word here.

        Args:
            is_job_store: Whether the trainers did, before. Otherwise the first rank does now.

        Raises:
            CoordinationError: There is none.
        """
        store, (host, port) = self._store(), self.address
        if self.rank == 0 and not is_job_store:
            store.set(WORD, b"")
        elif self._await(store, WORD, 0 if is_job_store else self.timeout_seconds) is None:
            told = "its trainer" if is_job_store else "rank 0"
            raise CoordinationError(
                f"rank {self.rank} joined a store at {host}:{port}, where {told} has left no word: it is another "
                "job's, or rank 0 does not come. Let MASTER_ADDR and MASTER_PORT be those of this job on all ranks; or "
                "save with use_gloo=False, which talks through files in the checkpoint's directory"
            )
