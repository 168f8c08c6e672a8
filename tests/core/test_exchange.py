from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.adapter import KeyValueChannel
from dcp_core.coordination import star
from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.coordination.exchange import Answers, Exchange
from dcp_core.coordination.frames import FRAME_BYTES, Frame, FrameKind, decode_frame, encode_frame, pack, unpack
from dcp_core.coordination.star import SETTLE_SECONDS
from dcp_core.coordination.verdict import name_ranks
from dcp_core.errors import (
    ArgumentError,
    ArgumentsDifferError,
    CoordinationError,
    CoordinationTimeoutError,
    DcpError,
    InDoubtError,
    RankFailedError,
    ShapeMismatchError,
    StorageError,
)
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks

pytestmark = pytest.mark.timeout(60)

_keys = itertools.count()


class MemoryBoard:
    """A channel between threads."""

    def __init__(self) -> None:
        self.messages: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.overwritten: list[str] = []

    def put(self, name: str, payload: bytes) -> None:
        with self.changed:
            if name in self.messages:
                self.overwritten.append(name)
            self.messages[name] = payload
            self.changed.notify_all()

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        with self.changed:
            self.changed.wait_for(lambda: name in self.messages, timeout_seconds)
            return self.messages.get(name)

    def delete(self, name: str) -> None:
        with self.changed:
            self.messages.pop(name, None)


class BrokenBoard(MemoryBoard):
    """A channel whose operation of a kind fails, on names that end with a suffix."""

    def __init__(self, shared: MemoryBoard, operation: str, suffix: str = "") -> None:
        super().__init__()
        self.messages, self.changed = shared.messages, shared.changed
        self.operation, self.suffix = operation, suffix

    def _check(self, operation: str, name: str) -> None:
        if operation == self.operation and name.endswith(self.suffix):
            raise ConnectionResetError(f"{operation} failed")

    def put(self, name: str, payload: bytes) -> None:
        self._check("put", name)
        super().put(name, payload)

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        self._check("wait", name)
        return super().wait(name, timeout_seconds)

    def delete(self, name: str) -> None:
        self._check("delete", name)
        super().delete(name)


