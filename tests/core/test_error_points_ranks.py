"""Every operation that changes the disk fails on one rank of a save, in every way: all ranks say so, and nothing stays.

One set of processes makes all the failing saves of a rank, one after another.
"""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.async_jobs import async_outcome, checkpoint_directory, tag_in
from tests.core.failing_writers import FailingWriter, diary_of
from tests.core.fault_jobs import (
    SOON_SECONDS,
    Outcome,
    Seat,
    checkpoint_names,
    loaded_tag,
    names_in,
    outcome_of,
    state_of,
)
from tests.core.test_error_points import ERRORS, MAY_FAIL

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

WORLD = 2
OLD, NEW, NEXT = 1, 2, 3


@pytest.fixture
def directory() -> Iterator[Path]:
    with checkpoint_directory() as path:
        yield path


@dataclass(frozen=True)
class Step:
    """What one rank saw of a save of which something failed.

    Attributes:
        what: What failed, in words, on the rank where it did; empty elsewhere.
        error_number: How.
        outcome: Of the save.
        changed: Names that came or went, of a save that failed.
    """

    what: str
    error_number: int
    outcome: Outcome
    changed: tuple[str, ...]


def _save_again(seat: Seat, directory: Path, tag: int) -> None:
    seat.save(state_of(seat.rank, seat.world, tag), checkpoint_id=directory)
    assert loaded_tag(seat, directory) == tag


def _look(seat: Seat, directory: Path, before: list[str], outcome: Outcome) -> tuple[str, ...]:
    """What a save that failed has changed."""
    seat.share()
    changed = sorted(set(before) ^ set(names_in(directory))) if outcome.kind else []
    seat.share()
    return tuple(changed)


def _reset(seat: Seat, directory: Path, first: bool) -> list[str]:
    seat.share()
    if first and seat.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
    elif not first:
        _save_again(seat, directory, OLD)
    seat.share()
    before = names_in(directory)
    seat.share()
    return before


def _fail_plainly(context: RankContext, directory: Path, rank: int, first: bool) -> list[Step]:
    seat = Seat.of(context)
    steps: list[Step] = []
    for number in itertools.count(1):
        before = _reset(seat, directory, first)
        for error_number in ERRORS:
            operations = FaultyOperations(fail_at=number, error_number=error_number)
            writer = FileSystemWriter(storage=LocalStorage(directory, operations if seat.rank == rank else None))
            outcome = outcome_of(seat.save, state_of(seat.rank, WORLD, NEW), storage_writer=writer)
            reached = len(operations.log) >= number
            if b"1" not in seat.share(b"1" if reached else b""):
                assert not outcome.kind, outcome
                return steps
            record = operations.log[number - 1] if reached else None
            what = "" if record is None else f"{record.operation} {record.name}"
            changed = _look(seat, directory, before, outcome)
            steps.append(Step(what, error_number, outcome, changed))
            if not outcome.kind:
                before = _reset(seat, directory, first)
            elif first and seat.rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
            seat.share()
        if first:
            _save_again(seat, directory, NEXT)
        assert loaded_tag(seat, directory) == (NEXT if first else OLD)
    raise AssertionError("unreachable")


def _check(found: list[list[Step]], rank: int, *, first: bool = False) -> set[str]:
    """Check every step; what made a save fail."""
    fatal = set()
    for ranks in zip(*found, strict=True):
        own = ranks[rank]
        told = [step.outcome for step in ranks]
        assert len({(outcome.kind, outcome.message) for outcome in told}) == 1, ranks
        operation, _, name = own.what.partition(" ")
        if not told[0].kind:
            assert operation in MAY_FAIL, ranks
            continue
        fatal.add(operation)
        assert told[0].kind == "StorageError" and told[0].blamed == (rank,), ranks
        assert f"[{errno.errorcode[own.error_number]}]" in told[0].message, ranks
        assert name.rpartition(".tmp")[0] in told[0].message or name in told[0].message, ranks
        assert max(outcome.seconds for outcome in told) < SOON_SECONDS, ranks
        assert first or {step.changed for step in ranks} == {()}, ranks
    return fatal


