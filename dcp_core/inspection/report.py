"""What a verification found: plain values, all problems at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dcp_core.box import Box
from dcp_core.errors import CorruptError, FormatError, IncompleteError, NewerVersionError

ProblemKind = Literal[
    "no checkpoint", "missing file", "wrong size", "unreadable", "newer version", "damaged description",
    "another save's file", "damaged header", "damaged data", "damaged object", "contradiction", "hole", "overlap",
]  # fmt: skip
StrayKind = Literal["data file", "description", "intent record", "mailbox", "other"]

RESTORE = "restore the file from a copy, or load another checkpoint"
RETRY = "see that the file can be read here (permissions, disk, network), then verify again"
KEYS_NAMED = 8

_INCOMPLETE = ("no checkpoint", "missing file", "wrong size")
_LINES_RAISED = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint.

    Attributes:
        kind: Which sort of thing.
        text: What is wrong, in a sentence.
        file: Name of the file; "" for what concerns none.
        keys: Names of tensors and objects that it concerns, at most `KEYS_NAMED`.
        more_keys: How many more it concerns.
        byte_offset: First byte of the file that is concerned, if it is known.
        nbytes: How many bytes from there on.
        box: Which elements of the tensor are concerned, if that is known.
        expected: What should be there; "" where `text` says it.
        found: What is there instead; "" where `text` says it.
        remedy: What to do.
    """

    kind: ProblemKind
    text: str
    file: str = ""
    keys: tuple[str, ...] = ()
    more_keys: int = 0
    byte_offset: int | None = None
    nbytes: int | None = None
    box: Box | None = None
    expected: str = ""
    found: str = ""
    remedy: str = RESTORE

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.text}"]
        if self.expected or self.found:
            parts.append(f"expected {self.expected or 'nothing'}, found {self.found or 'nothing'}")
        if self.keys:
            parts.append("concerns " + keys_text(self.keys, self.more_keys))
        return "; ".join([*parts, self.remedy])


@dataclass(frozen=True, slots=True)
class Stray:
    """A name in the directory that is no part of the checkpoint. None of them does harm.

    Attributes:
        name: The name.
        kind: What it looks like.
        text: What it is, in words.
        nbytes: Its size; None for what is no file.
    """

    name: str
    kind: StrayKind
    text: str
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        place: Where the checkpoint is.
        format: "dcp", "huggingface", "torch-dcp", or "none" where no save has been completed.
        save_ids: The saves that it is: one, or one for each rank that saved alone. Empty for other formats.
        tensors: How many are described.
        chunks: How many stored boxes.
        objects: How many values that are no tensors.
        files: How many data files.
        nbytes: Size of those files together, as described.
        checked_nbytes: Bytes that were compared with their checksums.
        is_quick: Checksums of data were left out.
        problems: What is wrong, by file.
        more_problems: How many more there are, where only so many are listed.
        strays: What else lies in the directory; None where that cannot be told.
        notes: What is worth knowing and is no problem.
        seconds: How long it took.
    """

    place: str
    format: Literal["dcp", "huggingface", "torch-dcp", "none"]
    save_ids: tuple[str, ...] = ()
    tensors: int = 0
    chunks: int = 0
    objects: int = 0
    files: int = 0
    nbytes: int = 0
    checked_nbytes: int = 0
    is_quick: bool = False
    problems: tuple[Problem, ...] = ()
    more_problems: int = 0
    strays: tuple[Stray, ...] | None = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong, as far as was looked."""
        return not self.problems

    def raise_problems(self) -> None:
        """Raise what is wrong; nothing where nothing is.

        Raises:
            NewerVersionError, IncompleteError, CorruptError: By the first problem; the message lists them.
        """
        if self.is_whole:
            return
        lines = [str(problem) for problem in self.problems[:_LINES_RAISED]]
        left = len(self.problems) + self.more_problems - len(lines)
        if left:
            lines.append(f"and {left} more")
        raise _error_type(self.problems[0].kind)(f"the checkpoint {self.place} is not whole:\n" + "\n".join(lines))

    def to_values(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return {**asdict(self), "is_whole": self.is_whole}


def _error_type(kind: ProblemKind) -> type[FormatError]:
    if kind == "newer version":
        return NewerVersionError
    return IncompleteError if kind in _INCOMPLETE else CorruptError


def keys_text(keys: Iterable[str], more: int = 0) -> str:
    """Names for people.

    >>> keys_text(["a", "b"], 3)
    "'a', 'b' and 3 more"
    """
    return ", ".join(map(repr, keys)) + (f" and {more} more" if more else "")


def merged(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Join neighbouring damaged ranges of the same keys; the problems are in the order of files and bytes."""
    last: Problem | None = None
    for problem in problems:
        if last is not None and _touch(last, problem):
            assert last.nbytes is not None and problem.nbytes is not None and last.byte_offset is not None
            nbytes = last.nbytes + problem.nbytes
            last = replace(last, nbytes=nbytes, text=damaged_text(last.file, last.byte_offset, nbytes))
            continue
        if last is not None:
            yield last
        last = problem
    if last is not None:
        yield last


def damaged_text(file: str, start: int, nbytes: int) -> str:
    """Say that data contradicts its checksums."""
    return f"bytes {start} to {start + nbytes} of {file} contradict their checksums"


def _touch(one: Problem, other: Problem) -> bool:
    return (
        one.kind == other.kind == "damaged data"
        and (one.file, one.keys, one.more_keys) == (other.file, other.keys, other.more_keys)
        and one.byte_offset is not None
        and one.nbytes is not None
        and one.byte_offset + one.nbytes == other.byte_offset
    )
