"""The two sides of an exchange over a board: the coordinator, who gathers and answers, and the others.

The messages of one exchange share a prefix. `.<rank>` holds what a rank hands in (its reader removes it), `.answers`
the one answer for all, or the error, or the note that everybody's own answer is posted, `.<rank>.answer` such an own
answer (its reader removes it). The coordinator removes `.answers` once every rank has come to a later exchange, so
that a late rank still finds what was decided without it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dcp_core.coordination.frames import Frame, FrameKind, decode_frame, encode_frame
from dcp_core.coordination.verdict import (
    ANY_STAGE,
    checked_answers,
    decode_failure,
    error_frame,
    failure_for_all,
    is_bad,
    judge,
    name_ranks,
    safe_cause,
    told_late,
    was_missed,
)
from dcp_core.errors import (
    CoordinationError,
    CoordinationTimeoutError,
    DcpError,
    InDoubtError,
    RankCause,
    SaveCancelledError,
    encode_error,
    merge_errors,
)

COORDINATOR = 0
SETTLE_SECONDS = 1.5
"""How much longer the coordinator waits for the others once one rank has failed."""

_LONGEST_GRACE_SECONDS = 10.0
_FIRST_SLICE_SECONDS = 0.25
_LONGEST_SLICE_SECONDS = 1.0
_PROBE_SECONDS = 0.001
_TELLS_AFTER_SECONDS = 60.0
"""Until the coordinator says for whom it waits; then twice as long, and so on."""

_STORE_HINT = "if a store carries it, see whether the process that hosts that has ended: rank 0, or the job's launcher"


_log = logging.getLogger("dcp.coordination")

Answers = Sequence[bytes] | bytes


class Board(Protocol):
    """What an exchange needs of a channel: `dcp_core.adapter.KeyValueChannel` is one."""

    def put(self, name: str, payload: bytes) -> None:
        """Post a message."""
        ...

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        """Wait for a message and return it; None when it did not come in time."""
        ...

    def delete(self, name: str) -> None:
        """Remove a message."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `run`."""

    stage: str
    prefix: str
    request: Frame
    started: float
    error: BaseException | None
    compute: Callable[[Sequence[bytes]], Answers] | None
    commit: bool
    in_doubt: str
    is_last: bool = False
    delay_seconds: float = 0.0

    @property
    def is_interrupt(self) -> bool:
        """Whether the rank leaves at once (Ctrl-C), without waiting for the others."""
        return self.error is not None and not isinstance(self.error, Exception)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out: an answer for all, or one each, or a failure and what it was raised from."""

    answers: tuple[bytes, ...] | bytes = b""
    failure: DcpError | None = None
    original: BaseException | None = None
    nbytes: int = 0


@dataclass(slots=True)
class Ledger:
    """What this process remembers of a group between exchanges: the next number, and answers still on the board."""

    number: int = 0
    posted: list[str] = field(default_factory=list)


class Side(ABC):
    """What both sides share.

    Args:
        rank: This rank in the group.
        world_size: Ranks of the group.
        board: Where the messages are; None for a group of one.
        timeout_seconds: How long the coordinator waits for the slowest rank.
        ledger: The group's memory in this process.
    """

    def __init__(self, rank: int, world_size: int, board: Board | None, timeout_seconds: float, ledger: Ledger) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.ledger = ledger
        self._channel = board

    @abstractmethod
    def run(self, call: Call) -> Verdict:
        """Carry out one exchange; only an interrupt is raised, every failure is returned."""

    @property
    def board(self) -> Board:
        """Where the messages are."""
        if self._channel is None:
            raise CoordinationError(f"rank {self.rank} of a group of {self.world_size} has no channel to the others")
        return self._channel

    def forget(self, names: Iterable[str]) -> None:
        """Remove messages; one that stays is litter, no failure."""
        for name in names:
            try:
                self.board.delete(name)
            except Exception as error:
                _log.debug("message %s could not be removed: %s", name, error)
            if name in self.ledger.posted:
                self.ledger.posted.remove(name)

    def own_failure(self, call: Call, error: BaseException, in_doubt: bool) -> DcpError:
        """What the channel's failure, or an interrupt, on this rank amounts to."""
        cause = safe_cause(error, self.rank)
        hint = "" if isinstance(error, DcpError) else f"; {_STORE_HINT}"
        if in_doubt:
            return InDoubtError(f"{call.in_doubt}: rank {self.rank}: {cause.kind}: {cause.message}{hint}", [cause])
        if not isinstance(error, Exception) or isinstance(error, SaveCancelledError):
            return merge_errors([cause])
        return CoordinationError(
            f"rank {self.rank} lost the channel to the other ranks in exchange {call.stage}: "
            f"{cause.kind}: {cause.message}{hint}",
            [cause],
        )


