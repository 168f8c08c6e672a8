"""The suite of an adapter's process group: every rank knows its place, and the channel connects all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dcp_core.adapter import Adapter, ProcessGroup, drain
from dcp_core.coordination.exchange import Exchange
from dcp_core.testing.conformance.suite import RankedSuite
from dcp_core.testing.ranks import RankContext

_DRAIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Place:
    """What a rank says of its group."""

    rank: int
    world_size: int
    global_rank: int
    key: str


class GroupConformance(RankedSuite):
    """Tests of `Adapter.process_group`. `in_rank` starts the framework's job, and gives the adapter.

    Attributes:
        patience_seconds: How long something may take that should happen at once.
    """

    patience_seconds = 20.0

    def test_every_rank_knows_its_place(self) -> None:
        """Ranks count from 0, the world is all of them, and the group has one name in a process."""
        for world_size in (2, 4):
            found = self.run_in_ranks(self._tell_places, world_size)
            for rank, (with_channel, without) in enumerate(found):
                assert (with_channel.rank, with_channel.world_size) == (rank, world_size)
                assert (without.rank, without.world_size) == (rank, world_size)
                assert with_channel.global_rank == without.global_rank == rank

    def _tell_places(self, context: RankContext, adapter: Adapter) -> tuple[_Place, _Place]:
        """A job: what the group says, with and without a channel."""
        group = adapter.process_group()
        found = _place(group), _place(adapter.process_group(None, with_channel=False))
        self._leave(group)
        return found

    def test_a_job_of_one_rank_has_a_group_of_one(self) -> None:
        """It needs no channel."""
        assert self.run_in_ranks(self._tell_whether_alone, 1) == [(0, 1, True)]

    def _tell_whether_alone(self, context: RankContext, adapter: Adapter) -> tuple[int, int, bool]:
        """A job: rank, world size, and whether there is no channel."""
        group = adapter.process_group()
        return group.rank, group.world_size, group.channel is None

    def test_the_group_is_made_once_in_a_process(self) -> None:
        """Saves of one group share its channel and what is kept under its name."""
        if self.run_in_ranks(self._ask_twice, 2) != [True, True]:
            pytest.fail(
                "process_group makes a new channel, or another key, for a second call on the same group: keep the "
                "group that was made, by what tells it from others"
            )

    def _ask_twice(self, context: RankContext, adapter: Adapter) -> bool:
        """A job: whether the second answer is the first one."""
        first, second = adapter.process_group(), adapter.process_group()
        self._leave(first)
        return first.channel is second.channel and first.key == second.key

    def test_the_channel_connects_all_ranks(self) -> None:
        """Small and large messages reach the coordinator, and its answers all ranks."""
        expected = [[(rank, size) for rank in range(4)] for size in (0, 100, 9 << 20)]
        assert self.run_in_ranks(self._gather_over_the_channel, 4) == [expected] * 4

    def _gather_over_the_channel(self, context: RankContext, adapter: Adapter) -> list[list[tuple[int, int]]]:
        """A job: gather messages of several sizes; gives who sent how much, as the coordinator told."""
        group = adapter.process_group()
        assert group.channel is not None
        exchange = Exchange(
            group.rank, group.world_size, group.channel, key="conformance", timeout_seconds=self.patience_seconds
        )
        found = []
        for size in (0, 100, 9 << 20):
            told = exchange.run("gather", bytes([group.rank]) * (size + 1), compute=_tell_senders)
            found.append([(sender, int(length)) for sender, length in enumerate(told.decode().split(","))])
        self._leave(group)
        return found

    def test_the_channel_for_background_processes_connects_them(self) -> None:
        """`ProcessGroup.remote`, where there is one, opens a channel of its own in another process."""
        assert self.run_in_ranks(self._open_remote, 2) in ([b"10"] * 2, [None] * 2)

    def _open_remote(self, context: RankContext, adapter: Adapter) -> bytes | None:
        """A job: exchange messages over the channel that background processes get, where there is one."""
        group = adapter.process_group()
        found = None
        if group.remote is not None:
            channel = group.remote.open()
            channel.put(f"from-{group.rank}", str(group.rank).encode())
            received = [channel.wait(f"from-{rank}", self.patience_seconds) for rank in (1, 0)]
            found = b"".join(message or b"nothing" for message in received)
        self._leave(group)
        return found

    def _leave(self, group: ProcessGroup) -> None:
        """Meet once more: a rank may host what carries the others' messages."""
        exchange = Exchange(
            group.rank, group.world_size, group.channel, key="leave", timeout_seconds=self.patience_seconds
        )
        exchange.run("leave")
        drain(group.channel, _DRAIN_SECONDS)


def _place(group: ProcessGroup) -> _Place:
    return _Place(group.rank, group.world_size, group.global_rank, group.key)


def _tell_senders(payloads: Any) -> bytes:
    """Lengths without the first byte, by sender; that every byte says who sent it is checked."""
    for rank, payload in enumerate(payloads):
        if payload.count(bytes([rank])) != len(payload):
            raise AssertionError(f"a message of rank {rank} came as another")
    return ",".join(str(len(payload) - 1) for payload in payloads).encode()
