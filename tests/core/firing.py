"""Trouble, and the places of files where it can come; what of that a background process needs, which imports no more.

A `Fuse` goes off once, at one place of one process. The place is a word and what it is done to: "put save/agree" is the
moment before this rank posts a message of that exchange, "pwritev data" the one before it writes into a data file.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.execution.interfaces import CheckpointId, MailboxFolder, MetadataDraft, WriteContext, WriteResult
from dcp_core.metadata import Metadata
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from tests.background_processes import wait_until

_Result = TypeVar("_Result")

SLOW, STALLS, STOPPED, DIES = "is slow", "stalls", "is stopped", "dies"
FAULTS = (SLOW, STALLS, STOPPED, DIES)
SLOW_SECONDS = 0.3
_LONGEST_SECONDS = 60.0


class Scene:
    """The files by which the ranks of a job say how one fault went.

    Args:
        directory: Beside the checkpoint; of one fault of one job.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def say(self, word: str, text: str = "") -> None:
        unfinished = self.directory / f".{word}"
        unfinished.write_text(text)
        unfinished.rename(self.directory / word)

    def heard(self, word: str) -> bool:
        return (self.directory / word).exists()

    @property
    def victim(self) -> int:
        """The process that got into trouble."""
        return int((self.directory / "fired").read_text())

    def await_all(self, *words: str) -> None:
        wait_until(lambda: all(map(self.heard, words)), f"{words} in {self.directory}", _LONGEST_SECONDS)

    # -- in the process that gets into trouble ------------------------------------------------------------------------

    def suffer(self, fault: str) -> None:
        """Get into trouble. Who stalls or is stopped goes on when the others have seen enough of it."""
        self.say("fired", str(os.getpid()))
        if fault == SLOW:
            time.sleep(SLOW_SECONDS)
        elif fault == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == STOPPED:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # another thread may take its time to get it
        else:
            self.await_all("go")

    # -- in another one -----------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Let it go on, whether it stalls or is stopped."""
        self.say("go")
        if self.heard("fired"):
            os.kill(self.victim, signal.SIGCONT)


class Fuse:
    """Goes off when its place is reached, once."""

    def __init__(self) -> None:
        self.stage = ""
        self._where = ""
        self._action: Callable[[], None] = lambda: None

    def set(self, where: str, action: Callable[[], None]) -> None:
        self._where, self._action = where, action

    def reach(self, where: str) -> None:
        if self._where == where:
            self._where = ""
            self._action()


# -- files ----------------------------------------------------------------------------------------------------------


def kind_of_file(path: str) -> str:
    name = os.path.basename(path)
    for kind, mark in (("intent", ".intent-"), ("description", ".metadata"), ("objects", ".bytes")):
        if mark in name:
            return kind
    return "data" if ".safetensors" in name else "directory"


class FiringOperations(FileOperations):
    """Operations of the disk: "pwritev data", "rename description", "preadv objects", ..."""

    def __init__(self, fuse: Fuse) -> None:
        self._fuse = fuse

    def perform(self, operation: str, path: str, action: Callable[[], _Result]) -> _Result:
        self._fuse.reach(f"{operation} {kind_of_file(path)}")
        return action()

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        self._fuse.reach(f"preadv {kind_of_file(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        return super().preadv(descriptor, buffers, offset)


def writer_over(directory: Path, fuse: Fuse) -> FileSystemWriter:
    return FileSystemWriter(storage=LocalStorage(directory, FiringOperations(fuse)))


def reader_over(directory: Path, fuse: Fuse) -> FileSystemReader:
    return FileSystemReader(storage=LocalStorage(directory, FiringOperations(fuse)))


class FiringWriter(FileSystemWriter):
    """A writer that gets its process into trouble at one place, unless it is the trainer, which made it.

    Besides the operations of the disk: "meet", "put message", "wait message", "configure", "write", "commit".
    """

    def __init__(
        self, path: CheckpointId | None = None, *, where: str, scene: str, fault: str, spared: int = 0
    ) -> None:
        self._fate = {"where": where, "scene": scene, "fault": fault, "spared": spared or os.getpid()}
        self._fuse = Fuse()
        if os.getpid() != self._fate["spared"]:
            self._fuse.set(where, lambda: Scene(Path(scene)).suffer(fault))
        super().__init__(
            storage=LocalStorage("/nowhere" if path is None else os.fspath(path), FiringOperations(self._fuse))
        )

    def rebuild_arguments(self) -> Mapping[str, Any] | None:
        return self._fate | {"path": self._directory.storage.describe().strip("'")}

    def open_mailbox(self, save_id: str) -> MailboxFolder | None:
        folder = super().open_mailbox(save_id)
        if folder is None:
            return None
        put, wait = folder.put, folder.wait

        def firing_put(name: str, payload: bytes) -> None:
            self._fuse.reach("put message")
            put(name, payload)

        def firing_wait(name: str, timeout_seconds: float) -> bytes | None:
            self._fuse.reach("wait message")
            return wait(name, timeout_seconds)

        folder.put, folder.wait = firing_put, firing_wait  # type: ignore[method-assign]
        return folder

    def configure_writer(self, context: WriteContext) -> None:
        self._fuse.reach("configure")
        super().configure_writer(context)

    def finalize_checkpoint(self, metadata: MetadataDraft, results: Sequence[WriteResult]) -> Metadata:
        self._fuse.reach("commit")
        return super().finalize_checkpoint(metadata, results)