class Group:
    """Ranks as threads over one board."""

    def __init__(self, world_size: int, timeout_seconds: float = 20.0, board: MemoryBoard | None = None) -> None:
        self.world_size = world_size
        self.board = MemoryBoard() if board is None else board
        self.boards: dict[int, MemoryBoard] = {}
        self.timeout_seconds = timeout_seconds
        self.key = f"test-{next(_keys)}"

    def exchange(self, rank: int) -> Exchange:
        board = self.boards.get(rank, self.board)
        return Exchange(rank, self.world_size, board, key=self.key, timeout_seconds=self.timeout_seconds)

    def run(self, body: Callable[[Exchange], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """What `body` returned, or raised, on each rank that takes part."""
        taking_part = list(range(self.world_size)) if ranks is None else list(ranks)
        results: dict[int, Any] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = body(self.exchange(rank))
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in taking_part]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a rank hangs"
        return [results[rank] for rank in taking_part]


def joined(payloads: Sequence[bytes]) -> bytes:
    return b"|".join(payloads)


def each_its_own(payloads: Sequence[bytes]) -> list[bytes]:
    return [b"for " + payload for payload in payloads]


def in_turn(number: int) -> Callable[[Sequence[bytes]], Answers]:
    return each_its_own if number % 2 else joined


def never(payloads: Sequence[bytes]) -> bytes:
    raise AssertionError("the computation ran although a rank failed")


def run_stage(exchange: Exchange, **arguments: Any) -> bytes:
    return exchange.run("a", b"x", **arguments)


def all_equal_errors(results: Sequence[Any], kind: type[DcpError]) -> DcpError:
    assert [type(result) for result in results] == [kind] * len(results), results
    assert len({str(result) for result in results}) == 1
    assert len({result.causes for result in results}) == 1
    first = results[0]
    assert isinstance(first, DcpError)
    return first


# -- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_one_answer_reaches_all_ranks(world_size: int) -> None:
    group = Group(world_size)
    results = group.run(lambda exchange: exchange.run("save/agree", b"%d" % exchange.rank, compute=joined))
    assert results == [joined([b"%d" % rank for rank in range(world_size)])] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_gets_its_own_answer(world_size: int) -> None:
    group = Group(world_size)
    results = group.run(lambda exchange: exchange.run("save/plan", b"%d" % exchange.rank, compute=each_its_own))
    assert results == [b"for %d" % rank for rank in range(world_size)]


def test_without_a_computation_every_rank_gets_nothing_once_all_have_come() -> None:
    group = Group(3)
    arrived: list[int] = []

    def body(exchange: Exchange) -> tuple[bytes, int]:
        time.sleep(0.05 * exchange.rank)
        arrived.append(exchange.rank)
        return exchange.run("save/barrier"), len(arrived)

    assert group.run(body) == [(b"", 3)] * 3


def test_only_the_coordinator_computes() -> None:
    ran_on: list[str] = []

    def body(exchange: Exchange) -> bytes:
        def compute(payloads: Sequence[bytes]) -> bytes:
            ran_on.append(f"rank {exchange.rank}")
            return b""

        return exchange.run("save/agree", compute=compute)

    Group(4).run(body)
    assert ran_on == ["rank 0"]


def test_many_exchanges_in_a_row_keep_their_answers_apart() -> None:
    def body(exchange: Exchange) -> list[bytes]:
        return [exchange.run(f"stage/{number % 3}", b"%d" % number, compute=in_turn(number)) for number in range(20)]

    expected = [b"%d|%d|%d" % (n, n, n) if n % 2 == 0 else b"for %d" % n for n in range(20)]
    assert Group(3).run(body) == [expected] * 3


def test_a_large_payload_and_answer_arrive_whole() -> None:
    payload = os.urandom(3_000_000)
    results = Group(2).run(lambda exchange: exchange.run("save/plan", payload, compute=joined))
    assert results == [payload + b"|" + payload] * 2


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("answers", [[b"too few"][:0], [b"x"] * 9, ["text"] * 3, 7])
def test_answers_that_are_none_are_an_error_on_all_ranks(world_size: int, answers: Any) -> None:
    group = Group(world_size)
    results = group.run(lambda exchange: exchange.run("save/plan", compute=lambda payloads: answers))
    all_equal_errors(results, CoordinationError)


def test_an_exchange_of_a_group_of_several_needs_a_channel() -> None:
    with pytest.raises(ArgumentError, match="no channel"):
        Exchange(0, 2, None, key="x")
    with pytest.raises(ArgumentError, match="outside"):
        Exchange(2, 2, MemoryBoard(), key="x")
    with pytest.raises(ArgumentError, match="timeout_seconds"):
        Exchange(0, 1, None, key="x", timeout_seconds=0)


def test_a_key_of_any_text_names_messages_that_a_channel_accepts() -> None:
    group = Group(2)
    group.key = f"gloo/group: ü_{next(_keys)}"
    assert group.run(lambda exchange: exchange.run("a", b"x", compute=joined)) == [b"x|x"] * 2
    (name,) = group.board.messages
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("original", [StorageError("disk full"), ValueError("bad"), KeyError("k"), StopIteration()])
def test_an_error_on_any_rank_is_the_same_error_on_all(world_size: int, original: Exception) -> None:
    for failing in range(world_size):
        group = Group(world_size)

        def body(exchange: Exchange, failing: int = failing) -> bytes:
            error = original if exchange.rank == failing else None
            return exchange.run("save/plan", error=error, compute=never)

        results = group.run(body)
        kind = StorageError if isinstance(original, StorageError) else RankFailedError
        failure = all_equal_errors(results, kind)
        assert f"rank {failing}: " in failure.message
        assert type(original).__name__ in failure.message or kind is StorageError
        assert [cause.rank for cause in failure.causes] == [failing]
        assert results[failing].__cause__ is original
        assert all(result.__cause__ is None for rank, result in enumerate(results) if rank != failing)
        assert set(group.board.messages) <= {f"{group.key}.0.answers"}


def test_errors_of_several_ranks_are_merged_and_the_lowest_rank_gives_the_class() -> None:
    errors: dict[int, Exception] = {
        1: ShapeMismatchError("w: (2,) here"),
        3: RuntimeError("boom"),
        4: RuntimeError("boom"),
    }
    results = Group(5).run(lambda exchange: exchange.run("save/agree", error=errors.get(exchange.rank), compute=never))
    failure = all_equal_errors(results, ShapeMismatchError)
    assert failure.message.splitlines() == ["rank 1: w: (2,) here", "ranks 3, 4: RuntimeError: boom"]
    assert [cause.rank for cause in failure.causes] == [1, 3, 4]


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_error_of_ours_in_the_computation_reaches_all_with_class_and_text(world_size: int) -> None:
    original = ShapeMismatchError("w: rank 0 has (2,), rank 1 has (3,)")

    def compute(payloads: Sequence[bytes]) -> bytes:
        raise original

    results = Group(world_size).run(lambda exchange: exchange.run("save/agree", compute=compute))
    failure = all_equal_errors(results, ShapeMismatchError)
    assert failure.message == original.message
    assert results[0].__cause__ is original


def test_a_foreign_error_in_the_computation_becomes_a_rank_failed_error() -> None:
    def compute(payloads: Sequence[bytes]) -> bytes:
        raise ZeroDivisionError("planner")

    results = Group(3).run(lambda exchange: exchange.run("save/agree", compute=compute))
    assert all_equal_errors(results, RankFailedError).message == "rank 0: ZeroDivisionError: planner"


def test_an_error_that_cannot_be_shown_still_travels() -> None:
    class NastyError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    results = Group(2).run(lambda exchange: exchange.run("a", error=NastyError() if exchange.rank == 1 else None))
    assert "NastyError" in all_equal_errors(results, RankFailedError).message


def test_lone_surrogates_and_unicode_in_an_error_travel() -> None:
    error = ValueError("key \udcff ü \0")
    results = Group(2).run(lambda exchange: exchange.run("a", error=error if exchange.rank == 0 else None))
    assert "key \udcff ü \0" in all_equal_errors(results, RankFailedError).message


def test_the_exchange_after_a_failed_one_works() -> None:
    def body(exchange: Exchange) -> bytes:
        with pytest.raises(RankFailedError):
            exchange.run("a", error=ValueError("x") if exchange.rank == 1 else None)
        return exchange.run("b", b"%d" % exchange.rank, compute=joined)

    assert Group(3).run(body) == [b"0|1|2"] * 3


@pytest.mark.parametrize("failing", [0, 3])
def test_an_error_is_not_kept_waiting_for_a_slow_rank(failing: int) -> None:
    """Rank 1 hangs in code that waits for the failed rank: the others must not wait for rank 1."""
    group = Group(4)
    others_are_through = threading.Event()

    def body(exchange: Exchange) -> float:
        if exchange.rank == 1:
            others_are_through.wait(20)
        started = time.monotonic()
        with pytest.raises(StorageError, match=f"rank {failing}: disk full"):
            exchange.run("a", error=StorageError("disk full") if exchange.rank == failing else None, compute=never)
        seconds = time.monotonic() - started
        if exchange.rank == 0:
            others_are_through.set()
        return seconds

    seconds = group.run(body)
    assert [type(value) for value in seconds] == [float] * 4, seconds
    assert max(seconds) < SETTLE_SECONDS + 3
    assert group.run(lambda exchange: exchange.run("b", b"x", compute=joined)) == [b"x|x|x|x"] * 4
    assert set(group.board.messages) == {f"{group.key}.1.answers"}


@pytest.mark.parametrize("interrupted", [0, 2])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt("now"), SystemExit(3)])
def test_an_interrupt_is_raised_unchanged_on_its_rank_and_fails_the_others(
    interrupted: int, interrupt: BaseException
) -> None:
    group = Group(3)
    results = group.run(
        lambda exchange: exchange.run("a", error=interrupt if exchange.rank == interrupted else None, compute=never)
    )
    assert results.pop(interrupted) is interrupt
    failure = all_equal_errors(results, RankFailedError)
    assert f"rank {interrupted}: {type(interrupt).__name__}" in failure.message
    assert set(group.board.messages) <= {f"{group.key}.0.answers"}


