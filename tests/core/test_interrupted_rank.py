"""A rank that is interrupted while it waits is not waited for."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.coordination.exchange import Exchange
from dcp_core.errors import DcpError
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.async_jobs import MODES, RESULT_SECONDS, async_outcome, async_save, checkpoint_directory, tag_in
from tests.core.async_writers import Gate, GatedWriter
from tests.core.fault_jobs import Outcome, Seat, outcome_of, state_of

LONG_SECONDS = 120.0


@pytest.fixture
def directory() -> Iterator[Path]:
    with checkpoint_directory() as path:
        yield path


def _slow(payloads: Sequence[bytes]) -> bytes:
    time.sleep(1.0)
    return b"late"


def _interrupted_while_waiting(context: RankContext, leaves: bool) -> tuple[float, list[str]]:
    channel = DirectoryChannel(context.channel_directory)
    exchange = Exchange(context.rank, context.world_size, channel, key="interrupted", timeout_seconds=LONG_SECONDS)
    outcomes = []
    if context.rank == 1:
        threading.Timer(0.4, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            exchange.run("agree", b"x", compute=_slow)
        if leaves:
            return 0.0, []
    else:
        outcomes.append(exchange.run("agree", b"x", compute=_slow).decode())
    started = time.monotonic()
    for stage in ("commit", "next", "after"):
        if context.rank == 1 and stage == "commit":
            continue
        try:
            outcomes.append(exchange.run(stage, b"y", compute=lambda payloads: b"fine").decode())
        except DcpError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        if leaves:
            break
    return time.monotonic() - started, outcomes


@pytest.mark.timeout(90)
def test_the_others_hear_at_once_of_a_rank_that_was_interrupted_and_left() -> None:
    seconds, outcomes = run_ranks(_interrupted_while_waiting, 3, True, timeout_seconds=60)[0]
    assert seconds < 10
    assert outcomes[0] == "late"
    assert outcomes[1].startswith("RankFailedError: rank 1: KeyboardInterrupt")


@pytest.mark.timeout(90)
def test_a_rank_that_was_interrupted_and_stayed_is_in_step_again_after_one_failure() -> None:
    ranks = run_ranks(_interrupted_while_waiting, 3, False, timeout_seconds=60)
    assert ranks[0][0] < 10
    for rank in (0, 2):
        assert ranks[rank][1][0] == "late"
        assert ranks[rank][1][1].startswith("RankFailedError: rank 1: KeyboardInterrupt")
        assert ranks[rank][1][2:] == ["fine", "fine"]
    assert ranks[1][1] == ["fine", "fine"]


def _interrupted_in_the_last_exchange(context: RankContext) -> list[str]:
    channel = DirectoryChannel(context.channel_directory)
    exchange = Exchange(context.rank, context.world_size, channel, key="last", timeout_seconds=LONG_SECONDS)
    if context.rank == 1:
        threading.Timer(0.4, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            exchange.run("done", b"x", compute=_slow, is_last=True)
    else:
        exchange.run("done", b"x", compute=_slow, is_last=True)
    return [exchange.run("next", b"y", compute=lambda payloads: b"fine").decode() for _ in range(2)]


@pytest.mark.timeout(90)
def test_a_rank_that_was_interrupted_in_the_last_exchange_of_a_call_stays_in_step() -> None:
    assert run_ranks(_interrupted_in_the_last_exchange, 3, timeout_seconds=60) == [["fine", "fine"]] * 3


# -- while it waits for an earlier save -------------------------------------------------------------------------------


def _interrupted_before_its_turn(context: RankContext, directory: Path, mode_name: str) -> Outcome:
    """Rank 1 is interrupted while it waits for the save in flight, before it has told anybody that it is there."""
    seat, mode = Seat.of(context), MODES.get(mode_name, MODES["mailbox"])
    gate = Gate(directory).close()
    seat.share()
    first = async_save(seat, state_of(seat.rank, seat.world, 1), directory, storage_writer=GatedWriter(), **mode.save)
    gate.await_writing(*range(seat.world))
    plain = concurrent.futures.wait

    def interrupted(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return plain(*args, **options)

    def call(tag: int) -> Outcome:
        state = state_of(seat.rank, seat.world, tag)
        if mode_name == "plain":
            return outcome_of(seat.save, state, checkpoint_id=directory, durable=False)
        return async_outcome(seat, state, directory, **mode.save)

    with pytest.MonkeyPatch.context() as patch:
        if seat.rank == 1:
            patch.setattr(concurrent.futures, "wait", interrupted)
        outcome = call(2)
    if seat.rank == 1:
        gate.open()
    first.get_result(RESULT_SECONDS)
    seat.share()
    assert tag_in(seat, directory, mode) == 1
    seat.share()
    again = call(3)
    assert again.kind == "", again
    assert tag_in(seat, directory, mode) == 3
    return outcome


@pytest.mark.faults
@pytest.mark.timeout(90)
@pytest.mark.parametrize("mode", ["plain", "mailbox", "no channel"])
def test_the_others_hear_of_a_rank_that_was_interrupted_before_its_turn(directory: Path, mode: str) -> None:
    first, interrupted, last = run_ranks(_interrupted_before_its_turn, 3, directory, mode, timeout_seconds=80)
    assert interrupted.kind == "KeyboardInterrupt", interrupted
    for outcome in (first, last):
        assert outcome.kind == "RankFailedError" and "rank 1: KeyboardInterrupt" in outcome.message, outcome
