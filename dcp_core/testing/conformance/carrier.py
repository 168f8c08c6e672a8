"""The suite of a coordination carrier: a `KeyValueChannel` loses, tears, mixes and delays nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core.adapter import KeyValueChannel, drain
from dcp_core.coordination.exchange import Exchange
from dcp_core.errors import CoordinationTimeoutError, DcpError, StorageError
from dcp_core.testing.conformance.suite import RankedSuite
from dcp_core.testing.ranks import RankContext

_SIZES = (0, 1, 1000, 70_000, 9 << 20)
_LONG_NAME = "a-name." + "0123456789" * 10
_MESSAGES = 40
_DRAIN_SECONDS = 2.0


def _payload(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def _sizes(seed: int) -> list[int]:
    """Sizes of the messages of one rank: mostly small, some large."""
    return [int(size) for size in np.random.default_rng(seed).choice([0, 3, 500, 20_000, 300_000], _MESSAGES)]


class CarrierConformance(RankedSuite):
    """Tests of a `KeyValueChannel`. Derive from it and say how a rank opens one.

    Attributes:
        patience_seconds: How long something may take that should happen at once.
    """

    patience_seconds = 20.0

    def open_channel(self, place: Path, rank: int, world_size: int) -> KeyValueChannel:
        """Open one rank's end of a board.

        Several ends of one board are opened in one process and in several.

        Args:
            place: A directory that all ends of a board share; another one for every test.
            rank: Whose end.
            world_size: How many ends there are.
        """
        raise NotImplementedError

    @pytest.fixture
    def ends(self, tmp_path: Path) -> list[KeyValueChannel]:
        """Three ends of one board, in this process."""
        return [self.open_channel(tmp_path, rank, 3) for rank in range(3)]

    # -- messages --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_a_message_comes_as_it_was_posted(self, ends: list[KeyValueChannel], nbytes: int) -> None:
        """In either direction, whatever its size."""
        for sender, reader in ((0, 1), (1, 0), (2, 1)):
            name, payload = f"message-{sender}", _payload(nbytes, sender)
            ends[sender].put(name, payload)
            received = ends[reader].wait(name, self.patience_seconds)
            assert isinstance(received, bytes)
            assert received == payload

    def test_a_message_is_read_by_everybody_and_again(self, ends: list[KeyValueChannel]) -> None:
        """The coordinator's answer is one message, and all read it."""
        ends[0].put("answer", b"for all")
        assert [end.wait("answer", self.patience_seconds) for end in (*ends, *ends)] == [b"for all"] * 6

    def test_a_reader_that_waits_already_gets_what_comes(self, ends: list[KeyValueChannel]) -> None:
        """Waiting ends when the message is there."""
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(end.wait, "late", self.patience_seconds) for end in ends[1:]]
            time.sleep(0.1)  # whichever comes first, both must work
            ends[0].put("late", b"here")
            assert [found.result() for found in waiting] == [b"here", b"here"]

    def test_a_message_that_is_there_takes_no_time(self, ends: list[KeyValueChannel]) -> None:
        """A wait looks at least once, however short its time."""
        ends[0].put("there", b"x")
        ends[0].wait("there", self.patience_seconds)
        assert ends[0].wait("there", 0.0) == b"x"
        deadline = time.monotonic() + self.patience_seconds
        while ends[1].wait("there", 0.0) is None:  # a board may take a moment to show it to others
            assert time.monotonic() < deadline

    def test_names_are_not_mixed_up(self, ends: list[KeyValueChannel]) -> None:
        """Names that begin alike, differ in a sign, or are long."""
        names = ["a", "a.1", "a.10", "a-1", "a.1.0", "1", "0f3a", "A", _LONG_NAME, _LONG_NAME + "1"]
        for name in names:
            ends[0].put(name, name.encode())
        assert [ends[1].wait(name, self.patience_seconds) for name in names] == [name.encode() for name in names]
        assert ends[1].wait("a.2", 0.0) is None

    # -- waiting ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("seconds", [0.0, 0.05, 0.7])
    def test_what_does_not_come_is_none_when_the_time_is_up(self, ends: list[KeyValueChannel], seconds: float) -> None:
        """Not earlier, and not much later: a rank that is missing is found out by this."""
        for end in ends:
            began = time.monotonic()
            assert end.wait("never", seconds) is None
            waited = time.monotonic() - began
            assert seconds - 0.01 <= waited < seconds + self.patience_seconds

    def test_several_threads_wait_and_post_at_a_time(self, ends: list[KeyValueChannel]) -> None:
        """Also through one end."""

        def talk(number: int) -> bytes | None:
            ends[number % 2].put(f"from-{number}", str(number).encode())
            return ends[(number + 1) % 2].wait(f"from-{(number + 1) % 8}", self.patience_seconds)

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(talk, range(8))) == [str((number + 1) % 8).encode() for number in range(8)]

    # -- removal ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("nbytes", [1, 9 << 20])
    def test_a_removed_message_is_gone(self, ends: list[KeyValueChannel], nbytes: int) -> None:
        """For everybody, whoever removes it."""
        for number, remover in enumerate(ends):
            name = f"gone-{number}"
            ends[0].put(name, _payload(nbytes))
            assert ends[1].wait(name, self.patience_seconds) is not None
            remover.delete(name)
            self._await_absence(ends, name)

    def test_removing_what_is_not_there_is_fine(self, ends: list[KeyValueChannel]) -> None:
        """Never there, or removed before."""
        for end in ends:
            end.delete("never")
        ends[0].put("once", b"x")
        for _ in range(2):
            ends[1].delete("once")
        assert ends[0].wait("once", 0.0) is None

    def test_a_name_that_is_used_again_has_its_new_content(self, ends: list[KeyValueChannel]) -> None:
        """Nothing old is delivered."""
        for turn in range(5):
            payload = _payload(1000, turn)
            ends[turn % 3].put("again", payload)
            assert [end.wait("again", self.patience_seconds) for end in ends] == [payload] * 3
            ends[(turn + 1) % 3].delete("again")
            self._await_absence(ends, "again")

    def test_boards_of_different_places_are_apart(self, tmp_path: Path) -> None:
        """Two jobs, or two groups, don't hear each other."""
        places = [tmp_path / "one", tmp_path / "two"]
        for place in places:
            place.mkdir()
        one, two = (self.open_channel(place, 0, 2) for place in places)
        one.put("a", b"one")
        assert two.wait("a", 0.0) is None
        two.put("a", b"two")
        assert (one.wait("a", 1.0), two.wait("a", 1.0)) == (b"one", b"two")

    # -- processes -------------------------------------------------------------------------------------------------

    def test_no_message_between_processes_is_lost_or_torn(self) -> None:
        """Every rank posts many of all sizes, and reads those of all others."""
        assert self.run_in_ranks(self._exchange_many, 3) == [[], [], []]

    def _exchange_many(self, context: RankContext, given: Any) -> list[str]:
        """A job: post, then read; gives what is wrong."""
        channel = self._end_of(context)
        for number, nbytes in enumerate(_sizes(context.rank)):
            channel.put(f"from-{context.rank}.{number}", _payload(nbytes, number))
        wrong = []
        for other in range(context.world_size):
            for number, nbytes in enumerate(_sizes(other)):
                received = channel.wait(f"from-{other}.{number}", self.patience_seconds)
                if received != _payload(nbytes, number):
                    found = "nothing" if received is None else f"{len(received)} bytes"
                    wrong.append(f"{number} of rank {other}: {found} for {nbytes} bytes")
        self._leave(channel, context)
        return wrong

    def test_a_message_is_seen_whole_or_not_at_all(self) -> None:
        """However often somebody looks while it is being posted."""
        assert self.run_in_ranks(self._look_while_it_is_posted, 2) == [[], []]

    def _look_while_it_is_posted(self, context: RankContext, given: Any) -> list[str]:
        """A job: rank 0 posts large messages, rank 1 looks without a pause; gives what is wrong."""
        channel = self._end_of(context)
        wrong = []
        for turn in range(12):
            payload = _payload((5 << 20) + turn, turn)
            if context.rank == 0:
                channel.put(f"large-{turn}", payload)
                continue
            received = None
            deadline = time.monotonic() + self.patience_seconds
            while received is None and time.monotonic() < deadline:
                received = channel.wait(f"large-{turn}", 0.0)
            if received != payload:
                wrong.append(f"{turn}: {'nothing' if received is None else len(received)} for {len(payload)} bytes")
        self._leave(channel, context)
        return wrong

    def test_exchanges_run_over_it(self) -> None:
        """Rounds of the protocol: every payload reaches the coordinator, every answer its rank."""
        assert self.run_in_ranks(self._run_exchanges, 4) == [[[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]] * 4

    def _run_exchanges(self, context: RankContext, given: Any) -> list[list[int]]:
        """A job: gather a number of every rank, three times; gives what the coordinator told."""
        channel = self._end_of(context)
        exchange = Exchange(
            context.rank, context.world_size, channel, key="rounds", timeout_seconds=self.patience_seconds
        )
        found = []
        for turn in range(3):
            answer = exchange.run("gather", bytes([10 * turn + context.rank]), compute=b"".join)
            found.append(list(answer))
        self._leave(channel, context)
        return found

    def test_an_error_of_one_rank_reaches_all(self) -> None:
        """As an error of its class, that names the rank."""
        found = self.run_in_ranks(self._fail_on_one, 3)
        assert [kind for kind, _ in found] == ["StorageError"] * 3
        assert all("rank 2: the disk is full" in message for _, message in found)

    def _fail_on_one(self, context: RankContext, given: Any) -> tuple[str, str]:
        """A job: rank 2 hands an error into an exchange; gives what it raises."""
        error = StorageError("the disk is full") if context.rank == 2 else None
        return self._raised_by_exchange(context, error, self.patience_seconds)

    def test_a_rank_that_does_not_come_is_named_in_time(self) -> None:
        """The others give up when their time is up."""
        found = self.run_in_ranks(self._miss_one, 3)
        assert found[1] == ("", "")
        for rank in (0, 2):
            assert found[rank][0] == CoordinationTimeoutError.__name__
            assert "rank 1" in found[rank][1]

    def _miss_one(self, context: RankContext, given: Any) -> tuple[str, str]:
        """A job: rank 1 stays away; gives what the exchange raises on the others."""
        return ("", "") if context.rank == 1 else self._raised_by_exchange(context, None, 1.0)

    def _raised_by_exchange(self, context: RankContext, error: DcpError | None, seconds: float) -> tuple[str, str]:
        channel = self._end_of(context)
        exchange = Exchange(context.rank, context.world_size, channel, key="errors", timeout_seconds=seconds)
        raised: BaseException | None = None
        try:
            exchange.run("stage", b"", error=error)
        except DcpError as found:
            raised = found
        drain(channel, _DRAIN_SECONDS)
        return type(raised).__name__, str(raised)

    # -- leaving ---------------------------------------------------------------------------------------------------

    def test_leaving_takes_bounded_time(self, ends: list[KeyValueChannel]) -> None:
        """A channel that can wait until its messages are read does so for the time that it is given."""
        ends[0].put("unread", b"x")
        for end in ends:
            began = time.monotonic()
            drain(end, 0.2)
            assert time.monotonic() - began < 0.2 + self.patience_seconds

    def _end_of(self, context: RankContext) -> KeyValueChannel:
        return self.open_channel(context.channel_directory, context.rank, context.world_size)

    def _leave(self, channel: KeyValueChannel, context: RankContext) -> None:
        """Rank 0 stays until everybody has read everything: it may host what carries the messages."""
        if context.rank:
            channel.put(f"left-{context.rank}", b"")
            channel.wait("left", self.patience_seconds)
            return
        for rank in range(1, context.world_size):
            channel.wait(f"left-{rank}", self.patience_seconds)
        channel.put("left", b"")
        drain(channel, _DRAIN_SECONDS)

    def _await_absence(self, ends: list[KeyValueChannel], name: str) -> None:
        self._await(lambda: all(end.wait(name, 0.0) is None for end in ends), f"{name} is still delivered")

    def _await(self, condition: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + self.patience_seconds
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < deadline, problem
            pause.wait(0.005)