def test_an_interrupt_of_a_rank_that_is_alone_is_raised_unchanged() -> None:
    with pytest.raises(KeyboardInterrupt):
        Exchange(0, 1, None, key=f"alone-{next(_keys)}").run("a", error=KeyboardInterrupt())


def test_an_interrupt_in_the_computation_reaches_the_others_at_once() -> None:
    def compute(payloads: Sequence[bytes]) -> bytes:
        raise KeyboardInterrupt

    first, *others = Group(3).run(lambda exchange: exchange.run("a", compute=compute))
    assert type(first) is KeyboardInterrupt
    assert "KeyboardInterrupt" in all_equal_errors(others, RankFailedError).message


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_during_the_wait_reaches_the_others_at_once(rank: int) -> None:
    group = Group(3)

    class Interrupting(MemoryBoard):
        def wait(self, name: str, timeout_seconds: float) -> bytes | None:
            raise KeyboardInterrupt

    interrupting = Interrupting()
    interrupting.messages, interrupting.changed = group.board.messages, group.board.changed
    group.boards[rank] = interrupting

    def body(exchange: Exchange) -> bytes:
        if exchange.rank == 0 and rank != 0:
            time.sleep(0.3)
        return exchange.run("a", compute=never)

    results = group.run(body)
    assert type(results.pop(rank)) is KeyboardInterrupt
    assert f"rank {rank}: KeyboardInterrupt" in all_equal_errors(results, RankFailedError).message


