"""Where the members of one group of a load meet: names in the job's store.

Members gather there before they make a group, since a backend that waits for a member which does not come cannot be
interrupted, and does not say which one. And a member that gives the group up says so there: another one that waits for
a third, which is still there, would learn of it only when its time is up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import xxhash
from torch.distributed import DistNetworkError, PrefixStore  # type: ignore[attr-defined]  # no list of exports

_FIRST_PAUSE_SECONDS = 0.0003
_LONGEST_PAUSE_SECONDS = 0.02
_LOOK_SECONDS = 0.5
_LOOKS_A_SECOND = 4000
_FAILED = "failed"


class Meeting:
    """What one rank does and sees there.

    Args:
        store: The job's, on a connection that nobody waits on.
        prefix: Of the load, and of the type of device.
        ranks: Global ranks of the members.
        rank: Global rank of this one.
    """

    def __init__(self, store: Any, prefix: str, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.name = f"{prefix}/{xxhash.xxh3_128_hexdigest(','.join(map(str, ranks)).encode())}"
        self.store = PrefixStore(f"{self.name}/backend", store)
        self._board: Any = PrefixStore(self.name, store)
        self._has_gathered = False
        self._has_failed = False

    @property
    def look_seconds(self) -> float:
        """Between two looks at whether another member has failed, so that the store keeps up."""
        return max(_LOOK_SECONDS, len(self.ranks) / _LOOKS_A_SECOND)

    def gather(self, timeout_seconds: float) -> tuple[int, ...]:
        """Wait for all members to be here; returns those that did not come in time.

        Raises:
            RuntimeError: The store failed.
        """
        self._has_gathered = True
        self._board.set(_here(self.rank), b"")
        names = [_here(rank) for rank in self.ranks]
        began = time.monotonic()
        while not self._board.check(names):
            waited = time.monotonic() - began
            if waited > timeout_seconds:
                return tuple(rank for rank in self.ranks if not self._board.check([_here(rank)]))
            time.sleep(min(max(waited / 10, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS))
        return ()

    def fail(self, reason: str) -> None:
        """Tell the others that the group is of no use any more; what was told first stays.

        Raises:
            RuntimeError: The store failed.
        """
        if not self._board.check([_FAILED]):
            self._board.set(_FAILED, reason.encode())
            self._has_failed = True

    def failure(self) -> str:
        """What another member has told; nothing if none has. The job's store being gone is one, too."""
        try:
            told: bytes = self._board.get(_FAILED) if self._board.check([_FAILED]) else b""
        except DistNetworkError as error:
            return f"the store of the job is gone: {' '.join(str(error).split())}"
        return told.decode()

    def remove(self) -> None:
        """Remove what this rank left, once every member has ended the load.

        Raises:
            RuntimeError: The store failed.
        """
        if self._has_gathered:
            self._board.delete_key(_here(self.rank))
            own = self.ranks.index(self.rank)
            self.store.delete_key(f"0/{own}")  # of gloo: where it listens
            if own == 0:
                self.store.delete_key("0")  # of NCCL and its like: the id of the communicator
        if self._has_failed:
            self._board.delete_key(_FAILED)


def _here(rank: int) -> str:
    return f"here/{rank}"
