"""Looks at the checkpoints in a directory and finds the newest one that is whole.

In: the storage of the directory. Out: a `RootSurvey`: the checkpoint, and why newer ones were passed over. Runs on one
rank; nothing is changed, and no link is followed.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass

from dcp_core.errors import FormatError, IncompleteError, NewerVersionError, NotFoundError, StorageError
from dcp_core.execution.completeness import check_complete
from dcp_core.file_names import METADATA_NAME, parse_data_file_name, parse_rank_metadata_name, rank_metadata_name
from dcp_core.inspection.verify import verify_storage
from dcp_core.storage.base import Storage
from dcp_core.storage.intent import parse_intent_name

_STEP = re.compile(r".*?([0-9]{1,18})")
_MOST_LOOKS = 8
_LOG = logging.getLogger("dcp.manager")


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint in a directory of checkpoints.

    Attributes:
        name: Of its directory.
        step: The number that the name ends with; None where it ends with none.
        committed_seconds: When its description was written, by the clock of the storage.
    """

    name: str
    step: int | None
    committed_seconds: float


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A directory that a search passed over.

    Attributes:
        name: Of the directory.
        reason: Why.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RootSurvey:
    """What a search found.

    Attributes:
        root: The directory of checkpoints, as it was given, made absolute.
        newest: The newest checkpoint that is whole; None where there is none.
        path: Of that: what `load` takes as `checkpoint_id`.
        skipped: Directories that would have come before it, had they been whole.
    """

    root: str
    newest: FoundCheckpoint | None
    path: str | None
    skipped: tuple[SkippedCheckpoint, ...] = ()

    def to_bytes(self) -> bytes:
        """Flatten."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> RootSurvey:
        """Undo `to_bytes`."""
        fields = json.loads(raw)
        newest = None if fields["newest"] is None else FoundCheckpoint(**fields["newest"])
        return cls(
            fields["root"], newest, fields["path"], tuple(SkippedCheckpoint(**each) for each in fields["skipped"])
        )


def step_of(name: str) -> int | None:
    """The number that a name ends with.

    >>> step_of("step_100"), step_of("checkpoint-00020"), step_of("final")
    (100, 20, None)
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def survey(
    root: Storage,
    *,
    verify: bool = False,
    passed_over: Collection[str] = (),
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> tuple[FoundCheckpoint | None, tuple[SkippedCheckpoint, ...]]:
    """Find the newest checkpoint that is whole.

    Args:
        root: The directory of checkpoints.
        verify: Whether to read all files of a checkpoint and compare them with their checksums.
        passed_over: Names that are out of the question.
        is_wanted: Tells which names count.

    Returns:
        The checkpoint, None where there is none; and the directories that came before it, with reasons.

    Raises:
        NewerVersionError: The newest one was written by a newer version of this library.
        StorageError: The storage refuses to show something; but a directory, or what describes a checkpoint, that this
            user may not read is passed over like one that is damaged.
    """

    def counts(name: str) -> bool:
        return name not in passed_over and is_wanted(name)

    seen: tuple[object, object] | None = None
    for _ in range(_MOST_LOOKS):  # none is whole only if nothing changed while we looked
        names = _directories(root, counts)
        found, skipped = _look_through(root, counts, verify=verify)
        if found is not None or not names or (names, skipped) == seen:
            break
        seen = names, skipped
    return found, skipped


def _look_through(
    root: Storage, is_wanted: Callable[[str], bool], *, verify: bool
) -> tuple[FoundCheckpoint | None, tuple[SkippedCheckpoint, ...]]:
    """Look at one candidate after another. Another job may commit and remove meanwhile: then none is seen whole."""
    skipped: list[SkippedCheckpoint] = []
    for candidate in candidates(root, is_wanted=is_wanted):
        try:
            check_candidate(root, candidate.name, verify=verify)
        except NewerVersionError:
            raise
        except (FormatError, StorageError) as error:
            if not is_unusable(root, error):
                raise
            skipped.append(SkippedCheckpoint(candidate.name, str(error)))
            continue
        return candidate, tuple(skipped)
    return None, tuple(skipped)


def is_unusable(root: Storage, error: FormatError | StorageError) -> bool:
    """Whether an error says that a checkpoint is of no use, as against one that may be gone in a moment.

    An object store that refuses one object refuses all, so the fault is not the checkpoint's.

    Args:
        root: The directory of checkpoints.
        error: What looking at a checkpoint in it raised.
    """
    if isinstance(error, StorageError):
        return error.errno in (errno.EACCES, errno.EPERM) and not root.is_object_store
    return True


def _directories(root: Storage, is_wanted: Callable[[str], bool]) -> Sequence[str]:
    """The names of all that may be looked at; none where there is no directory."""
    try:
        return [name for name in root.list_directories() if not name.startswith(".") and is_wanted(name)]
    except NotFoundError:
        return []


def candidates(root: Storage, *, is_wanted: Callable[[str], bool] = lambda name: True) -> list[FoundCheckpoint]:
    """List the directories that may be checkpoints, the newest first.

    Those whose names end with a number come by that, equal numbers by the time of their commits. Another one comes
    before all numbered ones that were committed before it.

    Args:
        root: The directory of checkpoints; where there is none, it holds none.
        is_wanted: Tells which names count. Names that start with a dot never do.
    """
    found = [_look(root, name) for name in _directories(root, is_wanted)]
    known = [each for each in found if each is not None]
    numbered = sorted((each for each in known if each.step is not None), key=_by_step, reverse=True)
    others = sorted((each for each in known if each.step is None), key=lambda each: each.committed_seconds)
    ordered = []
    for each in numbered:
        while others and others[-1].committed_seconds > each.committed_seconds:
            ordered.append(others.pop())
        ordered.append(each)
    return ordered + others[::-1]


def _by_step(found: FoundCheckpoint) -> tuple[int, float, str]:
    return found.step or 0, found.committed_seconds, found.name


def _look(root: Storage, name: str) -> FoundCheckpoint | None:
    """What a directory may be: None for one that has nothing to do with checkpoints."""
    try:
        return _look_inside(root, name)
    except StorageError as error:
        if not is_unusable(root, error):
            raise
        return FoundCheckpoint(name, step_of(name), 0.0)  # what is wrong with it is said when it is looked at closely


def _look_inside(root: Storage, name: str) -> FoundCheckpoint | None:
    storage, step = root.folder(name), step_of(name)
    committed = storage.modified_seconds(METADATA_NAME)
    if committed is None:
        try:
            names = storage.list()
        except NotFoundError:
            return None
        described = [each for each in names if parse_rank_metadata_name(each) is not None]
        if not described and step is None and not any(map(_is_ours, names)):
            return None
        committed = max([storage.modified_seconds(each) or 0.0 for each in described], default=0.0)
    return FoundCheckpoint(name, step, committed)


def _is_ours(name: str) -> bool:
    return parse_data_file_name(name) is not None or parse_intent_name(name) is not None


def check_candidate(root: Storage, name: str, *, verify: bool = False) -> None:
    """Check that a directory holds a whole checkpoint.

    Raises:
        FormatError: It does not; the text says why.
    """
    storage = root.folder(name)
    for description in _descriptions(storage):
        check_complete(storage, description)
    if verify:
        verify_storage(storage).raise_problems()


def _descriptions(storage: Storage) -> Iterator[str]:
    """The descriptions that must hold for a checkpoint to be whole: that of the job, or those of all its ranks."""
    if storage.exists(METADATA_NAME):
        yield METADATA_NAME
        return
    ranks = sorted(rank for rank in map(parse_rank_metadata_name, storage.list()) if rank is not None)
    if not ranks:
        raise IncompleteError(f"there is no {METADATA_NAME} in {storage.describe()}: no save into it was completed")
    worlds = set()
    for rank in ranks:
        worlds.add(check_complete(storage, rank_metadata_name(rank)).writer.world_size)
        yield rank_metadata_name(rank)
    if worlds != {len(ranks)} or ranks != list(range(len(ranks))):
        raise IncompleteError(
            f"ranks saved alone into {storage.describe()}, and their descriptions are no complete set: ranks "
            f"{_some(ranks)}, of a job of {' or '.join(map(str, sorted(worlds)))}"
        )


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")


def warn_of_skipped(skipped: Sequence[SkippedCheckpoint], level: int = logging.WARNING) -> None:
    """Say in the log which directories were passed over, and why."""
    for each in skipped:
        _LOG.log(level, "%r is no checkpoint to go on from, and is passed over: %s", each.name, each.reason)