# -- ranks that do not come -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("missing", "named"), [((2,), "rank 2"), ((1, 2, 4), "ranks 1-2, 4")])
def test_missing_ranks_are_named_with_the_deadline_on_all_that_came(missing: tuple[int, ...], named: str) -> None:
    group = Group(5, timeout_seconds=1.5)
    came = [rank for rank in range(5) if rank not in missing]
    started = time.monotonic()
    results = group.run(lambda exchange: exchange.run("save/agree", compute=never), came)
    assert time.monotonic() - started < 40
    failure = all_equal_errors(results, CoordinationTimeoutError)
    assert isinstance(failure, TimeoutError)
    assert failure.message.startswith(f"{named} did not come to exchange save/agree within 1.5 s")
    assert [cause.rank for cause in failure.causes] == list(missing)


@pytest.mark.parametrize("kind", [CoordinationError, CoordinationTimeoutError])
def test_who_did_not_come_is_named_beside_ranks_that_could_not_reach_others(kind: type[CoordinationError]) -> None:
    """A broadcast that broke or took too long does not tell for whom it waited."""
    results = Group(4).run(
        lambda exchange: exchange.run("load/done", error=kind("nothing came"), compute=never), [0, 2]
    )
    failure = all_equal_errors(results, kind)
    assert failure.message.startswith("ranks 0, 2: nothing came\nranks 1, 3 had not come to exchange load/done by then")
    assert [cause.rank for cause in failure.causes] == [1, 3, 0, 2]


def test_a_coordinator_that_waits_for_long_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(star, "_TELLS_AFTER_SECONDS", 0.2)
    Group(4, timeout_seconds=1.5).run(lambda exchange: exchange.run("save/agree", compute=never), [0, 2])
    told = [record.getMessage() for record in caplog.records if record.name == "dcp.coordination"]
    assert 1 <= len(told) <= 4 and "for ranks 1, 3 in exchange save/agree" in told[-1]


def test_a_missing_coordinator_is_named_by_the_others() -> None:
    results = Group(3, timeout_seconds=0.4).run(lambda exchange: exchange.run("save/agree"), [1, 2])
    assert [type(result) for result in results] == [CoordinationTimeoutError] * 2
    assert all("rank 0, the coordinator, gave no answer in exchange save/agree within 0.5 s" in str(r) for r in results)


