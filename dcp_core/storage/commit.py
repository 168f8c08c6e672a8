"""How a save begins, commits and is taken back, so that at every moment one checkpoint in the directory is whole.

New files have names that no other save uses and are created exclusively; one step of the metadata, a rename or a put,
switches from the old set to the new; only then the old files go. Runs on the rank that decides (the coordinator, or a
rank that saves alone). In: names, sizes, the metadata's bytes. Out: a changed directory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from dcp_core.errors import ArgumentError, DcpError, IncompleteError, NotFoundError
from dcp_core.file_names import METADATA_NAME, parse_data_file_name, parse_rank_metadata_name, rank_metadata_name
from dcp_core.storage.base import Storage
from dcp_core.storage.intent import (
    HEARTBEAT_EXPIRY_SECONDS,
    HEARTBEAT_INTERVAL_SECONDS,
    Opening,
    check_save_id,
    heartbeat,
    parse_intent_name,
    post_intent,
    retire_intent,
)
from dcp_core.storage.leftovers import (
    FilesOf,
    concerns,
    has_intent,
    named_files,
    remove_quietly,
    sweep,
    temporary_name,
)

__all__ = [
    "HEARTBEAT_EXPIRY_SECONDS",
    "HEARTBEAT_INTERVAL_SECONDS",
    "FilesOf",
    "Opening",
    "abort",
    "begin",
    "commit",
    "heartbeat",
    "remove_rank_checkpoints",
    "remove_replaced",
]

_LOG = logging.getLogger("dcp.storage")
_NAMES_SHOWN = 8


def begin(storage: Storage, save_id: str, *, rank: int | None, files_of: FilesOf) -> Opening:
    """Open a save: make the directory, announce the save, clean up after dead ones, choose file names.

    Args:
        storage: The directory.
        save_id: 32 hex digits, random, never used before.
        rank: None for a save of all ranks; else the rank that saves alone (`use_collectives=False`).
        files_of: Tells which data files a metadata file names.

    Returns:
        The opening. Its suffix is "" only for a save that found neither another's intent record nor a data file
        (for a rank alone: none that may be of this rank).

    Raises:
        ArgumentError: If a rank wants to save alone where the checkpoint of a whole job lies.
        StorageError: If the storage refuses; the save has left nothing then.
    """
    check_save_id(save_id)
    if rank is not None:
        _refuse_shadow(storage, rank)
    storage.prepare()
    post_intent(storage, save_id, rank)
    try:
        suffix = f".{save_id}" if storage.is_object_store else _choose_suffix(storage.list(), save_id, rank)
        opening = Opening(save_id, suffix, rank)
        sweep(storage, opening, files_of)
    except BaseException:
        retire_intent(storage, save_id, rank)
        raise
    return opening


def commit(
    storage: Storage,
    opening: Opening,
    metadata: bytes,
    expected: Mapping[str, int],
    *,
    files_of: FilesOf,
    name: str | None = None,
    durable: bool = True,
) -> None:
    """Make the new set of files the checkpoint, then remove the old one.

    Once the metadata has its name, nothing is raised any more: what cannot be cleaned up is logged.

    Args:
        storage: The directory.
        opening: From `begin`.
        metadata: What the metadata file holds.
        expected: Every data file of the new set and its size in bytes; each was synced, and so was the directory,
            by the rank that wrote it.
        files_of: Tells which data files a metadata file names.
        name: The metadata file; None: `.metadata`, or that of the rank that saves alone.
        durable: Whether to wait for the disk at every step. The order of the steps is the same without.

    Raises:
        IncompleteError: If data files are missing or of another size, or if another save took this one for dead.
        ArgumentError: If meanwhile a whole job committed where this rank saves alone.
        StorageError: If the storage refuses. In all three cases the old checkpoint is untouched; call `abort`.
    """
    name = name or _metadata_name(opening)
    temporary = temporary_name(name, opening.save_id)
    replaced: frozenset[str] | None = None

    def ready() -> None:
        nonlocal replaced
        _check_files(storage, expected)
        if opening.rank is not None:
            _refuse_shadow(storage, opening.rank)
        replaced = named_files(storage, name, files_of)
        _confirm_alive(storage, opening)

    _confirm_alive(storage, opening)
    storage.put(name, metadata, temporary=temporary, durable=durable, ready=ready)
    obsolete = None if replaced is None else replaced - expected.keys()
    _settle(storage, opening, obsolete, files_of, durable=durable)


def abort(storage: Storage, opening: Opening | None, own_files: Iterable[str], *, files_of: FilesOf) -> None:
    """Take a failed save back, as far as the storage lets us; never raises one of our errors.

    Every rank that wrote calls it. Don't call it when the answer to the commit is in doubt: the files may be a
    checkpoint by then. (As a last guard, files that the present metadata names are kept.)

    Args:
        storage: The directory.
        opening: From `begin`, on the rank that called it; None on the others.
        own_files: The files that this rank created. Not those that it failed to create: they are another's.
        files_of: Tells which data files a metadata file names.
    """
    doomed = set(own_files)
    if opening is None and not doomed:
        return
    storage.hurry()
    try:
        if opening is not None:
            doomed |= _files_of_save(storage, opening)
            remove_quietly(storage, [temporary_name(_metadata_name(opening), opening.save_id)])
        for name in {METADATA_NAME, _metadata_name(opening)}:
            doomed -= _committed_files(storage, name, files_of)
        remove_quietly(storage, sorted(doomed))
    except DcpError as error:
        _LOG.warning("a failed save leaves files in %s: %s", storage.describe(), error)
    if opening is not None:
        retire_intent(storage, opening.save_id, opening.rank)


def _metadata_name(opening: Opening | None) -> str:
    return METADATA_NAME if opening is None or opening.rank is None else rank_metadata_name(opening.rank)


def _committed_files(storage: Storage, name: str, files_of: FilesOf) -> frozenset[str]:
    """Return what a metadata file names; nothing for one that is unreadable, as ours would not be."""
    return named_files(storage, name, files_of) or frozenset()


def _refuse_shadow(storage: Storage, rank: int) -> None:
    if storage.exists(METADATA_NAME):
        raise ArgumentError(
            f"rank {rank}: use_collectives=False cannot save into {storage.describe()}: it holds the checkpoint of a "
            f"whole job, whose {METADATA_NAME!r} would hide what this rank writes; choose another directory, or "
            "remove the old checkpoint"
        )


def _choose_suffix(names: Iterable[str], save_id: str, rank: int | None) -> str:
    """Choose plain names if nobody else is or was here, as far as this rank's files are concerned."""
    for name in names:
        intent = parse_intent_name(name)
        parsed = parse_data_file_name(name)
        if intent is not None and intent[0] != save_id and concerns(rank, intent[1]):
            return f".{save_id}"
        if name.startswith("_rank") and concerns(rank, parsed[0] if parsed else None):
            return f".{save_id}"
    return ""


