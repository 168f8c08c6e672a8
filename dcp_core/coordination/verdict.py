"""What an exchange comes to: from what the ranks handed in (or did not) to the one error that all of them raise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from dcp_core.coordination.frames import Frame, FrameKind
from dcp_core.errors import (
    ERROR_TYPES,
    ArgumentsDifferError,
    CoordinationError,
    CoordinationTimeoutError,
    DcpError,
    RankCause,
    cause_of,
    decode_error,
    encode_error,
    merge_errors,
)

ANY_STAGE = ""
"""Label of a message from a rank that has left, and so is in no stage."""

_CAUSES_SENT = 16
_RUN = r"[0-9]{1,9}(?:-[0-9]{1,9})?"
_MISSING = re.compile(rf"ranks? ({_RUN}(?:, {_RUN})*) did not come to exchange ")


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks for a message, all of them, runs of neighbours in short.

    >>> name_ranks([7, 0, 1, 2]), name_ranks([4])
    ('ranks 0-2, 7', 'rank 4')
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(shown)}"


def judge(stage: str, frames: Mapping[int, Frame], world_size: int, timeout_seconds: float) -> DcpError | None:
    """Find the failure in what was handed in.

    Args:
        stage: Where the coordinator is.
        frames: What came, by rank; the coordinator's own at rank 0.
        world_size: Ranks that should have come.
        timeout_seconds: How long they were waited for.

    Returns:
        The error that every rank raises, or None if all is well. Ranks in different stages come first, then what
        ranks raised, then who is missing: once one has failed, the others are waited for a moment only. Where ranks
        failed to reach others, those that did not come within it are named as well.
    """
    causes = [_cause_in(rank, frames[rank]) for rank in sorted(frames) if frames[rank].kind is not FrameKind.PAYLOAD]
    if any(frame.label not in (frames[0].label, ANY_STAGE) for frame in frames.values()):
        return _stages_differ(frames, causes)
    missing = [rank for rank in range(world_size) if rank not in frames]
    if causes:
        return _with_missing(merge_errors(causes), stage, missing)
    return _missing(stage, missing, timeout_seconds) if missing else None


def is_bad(frame: Frame, label: str) -> bool:
    """Whether what a rank handed in makes the exchange fail."""
    return frame.kind is not FrameKind.PAYLOAD or frame.label != label


def checked_answers(answers: object, world_size: int) -> tuple[bytes, ...] | bytes:
    """Check what a computation returned.

    Raises:
        CoordinationError: Neither one answer for all nor one for each rank.
    """
    if isinstance(answers, (bytes, bytearray, memoryview)):
        return bytes(answers)
    if not isinstance(answers, Sequence) or len(answers) != world_size:
        raise CoordinationError(f"an exchange of {world_size} ranks needs one answer for all, or {world_size} answers")
    if not all(isinstance(answer, (bytes, bytearray, memoryview)) for answer in answers):
        raise CoordinationError("the answers of an exchange must be bytes")
    return tuple(bytes(answer) for answer in answers)


def failure_for_all(error: Exception, rank: int) -> DcpError:
    """Make the error that all raise when the coordinator's computation fails: ours keep class, text and causes."""
    cause = safe_cause(error, rank)
    if isinstance(error, DcpError) and ERROR_TYPES.get(cause.kind) is type(error):
        return type(error)(error.message, error.causes or (cause,))
    return merge_errors([cause])


def error_frame(label: str, error: BaseException, rank: int) -> Frame:
    """Frame what a rank raised."""
    return Frame(FrameKind.ERROR, label, encode_error(DcpError("", [safe_cause(error, rank)])))


def safe_cause(error: BaseException, rank: int) -> RankCause:
    """Describe what a rank raised, also an error whose own `__str__` raises."""
    try:
        return cause_of(error, rank)
    except Exception:
        return RankCause(rank, type(error).__name__, "its message can't be shown")


def decode_failure(body: bytes) -> DcpError:
    """Undo `encode_error`; what can't be read is an error of its own."""
    try:
        return decode_error(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return CoordinationError(f"an error of {len(body)} bytes can't be read: {error}")


def was_missed(failure: DcpError, rank: int) -> bool:
    """Whether a failure says that this rank, among others perhaps, did not come."""
    match = _MISSING.match(failure.message) if isinstance(failure, CoordinationTimeoutError) else None
    runs = match[1].split(", ") if match else ()
    for run in runs:
        first, _, last = run.partition("-")
        if int(first) <= rank <= int(last or first):
            return True
    return False


def told_late(failure: DcpError, rank: int, stage: str) -> DcpError:
    """Make what a rank raises that comes to an exchange only after it was given up because of that rank.

    Args:
        failure: What the others raised.
        rank: The rank that is late.
        stage: Where it is now.
    """
    return CoordinationTimeoutError(
        f"{failure.message}\nrank {rank} comes to exchange {stage} only now, after the deadline; or it left out an "
        "earlier save or load, so that the ranks are at different calls. If calls were left out, all later ones will "
        "fail as well: make every rank call, and restart the job",
        failure.causes,
    )


def _cause_in(rank: int, frame: Frame) -> RankCause:
    failure = decode_failure(frame.body)
    return failure.causes[0] if failure.causes else safe_cause(failure, rank)


def _missing(stage: str, missing: Sequence[int], timeout_seconds: float) -> CoordinationTimeoutError:
    text = f"did not come to exchange {stage} within {timeout_seconds:g} s"
    causes = [RankCause(rank, CoordinationTimeoutError.__name__, text) for rank in missing[:_CAUSES_SENT]]
    return CoordinationTimeoutError(
        f"{name_ranks(missing)} {text}; the others gave up. See what became of them in their logs; if they are only "
        "slow, pass a larger timeout_seconds",
        causes,
    )


def _with_missing(failure: DcpError, stage: str, missing: Sequence[int]) -> DcpError:
    """Name who did not come, too, where ranks failed to reach others: a broadcast does not tell for whom it waited."""
    if not missing or type(failure) not in (CoordinationError, CoordinationTimeoutError):
        return failure
    text = f"had not come to exchange {stage} by then"
    causes = [RankCause(rank, CoordinationTimeoutError.__name__, text) for rank in missing]
    message = f"{failure.message}\n{name_ranks(missing)} {text}: see what became of them in their logs"
    return type(failure)(message, [*causes, *failure.causes][:_CAUSES_SENT])


def _stages_differ(frames: Mapping[int, Frame], causes: Sequence[RankCause]) -> ArgumentsDifferError:
    ranks_in: dict[str, list[int]] = {}
    for rank in sorted(frames):
        if frames[rank].label != ANY_STAGE:
            ranks_in.setdefault(frames[rank].label, []).append(rank)
    stages = "; ".join(f"{name_ranks(ranks)} in {label}" for label, ranks in ranks_in.items())
    lines = [f"the ranks are at different places: {stages}. Every rank must make the same calls in the same order"]
    if causes:
        lines.append(merge_errors(causes).message)
    return ArgumentsDifferError("\n".join(lines), causes)
