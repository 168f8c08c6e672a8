"""How a checkpoint is removed, so that at no moment a part of it looks like a whole.

Its description goes first, then what that named, then what is empty. A removal announces itself as a save does, so one
that was killed leaves what a dead save leaves, and is cleaned up by the same proof. Names that no save makes stay.
"""

from __future__ import annotations

import secrets

from dcp_core.errors import StorageError
from dcp_core.file_names import INTENT_PREFIX, MAILBOX_PREFIX, METADATA_NAME, parse_rank_metadata_name
from dcp_core.storage.base import Storage
from dcp_core.storage.commit import begin, remove_rank_checkpoints, remove_replaced
from dcp_core.storage.intent import Opening, leave_intent, parse_intent_name, retire_intent
from dcp_core.storage.leftovers import FilesOf, named_files


def remove_checkpoint(storage: Storage, *, files_of: FilesOf, durable: bool = True) -> None:
    """Remove the checkpoint in a directory, and what dead saves left there.

    Args:
        storage: The directory. It stays, with whatever else lies in it.
        files_of: Tells which data files a metadata file names.
        durable: Whether the description is gone for good before the first data file goes.

    Raises:
        StorageError: The storage refuses, a save into the directory is under way, or the description is none of ours.
    """
    opening = begin(storage, secrets.token_hex(16), rank=None, files_of=files_of)
    try:
        named = _removable(storage, opening, files_of)
        remove_rank_checkpoints(storage, files_of)  # while the description of the whole job hides them
        storage.remove(METADATA_NAME)
    except BaseException:
        retire_intent(storage, opening.save_id, opening.rank)
        raise
    leave_intent(opening.save_id)  # from here on a later look finishes what this one does not
    if durable:
        storage.sync()
    remove_replaced(storage, named)
    if not any(map(storage.exists, named)):
        retire_intent(storage, opening.save_id, opening.rank)


def clear_dead_save(storage: Storage, *, files_of: FilesOf) -> bool:
    """Remove what a save or a removal that is proven dead left in a directory without a checkpoint.

    Args:
        storage: The directory.
        files_of: Tells which data files a metadata file names.

    Returns:
        Whether the directory may be empty now. Nothing is touched where no save announced itself, or left its mailbox.
    """
    names = storage.list()
    has_checkpoint = METADATA_NAME in names or any(parse_rank_metadata_name(name) is not None for name in names)
    if has_checkpoint or not any(name.startswith((INTENT_PREFIX, MAILBOX_PREFIX)) for name in names):
        return not names
    opening = begin(storage, secrets.token_hex(16), rank=None, files_of=files_of)  # cleans up after dead saves
    retire_intent(storage, opening.save_id, opening.rank)
    return True


def _removable(storage: Storage, opening: Opening, files_of: FilesOf) -> frozenset[str]:
    """The data files of a checkpoint that may go; dead saves have been cleaned up after by now."""
    others = [name for name in storage.list() if parse_intent_name(name) and name != opening.intent_name]
    if others:
        raise StorageError(f"a save into {storage.describe()} is under way ({others[0]}), so the checkpoint stays")
    named = named_files(storage, METADATA_NAME, files_of)
    if named is None:
        raise StorageError(f"{METADATA_NAME!r} in {storage.describe()} cannot be read, so the checkpoint stays")
    return named
