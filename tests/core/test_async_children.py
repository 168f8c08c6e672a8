"""The processes that write: what they are, and what happens when one of them, or its trainer, is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.background.carriers import ProcessCarrier
from dcp_core.background.response import AsyncSaveResponse, SaveFuture
from dcp_core.background.service import service
from dcp_core.background.task import PersistResult, PersistTask
from dcp_core.errors import CoordinationError
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks
from tests.background_processes import background_processes, children_of, is_running, wait_until
from tests.core.async_jobs import (
    MODES,
    async_outcome,
    async_save,
    checkpoint_directory,
    outcome_of_response,
    tag_in,
)
from tests.core.async_writers import EXIT_CODE, LAST_WORDS, CommitGatedWriter, Gate, GatedWriter
from tests.core.fault_jobs import SOON_SECONDS, Outcome, Seat, checkpoint_names, names_in, state_of

pytestmark = pytest.mark.timeout(120)

WORLD = 3


@pytest.fixture
def directory() -> Iterator[Path]:
    with checkpoint_directory() as path:
        yield path


# -- what a background process is -------------------------------------------------------------------------------------


def _look_at_children(context: RankContext, directory: Path) -> list[dict[str, Any]]:
    """Save twice and ask each time who writes; one process lives through both."""
    seat = Seat.of(context)
    seen = []
    for tag in (1, 2):
        gate = Gate(f"{directory}-{tag}").close()
        seat.share()
        response = async_save(seat, state_of(seat.rank, seat.world, tag), f"{directory}-{tag}",
                              storage_writer=GatedWriter())  # fmt: skip
        [told] = gate.await_writing(seat.rank)
        assert children_of(os.getpid()) == [told["pid"]]
        gate.open()
        response.get_result(60)
        seen.append(told | {"trainer": os.getpid(), "trainer's niceness": os.getpriority(os.PRIO_PROCESS, 0)})
    return seen


def test_one_light_process_of_its_own_session_writes_all_saves_of_a_rank(directory: Path) -> None:
    found = run_ranks(_look_at_children, 2, directory)
    for first, second in found:
        assert first["pid"] == second["pid"]
        assert first["parent"] == first["trainer"]
        assert first["session"] == first["pid"]
        assert first["frameworks"] == []
        assert not first["devices"]
        assert first["niceness"] > first["trainer's niceness"]
        assert first["working_directory"] == "/"
    assert found[0][0]["pid"] != found[1][0]["pid"]


# -- a background process dies ----------------------------------------------------------------------------------------


def _lose_a_child(
    context: RankContext, directory: Path, mode_name: str, victim: int, orders: tuple[str, ...], over: bool
) -> tuple[Outcome, int, list[str]]:
    """The victim's process dies at the gate, or as soon as it is through; then all save again, twice."""
    seat, mode = Seat.of(context), MODES[mode_name]
    if over:
        async_save(seat, state_of(seat.rank, WORLD, 1), directory, **mode.save).get_result(60)
    gate = Gate(directory).close(*orders)
    seat.share()
    response = async_save(seat, state_of(seat.rank, WORLD, 2), directory, storage_writer=GatedWriter(), **mode.save)
    pid = gate.await_writing(*range(WORLD))[victim]["pid"]
    seat.share()
    if seat.rank == 0:
        if f"exit-{victim}" not in orders:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not is_running(pid), "the end of the victim")
        gate.open()
    outcome = outcome_of_response(response)
    seat.share()
    names = names_in(directory)
    if over:
        assert tag_in(seat, directory, mode) == 1
    seat.share()
    for tag in (3, 4):
        assert async_outcome(seat, state_of(seat.rank, WORLD, tag), directory, **mode.save).kind == ""
        seat.share()
        assert tag_in(seat, directory, mode) == tag
        seat.share()
    if seat.rank == 0 and mode_name != "alone":
        assert names_in(directory) == checkpoint_names(directory)
    assert len(children_of(os.getpid())) == 1
    return outcome, pid, names


@pytest.mark.parametrize(
    ("mode", "victim", "orders", "over"),
    [
        ("mailbox", 0, (), False),
        ("mailbox", 1, (), True),
        ("mailbox", 0, ("after",), True),
        ("mailbox", 2, ("exit-2",), False),
        ("no channel", 0, (), False),
        ("no channel", 1, ("exit-1",), True),
        ("alone", 1, (), False),
    ],
)
def test_the_death_of_a_background_process_is_an_error_that_names_it_and_the_next_save_works(
    directory: Path, mode: str, victim: int, orders: tuple[str, ...], over: bool
) -> None:
    found = run_ranks(_lose_a_child, WORLD, directory, mode, victim, orders, over, timeout_seconds=100)
    own, pid, names = found[victim]
    assert own.kind == "RankFailedError", found
    words = [str(EXIT_CODE), LAST_WORDS] if f"exit-{victim}" in orders else ["SIGKILL", "-9"]
    assert all(word in own.message for word in [str(pid), *words]), own
    assert (".metadata" in names) == (over and mode != "alone")
    others = [outcome for rank, (outcome, _, _) in enumerate(found) if rank != victim]
    if mode == "alone":
        assert {outcome.kind for outcome in others} == {""}
    else:
        for outcome in others:
            assert outcome.kind == "RankFailedError", outcome
            assert f"rank {victim}" in outcome.message and str(pid) in outcome.message, outcome
    assert max(outcome.seconds for outcome, _, _ in found) < SOON_SECONDS, found


