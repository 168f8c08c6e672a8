"""A rank hangs in the middle of an operation: the others name it when their time is up, and later all goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.faults import FaultyOperations
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import (
    Outcome,
    Seat,
    checkpoint_names,
    loaded_tag,
    memory_directory,
    names_in,
    outcome_of,
    poison_of,
    state_of,
)

pytestmark = pytest.mark.faults

WORLD = 3
OLD, NEW, LATER = 1, 2, 3
PATIENCE_SECONDS = 2.5
STALL_SECONDS = 6.0


@dataclass(frozen=True)
class Stall:
    """One rank hangs in its first operation of a kind."""

    verb: Literal["save", "load"]
    rank: int
    operation: str
    pattern: str = "*"

    @property
    def place(self) -> str:
        return f"{self.verb} {self.rank} {self.operation} {self.pattern}".replace("*", "+")

    @property
    def in_the_commit(self) -> bool:
        """Whether the others wait for the coordinator's commit then: they cannot know if it will come."""
        return self.rank == 0 and self.pattern.startswith("_rank")

    @property
    def where_reading(self) -> bool:
        """Whether all ranks have begun to fill their targets then; the coordinator's first read is of `.metadata`."""
        return self.verb == "load" and self.rank != 0


STALLS = [
    Stall("save", 1, "create", "_rank1_*"),
    Stall("save", 2, "pwritev", "_rank2_*.safetensors"),
    Stall("save", 1, "fsync", "_rank1_*.bytes"),
    Stall("save", 0, "create", "_rank0_*"),
    Stall("save", 0, "create", ".intent-*"),
    Stall("load", 2, "preadv"),
    Stall("load", 0, "preadv"),
]


class StallingReads(FileOperations):
    """The first read takes long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stalled = False

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        with self._lock:
            first, self._stalled = not self._stalled, True
        if first:
            time.sleep(STALL_SECONDS)
        return super().preadv(descriptor, buffers, offset)


def _stalling(stall: Stall) -> FileOperations:
    if stall.operation == "preadv":
        return StallingReads()
    return FaultyOperations(
        operations=[stall.operation],
        name_pattern=stall.pattern,
        before=lambda record: time.sleep(STALL_SECONDS) if record.number == 1 else None,
    )


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def _stall(context: RankContext, root: Path) -> tuple[Outcome, int, int, list[str]]:
    """Save; stall; once all have come back, look; then save again."""
    seat = Seat.of(context, WORLD)
    stall = STALLS[seat.job]
    directory = root / stall.place
    seat.save(state_of(seat.rank, WORLD, OLD), checkpoint_id=directory)
    seat.share()
    storage = LocalStorage(directory, _stalling(stall) if seat.rank == stall.rank else None)
    arguments: dict[str, Any] = {"timeout_seconds": PATIENCE_SECONDS}
    if stall.verb == "save":
        arguments["storage_writer"] = FileSystemWriter(storage=storage)
        outcome = outcome_of(seat.save, state_of(seat.rank, WORLD, NEW), **arguments)
    else:
        arguments["storage_reader"] = FileSystemReader(storage=storage)
        outcome = outcome_of(seat.load, poison_of(seat.rank, WORLD), **arguments)
    seat.share()
    tag = loaded_tag(seat, directory)
    seat.save(state_of(seat.rank, WORLD, LATER), checkpoint_id=directory)
    return outcome, tag, loaded_tag(seat, directory), names_in(directory)


def test_ranks_that_wait_for_one_which_hangs_name_it_in_time_and_go_on_with_it_later(root: Path) -> None:
    found = run_ranks(_stall, WORLD * len(STALLS), root, timeout_seconds=100)
    for job, stall in enumerate(STALLS):
        ranks = found[job * WORLD : (job + 1) * WORLD]
        for rank, (outcome, tag, later, names) in enumerate(ranks):
            assert (tag, later) == (OLD, LATER), (stall, outcome)
            assert names == checkpoint_names(root / stall.place), stall
            doubtful = stall.in_the_commit and rank != stall.rank
            assert outcome.kind == ("InDoubtError" if doubtful else "CoordinationTimeoutError"), (stall, rank, outcome)
            assert stall.where_reading == ("the targets are undefined now" in outcome.message), (stall, rank, outcome)
            if rank != stall.rank:
                named = (
                    f"rank {stall.rank}",
                    f"[{job * WORLD + stall.rank}]",
                )
                assert any(name in outcome.message for name in named), (stall, rank, outcome.message)
                assert outcome.seconds < STALL_SECONDS, (stall, rank, outcome)
