"""What the tests of a manager share: a manager on a disk that fails or kills, and looks at what it left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from dcp_core import api
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.manager.latest import latest_checkpoint
from dcp_core.manager.manager import CheckpointManager
from dcp_core.storage.base import Storage
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations


class DiskManager(CheckpointManager):
    """A manager whose operations on the disk go through a shim.

    Args:
        root: The directory.
        operations: Of what comes after a commit.
        save_operations: Of saves; the same by default.
        how: As for `CheckpointManager`.
    """

    def __init__(
        self, root: Path, operations: FileOperations, save_operations: FileOperations | None = None, **how: Any
    ) -> None:
        super().__init__(root, **how)
        self.operations = operations
        self.save_operations = save_operations or operations

    def _open_root(self) -> Storage:
        return LocalStorage(self.root, self.operations)

    def _place(self, name: str) -> dict[str, Any]:
        return {"storage_writer": FileSystemWriter(storage=LocalStorage(Path(self.root) / name, self.save_operations))}


def state_at(step: int) -> dict[str, Any]:
    """A state that tells its step in all its values."""
    return {"w": np.full((50, 3), float(step)), "step": step, "seen": {step}}


def put(root: Path, *steps: int) -> None:
    """Save checkpoints, and no more."""
    for step in steps:
        api.save(state_at(step), checkpoint_id=root / f"step_{step}", durable=False)


def step_in(path: str | os.PathLike[str]) -> int:
    """Load a checkpoint, whole, and say which step it is."""
    state = state_at(-1)
    api.load(state, checkpoint_id=path, verify="full")
    step: int = state["step"]
    assert np.array_equal(state["w"], state_at(step)["w"]) and state["seen"] == {step}
    return step


def newest_step(root: Path) -> int | None:
    """Find the newest checkpoint, load it, and say which step it is."""
    found = latest_checkpoint(root)
    return None if found is None else step_in(found)


def names(root: Path) -> list[str]:
    """What lies in a directory, links with what they lead to; sorted."""
    return sorted(
        f"{entry.name} -> {os.readlink(entry.path)}" if entry.is_symlink() else entry.name for entry in os.scandir(root)
    )
