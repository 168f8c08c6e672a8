"""A board of messages on MindSpore's TCPStore.

That store has no way to ask whether a value is there: `get` waits, and keeps every thread of the process waiting with
it. So a counter beside each value says that it was set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from dcp_core.coordination import store_channel
from dcp_core.coordination.store import PrefixedStore

_SET = "?"


class MindSporeStore:
    """`dcp_core.coordination.store.Store` over a `mindspore.mint.distributed.TCPStore`.

    Any thread may use it: the calls hold Python's lock, so they follow one another. One that gets no answer (the
    process that hosts the store is stopped) fails after 15 s, and holds the lock so long.

    Args:
        store: The TCPStore; kept to the end of the process, since its destructor may crash.
    """

    def __init__(self, store: Any) -> None:
        self.host = str(store.host)
        self.port = int(store.port)
        self._store = store
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store.instance))

    def set(self, key: str, value: str | bytes, /) -> None:
        """Set a value."""
        self._call("set", key, value)  # never fails; the counter does
        self._call("add", key + _SET, 1)

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""
        value: bytes = self._call("get", key)
        return value

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter; returns what it comes to."""
        return int(self._call("add", key, amount))

    def check(self, keys: Sequence[str], /) -> bool:
        """Whether values were set under all keys."""
        return all(self._call("add", key + _SET, 0) > 0 for key in keys)

    def delete_key(self, key: str, /) -> None:
        """Remove a value or a counter."""
        self._call("delete_key", key + _SET)
        self._call("delete_key", key)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RuntimeError(f"the store at {self.host}:{self.port} failed: {reason}") from error


class StoreChannel(store_channel.StoreChannel):
    """`dcp_core.coordination.store_channel.StoreChannel` over MindSpore's TCPStore.

    Args:
        store: The store.
        prefix: Goes before every name.
        rank: This rank in the group.
        world_size: Ranks of the group.
    """

    def __init__(self, store: MindSporeStore, prefix: str, *, rank: int, world_size: int) -> None:
        super().__init__(prefix, rank=rank, world_size=world_size)
        self._origin = store

    def connect(self) -> PrefixedStore:
        """The store, all of whose keys get the prefix."""
        return PrefixedStore(self.prefix, self._origin)
