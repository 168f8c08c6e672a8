"""What a caller holds while a save runs: results, callbacks, one save in flight at a time, failures, cancelling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from dcp_core import api
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.background_processes import wait_until
from tests.core.async_jobs import (
    MODES,
    RESULT_SECONDS,
    async_outcome,
    async_save,
    checkpoint_directory,
    outcome_of_response,
    tag_in,
    was_hit,
)
from tests.core.async_writers import DISK_FULL, Gate, GatedWriter
from tests.core.fault_jobs import SOON_SECONDS, Outcome, Seat, checkpoint_names, names_in, outcome_of, state_of

pytestmark = pytest.mark.timeout(120)

WORLD = 3


@pytest.fixture
def directory() -> Iterator[Path]:
    with checkpoint_directory() as path:
        yield path


def _begin(seat: Seat, tag: int, directory: Path, *orders: str, **options: Any) -> tuple[Gate, api.AsyncSaveResponse]:
    """Begin a save that stops at its gate."""
    gate = Gate(directory).close(*orders)
    seat.share()
    state = state_of(seat.rank, seat.world, tag)
    return gate, async_save(seat, state, directory, storage_writer=GatedWriter(), **options)


# -- results ----------------------------------------------------------------------------------------------------------


def _wait_a_moment(context: RankContext, directory: Path, mode_name: str) -> str:
    seat, mode = Seat.of(context), MODES[mode_name]
    gate, response = _begin(seat, 1, directory, **mode.save)
    assert isinstance(response.persist_completion, Future)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            response.get_result(timeout=0.01)
    assert not response.persist_completion.done()
    seat.share()
    gate.open()
    metadata = response.get_result()
    assert response.persist_completion.result(0) is metadata
    assert response.get_result(0) is metadata
    assert metadata.world_size == (WORLD if mode_name != "alone" else metadata.world_size)
    assert {"model.w", "model.b", "step"} <= set(metadata.state_dict_metadata)
    assert tag_in(seat, directory, mode) == 1
    return metadata.save_id


@pytest.mark.parametrize("mode", MODES)
def test_a_wait_that_is_too_short_leaves_the_save_alone(directory: Path, mode: str) -> None:
    found = run_ranks(_wait_a_moment, WORLD, directory, mode)
    assert len(set(found)) == (1 if mode != "alone" else WORLD)


# -- callbacks --------------------------------------------------------------------------------------------------------


def _call_back(context: RankContext, directory: Path, mode_name: str) -> list[tuple[bool, bool, bool]]:
    """Whether the future was done, the checkpoint was there, and it was the main thread: for each call."""
    seat, mode = Seat.of(context), MODES[mode_name]
    calls: list[tuple[bool, bool, bool]] = []
    holder: dict[str, api.AsyncSaveResponse] = {}
    name = ".metadata" if mode_name != "alone" else f"{seat.rank}.metadata"

    def callback() -> None:
        time.sleep(0.1)  # a future that were resolved meanwhile would show
        is_main = threading.current_thread() is threading.main_thread()
        calls.append((holder["response"].persist_completion.done(), name in names_in(directory), is_main))

    gate, holder["response"] = _begin(seat, 1, directory, callback=callback, **mode.save)
    assert calls == []
    gate.open()
    holder["response"].get_result(RESULT_SECONDS)
    holder["response"].get_result(RESULT_SECONDS)
    return calls


@pytest.mark.parametrize("mode", MODES)
def test_the_callback_runs_once_on_every_rank_between_the_commit_and_the_result(directory: Path, mode: str) -> None:
    for calls in run_ranks(_call_back, WORLD, directory, mode):
        assert calls == [(False, True, False)]


def _call_back_badly(context: RankContext, directory: Path) -> tuple[Outcome, Outcome, Outcome]:
    seat = Seat.of(context)

    def callback() -> None:
        if seat.rank == 1:
            raise ZeroDivisionError("in the callback of the test")

    first = async_outcome(seat, state_of(seat.rank, WORLD, 1), directory, callback=callback)
    assert tag_in(seat, directory) == 1
    second = async_outcome(seat, state_of(seat.rank, WORLD, 2), directory)
    assert tag_in(seat, directory) == 2
    seat.share()
    assert names_in(directory) == checkpoint_names(directory)
    seat.share()
    calls: list[int] = []
    _, response = _begin(seat, 3, directory, "fail-2", "go", callback=lambda: calls.append(1))
    third = outcome_of_response(response)
    assert calls == []
    assert tag_in(seat, directory) == 2
    return first, second, third


def test_a_callback_that_raises_fails_its_future_only_and_a_failed_save_calls_nobody(directory: Path) -> None:
    found = run_ranks(_call_back_badly, WORLD, directory)
    for rank, (first, second, third) in enumerate(found):
        assert first.kind == ("ZeroDivisionError" if rank == 1 else ""), first
        assert second.kind == ""
        assert third.kind == "StorageError" and DISK_FULL in third.message


# -- one save in flight -----------------------------------------------------------------------------------------------


def _have_one_in_flight(context: RankContext, root: Path, on_pending: str) -> tuple[Outcome, Outcome]:
    """Rank 1 alone has a save in flight when all save."""
    seat = Seat.of(context)
    gate, own = Gate(root / "own").close(), None
    seat.share()
    if seat.rank == 1:
        own = async_save(seat, {"a": [1]}, root / "own", storage_writer=GatedWriter(), no_dist=True)
        gate.await_writing(1)
        if on_pending == "wait":
            threading.Timer(0.5, gate.open).start()
    seat.share()
    first = async_outcome(seat, state_of(seat.rank, WORLD, 1), root / "all", on_pending=on_pending)
    if own is not None and on_pending == "wait":
        assert own.persist_completion.done()
    seat.share()
    gate.open()
    if own is not None:
        own.get_result(RESULT_SECONDS)
    return first, async_outcome(seat, state_of(seat.rank, WORLD, 2), root / "all", on_pending=on_pending)


@pytest.mark.parametrize("on_pending", ["wait", "raise"])
def test_when_one_rank_has_a_save_in_flight_all_wait_or_all_raise(directory: Path, on_pending: str) -> None:
    found = run_ranks(_have_one_in_flight, WORLD, directory, on_pending)
    assert {second.kind for _, second in found} == {""}
    first = {(outcome.kind, outcome.message) for outcome, _ in found}
    assert len(first) == 1
    kind, text = first.pop()
    if on_pending == "wait":
        assert kind == ""
    else:
        assert kind.endswith("Error") and "rank 1" in text and "in flight" in text, text
        assert max(outcome.seconds for outcome, _ in found) < SOON_SECONDS


def _wait_for_all(context: RankContext, directory: Path) -> None:
    seat = Seat.of(context)
    api.wait_all()
    gate, response = _begin(seat, 1, directory)
    seat.share()
    threading.Timer(0.3, gate.open).start()
    api.wait_all()
    assert response.persist_completion.done()
    assert tag_in(seat, directory) == 1
    gate, response = _begin(seat, 2, directory.with_name("other"))
    seat.share()
    threading.Timer(0.3, gate.open).start()
    seat.save(state_of(seat.rank, seat.world, 3), checkpoint_id=directory)  # a plain save does not overtake
    assert response.persist_completion.done()
    assert tag_in(seat, directory) == 3


def test_wait_all_and_a_plain_save_wait_for_what_is_in_flight(directory: Path) -> None:
    run_ranks(_wait_for_all, 2, directory)


# -- failures that nobody awaited -------------------------------------------------------------------------------------


def _forget_a_failure(context: RankContext, root: Path, awaiting: tuple[int, ...], kind: str) -> list[Outcome]:
    """A save fails, some ranks look; what the next two saves say."""
    seat = Seat.of(context)
    _, response = _begin(seat, 1, root / "failing", "fail-1", "go")
    if seat.rank in awaiting:
        assert outcome_of_response(response).kind == "StorageError"
    wait_until(response.persist_completion.done, "the failure")
    outcomes = []
    for tag in (2, 3):
        state = state_of(seat.rank, WORLD, tag)
        if kind == "save":
            outcomes.append(outcome_of(seat.save, state, checkpoint_id=root / "next"))
        else:
            outcomes.append(async_outcome(seat, state, root / "next"))
    assert tag_in(seat, root / "next") == 3
    assert not names_in(root / "failing")
    return outcomes


@pytest.mark.parametrize(
    ("awaiting", "kind"), [((), "save"), ((), "async_save"), ((0, 2), "save"), ((0, 1), "async_save")]
)
def test_a_failure_that_some_rank_never_saw_is_raised_by_the_next_save_on_all(
    directory: Path, awaiting: tuple[int, ...], kind: str
) -> None:
    for outcomes in run_ranks(_forget_a_failure, WORLD, directory, awaiting, kind):
        assert outcomes[0].kind == "StorageError" and DISK_FULL in outcomes[0].message, outcomes
        assert outcomes[0].seconds < SOON_SECONDS
        assert outcomes[1].kind == "", outcomes


def test_a_failure_that_all_ranks_saw_is_not_raised_again(directory: Path) -> None:
    for outcomes in run_ranks(_forget_a_failure, WORLD, directory, (0, 1, 2), "save"):
        assert [outcome.kind for outcome in outcomes] == ["", ""]


def _plan_of_a_failure(context: RankContext, directory: Path) -> list[bool]:
    seat = Seat.of(context)

    def save(tag: int, *orders: str) -> Callable[[], object]:
        return lambda: outcome_of_response(_begin(seat, tag, directory.with_name(f"{tag}"), *orders)[1])

    return [was_hit(save(1, "fail-0", "go")), was_hit(save(2, "go")), was_hit(save(3, "go"))]


def test_the_plan_of_a_save_that_failed_is_not_used_again(directory: Path) -> None:
    assert run_ranks(_plan_of_a_failure, 2, directory) == [[False, False, True]] * 2
