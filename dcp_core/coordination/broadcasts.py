"""How buffers travel between ranks: broadcasts of bytes within groups that are given, found, or made for a load.

Goes in: ranks, and what type of device their buffers lie on. Comes out: a `dcp_core.adapter.BroadcastGroup`. What
carries the bytes is the framework's: a subclass finds it, or makes it where the members of a group meet.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from dcp_core.coordination.broadcast_group import REMEDY, BroadcastGroup, Communicator, first_clause, reason_of, shown
from dcp_core.coordination.meeting import Meeting
from dcp_core.coordination.store import Store
from dcp_core.errors import ArgumentError, CoordinationError, CoordinationTimeoutError

M = TypeVar("M", bound=Meeting)
G = TypeVar("G", bound=BroadcastGroup)


class StoreBroadcasts(ABC, Generic[M, G]):
    """What is the same in every `dcp_core.adapter.Broadcasts` whose groups meet at a store.

    Args:
        prefix: Goes before every name in the store.
        rank: Global rank of this process.
    """

    def __init__(self, prefix: str, rank: int) -> None:
        self.rank = rank
        self._prefix = prefix
        self._token = ""
        self._meetings: list[M] = []
        self._connection: Store | None = None

    @abstractmethod
    def kind(self, device: str) -> str | None:
        """Name what carries broadcasts of memory on a type of device; None: nothing does."""

    @abstractmethod
    def carries(self, view: Any) -> bool:
        """Whether a value is a tensor of the framework."""

    @abstractmethod
    def connect(self) -> Store:
        """A connection to the store, so that nothing here holds up the trainer's use of it."""

    @abstractmethod
    def meeting(self, store: Store, load: str, device: str, ranks: tuple[int, ...]) -> M:
        """Where the members of a group meet."""

    @abstractmethod
    def group(self, communicator: Communicator, meeting: M, timeout_seconds: float) -> G:
        """A group over a communicator."""

    @abstractmethod
    def find(self, given: Any, device: str, meeting: M) -> Communicator | None:
        """What a group that was given carries this type of device by; None: it does not.

        Raises:
            RuntimeError, KeyError, TypeError, ValueError: The group is gone.
        """

    @abstractmethod
    def make(
        self, backend: str, device: str, meeting: M, ranks: tuple[int, ...], timeout_seconds: float
    ) -> Communicator:
        """Make what carries this type of device; all members are here, and do so at the same time.

        Raises:
            RuntimeError: It could not be made.
        """

    @abstractmethod
    def checked_group(self, ranks: tuple[int, ...], group: Any) -> Any:
        """A group that a caller passed for some ranks, or what it stands for.

        Raises:
            ArgumentError: It is no group, is gone, or has other members.
        """

    def given_groups(self, groups: Mapping[tuple[int, ...], Any]) -> Mapping[tuple[int, ...], Any]:
        """Check the groups that a caller passed.

        Raises:
            ArgumentError: A key is no tuple of ranks, or its group is none, is gone, or has other members.
        """
        found: dict[tuple[int, ...], Any] = {}
        for key, group in groups.items():
            ranks = _sorted_ranks(key)
            if ranks in found:
                raise ArgumentError(f"broadcast_groups has two groups for the ranks {shown(ranks)}; leave one out")
            if self.rank in ranks:
                found[ranks] = self.checked_group(ranks, group)
        return found

    def open(
        self, ranks: tuple[int, ...], given: Any | None, timeout_seconds: float, *, token: str, device: str = "cpu"
    ) -> G:
        """Open a group; see `dcp_core.adapter.Broadcasts`.

        Raises:
            CoordinationError: Members did not come in time, or the group could not be made.
        """
        if self.rank not in ranks or list(ranks) != sorted(set(ranks)):
            raise ArgumentError(
                f"rank {self.rank} opens a group of the ranks {ranks}: they must ascend, this one in them"
            )
        meeting = self._meet(ranks, token, device)
        try:
            communicator = self._find(meeting, given, device) or self._make(meeting, ranks, device, timeout_seconds)
        except CoordinationError as error:
            with contextlib.suppress(RuntimeError):
                meeting.give_up(first_clause(error))
            raise
        return self.group(communicator, meeting, timeout_seconds)

    def give_up(self, ranks: tuple[int, ...], reason: str, *, token: str, device: str = "cpu") -> None:
        """Tell the members of a group that this rank will not open it; see `dcp_core.adapter.Broadcasts`."""
        with contextlib.suppress(RuntimeError):
            meeting = self._meet(ranks, token, device)
            meeting.give_up(reason)
            meeting.fail(reason)

    def _meet(self, ranks: tuple[int, ...], token: str, device: str) -> M:
        if token != self._token:
            self._forget_meetings()
            self._token = token
        meeting = self.meeting(self._connected(), f"{self._prefix}/{token}", device, ranks)
        self._meetings.append(meeting)
        return meeting

    def _find(self, meeting: M, given: Any | None, device: str) -> Communicator | None:
        if given is None:
            return None
        try:
            return self.find(given, device, meeting)
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise CoordinationError(
                f"rank {self.rank} does not have the group of ranks {shown(meeting.ranks)} any more that it had when "
                f"the load began ({error}); let no other thread destroy process groups while a load runs"
            ) from error

    def _make(self, meeting: M, ranks: tuple[int, ...], device: str, timeout_seconds: float) -> Communicator:
        backend = self.kind(device)
        if backend is None:
            raise CoordinationError(f"no backend of this job broadcasts tensors on {device!r}; {REMEDY}")
        what = f"rank {self.rank} could not make a {backend} group of ranks {shown(ranks)}"
        try:
            missing = meeting.gather(timeout_seconds)
            if not missing:
                made = self.make(backend, device, meeting, ranks, timeout_seconds)
                meeting.ready()
                return made
        except RuntimeError as error:
            raise CoordinationError(f"{what}: {reason_of(error)}; {REMEDY}") from error
        raise CoordinationTimeoutError(
            f"{what}: ranks {shown(missing)} did not come within {timeout_seconds:g} s; {REMEDY}"
        )

    def _forget_meetings(self) -> None:
        """Remove what this rank left in the store for an earlier load, which every rank has ended by now."""
        meetings, self._meetings = self._meetings, []
        for meeting in meetings:
            with contextlib.suppress(RuntimeError):
                meeting.remove()

    def _connected(self) -> Store:
        if self._connection is None:
            self._connection = self.connect()
        return self._connection


def _sorted_ranks(key: Any) -> tuple[int, ...]:
    is_ranks = isinstance(key, tuple) and len(key) > 0 and all(type(rank) is int and rank >= 0 for rank in key)
    if not is_ranks or len(set(key)) != len(key):
        raise ArgumentError(
            f"broadcast_groups has the key {key!r}: it must be a tuple of the global ranks of a group, each once"
        )
    return tuple(sorted(key))