def test_a_late_rank_gets_the_posted_verdict_and_the_next_exchange_works() -> None:
    group = Group(3, timeout_seconds=1.5)
    early = group.run(lambda exchange: exchange.run("a"), [0, 1])
    late = group.run(lambda exchange: exchange.run("a"), [2])
    verdict = all_equal_errors(early, CoordinationTimeoutError).message
    assert type(late[0]) is CoordinationTimeoutError
    assert str(late[0]).startswith(
        f"{verdict}\nrank 2 comes to exchange a only now, after the deadline; or it left out"
    )
    assert group.run(lambda exchange: exchange.run("b", b"x", compute=joined)) == [b"x|x|x"] * 3
    assert set(group.board.messages) == {f"{group.key}.1.answers"}


def test_a_rank_that_is_late_by_several_exchanges_catches_up() -> None:
    group = Group(2, timeout_seconds=0.2)
    errors = [OSError(str(number)) for number in range(4)]
    early = [group.run(partial(run_stage, error=error), [0])[0] for error in errors]
    late = [group.run(lambda exchange: exchange.run("a"), [1])[0] for _ in range(4)]
    assert [str(error) for error in late] == [str(error) for error in early]
    assert group.run(lambda exchange: exchange.run("b", b"x", compute=joined)) == [b"x|x"] * 2
    assert set(group.board.messages) == {f"{group.key}.4.answers"}


def test_a_coordinator_that_comes_after_the_others_gave_up_hears_of_it_and_does_not_compute() -> None:
    group = Group(3, timeout_seconds=0.4)
    others = group.run(lambda exchange: exchange.run("a"), [1, 2])
    (first,) = group.run(lambda exchange: exchange.run("a", compute=never), [0])
    assert [type(result) for result in (*others, first)] == [CoordinationTimeoutError] * 3
    assert [cause.rank for cause in first.causes] == [1, 2]
    assert group.run(lambda exchange: exchange.run("b", b"x", compute=joined)) == [b"x|x|x"] * 3
    assert set(group.board.messages) == {f"{group.key}.1.answers"}


@pytest.mark.parametrize("commit", [False, True])
def test_others_that_give_up_while_the_coordinator_computes_stay_in_step_with_it(commit: bool) -> None:
    group = Group(3, timeout_seconds=0.4)

    def compute(payloads: Sequence[bytes]) -> bytes:
        time.sleep(1.2)
        return b"late"

    results = group.run(lambda exchange: exchange.run("a", compute=compute, commit=commit))
    expected = [InDoubtError] * 2 if commit else [CoordinationTimeoutError] * 2
    assert [type(result) for result in results[1:]] == expected
    if commit:
        assert results[0] == b"late"
    else:
        assert [cause.rank for cause in results[0].causes] == [1, 2]
    assert group.run(lambda exchange: exchange.run("b", b"x", compute=joined)) == [b"x|x|x"] * 3


def test_others_that_give_up_while_the_coordinator_posts_its_answer_stay_in_step_with_it() -> None:
    group = Group(3, timeout_seconds=0.4)
    are_gone = threading.Barrier(3)

    class SlowBoard(MemoryBoard):
        is_slow = True

        def put(self, name: str, payload: bytes) -> None:
            if self.is_slow and name.endswith(".answers"):
                self.is_slow = False
                are_gone.wait(20)
            super().put(name, payload)

    slow = group.boards[0] = SlowBoard()
    slow.messages, slow.changed = group.board.messages, group.board.changed

    def body(exchange: Exchange) -> bytes:
        try:
            return exchange.run("a", compute=joined)
        finally:
            if exchange.rank:
                are_gone.wait(20)

    first, *others = group.run(body)
    assert [type(result) for result in (first, *others)] == [CoordinationTimeoutError] * 3
    assert [cause.rank for cause in first.causes] == [1, 2]
    assert group.run(lambda exchange: exchange.run("b", b"x", compute=joined)) == [b"x|x|x"] * 3


def test_a_slow_but_punctual_rank_is_waited_for() -> None:
    def body(exchange: Exchange) -> bytes:
        time.sleep(0.6 if exchange.rank == 1 else 0)
        return exchange.run("a", b"x", compute=joined)

    assert Group(3, timeout_seconds=10).run(body) == [b"x|x|x"] * 3


