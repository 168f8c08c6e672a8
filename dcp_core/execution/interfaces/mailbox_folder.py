"""Where the processes of a job leave messages for each other, next to the files of a checkpoint."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from dcp_core.adapter import KeyValueChannel


@runtime_checkable
class MailboxFolder(KeyValueChannel, Protocol):
    """Where the processes of a job leave messages for each other while they save, next to the checkpoint's files.

    A message is named by letters, digits, "." and "-", and is seen whole or not at all; it may be seen late.
    `put` raises FileNotFoundError where the folder is not there.
    """

    def prepare(self) -> None:
        """Make the folder; it may exist."""
        ...

    def names(self, max_age_seconds: float = 0.0) -> frozenset[str] | None:
        """List the messages, from a listing that is not older than this; None when the folder is not there."""
        ...

    def remove(self, *, only_if_empty: bool = False) -> None:
        """Remove the folder with its messages, or only if there are none; a missing one is fine."""
        ...


@runtime_checkable
class KeyedMailboxFolder(MailboxFolder, Protocol):
    """A folder whose listings may be late or costly: what matters is looked for by its name."""

    def is_there(self, max_age_seconds: float = 0.0) -> bool:
        """Return whether the folder is there, as was seen not longer ago than this."""
        ...
