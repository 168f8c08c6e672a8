"""The one tree of errors.

Every error that DCP raises is a `DcpError`, picklable, and the same on every rank::

    DcpError
    ├── PlanningError (ValueError)          the state cannot be saved or loaded as it is
    │   ├── CoverageError                   a hole: elements that nobody holds
    │   ├── OverlapError                    elements held twice by boxes that differ
    │   ├── ShapeMismatchError              global shapes disagree
    │   ├── DTypeMismatchError (TypeError)  dtypes disagree
    │   ├── MissingKeysError (KeyError)     wanted keys that the checkpoint lacks
    │   ├── ReplicasDifferError             copies of one thing whose bits differ
    │   └── UnsupportedValueError (TypeError)
    ├── FormatError (ValueError)            what lies in storage is not what it should be
    │   ├── NotFoundError (FileNotFoundError)
    │   ├── IncompleteError                 data files are missing or too short
    │   ├── CorruptError                    bytes that contradict their checksum or the format
    │   ├── UntrustedObjectError            a pickled object whose class is not allowed
    │   └── NewerVersionError               written by a newer format version
    ├── StorageError (OSError)              the storage refused an operation
    ├── ArgumentError (ValueError)          a bad argument
    │   └── MissingRendezvousError (AssertionError)
    ├── CoordinationError (RuntimeError)    ranks could not agree
    │   ├── CoordinationTimeoutError (TimeoutError)
    │   ├── RankFailedError                 code that is not ours raised on a rank
    │   ├── ArgumentsDifferError (ValueError)
    │   ├── SaveCancelledError              somebody cancelled an asynchronous save
    │   └── InDoubtError                    may be committed: the coordinator died after the commit began
    └── AdapterError (RuntimeError)         a plugin is missing, broken, or contradicts another

An error travels between ranks as `encode_error` bytes: class name, message and causes, never a pickle.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_CAUSE_DETAIL_CHARS = 4000
_CAUSES_SENT = 16


@dataclass(frozen=True, slots=True)
class RankCause:
    """What one rank raised.

    Attributes:
        rank: The rank in its group.
        kind: Class name of what was raised.
        message: Its text.
        detail: Its traceback, for the log; may be empty.
    """

    rank: int
    kind: str
    message: str
    detail: str = ""


class DcpError(Exception):
    """Any error of DCP.

    Attributes:
        causes: What each failing rank raised, lowest rank first; empty for an error that never left its rank.
    """

    def __init__(self, message: str = "", causes: Sequence[RankCause] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.causes = tuple(causes)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[type[DcpError], tuple[str, tuple[RankCause, ...]]]:
        return type(self), (self.message, self.causes)


class PlanningError(DcpError, ValueError):
    """The state cannot be saved or loaded as it is."""


class CoverageError(PlanningError):
    """Some elements are held by nobody."""


class OverlapError(PlanningError):
    """Some elements are held by boxes that differ."""


class ShapeMismatchError(PlanningError):
    """Two sides disagree on a global shape."""


class DTypeMismatchError(PlanningError, TypeError):
    """Two sides disagree on a dtype, or a conversion is not allowed."""


class MissingKeysError(PlanningError, KeyError):
    """The checkpoint lacks keys that were asked for."""


class ReplicasDifferError(PlanningError):
    """Ranks hold different bits of what a save takes for copies (`check_replicas=True`)."""


class UnsupportedValueError(PlanningError, TypeError):
    """A value that cannot be stored."""


class FormatError(DcpError, ValueError):
    """What lies in storage is not what it should be."""


class NotFoundError(FormatError, FileNotFoundError):
    """There is no complete checkpoint."""


class IncompleteError(FormatError):
    """Files of the checkpoint are missing or too short."""


class CorruptError(FormatError):
    """Bytes contradict their checksum or the format."""


class UntrustedObjectError(FormatError):
    """A pickled object whose class nobody allowed."""


class NewerVersionError(FormatError):
    """The checkpoint was written by a newer format version."""


class StorageError(DcpError, OSError):
    """The storage refused an operation."""


class ArgumentError(DcpError, ValueError):
    """A bad argument."""


class MissingRendezvousError(ArgumentError, AssertionError):
    """`use_gloo=True` without MASTER_ADDR and MASTER_PORT."""


class CoordinationError(DcpError, RuntimeError):
    """The ranks could not agree."""


class CoordinationTimeoutError(CoordinationError, TimeoutError):
    """A rank did not answer before the deadline."""


class RankFailedError(CoordinationError):
    """Code that is not ours raised on a rank."""


class ArgumentsDifferError(CoordinationError, ValueError):
    """Ranks passed different arguments."""


class SaveCancelledError(CoordinationError):
    """An asynchronous save was cancelled; nothing of it was committed."""


class InDoubtError(CoordinationError):
    """The checkpoint may be committed; nobody can say. `latest_checkpoint` or `dcp verify` tells what is there."""


class AdapterError(DcpError, RuntimeError):
    """A plugin is missing, broken, or contradicts another."""


def doubt_about(save_id: str) -> str:
    """What an `InDoubtError` of a save says first."""
    return f"see by latest_checkpoint or `dcp verify` what is there: the checkpoint may be committed, id {save_id}"


def _tree(root: type[DcpError]) -> dict[str, type[DcpError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


ERROR_TYPES: dict[str, type[DcpError]] = _tree(DcpError)


def cause_of(error: BaseException, rank: int) -> RankCause:
    """Describe what a rank raised, traceback included."""
    detail = "".join(traceback.format_exception(error))[-_CAUSE_DETAIL_CHARS:]
    return RankCause(rank, type(error).__name__, str(error) or repr(error), detail)


def merge_errors(causes: Sequence[RankCause]) -> DcpError:
    """Make the one error that every rank raises.

    Args:
        causes: What the failing ranks raised, at least one.

    Returns:
        An error of the class that the first failing rank raised if that is one of ours, else a `RankFailedError`.
        They come by rank, but those that may have failed because of another one (`CoordinationError`) last. Ranks that
        raised the same text are named together.
    """
    ordered = sorted(causes, key=lambda cause: (_is_of_others(cause), cause.rank))
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for cause in ordered:
        ranks_of.setdefault((cause.kind, cause.message), []).append(cause.rank)
    lines = []
    for (kind, message), ranks in list(ranks_of.items())[:_CAUSES_SENT]:
        label = "rank" if len(ranks) == 1 else "ranks"
        shown = ", ".join(str(rank) for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        text = message if kind in ERROR_TYPES else f"{kind}: {message}"
        lines.append(f"{label} {shown}: {text}")
    if len(ranks_of) > _CAUSES_SENT:
        lines.append(f"and {len(ranks_of) - _CAUSES_SENT} more kinds of failure")
    error_type = ERROR_TYPES.get(ordered[0].kind, RankFailedError)
    return error_type("\n".join(lines), ordered[:_CAUSES_SENT])


def _is_of_others(cause: RankCause) -> bool:
    """Whether a rank may have failed because another one had."""
    return issubclass(ERROR_TYPES.get(cause.kind, DcpError), CoordinationError)


def encode_error(error: DcpError) -> bytes:
    """Flatten an error to bytes that another rank can raise."""
    fields = {"kind": type(error).__name__, "message": error.message, "causes": [asdict(c) for c in error.causes]}
    return json.dumps(fields).encode()


def decode_error(payload: bytes) -> DcpError:
    """Undo `encode_error`; a class that is not ours becomes a `RankFailedError`.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: These are no bytes of `encode_error`.
    """
    fields = json.loads(payload)
    causes = [RankCause(**cause) for cause in fields["causes"]]
    numbers = [cause.rank for cause in causes]
    texts = [
        fields["kind"],
        fields["message"],
        *(text for cause in causes for text in (cause.kind, cause.message, cause.detail)),
    ]
    if not all(type(number) is int for number in numbers) or not all(type(text) is str for text in texts):
        raise ValueError("not the fields of an error")
    return ERROR_TYPES.get(fields["kind"], RankFailedError)(fields["message"], causes)