def test_ranks_in_different_stages_are_told_who_is_where_and_stay_in_step() -> None:
    group = Group(4)
    stages = ["save/agree", "save/agree", "load/metadata", "save/agree"]
    failure = all_equal_errors(
        group.run(lambda exchange: exchange.run(stages[exchange.rank], compute=never)), ArgumentsDifferError
    )
    assert "ranks 0-1, 3 in save/agree; rank 2 in load/metadata" in failure.message
    assert group.run(lambda exchange: exchange.run("b", b"x", compute=joined)) == [b"x|x|x|x"] * 4


def test_an_error_from_another_stage_is_shown_beside_the_difference() -> None:
    def body(exchange: Exchange) -> bytes:
        if exchange.rank == 1:
            return exchange.run("load/metadata", error=StorageError("gone"))
        return exchange.run("save/agree")

    failure = all_equal_errors(Group(2).run(body), ArgumentsDifferError)
    assert "rank 1: gone" in failure.message


# -- the channel ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("operation", ["put", "wait"])
def test_a_channel_that_raises_is_a_coordination_error_that_names_stage_and_rank(rank: int, operation: str) -> None:
    group = Group(3, timeout_seconds=2)
    group.boards[rank] = BrokenBoard(group.board, operation)
    results = group.run(lambda exchange: exchange.run("save/agree", b"x", compute=joined))
    failure = results[rank]
    assert type(failure) is CoordinationError
    expected = f"rank {rank} lost the channel to the other ranks in exchange save/agree: ConnectionResetError"
    assert failure.message.startswith(expected)
    assert type(failure.__cause__) is ConnectionResetError
    others = [result for other, result in enumerate(results) if other != rank]
    if rank == 2 and operation == "wait":
        assert others == [b"x|x|x"] * 2
    else:
        assert all(isinstance(result, CoordinationError) for result in others)


def test_messages_that_cannot_be_removed_are_no_failure() -> None:
    group = Group(3)
    group.boards = {rank: BrokenBoard(group.board, "delete") for rank in range(3)}
    for _ in range(3):
        assert group.run(lambda exchange: exchange.run("a", b"x", compute=each_its_own)) == [b"for x"] * 3


@pytest.mark.parametrize(
    "junk", [b"", b"\x01", b"\x01\xff", b"\x09\x01a", b"\x01\x01\xff", b"\x02\x01a{", b"\x02\x01a[]"]
)
def test_junk_from_a_rank_is_an_error_that_names_the_rank(junk: bytes) -> None:
    group = Group(2, timeout_seconds=5)
    group.board.put(f"{group.key}.0.1", junk)
    (result,) = group.run(lambda exchange: exchange.run("a", compute=never), [0])
    assert type(result) is CoordinationError
    assert "rank 1: " in str(result)


@pytest.mark.parametrize("junk", [b"", b"\x09\x00", b"\x01\x01a", b"\x02\x01anull"])
def test_junk_from_the_coordinator_is_a_coordination_error(junk: bytes) -> None:
    group = Group(2, timeout_seconds=5)
    group.board.put(f"{group.key}.0.answers", junk)
    (result,) = group.run(lambda exchange: exchange.run("a"), [1])
    assert type(result) is CoordinationError


# -- a commit -------------------------------------------------------------------------------------------------------


def test_a_rank_that_loses_the_coordinator_during_a_commit_is_in_doubt() -> None:
    group = Group(2, timeout_seconds=0.3)
    (result,) = group.run(
        lambda exchange: exchange.run("save/commit", commit=True, in_doubt="save 12ab may be committed"), [1]
    )
    assert type(result) is InDoubtError
    assert str(result).startswith("save 12ab may be committed: rank 0, the coordinator")


def test_a_rank_that_failed_itself_is_not_in_doubt_about_the_commit() -> None:
    group = Group(2, timeout_seconds=0.3)
    (result,) = group.run(lambda exchange: exchange.run("save/commit", error=OSError("x"), commit=True), [1])
    assert type(result) is CoordinationTimeoutError
    assert type(result.__cause__) is OSError


