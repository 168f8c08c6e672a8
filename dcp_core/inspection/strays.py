"""What lies in a checkpoint's directory and is no part of it: left-overs of other saves, running saves, foreign files.

In: a storage, and the names that belong to the checkpoint. Out: each other name, with what it is. Only looks.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from dcp_core.errors import DcpError
from dcp_core.file_names import (
    INTENT_PREFIX,
    JOIN_NAME,
    METADATA_NAME,
    parse_data_file_name,
    parse_rank_metadata_name,
)
from dcp_core.inspection.report import Stray
from dcp_core.storage.base import Storage
from dcp_core.storage.intent import is_dead, parse_intent_name
from dcp_core.storage.leftovers import parse_mailbox_name, parse_temporary_name


def find_strays(
    storage: Storage, names: Sequence[str], own: Collection[str], *, is_known: bool = True
) -> tuple[Stray, ...]:  # fmt: skip
    """Say what the other names in a directory are.

    Args:
        storage: The directory.
        names: What is listed there.
        own: The description and the data files that it names.
        is_known: Whether the description could be read as far as it names data files.
    """
    return tuple(_stray(storage, name, METADATA_NAME in own, is_known) for name in names if name not in own)


def _stray(storage: Storage, name: str, is_complete: bool, is_known: bool) -> Stray:
    nbytes = size_of(storage, name)
    data, temporary, mailbox = parse_data_file_name(name), parse_temporary_name(name), parse_mailbox_name(name)
    if data is not None:
        whose = f"of the save {data[3][1:]}" if data[3] else "of a save into an empty directory"
        named = "which no description names" if is_known else "which may be part of what cannot be read"
        return Stray(name, "data file", f"data {whose}, {named}", nbytes)
    if parse_rank_metadata_name(name) is not None:
        text = "what a rank saved alone; hidden by .metadata" if is_complete else "what another rank saved alone"
        return Stray(name, "description", text, nbytes)
    if temporary is not None:
        return Stray(name, "description", f"of the save {temporary[1]}, never put in its place", nbytes)
    if mailbox is not None:
        whose = "where ranks meet before a save" if mailbox == JOIN_NAME else f"messages of the save {mailbox}"
        return Stray(name, "mailbox", whose, nbytes)
    if name.startswith(INTENT_PREFIX):
        return Stray(name, "intent record", _save_state(storage, name), nbytes)
    return Stray(name, "other", "no save of this library makes such a name", nbytes)


def _save_state(storage: Storage, name: str) -> str:
    parsed = parse_intent_name(name)
    if parsed is None:
        return "the record of a save, never finished"
    whose = f"the save {parsed[0]}" + ("" if parsed[1] is None else f" of rank {parsed[1]}")
    try:
        modified = storage.modified_seconds(name)
        if modified is None:
            return f"{whose} has just ended"
        if is_dead(storage, name, time.time()):
            return f"{whose} died; the next save into the directory removes what it left"
        return f"{whose} is running; sign of life {max(time.time() - modified, 0.0):.0f} s ago"
    except DcpError as error:
        return f"{whose}; its state cannot be told: {error}"


def size_of(storage: Storage, name: str) -> int | None:
    """Size of a file; None for what is no file, or cannot be looked at."""
    try:
        return storage.size(name)
    except DcpError:
        return None