def _lose_a_child_that_is_done(
    context: RankContext, directory: Path, mode_name: str, victim: int, orders: tuple[str, ...]
) -> Outcome:
    """A process dies that has done all it had to: its part is handed in, or it has committed and told nobody."""
    seat, mode = Seat.of(context), MODES[mode_name]
    gate = Gate(directory).close(*orders)
    seat.share()
    response = async_save(seat, state_of(seat.rank, WORLD, 1), directory, storage_writer=CommitGatedWriter(),
                          **mode.save)  # fmt: skip
    gate.await_writing(*(range(WORLD) if mode_name == "alone" else [0]))
    if seat.rank == victim:
        [pid] = children_of(os.getpid())
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "the end of the process")
    seat.share()
    gate.open()
    outcome = outcome_of_response(response)
    seat.share()
    assert tag_in(seat, directory, mode) == 1
    seat.share()
    assert async_outcome(seat, state_of(seat.rank, WORLD, 2), directory, **mode.save).kind == ""
    assert tag_in(seat, directory, mode) == 2
    seat.share()
    if mode_name != "alone":
        left = set(names_in(directory)) - set(checkpoint_names(directory))
        assert all(victim == 0 and name.startswith(".mailbox-") for name in left), left  # that must wait for its time
    return outcome


@pytest.mark.faults
@pytest.mark.parametrize(
    ("mode", "victim", "orders"),
    [
        ("mailbox", 2, ()),
        ("no channel", 0, ("after",)),
        ("alone", 1, ("after",)),
    ],
)
def test_a_background_process_that_dies_while_another_commits_or_when_it_has_fails_no_save(
    directory: Path, mode: str, victim: int, orders: tuple[str, ...]
) -> None:
    for outcome in run_ranks(_lose_a_child_that_is_done, WORLD, directory, mode, victim, orders):
        assert outcome.kind == "", outcome


def _lose_an_idle_child(context: RankContext, directory: Path) -> None:
    seat = Seat.of(context)
    seen = set()
    for tag in (1, 2, 3):
        assert async_outcome(seat, state_of(seat.rank, seat.world, tag), directory).kind == ""
        [pid] = children_of(os.getpid())
        seen.add(pid)
        if seat.rank == 0 or tag == 2:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not is_running(pid), "the end of the idle process")  # type: ignore[misc]
        assert tag_in(seat, directory) == tag
    assert len(seen) == (3 if seat.rank == 0 else 2)
    seat.share()
    assert names_in(directory) == checkpoint_names(directory)


def test_an_idle_background_process_that_died_is_replaced(directory: Path) -> None:
    run_ranks(_lose_an_idle_child, 2, directory)


# -- a trainer dies ---------------------------------------------------------------------------------------------------


def _die_after_the_return(
    context: RankContext, directory: Path, mode_name: str, dying: tuple[int, ...], warm: bool
) -> str:
    seat, mode = Seat.of(context), MODES[mode_name]
    if warm:
        async_save(seat, state_of(seat.rank, seat.world, 1), f"{directory}-warm", **mode.save).get_result(60)
    response = async_save(seat, state_of(seat.rank, seat.world, 2), directory, storage_writer=GatedWriter(),
                          **mode.save)  # fmt: skip
    if mode_name == "no channel":  # before they have found each other there is no save yet that could go on
        Gate(directory).await_writing(seat.rank)
    trainers = [int(told) for told in seat.share(str(os.getpid()).encode())]
    if seat.rank in dying:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(lambda: not any(is_running(trainers[rank]) for rank in dying), "the end of the trainers")
    Gate(directory).open()
    return outcome_of_response(response).kind


def _load_tag(context: RankContext, directory: Path, mode_name: str) -> int:
    return tag_in(Seat.of(context), directory, MODES[mode_name])


@pytest.mark.parametrize(
    ("mode", "dying", "warm"),
    [
        ("mailbox", (0, 1, 2), False),
        ("mailbox", (0, 1, 2), True),
        ("mailbox", (0,), False),
        ("mailbox", (1, 2), True),
        ("no channel", (0, 1, 2), False),
        ("no channel", (0,), True),
        ("alone", (0, 2), True),
    ],
)
def test_background_processes_whose_trainers_are_killed_commit_and_end(
    directory: Path, mode: str, dying: tuple[int, ...], warm: bool
) -> None:
    gate = Gate(directory).close()
    found = run_ranks(_die_after_the_return, WORLD, directory, mode, dying, warm, return_exceptions=True)
    gate.open()
    for rank, seen in enumerate(found):
        assert isinstance(seen, RankProcessError) and "SIGKILL" in str(seen) if rank in dying else seen == "", found
    wanted = [".metadata"] if mode != "alone" else [f"{rank}.metadata" for rank in range(WORLD)]
    wait_until(lambda: set(wanted) <= set(names_in(directory)), "the commit")
    assert run_ranks(_load_tag, WORLD, directory, mode) == [2] * WORLD
    wait_until(lambda: not background_processes(), "the end of the background processes")
    if mode != "alone":
        assert names_in(directory) == checkpoint_names(directory)


