"""Where the members of one group of a load meet: names in the job's store.

Members gather there before they make a group, since a backend that waits for a member which does not come cannot be
interrupted, and does not say which one. And a member that gives up says so there: others that wait for a third, which
is still there, would learn of it only when their time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import xxhash

from dcp_core.coordination.store import PrefixedStore, Store

_FIRST_PAUSE_SECONDS = 0.0003
_LONGEST_PAUSE_SECONDS = 0.02
_LOOK_SECONDS = 0.5
_LOOKS_A_SECOND = 4000
_CHECKS_A_SECOND = 20_000
_SETTLE_SECONDS = 30.0
_COUNT = "count"
_READY = "ready"
_FAILED = "failed"


class Meeting:
    """What one rank does and sees there.

    Args:
        store: The job's, on a connection that nobody waits on.
        load: Prefix of the load.
        device: What type of device the group is for.
        ranks: Global ranks of the members.
        rank: Global rank of this one.

    Attributes:
        name: Of the group, new in the store.
        has_gathered: Whether `gather` was called.
        leftovers: What else `remove` does.
    """

    def __init__(self, store: Store, load: str, device: str, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.name = f"{load}/{device}/{xxhash.xxh3_128_hexdigest(','.join(map(str, ranks)).encode())}"
        self._board = PrefixedStore(self.name, store)
        self._board_of_all = PrefixedStore(load, store)
        self._told: list[PrefixedStore] = []
        self.has_gathered = False
        self.leftovers: list[Callable[[], None]] = []
        self._is_removed = False

    @property
    def look_seconds(self) -> float:
        """Between two looks at whether another member has failed, so that the store keeps up."""
        return max(_LOOK_SECONDS, len(self.ranks) / _LOOKS_A_SECOND)

    def gather(self, timeout_seconds: float) -> tuple[int, ...]:
        """Wait for all members to be here; returns those that did not come in time.

        Either every member finds all of them here, or none does that came late.

        Raises:
            RuntimeError: The store failed, or a rank of the load has given up.
        """
        self.has_gathered = True
        self._board.set(_here(self.rank), "")
        came = self._board.add(_COUNT, 1)
        shortest = max(_FIRST_PAUSE_SECONDS, len(self.ranks) / _CHECKS_A_SECOND)
        longest = max(_LONGEST_PAUSE_SECONDS, shortest)
        began = looked_at = time.monotonic()
        while came < len(self.ranks):
            now = time.monotonic()
            reason = ""
            if now - looked_at > self.look_seconds:
                looked_at = now
                reason = _read(self._board_of_all)
            if (reason or now - began > timeout_seconds) and self._withdraw():
                if reason:
                    raise RuntimeError(reason)
                return tuple(rank for rank in self.ranks if not self._board.check([_here(rank)]))
            time.sleep(min(max((now - began) / 10, shortest), longest))
            came = self._board.add(_COUNT, 0)
        return ()

    def _withdraw(self) -> bool:
        """Be counted no more, so that whoever comes later waits in vain; False if all have come meanwhile."""
        if self._board.add(_COUNT, -1) < len(self.ranks) - 1:
            return True
        self._board.add(_COUNT, 1)
        return False

    def ready(self) -> None:
        """Note that this member has made the group.

        Raises:
            RuntimeError: The store failed.
        """
        self._board.add(_READY, 1)

    def await_ready(self, timeout_seconds: float) -> None:
        """Wait a while for all members to have made the group: one that is left while it does so would fail.

        Raises:
            RuntimeError: The store failed.
        """
        deadline = time.monotonic() + min(timeout_seconds, _SETTLE_SECONDS)
        while not self._is_removed and self._board.add(_READY, 0) < len(self.ranks):
            if time.monotonic() > deadline or _read(self._board):
                return
            time.sleep(_LONGEST_PAUSE_SECONDS)

    def give_up(self, reason: str) -> None:
        """Tell all ranks of the load that still gather, in whatever group.

        Raises:
            RuntimeError: The store failed.
        """
        self._tell(self._board_of_all, reason)

    def fail(self, reason: str) -> None:
        """Tell the other members that the group is of no use any more.

        Raises:
            RuntimeError: The store failed.
        """
        self._tell(self._board, reason)

    def failure(self) -> str:
        """What another member has told; nothing if none has. That the store does not answer is a failure, too."""
        try:
            return _read(self._board)
        except RuntimeError as error:
            return f"the store of the job does not answer: {' '.join(str(error).split())}"

    def remove(self) -> None:
        """Remove what this rank left, once every member has ended the load.

        Raises:
            RuntimeError: The store failed.
        """
        if self.has_gathered:
            self._board.delete_key(_here(self.rank))
            if self.rank == self.ranks[0]:
                self._board.delete_key(_COUNT)
                self._board.delete_key(_READY)
        for board in self._told:
            board.delete_key(_FAILED)
        for remove in self.leftovers:
            remove()
        self._is_removed = True

    def _tell(self, board: PrefixedStore, reason: str) -> None:
        """Put a reason on a board; what was told first stays."""
        if not board.check([_FAILED]):
            board.set(_FAILED, reason)
            self._told.append(board)


def _read(board: PrefixedStore) -> str:
    told: bytes = board.get(_FAILED) if board.check([_FAILED]) else b""
    return told.decode()


def _here(rank: int) -> str:
    return f"here/{rank}"
