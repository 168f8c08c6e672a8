"""Something goes wrong on one rank of a save in the background: all ranks hear the same, soon, and the next save works.

The faults are those of a plain save: wherever they strike here, in the call or behind the response, the error is the
one that a plain save raises.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_core.api import wait_all
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.async_jobs import MODES, async_outcome, checkpoint_directory, tag_in
from tests.core.async_writers import DirectorylessWriter
from tests.core.fault_jobs import (
    PATIENT_SECONDS,
    SOON_SECONDS,
    Outcome,
    Seat,
    checkpoint_names,
    names_in,
    outcome_of,
    state_of,
)
from tests.core.one_rank_faults import (
    RANKS,
    WORLD,
    Arguments,
    FailingState,
    Fault,
    bad,
    bad_arguments,
    differing,
    other,
)
from tests.core.save_faults import SAVE_FAULTS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

_IN_A_THREAD = re.compile("execute_write|begin_checkpoint")
"""Where an interrupt has no call of the user's to end."""

ASYNC_FAULTS: dict[str, list[Fault]] = {
    **{name: faults for name, faults in SAVE_FAULTS.items() if name not in ("interrupts", "bad arguments")},
    "interrupts": [fault for fault in SAVE_FAULTS["interrupts"] if not _IN_A_THREAD.search(fault.name)],
    "bad arguments": [
        *SAVE_FAULTS["bad arguments"],
        *bad_arguments({
            "a number for a callback": bad(callback=5),
            "a callback's name": bad(callback="print"),
            "on_pending in other words": bad(on_pending="queue"),
            "on_pending True": bad(on_pending=True),
            "on_pending None": bad(on_pending=None),
            "use_gloo in words": bad(use_gloo="yes"),
            "use_gloo None": bad(use_gloo=None),
        }),
    ],
    "more different arguments": [
        *differing({"on_pending": other(on_pending=("wait", "raise")), "durable": other(durable=(False, True))}),
        *differing({"durable": other(durable=(True, False)), "on_pending": other(on_pending=("raise", "wait"))}),
    ],
}  # fmt: skip


@pytest.fixture
def directory() -> Iterator[Path]:
    with checkpoint_directory() as path:
        yield path


def _call(seat: Seat, directory: Path, tag: int, arguments: Arguments) -> Outcome:
    given: Arguments = {"state_dict": state_of(seat.rank, WORLD, tag), "durable": True}
    arguments = given | arguments
    place, state = arguments.pop("checkpoint_id", directory), arguments.pop("state_dict")
    if "more" in arguments:
        state = state | arguments.pop("more")
    return async_outcome(seat, state, place, **arguments)


def _run_saves(context: RankContext, directory: Path, group: str) -> list[tuple[Outcome, list[str], int]]:
    """Save; then for each fault: fail over it, look, and save again."""
    seat = Seat.of(context)
    assert _call(seat, directory, 1, {}).kind == ""
    found = []
    for tag, fault in enumerate(ASYNC_FAULTS[group], 1):
        if fault.warm:
            assert _call(seat, directory, tag, fault.arguments(False)).kind == ""
        seat.share()
        before = names_in(directory)
        seat.share()
        outcome = _call(seat, directory, 1000 + tag, fault.arguments(seat.rank == fault.rank))
        wait_all()  # a rank that was interrupted has not waited
        seat.share()
        changed = sorted(set(before) ^ set(names_in(directory)))
        found.append((outcome, changed, tag_in(seat, directory)))
        again = _call(seat, directory, tag + 1, {})
        assert again.kind == "", (fault.name, again)
    seat.share()
    assert names_in(directory) == checkpoint_names(directory)
    return found


@pytest.mark.parametrize("group", ASYNC_FAULTS)
def test_a_failing_save_is_one_error_on_all_ranks_and_leaves_the_old_checkpoint_alone(
    directory: Path, group: str
) -> None:
    found = run_ranks(_run_saves, WORLD, directory, group, timeout_seconds=150)
    for number, fault in enumerate(ASYNC_FAULTS[group]):
        seen = [of_rank[number] for of_rank in found]
        told = [outcome for outcome, _, _ in seen]
        if fault.interrupt:  # the rank itself is interrupted; the others are told
            assert told.pop(fault.rank).kind == fault.interrupt, (fault.name, seen)
        assert {(outcome.kind, outcome.message) for outcome in told} == {(fault.kind, told[0].message)}, (
            fault.name, told,
        )  # fmt: skip
        assert fault.text in told[0].message, (fault.name, told[0])
        assert max(outcome.seconds for outcome in told) < SOON_SECONDS, (fault.name, told)
        for _, changed, tag in seen:
            assert (changed, tag) == ([], number + 1), (fault.name, seen)


