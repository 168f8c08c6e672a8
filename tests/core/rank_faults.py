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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from dcp_core.adapter import KeyValueChannel, ProcessGroup
from dcp_core.coordination.exchange import Answers, Exchange
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.numpy_broadcasts import NumpyBroadcasts
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
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
            os.kill(int((self.directory / "fired").read_text()), signal.SIGCONT)


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
    """The channel of the ranks; "put" and "wait" name the exchange, or "broadcast"."""

    def __init__(self, channel: KeyValueChannel, fuse: Fuse) -> None:
        self._channel, self._fuse = channel, fuse

    def _reach(self, word: str, name: str) -> None:
        self._fuse.reach(f"{word} {'broadcast' if name.startswith('broadcast-') else self._fuse.stage}")

    def put(self, name: str, payload: bytes) -> None:
        self._reach("put", name)
        self._channel.put(name, payload)

    def wait(self, name: str, timeout_seconds: float) -> bytes | None:
        self._reach("wait", name)
        return self._channel.wait(name, timeout_seconds)

    def delete(self, name: str) -> None:
        self._channel.delete(name)


class FiringAdapter(NumpyRankAdapter):
    """Numpy ranks that talk through a `FiringChannel`."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self._fuse = fuse

    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        found = super().process_group(group)
        assert found.channel is not None
        channel = FiringChannel(found.channel, self._fuse)
        return replace(found, channel=channel, broadcasts=NumpyBroadcasts(channel, found.global_rank))


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
def watched_exchanges(fuse: Fuse) -> Iterator[None]:
    """Tell a fuse of every exchange, and when the coordinator decides: "decide save/agree"."""
    plain: Any = Exchange.run

    def run(
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
        found: bytes = plain(self, stage, payload, compute=decide, **more)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "run", run)
        yield


def writer_over(directory: Path, fuse: Fuse) -> FileSystemWriter:
    return FileSystemWriter(storage=LocalStorage(directory, FiringOperations(fuse)))


def reader_over(directory: Path, fuse: Fuse) -> FileSystemReader:
    return FileSystemReader(storage=LocalStorage(directory, FiringOperations(fuse)))


# -- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One place of one rank of a job.

    Attributes:
        verb: The call.
        phase: What the call is at there.
        where: The place.
        rank: Who gets into trouble.
        world: Ranks of the job.
        doubtful: Whether the others wait for the coordinator's commit then.
        harmless: Whether the others have no need of that rank any more.
        may_be_new: Whether the new checkpoint may be complete afterwards.
    """

    verb: str
    phase: str
    where: str
    rank: int
    world: int
    doubtful: bool = False
    harmless: bool = False
    may_be_new: bool = False

    @property
    def name(self) -> str:
        return f"{self.verb} {self.where} {self.rank} of {self.world}".replace("/", "+")
