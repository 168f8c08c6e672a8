"""What dead saves left behind, and the proof that it may go.

A file goes only if no metadata in the directory names it and no live save may own it. Other saves commit while we
look, and a listing is no snapshot, so the order of the looks is the proof:

1. List the files. Whoever made one had put its intent record there before.
2. Look up the intent records, after (1). A record that is absent now belongs to a save that has ended; a dead one is
   removed, which tells its save, should it wake up, that it must not commit.
3. Read what is committed, after (2). A save that ended with success is named there, or by what replaced it.
4. Remove what is left. A name with an id is never used twice. A plain name may be, but only by a save that saw no
   other's intent record; ours is there all the time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dcp_core.errors import CorruptError, DcpError, NotFoundError
from dcp_core.file_names import (
    JOIN_NAME,
    MAILBOX_PREFIX,
    METADATA_NAME,
    parse_data_file_name,
    parse_rank_metadata_name,
    rank_metadata_name,
)
from dcp_core.storage.base import Storage
from dcp_core.storage.intent import HEARTBEAT_EXPIRY_SECONDS, Opening, intent_name, is_dead, parse_intent_name

FilesOf = Callable[[bytes], Sequence[str]]
"""Tells which data files a metadata file names; raises for one that it cannot read."""

_LOG = logging.getLogger("dcp.storage")
_METADATA_LIMIT = 2**30
_TEMPORARY = re.compile(rf"(?:(0|[1-9][0-9]{{0,9}}))?{re.escape(METADATA_NAME)}\.([0-9a-f]{{32}})\.tmp")
_MAILBOX = re.compile(rf"{re.escape(MAILBOX_PREFIX)}([0-9a-f]{{32}}|{JOIN_NAME})")


@dataclass(frozen=True, slots=True)
class _Found:
    """A file that some save made."""

    name: str
    rank: int | None
    save_id: str


def temporary_name(name: str, save_id: str) -> str:
    """Name the file that becomes metadata by a rename.

    >>> temporary_name(".metadata", "0" * 32)
    '.metadata.00000000000000000000000000000000.tmp'
    """
    return f"{name}.{save_id}.tmp"


def parse_temporary_name(name: str) -> tuple[int | None, str] | None:
    """Undo `temporary_name`: (rank or None, save id); None for another name.

    >>> parse_temporary_name(".metadata." + "0" * 32 + ".tmp") == (None, "0" * 32)
    True
    """
    match = _TEMPORARY.fullmatch(name)
    return (int(match[1]) if match[1] else None, match[2]) if match else None


def parse_mailbox_name(name: str) -> str | None:
    """The save id of a mailbox directory, or `JOIN_NAME`; None for another name."""
    match = _MAILBOX.fullmatch(name)
    return match[1] if match else None


def sweep(storage: Storage, opening: Opening, files_of: FilesOf) -> None:
    """Remove what dead saves left behind. Never raises for a storage that refuses: it logs.

    Args:
        storage: The directory.
        opening: Our own save, whose intent record is there. A save of one rank only looks at that rank's files.
        files_of: Reads metadata.
    """
    try:
        _sweep(storage, opening, files_of)
    except DcpError as error:
        _LOG.warning("save %s: left-overs in %s stay: %s", opening.save_id, storage.describe(), error)


def named_files(storage: Storage, name: str, files_of: FilesOf) -> frozenset[str] | None:
    """Return the data files that a metadata file names.

    Args:
        storage: The directory.
        name: The metadata file; an absent one names none.
        files_of: Reads it.

    Returns:
        The names; None when the file is there and nobody can read it.
    """
    try:
        nbytes = storage.size(name)
        if nbytes is None:
            return frozenset()
        if nbytes > _METADATA_LIMIT:
            raise CorruptError(f"{name!r} has {nbytes} bytes, more than any metadata")
        return frozenset(files_of(storage.read(name)))
    except NotFoundError:
        return frozenset()
    except Exception as error:  # a stranger's file, read by code that is not ours
        _LOG.warning("%r in %s cannot be read, so what it names stays: %s", name, storage.describe(), error)
        return None


def remove_quietly(storage: Storage, names: Iterable[str]) -> None:
    """Remove files; what the storage refuses is logged and stays."""
    for name in names:
        try:
            storage.remove(name)
        except DcpError as error:
            _LOG.warning("%s", error)


def has_intent(storage: Storage, save_id: str, rank: int | None) -> bool:
    """Return whether the save that made a rank's file still has its intent record."""
    names = [intent_name(save_id, None)] + ([] if rank is None else [intent_name(save_id, rank)])
    return any(storage.modified_seconds(name) is not None for name in names)


def _sweep(storage: Storage, opening: Opening, files_of: FilesOf) -> None:
    names = storage.list()
    found = [made for made in map(_parse, names) if made is not None and made.save_id != opening.save_id]
    found = [made for made in found if opening.rank is None or made.rank == opening.rank]
    now_seconds = _now(storage, opening)
    dead = _remove_dead_intents(storage, opening, names, now_seconds)
    removable = _without_owner(storage, opening, found)
    if removable:
        named = _all_named(storage, opening.rank, files_of)
        remove_quietly(storage, [name for name in removable if named is not None and name not in named])
    storage.remove_unfinished(lambda name: _has_no_owner(storage, opening, name))
    _remove_mailboxes(storage, names, dead, now_seconds)


