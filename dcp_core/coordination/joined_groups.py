"""The groups that this process has joined at a store. It leaves them when the others have read what it posted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Sequence
from multiprocessing.util import Finalize
from typing import Generic, Protocol, TypeVar

import xxhash

from dcp_core.coordination.store_channel import StoreChannel


class _Joined(Protocol):
    @property
    def channel(self) -> object: ...


Group = TypeVar("Group", bound=_Joined)
"""What an adapter says of a group: a `dcp_core.adapter.ProcessGroup`."""


class JoinedGroups(Generic[Group]):
    """The groups of a process in one life of its job. At the end of the process it leaves them.

    Attributes:
        process: Id of the process; one that is forked from it has joined nothing.
        groups: The groups, by what tells them apart in the adapter.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self._process_now = os.getpid  # at the end of the interpreter `os` may be gone before this object
        self.groups: dict[Hashable, Group] = {}
        Finalize(self, self.leave, exitpriority=0)  # also in children of multiprocessing, which skip atexit

    def leave(self) -> None:
        """Let the others read what this process posted, then drop the channels: a store may live in this process."""
        groups, self.groups = self.groups, {}
        if self.process != self._process_now():
            return
        for group in groups.values():
            if isinstance(group.channel, StoreChannel):
                with contextlib.suppress(Exception):
                    group.channel.drain()


def group_prefix(ranks: Sequence[int]) -> str:
    """What the names of all messages of a group begin with, whichever life of it they are of.

    Args:
        ranks: Its members in the job, in the order of the group.
    """
    digest = xxhash.xxh3_64_hexdigest(",".join(map(str, ranks)).encode())
    return f"dcp/{digest}"
