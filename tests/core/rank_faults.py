"""Where a rank can get into trouble in a call, and what kinds of trouble there are; tests say what must become of it.

A `Fuse` goes off once, at one place of one rank. The place is a word and what it is done to: "put save/agree" is the
moment before this rank posts a message of that exchange, "pwritev data" the one before it writes into a data file.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from dcp_core.adapter import KeyValueChannel, ProcessGroup
from dcp_core.background.carriers import ProcessCarrier
from dcp_core.background.task import PersistResult, PersistTask
from dcp_core.coordination.exchange import Answers, Exchange
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.execution.interfaces import CheckpointId, MailboxFolder, MetadataDraft, WriteContext, WriteResult
from dcp_core.metadata import Metadata
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.standard_save import StandardSavePlanner
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


# -- places ---------------------------------------------------------------------------------------------------------


class FiringChannel:
    """The channel of the ranks; "put" and "wait" name the exchange."""

    def __init__(self, channel: KeyValueChannel, fuse: Fuse) -> None:
        self._channel, self._fuse = channel, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def put(self, name: str, payload: bytes) -> None:
        self._fuse.reach(f"put {self._fuse.stage}")
        self._channel.put(name, payload)

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        self._fuse.reach(f"wait {self._fuse.stage}")
        return self._channel.wait(name, timeout_seconds)

    def delete(self, name: str) -> None:
        self._channel.delete(name)


class FiringBroadcasts:
    """The broadcasts of the ranks: "open broadcast", "start broadcast", and "wait broadcast" while one is under way."""

    def __init__(self, broadcasts: Any, fuse: Fuse) -> None:
        self._broadcasts, self._fuse = broadcasts, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broadcasts, name)

    def open(self, *args: Any, **kwargs: Any) -> Any:
        self._fuse.reach("open broadcast")
        return _FiringGroup(self._broadcasts.open(*args, **kwargs), self._fuse)


class _FiringGroup:
    def __init__(self, group: Any, fuse: Fuse) -> None:
        self._group, self._fuse = group, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def broadcast(self, wire: Any, source: int) -> Any:
        self._fuse.reach("start broadcast")
        return _FiringWork(self._group.broadcast(wire, source), self._fuse)


class _FiringWork:
    def __init__(self, work: Any, fuse: Fuse) -> None:
        self._work, self._fuse = work, fuse

    def is_done(self) -> Any:
        self._fuse.reach("wait broadcast")
        return self._work.is_done()

    def wait(self) -> None:
        self._fuse.reach("wait broadcast")
        self._work.wait()


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


class FiringSavePlanner(StandardSavePlanner):
    """ "plan" and "get data"; the ranks exchange their plans every time."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__(enable_plan_caching=False)
        self._fuse = fuse

    def build_local_plan(self) -> Any:
        self._fuse.reach("plan")
        return super().build_local_plan()

    def get_batch(self, spans: Any) -> Any:
        self._fuse.reach("get data")
        return super().get_batch(spans)


class FiringLoadPlanner(StandardLoadPlanner):
    """ "plan"."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self._fuse = fuse

    def build_local_plan(self) -> Any:
        self._fuse.reach("plan")
        return super().build_local_plan()


class FiringState:
    """A Stateful object: "state_dict" and "load_state_dict"."""

    def __init__(self, fuse: Fuse) -> None:
        self._fuse = fuse
        self.array = np.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        self._fuse.reach("state_dict")
        return {"array": self.array}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._fuse.reach("load_state_dict")


@contextmanager
def watched_calls(adapter: type[Any], fuse: Fuse) -> Iterator[None]:
    """Tell a fuse of what the calls of this process do.

    These are the places of its channel and of its broadcasts, "decide save/agree", where the coordinator decides, and
    "hand over", where a save goes to the background process.

    Args:
        adapter: Class of the framework's adapter.
        fuse: It goes off in the thread that comes to its place.
    """
    process_group, exchange, hand_over = adapter.process_group, Exchange.run, ProcessCarrier.hand_over

    def watched_group(self: Any, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        found: ProcessGroup = process_group(self, group, with_channel=with_channel)
        if found.channel is None:
            return found
        broadcasts: Any = found.broadcasts and FiringBroadcasts(found.broadcasts, fuse)
        return replace(found, channel=FiringChannel(found.channel, fuse), broadcasts=broadcasts)

    def watched_exchange(
        self: Exchange,
        stage: str,
        payload: bytes = b"",
        *,
        compute: Callable[[Sequence[bytes]], Answers] | None = None,
        **more: Any,
    ) -> bytes:
        def decide(payloads: Sequence[bytes]) -> Answers:
            fuse.reach(f"decide {stage}")
            return b"" if compute is None else compute(payloads)

        fuse.stage = stage
        return exchange(self, stage, payload, compute=decide, **more)

    def watched_hand_over(carrier: ProcessCarrier, task: PersistTask) -> Callable[[], PersistResult]:
        fuse.reach("hand over")
        return hand_over(carrier, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "process_group", watched_group)
        patch.setattr(Exchange, "run", watched_exchange)
        patch.setattr(ProcessCarrier, "hand_over", watched_hand_over)
        yield


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