@pytest.mark.parametrize("first", [True, False], ids=["first", "over another"])
@pytest.mark.parametrize("rank", range(WORLD))
def test_whatever_operation_of_a_rank_fails_in_whatever_way_all_ranks_say_so(
    directory: Path, rank: int, first: bool
) -> None:
    found = run_ranks(_fail_plainly, WORLD, directory, rank, first, timeout_seconds=150)
    fatal = _check(found, rank, first=first)
    expected = {"create", "preallocate", "pwritev", "fsync", "close_written", "fsync_directory"}
    assert expected | ({"rename"} if rank == 0 else set()) <= fatal


# -- in the background process of a rank ------------------------------------------------------------------------------


def _fail_in_the_background(context: RankContext, directory: Path, rank: int, kind: str) -> list[Step]:
    """Over the same old checkpoint, again and again: after a failure it is there still, and the next save works.

    Where messages fail, plans travel by messages every time.
    """
    seat = Seat.of(context)
    steps: list[Step] = []
    errors = itertools.cycle(ERRORS)
    for number in itertools.count(1):
        _save_again(seat, directory, OLD)
        seat.share()
        before, error_number = names_in(directory), next(errors)
        diary = directory.with_name(f"diary {rank} {number} {seat.rank}")
        here = number if seat.rank == rank else 0
        writer = FailingWriter(
            diary=str(diary), error_number=error_number, fail_message=here if kind == "message" else 0,
            fail_at=here if kind != "message" else 0,
        )  # fmt: skip
        seat.share()
        outcome = async_outcome(
            seat, state_of(seat.rank, WORLD, NEW), directory, storage_writer=writer, durable=True,
            planner=StandardSavePlanner(enable_plan_caching=kind != "message"),
        )  # fmt: skip
        noted = diary_of(diary, kind)
        reached = seat.rank == rank and len(noted) >= number
        if b"1" not in seat.share(b"1" if reached else b""):
            assert not outcome.kind, outcome
            return steps
        changed = _look(seat, directory, before, outcome)
        assert tag_in(seat, directory) == (OLD if outcome.kind else NEW)
        steps.append(Step(noted[number - 1] if reached else "", error_number, outcome, changed))
        assert not async_outcome(seat, state_of(seat.rank, WORLD, NEXT), directory, durable=True).kind
        assert tag_in(seat, directory) == NEXT
        seat.share()
        assert names_in(directory) == checkpoint_names(directory)
    raise AssertionError("unreachable")


@pytest.mark.parametrize("rank", range(WORLD))
def test_whatever_operation_of_a_background_process_fails_all_ranks_say_so(directory: Path, rank: int) -> None:
    found = run_ranks(_fail_in_the_background, WORLD, directory, rank, "operation", timeout_seconds=150)
    fatal = _check(found, rank)
    expected = {"create", "preallocate", "pwritev", "fsync", "close_written"}
    assert expected | ({"rename"} if rank == 0 else set()) <= fatal


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_message_that_a_background_process_cannot_post_is_one_error_soon(directory: Path, rank: int) -> None:
    found = run_ranks(_fail_in_the_background, WORLD, directory, rank, "message", timeout_seconds=150)
    assert len(found[0]) >= 2
    for ranks in zip(*found, strict=True):
        own, told = ranks[rank], [step.outcome for step in ranks]
        if not told[0].kind and not told[1].kind:
            continue  # one that only says that an answer was read
        for outcome in told:
            assert outcome.kind in ("CoordinationError", "InDoubtError", "RankFailedError", "StorageError"), ranks
            assert f"rank {rank}" in outcome.message and outcome.seconds < SOON_SECONDS, ranks
        assert errno.errorcode[own.error_number] in told[rank].message or "Errno" in told[rank].message, ranks
        assert {step.changed for step in ranks} == {()}, ranks
