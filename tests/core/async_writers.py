"""Writers that a background process can rebuild, and that do what files beside the checkpoint tell them.

Beside the checkpoint `step_1` lies the directory `step_1.gate`, where a test makes it. While it lacks the file `go`,
writers wait there, having said who they are.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcp_core.errors import StorageError
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.execution.interfaces import (
    CheckpointId,
    MetadataDraft,
    PlannedWrite,
    StorageWriter,
    WriteContext,
    WriteResult,
    WriteSource,
)
from dcp_core.metadata import Metadata
from tests.background_processes import wait_until

LAST_WORDS = "the last words of the writer"
DISK_FULL = "the disk of the test is full"
EXIT_CODE = 7
_OPEN_SECONDS = 30.0


class Gate:
    """What a test and the writers of one checkpoint say to each other.

    Args:
        checkpoint: The checkpoint's directory.
    """

    def __init__(self, checkpoint: str | os.PathLike[str]) -> None:
        self.directory = Path(f"{os.fspath(checkpoint)}.gate")

    # -- the test's side ----------------------------------------------------------------------------------------------

    def close(self, *orders: str) -> Gate:
        """Make writers wait, and give orders: "fail-1" has rank 1 fail, "exit-1" end its process, once they go on."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for order in orders:
            (self.directory / order).touch()
        return self

    def open(self) -> None:
        """Let all go on."""
        (self.directory / "go").touch()

    def await_writing(self, *ranks: int) -> list[dict[str, Any]]:
        """Wait until ranks have come to the gate; what each said of its process."""
        files = [self.directory / f"writing-{rank}" for rank in ranks]
        wait_until(lambda: all(file.exists() for file in files), f"ranks {ranks} at {self.directory}", _OPEN_SECONDS)
        return [json.loads(file.read_text()) for file in files]

    # -- the writers' side --------------------------------------------------------------------------------------------

    def pass_through(self, rank: int) -> None:
        """Wait until the gate is open, then obey."""
        if not self.directory.is_dir():
            return
        told = {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "is_main_thread": threading.current_thread() is threading.main_thread(),
            "is_daemon": threading.current_thread().daemon,
            "frameworks": [name for name in ("torch", "mindspore") if name in sys.modules],
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "session": os.getsid(0),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "working_directory": os.getcwd(),
        }
        unfinished = self.directory / f".writing-{rank}"
        unfinished.write_text(json.dumps(told))
        unfinished.rename(self.directory / f"writing-{rank}")
        deadline = time.monotonic() + _OPEN_SECONDS
        while not (self.directory / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        if (self.directory / f"fail-{rank}").exists():
            raise StorageError(DISK_FULL)
        if (self.directory / f"exit-{rank}").exists():
            sys.stderr.write(LAST_WORDS + "\n")
            sys.stderr.flush()
            os._exit(EXIT_CODE)


class GatedWriter(FileSystemWriter):
    """Waits at the gate before it writes; with the order "after" when it has written, before it says so."""

    _rank = 0

    def rebuild_arguments(self) -> Mapping[str, Any] | None:
        return self.path_arguments()

    def configure_writer(self, context: WriteContext) -> None:
        super().configure_writer(context)
        self._rank = context.rank

    def execute_write(self, plan: PlannedWrite, planner: WriteSource) -> WriteResult:
        gate = Gate(str(self._directory._path))
        if (gate.directory / "after").exists():
            result = super().execute_write(plan, planner)
            gate.pass_through(self._rank)
            return result
        gate.pass_through(self._rank)
        return super().execute_write(plan, planner)


class DirectorylessWriter(StorageWriter):
    """A storage that is no directory: nothing in it can carry messages."""

    def initialize_writer(self, checkpoint_id: CheckpointId | None = None) -> None:
        return

    def configure_writer(self, context: WriteContext) -> None:
        return

    def execute_write(self, plan: PlannedWrite, planner: WriteSource) -> WriteResult:
        raise AssertionError("nothing is to be written")

    def finalize_checkpoint(self, metadata: MetadataDraft, results: Sequence[WriteResult]) -> Metadata:
        raise AssertionError("nothing is to be committed")


class ThreadWriter(GatedWriter):
    """One that no other process can make, so that a thread of the trainer uses it."""

    def rebuild_arguments(self) -> None:
        return None


class LateWriter(FileSystemWriter):
    """On one rank its background process waits at the gate before it knows where to write.

    Args:
        path: The checkpoint's directory.
        rank: Of this process's trainer.
        late: The rank that waits.
        trainer: The process that made the writer first.
    """

    def __init__(self, path: CheckpointId | None = None, *, rank: int, late: int, trainer: int = 0, **options: Any):
        super().__init__(path, **options)
        self._fate = {"rank": rank, "late": late, "trainer": trainer or os.getpid()}

    def rebuild_arguments(self) -> Mapping[str, Any] | None:
        return {**(self.path_arguments() or {}), **self._fate}

    def initialize_writer(self, checkpoint_id: CheckpointId | None = None) -> None:
        super().initialize_writer(checkpoint_id)
        if os.getpid() != self._fate["trainer"] and self._fate["rank"] == self._fate["late"]:
            Gate(str(self._directory._path)).pass_through(self._fate["rank"])


class CommitGatedWriter(GatedWriter):
    """Waits at the gate before it commits; with the order "after" when it has committed, before it says so."""

    def execute_write(self, plan: PlannedWrite, planner: WriteSource) -> WriteResult:
        return super(GatedWriter, self).execute_write(plan, planner)

    def finalize_checkpoint(self, metadata: MetadataDraft, results: Sequence[WriteResult]) -> Metadata:
        gate = Gate(str(self._directory._path))
        if (gate.directory / "after").exists():
            committed = super().finalize_checkpoint(metadata, results)
            gate.pass_through(self._rank)
            return committed
        gate.pass_through(self._rank)
        return super().finalize_checkpoint(metadata, results)


class CountingWriter(FileSystemWriter):
    """Notes beside the checkpoint how many objects its process has when it begins to write, or fails instead."""

    def __init__(self, path: CheckpointId | None = None, *, fails: bool = False, **options: Any) -> None:
        super().__init__(path, **options)
        self._fails = fails

    def rebuild_arguments(self) -> Mapping[str, Any] | None:
        return {**(self.path_arguments() or {}), "fails": self._fails}

    def configure_writer(self, context: WriteContext) -> None:
        super().configure_writer(context)
        if self._fails:
            raise StorageError(DISK_FULL)
        with Path(f"{self._directory._path}.objects-{context.rank}").open("a") as file:
            file.write(f"{objects_here()}\n")


def objects_here() -> int:
    """How many objects this process has that may hold others; what nobody needs is collected before."""
    gc.collect()
    return len(gc.get_objects())
