"""A board of messages on a c10d store: TCPStore, FileStore, HashStore, or any that has their methods."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # torch lists no exports
    DistNetworkError,
    PrefixStore,
    TCPStore,
)

from dcp_core.coordination import store_channel
from dcp_core.coordination.store import Store
from dcp_torch.remote_channel import innermost

_NOTHING = b"?"


class StoreChannel(store_channel.StoreChannel):
    """`dcp_core.coordination.store_channel.StoreChannel` over a c10d store.

    Every thread gets a connection of its own, so that a wait here never holds up the trainer's use of the store.

    Args:
        store: The store; it is cloned where it can be.
        prefix: Goes before every name.
        rank: This rank in the group.
        world_size: Ranks of the group.
    """

    def __init__(self, store: Any, prefix: str, *, rank: int, world_size: int) -> None:
        super().__init__(prefix, rank=rank, world_size=world_size)
        self._origin = store
        self._is_tcp = isinstance(innermost(store), TCPStore)

    def connect(self) -> Any:
        """A new connection, all of whose keys get the prefix."""
        clone = getattr(self._origin, "clone", None)
        return PrefixStore(self.prefix, self._origin if clone is None else clone())

    def look(self, store: Store, name: str) -> bytes | None:
        """The head of a message, or None; a TCPStore is asked once, where `check` and `get` would ask it three times.

        A TCPStore answers `compare_set` by the value that is there, or, where there is none, by the expected one; it
        sets nothing unless the expected one is there, which no message is.
        """
        if not self._is_tcp:
            return super().look(store, name)
        found: bytes = store.compare_set(name, _NOTHING, _NOTHING)  # type: ignore[attr-defined]  # of torch's stores
        return found if found.startswith(store_channel.HEADS) else None

    def block(self, store: Any, name: str, seconds: float) -> bool:
        """Leave a wait to the store; False when its time was up."""
        return wait_in(store, name, seconds)


def wait_in(store: Any, name: str, seconds: float) -> bool:
    """Leave a wait to a store; False when its time was up.

    Raises:
        RuntimeError: The store failed.
    """
    deadline = time.monotonic() + seconds
    try:
        store.wait([name], timedelta(seconds=seconds))
    except RuntimeError as error:
        timed_out = time.monotonic() >= deadline - 0.1 and not isinstance(error, DistNetworkError)
        if not timed_out:
            raise
        return False
    return True
