"""Ranks that agree through files beside the checkpoint: what crashed attempts left there, and two jobs at once."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dcp_core.api import clear_plan_cache
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks
from tests.background_processes import background_processes, children_of, wait_until
from tests.core.async_jobs import MODES, async_outcome, async_save, checkpoint_directory, tag_in
from tests.core.async_writers import Gate, GatedWriter
from tests.core.fault_jobs import (
    PATIENT_SECONDS,
    SOON_SECONDS,
    Outcome,
    Seat,
    checkpoint_names,
    loaded_tag,
    names_in,
    state_of,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

_MAILBOX = re.compile(r"\.mailbox-([0-9a-f]{32}|join)")
_DATA = re.compile(r"_rank\d+_(\.[0-9a-f]{32})?\.(safetensors|bytes)")


@pytest.fixture
def directory() -> Iterator[Path]:
    with checkpoint_directory() as path:
        yield path


# -- left-overs -------------------------------------------------------------------------------------------------------


def _crash(context: RankContext, directory: Path, mode_name: str, orders: tuple[str, ...]) -> None:
    """All trainers and all background processes die while they save; with the order "join" one never came."""
    seat, mode = Seat.of(context), MODES[mode_name]
    last = seat.world - 1
    if "join" not in orders or seat.rank != last:
        async_save(seat, state_of(seat.rank, seat.world, 1), directory, storage_writer=GatedWriter(), **mode.save)
    if "join" in orders:
        wait_until(lambda: any(_MAILBOX.fullmatch(name) for name in names_in(directory)), "a mailbox")
        time.sleep(0.3)  # those who came have said so; whether they have makes no difference to the outcome
    else:
        Gate(directory).await_writing(*range(seat.world))
        assert any(_MAILBOX.fullmatch(name) for name in names_in(directory))
    seat.share()
    for pid in children_of(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _save_twice(context: RankContext, directory: Path, mode_name: str, first_tag: int) -> list[list[str]]:
    seat, mode = Seat.of(context), MODES[mode_name]
    seen = []
    for tag in (first_tag, first_tag + 1):
        clear_plan_cache()
        outcome = async_outcome(seat, state_of(seat.rank, seat.world, tag), directory, **mode.save)
        assert outcome.kind == "" and outcome.seconds < SOON_SECONDS, outcome
        seat.share()
        assert tag_in(seat, directory) == tag
        seen.append(names_in(directory))
        seat.share()
    return seen


@pytest.mark.parametrize(
    ("mode", "worlds", "orders"),
    [
        ("mailbox", (4, 2, 3), ()),
        ("mailbox", (2, 4), ("after",)),
        ("no channel", (4, 2), ()),
        ("no channel", (3, 4), ("join",)),
        ("no channel", (4, 2), ("join",)),
    ],
)
def test_what_crashed_attempts_of_other_worlds_left_is_ignored_and_goes(
    directory: Path, mode: str, worlds: tuple[int, ...], orders: tuple[str, ...]
) -> None:
    for world in worlds[:-1]:
        gate = Gate(directory).close(*orders)
        crashed = run_ranks(_crash, world, directory, mode, orders, return_exceptions=True)
        assert all(isinstance(end, RankProcessError) and "SIGKILL" in str(end) for end in crashed), crashed
        wait_until(lambda: not background_processes(), "the end of the background processes")
        assert any(_MAILBOX.fullmatch(name) for name in names_in(directory))
        assert ".metadata" not in names_in(directory)
        for file in gate.directory.iterdir():
            file.unlink()
        gate.directory.rmdir()
    seen = run_ranks(_save_twice, worlds[-1], directory, mode, 5)
    if "join" in orders:  # nobody can say that such a mailbox has no owner before it is old
        left = set(seen[0][-1]) - set(checkpoint_names(directory))
        assert all(_MAILBOX.fullmatch(name) for name in left), left
        for name in left:
            _make_old(directory / name)
        seen = run_ranks(_save_twice, worlds[-1], directory, mode, 15)
    for names in seen:
        assert names[-1] == checkpoint_names(directory)


def _make_old(path: Path) -> None:
    two_days_ago = time.time() - 2 * 86400
    os.utime(path, (two_days_ago, two_days_ago))


def test_old_mailboxes_of_unknown_saves_go_and_fresh_ones_disturb_nobody(directory: Path) -> None:
    old, fresh, joining = ".mailbox-" + "0" * 32, ".mailbox-" + "1" * 32, ".mailbox-join"
    for name in (old, fresh, joining):
        (directory / name).mkdir(parents=True)
        for message in ("abort.0", "abort.1", "hello.0.0", "hello.0.1", "welcome.0.1", "0.answers", ".tmp", "x"):
            (directory / name / message).write_bytes(b"nonsense" * 9)
    _make_old(directory / old)
    names: list[str] = []
    for number, mode in enumerate(("mailbox", "no channel")):
        names = run_ranks(_save_twice, 2, directory, mode, 10 * number + 1)[0][-1]
        assert old not in names
    assert set(names) - {fresh, joining} == set(checkpoint_names(directory))


def _look_meanwhile(context: RankContext, directory: Path, mode_name: str) -> tuple[list[str], list[str]]:
    seat, mode = Seat.of(context), MODES[mode_name]
    gate = Gate(directory).close("after")
    seat.share()
    response = async_save(seat, state_of(seat.rank, seat.world, 1), directory, storage_writer=GatedWriter(),
                          **mode.save)  # fmt: skip
    gate.await_writing(*range(seat.world))
    during = names_in(directory)
    seat.share()
    gate.open()
    response.get_result(60)
    seat.share()
    return during, names_in(directory)


@pytest.mark.parametrize("mode", ["mailbox", "no channel"])
def test_while_a_save_runs_its_directory_holds_its_own_files_only_and_then_the_checkpoint(
    directory: Path, mode: str
) -> None:
    for during, after in run_ranks(_look_meanwhile, 3, directory, mode):
        kinds = [name for name in during if not _DATA.fullmatch(name)]
        intents = [name for name in kinds if name.startswith(".intent-")]
        mailboxes = [name for name in kinds if _MAILBOX.fullmatch(name)]
        assert len(intents) == 1 and sorted(kinds) == sorted(intents + mailboxes), during
        assert ".mailbox-" + intents[0].removeprefix(".intent-").split(".")[0] in mailboxes
        assert after == checkpoint_names(directory)


# -- two jobs ---------------------------------------------------------------------------------------------------------

_ROUNDS = 6


def _save_in_two_places(context: RankContext, root: Path) -> None:
    seat = Seat.of(context, 4)
    directory = root / f"job {seat.job}"
    for number in range(3):
        tag = 1 + 2 * number + seat.job
        assert async_outcome(seat, state_of(seat.rank, 4, tag), directory).kind == ""
        assert tag_in(seat, directory) == tag
    seat.share()
    assert names_in(directory) == checkpoint_names(directory)


def test_two_jobs_of_four_save_beside_each_other(directory: Path) -> None:
    run_ranks(_save_in_two_places, 8, directory)


def _save_into_one_place(
    context: RankContext, directory: Path, world: int
) -> list[tuple[Outcome, int, int, list[str]]]:
    """Both jobs save at once; then all ranks of both load, as one job."""
    seat, everybody = Seat.of(context, world), Seat.of(context)
    found = []
    for number in range(_ROUNDS):
        own_tag = 1 + number * 2 + seat.job
        everybody.share()
        outcome = async_outcome(seat, state_of(seat.rank, world, own_tag), directory)
        everybody.share()
        tag = loaded_tag(everybody, directory, own=False)
        left_over = sorted(set(names_in(directory)) - set(checkpoint_names(directory)))
        everybody.share()
        found.append((outcome, own_tag, tag, left_over))
    assert async_outcome(everybody, state_of(everybody.rank, everybody.world, 255), directory).kind == ""
    everybody.share()
    assert names_in(directory) == checkpoint_names(directory)
    return found


@pytest.mark.parametrize("world", [1, 4])
def test_two_jobs_that_save_into_one_directory_leave_one_of_the_two_results_whole(directory: Path, world: int) -> None:
    found = run_ranks(_save_into_one_place, 2 * world, directory, world, timeout_seconds=100)
    for seen in zip(*found, strict=True):
        assert {outcome.kind for outcome, _, _, _ in seen} == {""}, seen
        assert max(outcome.seconds for outcome, _, _, _ in seen) < PATIENT_SECONDS / 2
        tags = {tag for _, _, tag, _ in seen}
        assert len(tags) == 1 and tags <= {own_tag for _, own_tag, _, _ in seen}, seen
        left_over = seen[0][3]  # the loser's files, if it committed while the winner looked; the next save takes them
        assert len(left_over) <= 2 * world and all(_DATA.fullmatch(name) for name in left_over), seen
