"""A rank that is interrupted while it waits is not waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence

import pytest

from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.coordination.exchange import Exchange
from dcp_core.errors import DcpError
from dcp_core.testing.ranks import RankContext, run_ranks

LONG_SECONDS = 120.0


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
