"""Storage that no other process can rebuild is served by a thread of the trainer, and the user is told once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.execution.interfaces import StorageWriter
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.async_jobs import (
    MODES,
    async_outcome,
    async_save,
    checkpoint_directory,
    outcome_of_response,
    spoil,
    tag_in,
)
from tests.core.async_writers import DISK_FULL, Gate, GatedWriter
from tests.core.fault_jobs import SOON_SECONDS, Outcome, Seat, checkpoint_names, names_in, state_of
from tests.core.rank_jobs import heard_warnings

pytestmark = pytest.mark.timeout(120)

WORLD = 2


@pytest.fixture
def directory() -> Iterator[Path]:
    with checkpoint_directory() as path:
        yield path


def _local_writer() -> StorageWriter:
    class LocalWriter(GatedWriter):
        """A class that no other process can find."""

    return LocalWriter()


class SilentWriter(GatedWriter):
    """A class that does not say how to make another."""

    def rebuild_arguments(self) -> None:
        return None


_WRITERS: dict[str, Callable[[], StorageWriter]] = {"LocalWriter": _local_writer, "SilentWriter": SilentWriter}


@dataclass(frozen=True)
class Seen:
    """What one rank saw of three saves.

    Attributes:
        tellers: What the writer said of where it ran, save by save.
        pid: The trainer.
        warnings: What was logged.
    """

    tellers: list[dict[str, Any]]
    pid: int
    warnings: list[str]


def _save_by_threads(context: RankContext, root: Path, mode_name: str, writer: str) -> Seen:
    seat, mode = Seat.of(context), MODES[mode_name]
    tellers = []
    with heard_warnings() as lines:
        for tag in (1, 2, 3):
            directory = root / f"{tag}"
            gate = Gate(directory).close()
            seat.share()
            state = state_of(seat.rank, WORLD, tag)
            response = async_save(seat, state, directory, storage_writer=_WRITERS[writer](), **mode.save)
            spoil(state)
            tellers += gate.await_writing(seat.rank)
            assert not response.persist_completion.done()
            seat.share()
            gate.open()
            response.get_result(60)
            seat.share()
            assert tag_in(seat, directory, mode) == tag
            if seat.rank == 0 and mode_name != "alone":
                assert names_in(directory) == checkpoint_names(directory)
        assert async_outcome(seat, state_of(seat.rank, WORLD, 4), root / "4", **mode.save).kind == ""
    return Seen(tellers, os.getpid(), list(lines))


@pytest.mark.parametrize(
    ("mode", "writer"),
    [("mailbox", "LocalWriter"), ("no channel", "LocalWriter"), ("alone", "LocalWriter"), ("mailbox", "SilentWriter")],
)
def test_a_writer_that_no_other_process_can_make_writes_in_a_thread_of_the_trainer(
    directory: Path, mode: str, writer: str
) -> None:
    for seen in run_ranks(_save_by_threads, WORLD, directory, mode, writer):
        for told in seen.tellers:
            assert told["pid"] == seen.pid
            assert not told["is_main_thread"] and not told["is_daemon"]
        about_it = [line for line in seen.warnings if writer in line]
        assert len(about_it) == 1, seen.warnings
        assert "thread" in about_it[0]


def _leave_at_once(context: RankContext, directory: Path) -> None:
    """The gate opens when this process is already on its way out."""
    seat = Seat.of(context)
    async_save(seat, state_of(seat.rank, WORLD, 5), directory, storage_writer=_local_writer())
    Gate(directory).await_writing(*range(WORLD))
    threading.Timer(0.5, Gate(directory).open).start()


def _load_tag(context: RankContext, directory: Path) -> int:
    return tag_in(Seat.of(context), directory)


def test_a_rank_that_ends_waits_for_the_thread(directory: Path) -> None:
    Gate(directory).close()
    run_ranks(_leave_at_once, WORLD, directory)
    assert run_ranks(_load_tag, WORLD, directory) == [5, 5]
    assert names_in(directory) == checkpoint_names(directory)


def _own_storage(context: RankContext, directory: Path) -> list[int]:
    """A storage object with state: operations that count, which only this process sees."""
    seat = Seat.of(context)
    counts = []
    for tag in (1, 2):
        operations = FaultyOperations()
        writer = FileSystemWriter(storage=LocalStorage(directory, operations))
        response = async_save(seat, state_of(seat.rank, WORLD, tag), None, storage_writer=writer)
        response.get_result(60)
        assert tag_in(seat, directory) == tag
        seat.share()
        counts.append(len(operations.log))
    return counts


def test_a_storage_object_that_holds_state_is_used_itself(directory: Path) -> None:
    for counts in run_ranks(_own_storage, WORLD, directory):
        assert min(counts) > 0


def _fail_in_a_thread(context: RankContext, directory: Path) -> tuple[Outcome, Outcome]:
    seat = Seat.of(context)
    gate = Gate(directory).close("fail-1")
    gate.open()
    seat.share()
    failed = outcome_of_response(
        async_save(seat, state_of(seat.rank, WORLD, 1), directory, storage_writer=_local_writer())
    )
    seat.share()
    assert names_in(directory) == []
    seat.share()
    return failed, async_outcome(seat, state_of(seat.rank, WORLD, 2), directory)


def test_an_error_in_a_thread_is_one_error_on_all_ranks(directory: Path) -> None:
    found = run_ranks(_fail_in_a_thread, WORLD, directory)
    for failed, after in found:
        assert failed.kind == "StorageError" and DISK_FULL in failed.message and "rank 1" in failed.message
        assert failed.seconds < SOON_SECONDS
        assert after.kind == ""
