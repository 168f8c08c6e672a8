"""A writer that dies after an operation; a background process imports this, and no more of the tests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations


class MortalWriter(FileSystemWriter):
    """A writer whose process dies after an operation, unless it is the process that made the save.

    Args:
        path: The checkpoint's directory.
        kill_after: The operation, from 1.
        spared: The process that it spares.
    """

    def __init__(self, path: CheckpointId | None = None, *, kill_after: int, spared: int) -> None:
        self._fate = {"kill_after": kill_after, "spared": spared}
        operations = FaultyOperations(kill_at=None if os.getpid() == spared else kill_after, kill_moment="after")
        super().__init__(storage=LocalStorage("/nowhere" if path is None else os.fspath(path), operations))

    def rebuild_arguments(self) -> Mapping[str, Any] | None:
        return self._fate | {"path": self._directory.storage.describe().strip("'")}
