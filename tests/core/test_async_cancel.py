"""A save that is cancelled before it is committed leaves nothing; one that is committed stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dcp_core import api
from dcp_core.errors import SaveCancelledError
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.background_processes import end_own
from tests.core.async_jobs import (
    MODES,
    RESULT_SECONDS,
    async_outcome,
    async_save,
    checkpoint_directory,
    outcome_of_response,
    tag_in,
)
from tests.core.async_writers import CommitGatedWriter, Gate, GatedWriter, LateWriter, ThreadWriter
from tests.core.fault_jobs import SOON_SECONDS, Outcome, Seat, checkpoint_names, names_in, state_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def directory() -> Iterator[Path]:
    with checkpoint_directory() as path:
        yield path


def _cancel(
    context: RankContext, directory: Path, mode_name: str, who: int, warm: bool, orders: tuple[str, ...]
) -> tuple[bool, Outcome]:
    """One rank cancels while all wait at the gate; then it opens, and all save again."""
    seat, mode = Seat.of(context), MODES[mode_name]
    if warm:
        async_save(seat, state_of(seat.rank, seat.world, 1), directory, **mode.save).get_result(RESULT_SECONDS)
    seat.share()
    before, calls = names_in(directory), []
    gate = Gate(directory).close(*orders)
    seat.share()
    response = async_save(seat, state_of(seat.rank, seat.world, 2), directory, storage_writer=GatedWriter(),
                          callback=lambda: calls.append(1), **mode.save)  # fmt: skip
    gate.await_writing(*range(seat.world))
    answer = response.cancel() if seat.rank == who else False
    seat.share()
    gate.open()
    outcome = outcome_of_response(response)
    assert len(calls) == (0 if outcome.kind else 1)
    seat.share()
    if mode_name != "alone":
        assert names_in(directory) == before
    if warm and (mode_name != "alone" or seat.rank == who):
        assert tag_in(seat, directory, mode) == 1
    seat.share()
    again = async_outcome(seat, state_of(seat.rank, seat.world, 3), directory, **mode.save)
    assert again.kind == "", again
    seat.share()
    assert tag_in(seat, directory, mode) == 3
    if mode_name != "alone":
        assert names_in(directory) == checkpoint_names(directory)
    return answer, outcome


@pytest.mark.parametrize(
    ("mode", "world", "who", "warm", "orders"),
    [
        ("mailbox", 3, 0, False, ()),
        ("mailbox", 3, 2, True, ()),
        ("mailbox", 1, 0, False, ()),
        ("no channel", 2, 1, False, ()),
        ("alone", 2, 1, True, ()),
        ("mailbox", 2, 1, True, ("after",)),
        ("no channel", 2, 0, False, ("after",)),
        ("alone", 2, 0, False, ("after",)),
    ],
)
def test_a_save_that_one_rank_cancels_is_committed_nowhere_and_the_next_works(
    directory: Path, mode: str, world: int, who: int, warm: bool, orders: tuple[str, ...]
) -> None:
    """Before anything is written, or when all has been."""
    found = run_ranks(_cancel, world, directory, mode, who, warm, orders)
    assert [answer for answer, _ in found] == [rank == who for rank in range(world)]
    for rank, (_, outcome) in enumerate(found):
        assert bool(outcome.kind) == (mode != "alone" or rank == who), found
        assert not outcome.kind or "cancel" in (outcome.kind + outcome.message).lower(), found
        assert outcome.seconds < SOON_SECONDS


def _cancel_before_it_begins(context: RankContext, directory: Path) -> Outcome:
    seat = Seat.of(context)
    gate = Gate(directory).close()
    seat.share()
    writer = LateWriter(rank=seat.rank, late=1)
    response = async_save(seat, state_of(seat.rank, seat.world, 1), directory, storage_writer=writer)
    if seat.rank == 1:
        gate.await_writing(1)
        assert response.cancel() is True
        gate.open()
    outcome = outcome_of_response(response)
    seat.share()
    assert names_in(directory) == []
    return outcome


def test_a_save_that_is_cancelled_before_its_background_process_turns_to_it_is_not_committed(directory: Path) -> None:
    for outcome in run_ranks(_cancel_before_it_begins, 2, directory):
        assert outcome.kind == "SaveCancelledError", outcome


def _cancel_during_the_commit(context: RankContext, directory: Path, mode_name: str) -> None:
    seat, mode = Seat.of(context), MODES[mode_name]
    gate = Gate(directory).close()
    seat.share()
    response = async_save(seat, state_of(seat.rank, seat.world, 1), directory, storage_writer=CommitGatedWriter(),
                          **mode.save)  # fmt: skip
    gate.await_writing(seat.rank if mode_name == "alone" else 0)
    assert response.cancel() is False
    seat.share()
    gate.open()
    assert outcome_of_response(response).kind == ""
    seat.share()
    assert tag_in(seat, directory, mode) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_save_that_is_being_committed_cannot_be_cancelled_any_more(directory: Path, mode: str) -> None:
    run_ranks(_cancel_during_the_commit, 2, directory, mode)


@pytest.mark.parametrize("kind", [FileSystemWriter, ThreadWriter])
def test_a_save_whose_callback_runs_cannot_be_cancelled_any_more(directory: Path, kind: type[FileSystemWriter]) -> None:
    runs, may_end = threading.Event(), threading.Event()

    def callback() -> None:
        runs.set()
        may_end.wait(RESULT_SECONDS)

    state = {"a": np.arange(5)}
    response = api.async_save(state, checkpoint_id=directory, storage_writer=kind(), callback=callback, durable=False)
    assert runs.wait(RESULT_SECONDS)
    assert response.cancel() is False
    may_end.set()
    response.get_result(RESULT_SECONDS)
    assert (api.read(directory, "a") == state["a"]).all()
    end_own()


@pytest.mark.parametrize("orders", [(), ("after",)])
def test_a_save_on_a_thread_of_the_trainer_that_is_cancelled_is_not_committed(
    directory: Path, orders: tuple[str, ...]
) -> None:
    gate = Gate(directory).close(*orders)
    state = {"a": np.arange(5)}
    response = api.async_save(state, checkpoint_id=directory, storage_writer=ThreadWriter(), durable=False)
    gate.await_writing(0)
    assert response.cancel() is True
    gate.open()
    with pytest.raises(SaveCancelledError):
        response.get_result(RESULT_SECONDS)
    assert names_in(directory) == []


def _cancel_late(context: RankContext, directory: Path) -> None:
    seat = Seat.of(context)
    response = async_save(seat, state_of(seat.rank, seat.world, 1), directory)
    response.get_result(RESULT_SECONDS)
    assert response.cancel() is False
    assert response.get_result(0) is response.persist_completion.result(0)
    failing = directory.with_name("failing")
    gate = Gate(failing).close("fail-0")
    seat.share()
    gate.open()
    failed = async_save(seat, state_of(seat.rank, seat.world, 1), failing, storage_writer=GatedWriter())
    assert outcome_of_response(failed).kind == "StorageError"
    assert failed.cancel() is False
    assert outcome_of_response(failed).kind == "StorageError"
    assert tag_in(seat, directory) == 1


def test_a_save_that_has_ended_cannot_be_cancelled(directory: Path) -> None:
    run_ranks(_cancel_late, 2, directory)


def _cancel_at_any_moment(context: RankContext, root: Path) -> list[bool]:
    """Which saves were committed; each process goes on with the next."""
    seat, committed = Seat.of(context), []
    for tag in range(1, 7):
        response = async_save(seat, state_of(seat.rank, seat.world, tag), root / f"{tag}")
        if tag % 2:
            cancelled = response.cancel()  # comes early or late, on both ranks as it happens
            outcome = outcome_of_response(response)
            assert outcome.kind == "" or not (root / f"{tag}" / ".metadata").exists(), (tag, cancelled, outcome)
            assert not cancelled or outcome.kind != "", (tag, outcome)
            committed.append(outcome.kind == "")
        else:
            assert outcome_of_response(response).kind == ""
            assert tag_in(seat, root / f"{tag}") == tag
    return committed


def test_cancelling_at_any_moment_is_all_or_nothing(directory: Path) -> None:
    first, second = run_ranks(_cancel_at_any_moment, 2, directory)
    assert first == second