def test_a_commit_whose_answer_cannot_be_posted_leaves_all_in_doubt() -> None:
    group = Group(2, timeout_seconds=2)
    group.boards[0] = BrokenBoard(group.board, "put", ".answers")
    results = group.run(lambda exchange: exchange.run("c", compute=joined, commit=True, in_doubt="id 7"))
    assert [type(result) for result in results] == [InDoubtError] * 2
    assert all(str(result).startswith("id 7: ") for result in results)


def test_an_interrupt_inside_the_commit_leaves_the_others_in_doubt() -> None:
    def compute(payloads: Sequence[bytes]) -> bytes:
        raise KeyboardInterrupt

    first, second = Group(2).run(lambda exchange: exchange.run("c", compute=compute, commit=True, in_doubt="id 7"))
    assert type(first) is KeyboardInterrupt
    assert type(second) is InDoubtError


def test_a_commit_that_fails_plainly_is_not_in_doubt() -> None:
    def compute(payloads: Sequence[bytes]) -> bytes:
        raise StorageError("rename failed")

    results = Group(2).run(lambda exchange: exchange.run("c", compute=compute, commit=True))
    all_equal_errors(results, StorageError)


# -- bytes and litter -----------------------------------------------------------------------------------------------


def test_frames_add_few_bytes_and_the_log_counts_them() -> None:
    def body(exchange: Exchange) -> Exchange:
        exchange.run("save/agree", b"x" * 170, compute=lambda payloads: b"y" * 48)
        exchange.run("a stage of a rather long name", b"x", compute=each_its_own)
        return exchange

    for exchange in Group(3).run(body):
        agree, plan = exchange.log
        assert (agree.stage, agree.bytes_in, agree.bytes_out) == ("save/agree", 170 + 12, 48 + 12)
        assert plan.bytes_in == 1 + FRAME_BYTES
        assert plan.bytes_out == len(b"for x") + 2 * FRAME_BYTES
        assert FRAME_BYTES <= 24
        assert 0 <= agree.seconds < 30


def test_a_failed_exchange_is_logged_too() -> None:
    def body(exchange: Exchange) -> Exchange:
        with pytest.raises(RankFailedError):
            exchange.run("a", error=ValueError("x"))
        return exchange

    assert [len(exchange.log) for exchange in Group(2).run(body)] == [1, 1]


def test_only_the_last_shared_answer_stays_on_the_board() -> None:
    group = Group(4)
    for number in range(6):
        group.run(partial(run_stage, compute=in_turn(number)))
        assert set(group.board.messages) == {f"{group.key}.{number}.answers"}
    assert group.board.overwritten == []


def test_two_groups_on_one_board_do_not_meet() -> None:
    board = MemoryBoard()
    one, other = Group(3, board=board), Group(3, board=board)

    def body(exchange: Exchange) -> list[bytes]:
        second = other.exchange(exchange.rank)
        answers = []
        for number in range(5):
            answers.append(exchange.run("a", b"one", compute=joined))
            if number % 2:
                answers.append(second.run("a", b"other", compute=each_its_own))
        return answers

    expected = [
        b"one|one|one",
        b"one|one|one",
        b"for other",
        b"one|one|one",
        b"one|one|one",
        b"for other",
        b"one|one|one",
    ]
    assert one.run(body) == [expected] * 3
    assert set(board.messages) == {f"{one.key}.4.answers", f"{other.key}.1.answers"}


def test_groups_of_other_members_run_at_the_same_time() -> None:
    board = MemoryBoard()
    groups = [Group(2, board=board), Group(2, board=board)]
    results: dict[int, list[Any]] = {}

    def work(index: int) -> None:
        results[index] = groups[index].run(
            lambda exchange: [exchange.run("a", b"%d%d" % (index, n), compute=joined) for n in range(20)]
        )

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for index in range(2):
        assert results[index] == [[b"%d%d|%d%d" % (index, n, index, n) for n in range(20)]] * 2


# -- frames ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=200))
def test_packed_parts_come_back(parts: list[bytes]) -> None:
    assert unpack(pack(*parts)) == parts


@given(st.binary(max_size=40))
def test_any_bytes_unpack_to_what_packs_to_equal_parts_or_are_refused(blob: bytes) -> None:
    try:
        parts = unpack(blob)
    except CoordinationError:
        return
    assert unpack(pack(*parts)) == parts