class CoordinatorSide(Side):
    """Gathers, judges, computes, answers."""

    def run(self, call: Call) -> Verdict:
        """Gather, judge, compute, answer; whatever happens in between, the others hear of it."""
        earlier = list(self.ledger.posted)
        verdict: Verdict | None = None
        computing = False
        taken: set[int] = set()
        try:
            frames = self._gather(call, taken)
            failed = judge(call.stage, frames, self.world_size, self.timeout_seconds)
            computing = failed is None
            if failed is None:
                verdict = self._compute(call, [frames[rank].body for rank in range(self.world_size)])
                verdict = self._unless_left(call, frames, verdict)
            else:
                verdict = Verdict(failure=failed)
            posted = self._post(call, verdict)
            verdict = self._unless_left(call, frames, posted)  # posting may take long as well
            if verdict is not posted:
                verdict = self._post(call, verdict)
        except BaseException as error:
            succeeded = verdict is None or verdict.failure is None
            failure = self.own_failure(call, error, in_doubt=call.commit and computing and succeeded)
            with contextlib.suppress(Exception):
                self._post(call, Verdict(failure=failure))
            if not isinstance(error, Exception):
                raise
            return Verdict(failure=failure, original=error) if verdict is None or succeeded else verdict
        finally:  # and not before the answer, which all others wait for
            self.forget(f"{call.prefix}.{rank}" for rank in taken)
        if len(frames) == self.world_size:
            self.forget(earlier)
        return verdict

    def _gather(self, call: Call, taken: set[int]) -> dict[int, Frame]:
        """What the ranks hand in, by rank, as far as they come; `taken` gets the ranks whose messages were read.

        Waits for each until one common deadline, which moves close once a rank has failed: nobody should wait half an
        hour to hear of an error that is already here.
        """
        frames = {self.rank: call.request}
        if call.is_interrupt:
            return frames
        pending = list(range(1, self.world_size))
        deadline = call.started + self.timeout_seconds
        if is_bad(call.request, call.request.label):
            deadline = min(deadline, call.started + SETTLE_SECONDS)
        longest_wait, tells_after = _FIRST_SLICE_SECONDS, _TELLS_AFTER_SECONDS
        while pending:
            waited = time.monotonic() - call.started
            is_last_look = call.started + waited >= deadline
            if waited >= tells_after and not is_last_look:
                self._tell_of(pending, call.stage, waited)
                tells_after = 2 * waited
            absent: list[int] = []
            for rank in pending:
                patience = 0.0 if absent else min(longest_wait, deadline - time.monotonic())
                frame = self._take(call, rank, max(patience, _PROBE_SECONDS))
                if frame is None:
                    absent.append(rank)
                    continue
                taken.add(rank)
                frames[rank] = frame
                if is_bad(frame, call.request.label):
                    deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
            pending = absent
            if is_last_look:
                break
            longest_wait = min(longest_wait * 2, _LONGEST_SLICE_SECONDS)
        return frames

    def _tell_of(self, pending: Sequence[int], stage: str, waited_seconds: float) -> None:
        _log.warning(
            "rank %d has waited %.0f s for %s in exchange %s, and goes on until %g s have passed (timeout_seconds); if "
            "they do not make this call, end the job", self.rank, waited_seconds, name_ranks(pending), stage,
            self.timeout_seconds,
        )  # fmt: skip

    def _take(self, call: Call, rank: int, patience_seconds: float) -> Frame | None:
        """Read what a rank handed in."""
        message = self.board.wait(f"{call.prefix}.{rank}", patience_seconds)
        if message is None:
            return None
        try:
            return decode_frame(message)
        except CoordinationError as error:
            return error_frame(call.request.label, error, rank)

    def _compute(self, call: Call, payloads: Sequence[bytes]) -> Verdict:
        try:
            answers = b"" if call.compute is None else call.compute(payloads)
            return Verdict(checked_answers(answers, self.world_size))
        except Exception as error:
            return Verdict(failure=failure_for_all(error, self.rank), original=error)

    def _unless_left(self, call: Call, frames: dict[int, Frame], verdict: Verdict) -> Verdict:
        """Fail where others have given up while this rank was at it: it would be one exchange ahead of them.

        A commit stands whoever has left.
        """
        in_time = time.monotonic() - call.started <= self.timeout_seconds
        if in_time or call.commit or verdict.failure is not None:
            return verdict
        for rank in range(1, self.world_size):
            note = self._take(call, rank, _PROBE_SECONDS)
            if note is not None:
                frames[rank] = note
        failed = judge(call.stage, frames, self.world_size, self.timeout_seconds)
        return verdict if failed is None else Verdict(failure=failed)

    def _post(self, call: Call, verdict: Verdict) -> Verdict:
        """Answer the others; returns the verdict with the bytes that this rank got."""
        label, answers = call.request.label, verdict.answers
        own = b""
        if verdict.failure is not None:
            frame = Frame(FrameKind.ERROR, label, encode_error(verdict.failure))
        elif isinstance(answers, bytes):
            frame = Frame(FrameKind.SHARED, label, answers)
        else:
            frame = Frame(FrameKind.OWN, label)
            own = encode_frame(Frame(FrameKind.SHARED, label, answers[self.rank]))
            for rank in range(1, self.world_size):
                answer = encode_frame(Frame(FrameKind.SHARED, label, answers[rank]))
                self.board.put(f"{call.prefix}.{rank}.answer", answer)
        message = encode_frame(frame)
        if self.world_size > 1:
            self.board.put(f"{call.prefix}.answers", message)
            self.ledger.posted.append(f"{call.prefix}.answers")
        return Verdict(answers, verdict.failure, verdict.original, len(own) + len(message))