def _die_before_all_have_met(context: RankContext, directory: Path) -> None:
    """The last rank never saves; the trainers of the others die while their processes still look for it."""
    seat = Seat.of(context)
    if seat.rank < WORLD - 1:
        async_save(seat, state_of(seat.rank, WORLD, 1), directory, **MODES["no channel"].save)
    seat.share()
    os.kill(os.getpid(), signal.SIGKILL)


def test_background_processes_that_wait_for_others_end_soon_after_their_trainers(directory: Path) -> None:
    run_ranks(_die_before_all_have_met, WORLD, directory, return_exceptions=True)
    wait_until(lambda: not background_processes(), "the end of the background processes")
    assert ".metadata" not in names_in(directory)


# -- forks ------------------------------------------------------------------------------------------------------------


def _fork(work: Any) -> int:
    """Run something in a fork of this process that ends as processes of `multiprocessing` do."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def _fork_in_between(context: RankContext, directory: Path) -> None:
    seat = Seat.of(context)
    assert async_outcome(seat, state_of(seat.rank, seat.world, 1), directory).kind == ""
    [pid] = children_of(os.getpid())

    def save_alone() -> None:
        place = f"{directory}-fork-{seat.rank}"
        api.async_save({"a": np.arange(3)}, checkpoint_id=place, durable=False).get_result(60)
        assert (api.read(f"{place}", "a") == np.arange(3)).all()
        api.wait_all()

    fork = _fork(save_alone)
    assert os.waitpid(fork, 0)[1] == 0
    for tag in (2, 3):
        assert async_outcome(seat, state_of(seat.rank, seat.world, tag), directory).kind == ""
        assert tag_in(seat, directory) == tag
    assert children_of(os.getpid()) == [pid]


def test_a_fork_of_a_trainer_has_a_background_process_of_its_own(directory: Path) -> None:
    run_ranks(_fork_in_between, 2, directory)


def _wait_in_a_fork(context: RankContext) -> None:
    future = SaveFuture("0123")
    response = AsyncSaveResponse(future, lambda: False)

    def wait() -> None:
        for ask in (response.get_result, future.result, future.exception):
            with pytest.raises(CoordinationError, match=f"save 0123 was begun by process {os.getppid()}.*wait there"):
                ask()

    fork = _fork(wait)
    assert os.waitpid(fork, 0)[1] == 0
    future.set_exception(CoordinationError("over"))
    assert os.waitpid(_fork(lambda: str(future.exception()) == "over" or os._exit(2)), 0)[1] == 0


def test_a_fork_does_not_wait_for_a_save_of_its_trainer_whose_end_it_never_hears() -> None:
    run_ranks(_wait_in_a_fork, 1, timeout_seconds=30)


_FORKING = """
import os, signal, sys, time
import numpy as np
from dcp_core import api
api.async_save({"a": np.arange(3)}, checkpoint_id=sys.argv[1]).get_result(60)
worker = os.fork()
if not worker:
    time.sleep(50)
    os._exit(0)
print(worker, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_outlives_its_trainer_keeps_no_background_process(directory: Path) -> None:
    command = [sys.executable, "-c", _FORKING, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        trainer.wait(30)
        try:
            started = time.monotonic()
            wait_until(lambda: not background_processes(), "the end of the background process")
            assert time.monotonic() - started < SOON_SECONDS
            assert is_running(worker)
        finally:
            os.kill(worker, signal.SIGKILL)


def _hear_early(context: RankContext, directory: Path) -> str:
    """The background processes agree and write before the call that handed over returns: the id they agreed on."""
    seat, gate, hand_over = Seat.of(context), Gate(directory).close(), ProcessCarrier.hand_over

    def hand_over_slowly(carrier: ProcessCarrier, task: PersistTask) -> Callable[[], PersistResult]:
        found = hand_over(carrier, task)
        gate.await_writing(*range(WORLD))
        return found

    seat.share()
    state, mode = state_of(seat.rank, WORLD, 1), MODES["no channel"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessCarrier, "hand_over", hand_over_slowly)
        response = async_save(seat, state, directory, storage_writer=GatedWriter(), **mode.save)
    flight = service().latest
    assert flight is not None
    heard = flight.agreed_id
    seat.share()
    gate.open()
    response.get_result(60)
    return heard


def test_what_a_background_process_says_before_the_call_returns_is_heard(directory: Path) -> None:
    heard = run_ranks(_hear_early, WORLD, directory, timeout_seconds=60)
    assert heard[0] and heard == [heard[0]] * WORLD