def test_a_packed_payload_that_is_cut_or_extended_is_refused() -> None:
    blob = pack(b"abc", b"", b"d" * 200)
    for end in range(len(blob)):
        with pytest.raises(CoordinationError):
            unpack(blob[:end])
    with pytest.raises(CoordinationError):
        unpack(blob + b"x")
    with pytest.raises(CoordinationError):
        unpack(b"\xff" * 8 + b"\x7f")


@given(st.sampled_from(FrameKind), st.text(st.characters(codec="ascii"), max_size=22), st.binary())
def test_frames_come_back(kind: FrameKind, label: str, body: bytes) -> None:
    frame = Frame(kind, label, body)
    assert decode_frame(encode_frame(frame)) == frame


@given(st.sets(st.integers(0, 40), min_size=1))
def test_named_ranks_are_all_there(ranks: set[int]) -> None:
    found: set[int] = set()
    for run in name_ranks(ranks).split(" ", 1)[1].split(", "):
        first, _, last = run.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    assert found == ranks


# -- real processes -------------------------------------------------------------------------------------------------


def exchange_in_process(context: RankContext, timeout_seconds: float) -> Exchange:
    channel: KeyValueChannel = DirectoryChannel(context.channel_directory)
    return Exchange(context.rank, context.world_size, channel, key="job", timeout_seconds=timeout_seconds)


def several_exchanges(context: RankContext) -> tuple[bytes, bytes, list[str]]:
    exchange = exchange_in_process(context, 20)
    payload = b"%d" % context.rank
    one = exchange.run("a", payload, compute=joined)
    own = exchange.run("b", payload, compute=each_its_own)
    exchange.run("c")
    return one, own, sorted(os.listdir(context.channel_directory))


def fail_on_one(context: RankContext, failing: int) -> None:
    error = StorageError("disk full") if context.rank == failing else None
    exchange_in_process(context, 20).run("a", error=error, compute=never)


def kill_before_the_second(context: RankContext, killed: int) -> bytes:
    exchange = exchange_in_process(context, 1.0)
    exchange.run("a")
    if context.rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    return exchange.run("b", b"x", compute=joined)


def die_after_the_commit(context: RankContext) -> bytes:
    def compute(payloads: Sequence[bytes]) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    return exchange_in_process(context, 1.0).run("c", compute=compute, commit=True, in_doubt="save 12ab")


def test_real_processes_exchange_over_a_directory() -> None:
    results = run_ranks(several_exchanges, 4, timeout_seconds=30)
    assert [result[:2] for result in results] == [(b"0|1|2|3", b"for %d" % rank) for rank in range(4)]
    assert all("job.2.answers" in names for _, _, names in results)


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_in_one_process_is_the_same_error_in_all(failing: int) -> None:
    results = run_ranks(fail_on_one, 3, failing, timeout_seconds=30, return_exceptions=True)
    assert all_equal_errors(results, StorageError).message == f"rank {failing}: disk full"


def test_a_killed_process_is_named_by_the_others() -> None:
    results = run_ranks(kill_before_the_second, 3, 1, timeout_seconds=30, return_exceptions=True)
    killed = results.pop(1)
    assert type(killed) is RankProcessError
    assert "SIGKILL" in str(killed)
    failure = all_equal_errors(results, CoordinationTimeoutError)
    assert failure.message.startswith("rank 1 did not come to exchange b within 1 s")


def test_a_killed_coordinator_is_named_by_the_others() -> None:
    results = run_ranks(kill_before_the_second, 3, 0, timeout_seconds=30, return_exceptions=True)
    assert "SIGKILL" in str(results[0])
    for result in results[1:]:
        assert type(result) is CoordinationTimeoutError
        assert "rank 0, the coordinator, gave no answer in exchange b" in str(result)


def test_a_coordinator_killed_in_the_commit_leaves_the_others_in_doubt() -> None:
    results = run_ranks(die_after_the_commit, 3, timeout_seconds=30, return_exceptions=True)
    assert "SIGKILL" in str(results[0])
    for result in results[1:]:
        assert type(result) is InDoubtError
        assert str(result).startswith("save 12ab: ")