class ParticipantSide(Side):
    """Hands in, and waits for the answer."""

    def run(self, call: Call) -> Verdict:
        """Hand in, wait, collect; who leaves without an answer says so."""
        try:
            self._hand_in(call)
            if call.is_interrupt:
                return Verdict()
            return self._await_answer(call)
        except Exception as error:
            in_doubt = call.commit and call.error is None
            return Verdict(failure=self.own_failure(call, error, in_doubt), original=error)
        except BaseException as interrupt:
            self._withdraw(call, interrupt)
            if not call.is_last:
                self._leave(call, interrupt)
            raise

    def _hand_in(self, call: Call) -> None:
        """Post what this rank has; where that fails, why: nobody has to wait for it then."""
        name = f"{call.prefix}.{self.rank}"
        try:
            self.board.put(name, encode_frame(call.request))
        except CoordinationError:  # there is no way to the others any more
            raise
        except Exception as error:
            try:
                self.board.put(name, encode_frame(error_frame(call.request.label, error, self.rank)))
            except Exception as again:
                raise error from again

    def _await_answer(self, call: Call) -> Verdict:
        message = self.board.wait(f"{call.prefix}.answers", self._patience(call))
        if message is None:
            return self._give_up(call)
        frame, nbytes = decode_frame(message), len(message)
        if frame.kind is FrameKind.ERROR:
            self.forget([f"{call.prefix}.{self.rank}"])
            failure = decode_failure(frame.body)
            if was_missed(failure, self.rank):
                failure = told_late(failure, self.rank, call.stage)
            return Verdict(failure=failure, nbytes=nbytes)
        if frame.kind is FrameKind.OWN:
            name = f"{call.prefix}.{self.rank}.answer"
            message = self.board.wait(name, self._patience(call))
            if message is None:
                return self._give_up(call)
            self.forget([name])
            frame, nbytes = decode_frame(message), nbytes + len(message)
        if frame.kind is not FrameKind.SHARED:
            raise CoordinationError(f"the coordinator's answer is of kind {frame.kind.name}")
        return Verdict(frame.body, nbytes=nbytes)

    def _patience(self, call: Call) -> float:
        return max(call.started + self._longest_wait(call) - time.monotonic(), _PROBE_SECONDS)

    def _longest_wait(self, call: Call) -> float:
        """Seconds that a rank waits for its answer: longer than the coordinator waits for the slowest rank."""
        return self.timeout_seconds + min(_LONGEST_GRACE_SECONDS, self.timeout_seconds / 4) + call.delay_seconds

    def _give_up(self, call: Call) -> Verdict:
        seconds = f"{self._longest_wait(call):g} s"
        text = f"rank {COORDINATOR}, the coordinator, gave no answer in exchange {call.stage} within {seconds}"
        failure = CoordinationTimeoutError(
            f"{text} (rank {self.rank} waited): it is gone, or hangs, or waits for other "
            "ranks. See its log; if the ranks are only slow, pass a larger timeout_seconds",
            [RankCause(COORDINATOR, CoordinationTimeoutError.__name__, text)],
        )
        self._withdraw(call, failure)
        if call.commit and call.error is None:
            return Verdict(failure=InDoubtError(f"{call.in_doubt}: {failure.message}", failure.causes))
        return Verdict(failure=failure)

    def _leave(self, call: Call, interrupt: BaseException) -> None:
        """Take part in the next exchange by an error: a coordinator that has this call's message would wait there."""
        key, _, number = call.prefix.rpartition(".")
        upcoming = int(number) + 1
        self.ledger.number = max(self.ledger.number, upcoming + 1)
        with contextlib.suppress(Exception):
            frame = error_frame(ANY_STAGE, interrupt, self.rank)
            self.board.put(f"{key}.{upcoming}.{self.rank}", encode_frame(frame))

    def _withdraw(self, call: Call, error: BaseException) -> None:
        """Tell a coordinator that comes later than anybody waits that this rank has left."""
        name = f"{call.prefix}.{self.rank}"
        with contextlib.suppress(Exception):
            self.board.delete(name)
            self.board.put(name, encode_frame(error_frame(call.request.label, error, self.rank)))