def _confirm_alive(storage: Storage, opening: Opening) -> None:
    """Refresh the heartbeat, and make sure that nobody took us for dead and removed our files."""
    try:
        storage.touch(opening.intent_name)
    except NotFoundError as error:
        raise IncompleteError(
            f"save {opening.save_id} cannot be committed: its intent record {opening.intent_name!r} is gone from "
            f"{storage.describe()}. Either the directory was removed, or this save showed no sign of life for "
            f"{HEARTBEAT_EXPIRY_SECONDS:.0f} seconds and another one cleaned up after it; save again"
        ) from error


def _check_files(storage: Storage, expected: Mapping[str, int]) -> None:
    faults = []
    sizes = storage.sizes(list(expected))
    for (name, nbytes), seen in zip(expected.items(), sizes, strict=True):
        found = _fresh_size(storage, name) if seen != nbytes and seen is not None else seen
        if found is None:
            faults.append(f"{name!r} is missing")
        elif found != nbytes:
            faults.append(f"{name!r} has {found} bytes, expected {nbytes}")
    if faults:
        more = f" and {len(faults) - _NAMES_SHOWN} more" if len(faults) > _NAMES_SHOWN else ""
        raise IncompleteError(
            f"the save into {storage.describe()} cannot be committed: {'; '.join(faults[:_NAMES_SHOWN])}{more}. "
            "The files were changed after they were written, or the ranks do not see the same directory"
        )


def _fresh_size(storage: Storage, name: str) -> int | None:
    """Ask for a size again by opening the file: network file systems answer from a cache otherwise."""
    try:
        with storage.open_read(name) as handle:
            return handle.nbytes
    except NotFoundError:
        return None


def _settle(
    storage: Storage, opening: Opening, obsolete: Iterable[str] | None, files_of: FilesOf, *, durable: bool
) -> None:
    """Clean up after a commit; what fails is logged. `obsolete` is None where the replaced metadata is unreadable."""
    try:
        if durable:
            storage.sync()
        remove_replaced(storage, obsolete or ())
        if opening.rank is None:
            remove_rank_checkpoints(storage, files_of)
    except DcpError as error:
        _LOG.error("save %s is committed, but what it replaced stays: %s", opening.save_id, error)
    else:
        if obsolete is not None:
            sweep(storage, opening, files_of)
    retire_intent(storage, opening.save_id, opening.rank)


def remove_replaced(storage: Storage, names: Iterable[str]) -> None:
    """Remove what the replaced metadata named, unless it names what it cannot own."""
    for name in sorted(names):
        parsed = parse_data_file_name(name)
        if parsed is None:
            _LOG.warning(
                "%r, named by the replaced checkpoint in %s, is no data file: it stays", name, storage.describe()
            )
        elif not (parsed[3] and has_intent(storage, parsed[3][1:], parsed[0])):
            remove_quietly(storage, [name])


def remove_rank_checkpoints(storage: Storage, files_of: FilesOf) -> None:
    """Remove what ranks saved alone: the metadata of the whole job hides it."""
    names = [name for name in storage.list() if parse_rank_metadata_name(name) is not None]
    kept = named_files(storage, METADATA_NAME, files_of) if names else None
    for name in names:
        named = named_files(storage, name, files_of)
        remove_quietly(storage, [name])
        if named is not None and kept is not None:
            remove_replaced(storage, named - kept)


def _files_of_save(storage: Storage, opening: Opening) -> set[str]:
    """List what any rank wrote for a save, dead ranks included; nothing when its names may be another's by now."""
    if storage.modified_seconds(opening.intent_name) is None:
        return set()
    found = set()
    for name in storage.list():
        parsed = parse_data_file_name(name)
        if parsed is not None and parsed[3] == opening.suffix and concerns(opening.rank, parsed[0]):
            found.add(name)
    return found
