"""A board of messages on a store that the ranks of a job share.

A message is its head, `prefix/name`, written last, and for a large one parts beside it: stores refuse large values
(c10d's TCPStore closes the connection on those over 8 MiB).
"""

from __future__ import annotations

import struct
import threading
import time
from abc import ABC, abstractmethod

from dcp_core.coordination.store import Store

_PART_BYTES = 4 << 20
_WHOLE, _IN_PARTS = b"\0", b"\1"
HEADS = (_WHOLE, _IN_PARTS)
"""What every message begins with, in a store."""

_PARTS = struct.Struct("<I")

_FIRST_PAUSE_SECONDS = 0.0003
_LONGEST_PAUSE_SECONDS = 0.01
_CHECKS_A_SECOND = 20_000
_MANY_RANKS = 128
_FIRST_BLOCKING_SECONDS = 10.0
_BLOCKING_SECONDS = 60.0
_SHORT_WAIT_SECONDS = 2.0
_DRAIN_SECONDS = 2.0
_DRAIN_PAUSE_SECONDS = 0.002


class StoreChannel(ABC):
    """`dcp_core.adapter.KeyValueChannel` over a store.

    Every thread gets what `connect` makes, once.

    Waiting looks again and again in growing pauses: a store's own wait cannot be interrupted, and complains on stderr
    when its time is up. In a large group, where looking would drown the store, long waits are left to it.

    The process of the first rank often hosts the store and may end, or destroy its process group, right after it has
    posted an answer. So the others note what they have read, and `drain` waits for that.

    Args:
        prefix: Goes before every name.
        rank: This rank in the group.
        world_size: Ranks of the group.
    """

    def __init__(self, prefix: str, *, rank: int, world_size: int) -> None:
        self.prefix = prefix
        self.rank = rank
        self.world_size = world_size
        self._local = threading.local()
        self._lock = threading.Lock()
        self._posted: dict[str, int] = {}

    @abstractmethod
    def connect(self) -> Store:
        """A connection for the calling thread, all of whose keys get the prefix."""

    def block(self, store: Store, name: str, seconds: float) -> bool | None:
        """Leave a long wait in a large group to the store.

        Returns:
            Whether the message is there; None where the store has no wait that others can rely on.
        """
        return None

    def look(self, store: Store, name: str) -> bytes | None:
        """The head of a message, or None when it is not there, in as few calls as the store allows. Never waits."""
        return store.get(name) if store.check([name]) else None

    def put(self, name: str, payload: bytes) -> None:
        """Post a message."""
        store = self._store()
        parts = 0
        head = _WHOLE + payload
        if len(payload) > _PART_BYTES:
            view = memoryview(payload)
            parts = -(-len(payload) // _PART_BYTES)
            for part in range(parts):
                store.set(_part(name, part), bytes(view[part * _PART_BYTES : (part + 1) * _PART_BYTES]))
            head = _IN_PARTS + _PARTS.pack(parts)
        if self.rank == 0:
            with self._lock:
                self._posted[name] = parts
        store.set(name, head)

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        """Wait for a message and return it; None when it did not come in time. Looks once at least."""
        store = self._store()
        head = self._await(store, name, timeout_seconds)
        if head is None:
            return None
        if head[:1] == _WHOLE:
            payload, parts = head[1:], 0
        else:
            (parts,) = _PARTS.unpack(head[1:])
            payload = b"".join(store.get(_part(name, part)) for part in range(parts))
        self._note_parts(name, parts)
        if self.rank:
            store.add(_readers(name), 1)
        return payload

    def delete(self, name: str) -> None:
        """Remove a message; one that is not there is no error."""
        store = self._store()
        with self._lock:
            parts = self._posted.pop(name, None)
        is_own = parts is not None
        if parts is None:
            parts = self._count_parts(store, name)
        store.delete_key(name)
        for part in range(parts):
            store.delete_key(_part(name, part))
        if self.rank or is_own:
            store.delete_key(_readers(name))

    def drain(self, timeout_seconds: float = _DRAIN_SECONDS) -> None:
        """On the first rank, wait until the others have read what it posted, or the time is up."""
        if self.rank:
            return
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            newest_first = list(reversed(self._posted))
        for name in newest_first:
            self._await_readers(self._store(), name, deadline, _DRAIN_PAUSE_SECONDS)

    def _await_readers(self, store: Store, name: str, deadline: float, pause: float) -> None:
        while time.monotonic() < deadline and not self._is_read(store, name):
            time.sleep(pause)

    def _is_read(self, store: Store, name: str) -> bool:
        return not store.check([name]) or store.add(_readers(name), 0) >= self.world_size - 1

    def _store(self) -> Store:
        """The connection of this thread."""
        found: Store | None = getattr(self._local, "store", None)
        if found is None:
            found = self._local.store = self.connect()
        return found

    def _parts_read(self) -> dict[str, int]:
        """In how many parts the messages came that this thread has read last, and not removed."""
        found: dict[str, int] | None = getattr(self._local, "parts_read", None)
        if found is None:
            found = self._local.parts_read = {}
        return found

    def _note_parts(self, name: str, parts: int) -> None:
        read = self._parts_read()
        read[name] = parts
        if len(read) > self.world_size:
            del read[next(iter(read))]

    def _count_parts(self, store: Store, name: str) -> int:
        """How many parts a message has that this process did not post: mostly, one that it has just read."""
        parts = self._parts_read().pop(name, None)
        if parts is not None:
            return parts
        if not store.check([name]):
            return 0
        head: bytes = store.get(name)
        return int(_PARTS.unpack(head[1:])[0]) if head[:1] == _IN_PARTS else 0

    @property
    def _fair_pause(self) -> float:
        """Seconds between two looks where every rank looks, so that the store keeps up."""
        return self.world_size / _CHECKS_A_SECOND

    def _await(self, store: Store, name: str, timeout_seconds: float) -> bytes | None:
        """The head of a message, once it is there; None when it did not come in time."""
        started = time.monotonic()
        deadline = started + timeout_seconds
        shortest = max(_FIRST_PAUSE_SECONDS, self._fair_pause) if self.rank else _FIRST_PAUSE_SECONDS
        longest = max(_LONGEST_PAUSE_SECONDS, shortest)
        blocking = _FIRST_BLOCKING_SECONDS
        while (head := self.look(store, name)) is None:
            now = time.monotonic()
            if now >= deadline:
                return None
            if self.world_size >= _MANY_RANKS and deadline - now > _SHORT_WAIT_SECONDS:
                found = self.block(store, name, min(blocking, deadline - now))
                if found:
                    return store.get(name)
                blocking = _BLOCKING_SECONDS
                if found is not None:
                    continue
            pause = min(max((now - started) / 10, shortest), longest)
            time.sleep(min(pause, deadline - now))
        return head


def _part(name: str, part: int) -> str:
    return f"{name}/part{part}"


def _readers(name: str) -> str:
    return f"{name}/readers"
