"""Finds files of a checkpoint that are links to files elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dcp_core.storage.base import Storage
from dcp_core.storage.local import LocalStorage


def outside_links(storage: Storage, names: Sequence[str]) -> list[str]:
    """Say which of a checkpoint's files are links that leave its directory; nothing for storages without links."""
    if not isinstance(storage, LocalStorage):
        return []
    notes = []
    for name in names:
        path = os.path.join(storage.path, name)
        if os.path.islink(path):
            target = os.path.realpath(path)
            if os.path.dirname(target) != storage.path:
                notes.append(f"{name} is a link to {target}, outside of the directory: a copy has to follow links")
    return notes
