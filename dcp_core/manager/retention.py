"""What happens in a directory of checkpoints once a save is committed: the link moves, old checkpoints go.

In: the storage of the directory, and which checkpoint was committed. Runs on one rank. Nothing here fails a training:
what cannot be done is logged, and tried again after the next save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from dcp_core.errors import DcpError, FormatError, NotFoundError, StorageError
from dcp_core.execution.present_metadata import open_present
from dcp_core.file_names import METADATA_NAME
from dcp_core.formats.metadata_file import file_names
from dcp_core.manager.survey import FoundCheckpoint, candidates, check_candidate, is_unusable, step_of
from dcp_core.manager.whole_numbers import whole_number
from dcp_core.storage.base import Storage
from dcp_core.storage.removal import clear_dead_save, remove_checkpoint

LATEST_NAME = "latest"
"""Leads to the checkpoint that was committed last."""

_NAMES_SHOWN = 8
_LOG = logging.getLogger("dcp.manager")


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are kept.

    Attributes:
        keep: How many of the newest complete ones, at least 1; None: all.
        keep_every: Those whose step is a multiple of this are kept besides, at least 1; None: none.
    """

    keep: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep", "keep_every"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value, "1 or more, or None", least=1))

    def is_milestone(self, found: FoundCheckpoint) -> bool:
        """Whether a checkpoint is kept for its step."""
        return self.keep_every is not None and found.step is not None and found.step % self.keep_every == 0


def after_commit(
    root: Storage,
    committed: str,
    retention: Retention,
    *,
    is_ours: Callable[[str], bool],
    durable: bool = True,
) -> None:
    """Move the link `latest`, and remove the checkpoints that are not kept. Raises none of our errors.

    Args:
        root: The directory of checkpoints.
        committed: The one that was just committed; it stays.
        retention: Which others stay.
        is_ours: Tells which names may be removed.
        durable: Whether to wait for the disk at every step.
    """
    _quietly(f"let {LATEST_NAME!r} lead to {committed!r}", partial(_point, root, committed, durable=durable))
    if retention.keep is not None:
        remove_old = partial(_remove_old, root, committed, retention, is_ours, durable=durable)
        _quietly("remove old checkpoints", remove_old)


def warn_of_higher_steps(root: Storage, committed: str, *, is_ours: Callable[[str], bool], told: set[str]) -> None:
    """Say in the log which whole checkpoints have higher steps than the one that was just committed.

    They come first when a run is resumed, which who went back to an older checkpoint does not want.

    Args:
        root: The directory of checkpoints.
        committed: The one that was just committed.
        is_ours: Tells which names count.
        told: What was said before; what is said now is added.
    """
    step = step_of(committed) or 0
    try:
        names = [name for name in root.list_directories() if is_ours(name) and (step_of(name) or 0) > step]
        higher = sorted(set(names) - told, key=lambda name: step_of(name) or 0)
        told.update(higher)
        whole = [name for name in higher if _holds_checkpoint(root, name)]
    except DcpError as error:  # nothing that a training has to know
        _LOG.debug("whether there are higher steps than %r is unknown: %s", committed, error)
        return
    if whole:
        _LOG.warning(
            "%r was saved while %s of a higher step lies beside it: resume() and latest_checkpoint() go by the number "
            "and prefer that; remove it if its run was given up",
            committed, ", ".join(map(repr, whole[:_NAMES_SHOWN])) + (" and more" if len(whole) > _NAMES_SHOWN else ""),
        )  # fmt: skip


def _by_commit(found: FoundCheckpoint) -> tuple[float, int, str]:
    return found.committed_seconds, found.step or 0, found.name


def _holds_checkpoint(root: Storage, name: str) -> bool:
    try:
        check_candidate(root, name)
    except (FormatError, StorageError) as error:
        if not is_unusable(root, error):
            raise
        return False
    return True


def _quietly(what: str, action: Callable[[], None]) -> None:
    try:
        action()
    except (DcpError, OSError) as error:
        _LOG.warning("could not %s: %s", what, error)


def _point(root: Storage, committed: str, *, durable: bool) -> None:
    root.point(LATEST_NAME, committed)
    if durable:
        root.sync()


def _remove_old(
    root: Storage, committed: str, retention: Retention, is_ours: Callable[[str], bool], *, durable: bool
) -> None:
    """Remove, oldest first, all complete checkpoints but the newest; what the link leads to stays in any case.

    What was committed after our own stays, too: of two managers at work the last commit is removed by neither.
    """
    protected = {committed, root.target_of(LATEST_NAME)}
    left = (retention.keep or 1) - 1  # the committed one is the first that is kept
    old: list[FoundCheckpoint] = []
    listed = candidates(root, is_wanted=is_ours)
    own = next((_by_commit(found) for found in listed if found.name == committed), None)
    for found in listed:
        if found.name == committed or own is None:
            continue
        if left > 0 or found.name in protected or retention.is_milestone(found):
            left -= _is_whole(root, found.name)
        elif _by_commit(found) < own:
            old.append(found)
    for found in reversed(old):
        _quietly(f"remove {found.name!r}", partial(_remove, root, found, durable=durable))


def _is_whole(root: Storage, name: str) -> bool:
    """Whether a directory holds a complete checkpoint; what dead saves left in one that does not is removed."""
    is_whole = _holds_checkpoint(root, name)
    if not is_whole:
        _quietly(f"clean up {name!r}", partial(_clear, root, name))
    return is_whole


def _remove(root: Storage, found: FoundCheckpoint, *, durable: bool) -> None:
    name = found.name
    storage = root.folder(name)
    committed_seconds = storage.modified_seconds(METADATA_NAME)
    if committed_seconds is None:
        _clear(root, name)
        return
    if committed_seconds != found.committed_seconds:
        return  # another manager has committed it since we looked
    open_present(storage, METADATA_NAME)  # raises for what is none of ours
    remove_checkpoint(storage, files_of=file_names, durable=durable)
    _remove_directory(root, name)
    if durable:
        root.sync()


def _clear(root: Storage, name: str) -> None:
    with suppress(NotFoundError):  # another manager has removed it since we looked
        if clear_dead_save(root.folder(name), files_of=file_names):
            _remove_directory(root, name)


def _remove_directory(root: Storage, name: str) -> None:
    if not root.remove_empty_directory(name):
        _LOG.info("%r in %s holds other files, so the directory stays", name, root.describe())
