"""Broadcasts of host memory through the store that the ranks of a job share.

For frameworks without collectives that can be relied on for host memory. The source posts the bytes in parts, then a
head; each of the others takes them and says so; when all have, the source removes them.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.coordination.store import PrefixedStore, Store

Wire = npt.NDArray[np.uint8]

PART_BYTES = 4 << 20
_HEAD = struct.Struct("<qq")  # source, bytes
_LOOKS_A_SECOND = 10_000
_SHORTEST_SECONDS = 0.0003


class StoreCommunicator:
    """`dcp_core.coordination.broadcast_group.Communicator` whose wires are arrays of bytes in host memory.

    Nothing of it blocks but the transfer itself. A member that is gone is noticed by the time limit of the group.

    Args:
        store: The job's.
        name: Of the group, new in the store.
        ranks: Global ranks of its members.
        rank: Global rank of this one.
    """

    is_made = True
    gives_up_itself = False

    def __init__(self, store: Store, name: str, ranks: Sequence[int], rank: int) -> None:
        self.store = PrefixedStore(name, store)
        self.ranks = tuple(ranks)
        self.rank = rank
        self._count = 0
        self._left: dict[int, int] = {}

    def start(self, wire: Wire, source: int, timeout_seconds: float) -> Any:
        """Start a broadcast of bytes; the source is a global rank.

        Raises:
            RuntimeError: The store failed.
        """
        number, self._count = self._count, self._count + 1
        if source != self.rank:
            return _Receiving(self, number, source, wire)
        parts = -(-wire.nbytes // PART_BYTES)
        self._left[number] = parts
        for part in range(parts):
            self.store.set(f"{number}/{part}", wire[part * PART_BYTES : (part + 1) * PART_BYTES].tobytes())
        self.store.set(str(number), _HEAD.pack(source, wire.nbytes))
        return _Sending(self, number)

    def abort(self) -> None:
        """Nothing: no operation blocks."""

    def end(self) -> None:
        """Nothing: what others may still take stays until `remove`."""

    def forget(self, number: int) -> None:
        """Remove a broadcast of this rank that every member has done with."""
        for part in range(self._left.pop(number)):
            self.store.delete_key(f"{number}/{part}")
        self.store.delete_key(str(number))
        self.store.delete_key(f"{number}/taken")

    def remove(self) -> None:
        """Remove what this rank left, once every member has ended the load."""
        for number in sorted(self._left):
            self.forget(number)


class _Looking:
    """Part of a broadcast that looks at the store now and then, as often as that can bear."""

    def __init__(self, group: StoreCommunicator, number: int) -> None:
        self.group = group
        self.number = number
        self._pause = max(_SHORTEST_SECONDS, len(group.ranks) / _LOOKS_A_SECOND)
        self._look_at = 0.0
        self._is_completed = False
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if not self._is_completed and time.monotonic() >= self._look_at:
            try:
                self._is_completed = self.look()
            except (RuntimeError, ValueError) as error:
                self._is_completed, self._error = True, error
            self._look_at = time.monotonic() + self._pause
        return self._is_completed

    def wait(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error

    def look(self) -> bool:
        raise NotImplementedError


class _Sending(_Looking):
    """Until every other member has the bytes."""

    def look(self) -> bool:
        if self.group.store.add(f"{self.number}/taken", 0) < len(self.group.ranks) - 1:
            return False
        self.group.forget(self.number)
        return True


class _Receiving(_Looking):
    """Until the bytes are here."""

    def __init__(self, group: StoreCommunicator, number: int, source: int, wire: Wire) -> None:
        super().__init__(group, number)
        self._expected = (source, wire.nbytes)
        self._wire = wire

    def look(self) -> bool:
        store = self.group.store
        if not store.check([str(self.number)]):
            return False
        found = _HEAD.unpack(store.get(str(self.number)))
        if found != self._expected:
            raise RuntimeError(
                f"broadcast {self.number} has source and bytes {self._expected} here and {found} on rank {found[0]}; "
                "members must start the same broadcasts"
            )
        for at in range(0, self._wire.nbytes, PART_BYTES):
            part = store.get(f"{self.number}/{at // PART_BYTES}")
            self._wire[at : at + PART_BYTES] = np.frombuffer(part, np.uint8)
        store.add(f"{self.number}/taken", 1)
        return True
