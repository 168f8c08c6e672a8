"""The exchange: the one way in which ranks talk about control.

Every rank hands in a payload or an error; the coordinator (rank 0) gathers them and computes; every rank gets its own
answer, or all raise the same error. A star over a board of named messages; flat bytes only.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from dcp_core.coordination.frames import Frame, FrameKind, encode_frame, stage_label
from dcp_core.coordination.star import (
    COORDINATOR,
    Answers,
    Board,
    Call,
    CoordinatorSide,
    Ledger,
    ParticipantSide,
    Side,
    Verdict,
)
from dcp_core.coordination.verdict import error_frame
from dcp_core.errors import ArgumentError

__all__ = ["COORDINATOR", "Answers", "Board", "Exchange", "ExchangeRecord", "forget"]

_SAFE_KEY = re.compile(r"[A-Za-z0-9-]{1,100}")
_DOUBT = "the coordinator may have committed; nobody here can say"

_log = logging.getLogger("dcp.coordination")


@dataclass(frozen=True, slots=True)
class ExchangeRecord:
    """What one exchange cost this rank.

    Attributes:
        stage: Its name.
        bytes_in: Bytes that this rank handed in, framing included.
        bytes_out: Bytes that it got, framing included; 0 when it failed.
        seconds: From call to answer, the wait for slower ranks included.
    """

    stage: str
    bytes_in: int
    bytes_out: int
    seconds: float


_ledgers: dict[tuple[str, int], Ledger] = {}
_ledgers_lock = threading.Lock()


def forget(key: str, rank: int) -> None:
    """Forget a group that makes no exchange any more, such as the one of a single save.

    Args:
        key: The key that its exchanges were made with.
        rank: The rank that they ran on.
    """
    with _ledgers_lock:
        _ledgers.pop((_safe(key), rank), None)


def _safe(key: str) -> str:
    """A key as it stands in names of messages."""
    return key if _SAFE_KEY.fullmatch(key) else xxhash.xxh3_128_hexdigest(key.encode("utf-8", "replace"))


class Exchange:
    """The exchanges of one group, seen by one of its ranks.

    Exchanges of a group are numbered for the whole life of the process, at call entry, so that ranks stay in step
    whatever an earlier exchange ended with, and whichever object ran it.

    Args:
        rank: This rank in the group.
        world_size: Ranks of the group.
        channel: How they talk; not used by a group of one, which behaves the same otherwise.
        key: Names the group: the same on its ranks, and no other group's on the same channel.
        timeout_seconds: How long the coordinator waits for the slowest rank. The others wait a little longer, so that
            they hear from it which rank is missing.

    Attributes:
        log: One record an exchange.

    Raises:
        ArgumentError: No such rank, no time, or no channel for a group of several.
    """

    def __init__(
        self, rank: int, world_size: int, channel: Board | None, *, key: str, timeout_seconds: float = 1800.0
    ) -> None:
        if not 0 <= rank < world_size:
            raise ArgumentError(f"rank {rank} is outside a group of {world_size}")
        if not timeout_seconds > 0:
            raise ArgumentError(f"timeout_seconds must be positive: got {timeout_seconds}")
        if world_size > 1 and channel is None:
            raise ArgumentError(f"rank {rank} of a group of {world_size} has no channel to the others")
        self.rank = rank
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.log: list[ExchangeRecord] = []
        self._key = _safe(key)
        with _ledgers_lock:
            self._ledger = _ledgers.setdefault((self._key, rank), Ledger())
        side = CoordinatorSide if rank == COORDINATOR else ParticipantSide
        self._side: Side = side(rank, world_size, channel, timeout_seconds, self._ledger)

    def run(
        self,
        stage: str,
        payload: bytes = b"",
        *,
        error: BaseException | None = None,
        compute: Callable[[Sequence[bytes]], Answers] | None = None,
        commit: bool = False,
        in_doubt: str = "",
        is_last: bool = False,
        delay_seconds: float = 0.0,
    ) -> bytes:
        """Exchange payloads for answers. Every rank calls this, with the same stage.

        Args:
            stage: Where in the program the ranks are, for messages and to notice that they are not in one place.
            payload: What this rank hands in.
            error: What went wrong on this rank; handed in instead of the payload.
            compute: Makes the answers from all payloads in rank order: one for each rank, or one for all. Runs on the
                coordinator only, and only if nobody failed. None answers everybody with nothing.
            commit: `compute` commits: a rank that loses the coordinator while it waits for the answer can't tell
                whether that happened.
            in_doubt: What to say then.
            is_last: Nothing follows in this call. Where something does, a rank that is interrupted while it waits takes
                part in that by an error, so that nobody waits for it.
            delay_seconds: How much later the coordinator may come for good reasons, such as a wait of its own.

        Returns:
            This rank's answer.

        Raises:
            DcpError: The one error that all ranks raise: of the class that the lowest failing rank raised if that is
                one of ours, else `RankFailedError`; on a rank that failed, from its own error.
            CoordinationTimeoutError: Ranks did not come in time; it names them.
            ArgumentsDifferError: Ranks are in different stages.
            CoordinationError: The channel failed.
            InDoubtError: With `commit`: nobody knows here whether it happened. What was written must stay.
            BaseException: `error` itself, if it is no `Exception` (Ctrl-C): the others raise a `RankFailedError`.
        """
        call = self._enter(stage, payload, error, compute, commit, in_doubt, is_last or commit, delay_seconds)
        verdict = Verdict()
        try:
            verdict = self._side.run(call)
        finally:
            self._record(call, verdict)
        if error is not None and call.is_interrupt:
            raise error
        if verdict.failure is not None:
            cause = verdict.original if error is None else error
            if cause is None:
                raise verdict.failure
            raise verdict.failure from cause
        answers = verdict.answers
        return answers if isinstance(answers, bytes) else answers[self.rank]

    def _record(self, call: Call, verdict: Verdict) -> None:
        bytes_in = len(encode_frame(call.request))
        record = ExchangeRecord(call.stage, bytes_in, verdict.nbytes, time.monotonic() - call.started)
        self.log.append(record)
        _log.debug("%s", record)

    def _enter(
        self,
        stage: str,
        payload: bytes,
        error: BaseException | None,
        compute: Callable[[Sequence[bytes]], Answers] | None,
        commit: bool,
        in_doubt: str,
        is_last: bool,
        delay_seconds: float,
    ) -> Call:
        with _ledgers_lock:
            number = self._ledger.number
            self._ledger.number += 1
        if error is None:
            request = Frame(FrameKind.PAYLOAD, stage_label(stage), payload)
        else:
            request = error_frame(stage_label(stage), error, self.rank)
        return Call(
            stage,
            f"{self._key}.{number}",
            request,
            time.monotonic(),
            error,
            compute,
            commit,
            in_doubt or _DOUBT,
            is_last,
            delay_seconds,
        )