# -- without a channel on the calling thread --------------------------------------------------------------------------


def _fail_without_a_channel(context: RankContext, directory: Path) -> list[Outcome]:
    seat, mode = Seat.of(context), MODES["no channel"]
    outcomes = []
    for failing in RANKS:
        error = RuntimeError("out of luck") if seat.rank == failing else None
        state = state_of(seat.rank, WORLD, 1) | {"stateful": FailingState(1, saves=error)}
        outcomes.append(async_outcome(seat, state, directory, **mode.save))
        state = state_of(seat.rank, WORLD, 2)
        outcomes.append(async_outcome(seat, state, directory, **mode.save, durable=seat.rank != failing))
        assert async_outcome(seat, state, directory, **mode.save).kind == ""
        assert tag_in(seat, directory) == 2
    seat.share()
    assert names_in(directory) == checkpoint_names(directory)
    return outcomes


def test_ranks_without_a_channel_hear_of_each_others_errors_too(directory: Path) -> None:
    for number, told in enumerate(zip(*run_ranks(_fail_without_a_channel, WORLD, directory), strict=True)):
        kind = "ArgumentsDifferError" if number % 2 else "RankFailedError"
        assert {outcome.kind for outcome in told} == {kind}, told
        assert len({outcome.message for outcome in told}) == 1, told
        assert "durable" in told[0].message if number % 2 else f"rank {number // 2}" in told[0].message, told[0]
        assert max(outcome.seconds for outcome in told) < SOON_SECONDS, told


# -- ranks that do something else -------------------------------------------------------------------------------------


def _stay_away(context: RankContext, directory: Path, mode_name: str, away: int) -> Outcome | None:
    seat, mode = Seat.of(context), MODES[mode_name]
    seat.share()
    if seat.rank == away:
        time.sleep(4)
        return None
    return async_outcome(seat, state_of(seat.rank, WORLD, 1), directory, timeout_seconds=2.0, **mode.save)


@pytest.mark.parametrize(("mode", "away"), [("mailbox", 2), ("mailbox", 0), ("no channel", 1), ("no channel", 0)])
def test_a_rank_that_never_calls_is_named_after_the_time_of_the_others(directory: Path, mode: str, away: int) -> None:
    found = [outcome for outcome in run_ranks(_stay_away, WORLD, directory, mode, away) if outcome is not None]
    assert len(found) == WORLD - 1
    for outcome in found:
        assert outcome.kind == "CoordinationTimeoutError", outcome
        assert f"rank {away}" in outcome.message or f"ranks {away}" in outcome.message, outcome
        assert outcome.seconds < PATIENT_SECONDS / 2
    assert ".metadata" not in names_in(directory)


def _call_differently(context: RankContext, directory: Path) -> list[Outcome]:
    seat, outcomes = Seat.of(context), []
    for plain in ([0], [1], [0, 2]):
        state = state_of(seat.rank, WORLD, 1)
        if seat.rank in plain:
            outcomes.append(outcome_of(seat.save, state, checkpoint_id=directory, durable=False))
        else:
            outcomes.append(async_outcome(seat, state, directory))
        seat.share()
        assert names_in(directory) == []
        seat.share()
    assert async_outcome(seat, state_of(seat.rank, WORLD, 2), directory).kind == ""
    assert tag_in(seat, directory) == 2
    return outcomes


def test_ranks_that_save_in_the_background_while_others_save_plainly_are_told_so(directory: Path) -> None:
    for told in zip(*run_ranks(_call_differently, WORLD, directory), strict=True):
        assert {outcome.kind for outcome in told} == {"ArgumentsDifferError"}, told
        assert len({outcome.message for outcome in told}) == 1, told
        assert max(outcome.seconds for outcome in told) < SOON_SECONDS, told


# -- places that cannot carry messages --------------------------------------------------------------------------------


def _save_nowhere(context: RankContext, directory: Path) -> list[Outcome]:
    seat = Seat.of(context)
    outcomes = []
    for place, writer in ((directory, DirectorylessWriter()), (None, DirectorylessWriter()), (None, None)):
        options: dict[str, Any] = {} if writer is None else {"storage_writer": writer}
        outcomes.append(async_outcome(seat, state_of(seat.rank, WORLD, 1), place, **options))
    assert async_outcome(seat, state_of(seat.rank, WORLD, 1), directory).kind == ""
    return outcomes


def test_a_mailbox_needs_a_directory(directory: Path) -> None:
    for outcomes in run_ranks(_save_nowhere, WORLD, directory):
        assert [outcome.kind for outcome in outcomes] == ["ArgumentError"] * 3, outcomes  # a ValueError
        assert max(outcome.seconds for outcome in outcomes) < SOON_SECONDS