def _now(storage: Storage, opening: Opening) -> float:
    """Tell the present by the storage's clock, which our own heartbeat shows."""
    storage.touch(opening.intent_name)
    modified = storage.modified_seconds(opening.intent_name)
    if modified is None:
        raise NotFoundError(f"{opening.intent_name!r} is gone from {storage.describe()}")
    return modified


def _parse(name: str) -> _Found | None:
    """Tell which save made a file, "" for a plain name; None for a file that no save leaves behind."""
    parsed = parse_data_file_name(name)
    if parsed is not None:
        return _Found(name, parsed[0], parsed[3][1:])
    temporary = parse_temporary_name(name)
    return _Found(name, *temporary) if temporary is not None else None


def concerns(rank: int | None, other: int | None) -> bool:
    """Return whether a save of `other` (None: of all ranks) may own files of `rank` (None: of any)."""
    return rank is None or other is None or rank == other


def _other_intents(opening: Opening, names: Iterable[str]) -> list[tuple[str, int | None]]:
    """Pick the intent records of other saves that may own files that we look at: (name, rank)."""
    others = []
    for name in names:
        parsed = parse_intent_name(name)
        if parsed is not None and parsed[0] != opening.save_id and concerns(opening.rank, parsed[1]):
            others.append((name, parsed[1]))
    return others


def _remove_dead_intents(
    storage: Storage, opening: Opening, names: Iterable[str], now_seconds: float
) -> frozenset[str]:
    """Remove the records of dead saves of all ranks or of ours; returns the ids of the former."""
    dead = set()
    for name, rank in _other_intents(opening, names):
        if is_dead(storage, name, now_seconds):
            _LOG.info("save %s: %s is of a dead save", opening.save_id, name)
            try:
                storage.remove(name)
            except DcpError as error:  # a directory of that name, for instance: what it stands for stays, no more
                _LOG.warning("%s", error)
                continue
            parsed = parse_intent_name(name)
            if parsed is not None and rank is None:
                dead.add(parsed[0])
    for name in names:  # records that were never finished
        if _is_unfinished_intent(name) and _is_expired(storage, name, now_seconds):
            remove_quietly(storage, [name])
    return frozenset(dead)


def _is_unfinished_intent(name: str) -> bool:
    """Whether a name is that of a record, or of one that was touched, before it is in place."""
    return name.endswith(".tmp") and parse_intent_name(name.removesuffix(".tmp").removesuffix(".touch")) is not None


def _without_owner(storage: Storage, opening: Opening, found: Sequence[_Found]) -> list[str]:
    """Pick the files whose save has no intent record any more."""
    live = {made: has_intent(storage, *made) for made in {(made.save_id, made.rank) for made in found if made.save_id}}
    removable = [made.name for made in found if made.save_id and not live[made.save_id, made.rank]]
    plain = [made for made in found if not made.save_id]
    if plain:
        others = [rank for _, rank in _other_intents(opening, storage.list())]
        removable += [made.name for made in plain if not any(concerns(made.rank, rank) for rank in others)]
    return removable


def _has_no_owner(storage: Storage, opening: Opening, name: str) -> bool:
    made = _parse(name)
    if made is None or made.save_id == opening.save_id or not concerns(opening.rank, made.rank):
        return False
    return bool(_without_owner(storage, opening, [made]))


def _all_named(storage: Storage, rank: int | None, files_of: FilesOf) -> frozenset[str] | None:
    """Return the data files that any metadata names; None when one cannot be read."""
    if rank is None:
        metadata_names = [name for name in storage.list() if parse_rank_metadata_name(name) is not None]
    else:
        metadata_names = [rank_metadata_name(rank)]
    named: frozenset[str] = frozenset()
    for name in [METADATA_NAME, *metadata_names]:
        files = named_files(storage, name, files_of)
        if files is None:
            return None
        named |= files
    return named


def _remove_mailboxes(storage: Storage, names: Iterable[str], dead: frozenset[str], now_seconds: float) -> None:
    """Remove the mailboxes of saves that have ended, and the place where ranks meet when nobody is there.

    One without an intent record may be older than its record: ranks that must meet first make it before. Whoever
    waits in it touches it now and then, so its age tells.
    """
    for name in names:
        mailbox = parse_mailbox_name(name)
        if mailbox is None:
            continue
        if mailbox in dead or (_is_expired(storage, name, now_seconds) and not _has_save(storage, mailbox)):
            try:
                storage.remove_directory(name)
            except DcpError as error:
                _LOG.warning("%s", error)


def _has_save(storage: Storage, mailbox: str) -> bool:
    return mailbox != JOIN_NAME and has_intent(storage, mailbox, None)


def _is_expired(storage: Storage, name: str, now_seconds: float) -> bool:
    modified = storage.modified_seconds(name)
    return modified is not None and now_seconds - modified > HEARTBEAT_EXPIRY_SECONDS
