"""Two jobs in one directory at once, and ranks that save alone: one of the results, whole, and nobody's files mixed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core.api import clear_plan_cache
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations, OperationRecord
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks
from tests.core.fault_jobs import (
    SOON_SECONDS,
    Outcome,
    Seat,
    checkpoint_names,
    is_untouched,
    loaded_tag,
    memory_directory,
    names_in,
    outcome_of,
    poison_of,
    state_of,
    whole_tag,
)

pytestmark = pytest.mark.faults

JOBS = 2
ROUNDS = 20
_LONGEST_PAUSE_SECONDS = 0.004


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "checkpoint"


# --- two jobs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """What one rank saw of a round: how its save ended, and which of the two saves all ranks loaded afterwards."""

    saved: Outcome
    own_tag: int
    tag: int
    left_over: frozenset[str]


class _Dawdling(FaultyOperations):
    """Waits a little, never twice the same, before everything that changes the disk."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        super().__init__(before=self._dawdle)

    def _dawdle(self, record: OperationRecord) -> None:
        time.sleep(self._random.random() ** 3 * _LONGEST_PAUSE_SECONDS)


def _save_at_once(context: RankContext, directory: Path, world: int, seed: int) -> list[Round]:
    """Both jobs save into one directory; then all ranks of both load, as one job."""
    seat, everybody = Seat.of(context, world), Seat.of(context)
    found = []
    for number in range(ROUNDS):
        if number % 3 == 2:
            clear_plan_cache()
        operations = _Dawdling(hash((seed, number, context.rank)))
        own_tag = 1 + number * JOBS + seat.job
        everybody.share()
        saved = outcome_of(
            seat.save,
            state_of(seat.rank, seat.world, own_tag),
            storage_writer=FileSystemWriter(storage=LocalStorage(directory, operations)),
        )
        everybody.share()
        tag = loaded_tag(everybody, directory, own=False)
        left_over = frozenset(names_in(directory)) - frozenset(checkpoint_names(directory))
        everybody.share()
        found.append(Round(saved, own_tag, tag, left_over))
    everybody.share()
    everybody.save(state_of(everybody.rank, everybody.world, 255), checkpoint_id=directory)
    everybody.share()
    assert names_in(directory) == checkpoint_names(directory)
    return found


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_two_jobs_that_save_at_once_leave_one_of_the_two_results_whole(directory: Path, world: int, seed: int) -> None:
    found = run_ranks(_save_at_once, JOBS * world, directory, world, seed, timeout_seconds=100)
    winners = set()
    for rounds in zip(*found, strict=True):
        assert {seen.saved.kind for seen in rounds} == {""}, rounds
        tags = {seen.tag for seen in rounds}
        assert len(tags) == 1 and tags <= {seen.own_tag for seen in rounds}, rounds
        # The loser's files may stay until the next save, if it committed while the winner looked; its record never.
        left_over = rounds[0].left_over
        assert len(left_over) <= 2 * world and all(name.startswith("_rank") for name in left_over), rounds
        winners |= {seen.own_tag % JOBS for seen in rounds if seen.own_tag == seen.tag}
    assert winners == {0, 1}  # the race was one


def _save_beside_a_dying_job(context: RankContext, directory: Path, operation: str, pattern: str) -> int | None:
    """One job dies in the middle of its save while the other saves, again and again."""
    seat = Seat.of(context, 2)
    seat.share()
    if seat.job == 0:
        operations = FaultyOperations(kill_at=1, operations=[operation], name_pattern=pattern)
        writer = FileSystemWriter(storage=LocalStorage(directory, operations if seat.rank == 0 else None))
        outcome_of(seat.save, state_of(seat.rank, 2, 1), storage_writer=writer, timeout_seconds=1)
        return None
    tags = []
    for tag in range(2, 8):
        seat.save(state_of(seat.rank, 2, tag), checkpoint_id=directory)
        tags.append(loaded_tag(seat, directory))
    assert tags == list(range(2, 8))
    return tags[-1]


@pytest.mark.parametrize(
    ("operation", "pattern"),
    [
        ("touch", ".intent-*"),
        ("close_written", "_rank0_*.safetensors"),
        ("create", ".metadata.*.tmp"),
        ("rename", ".metadata"),
    ],
)
def test_a_job_that_dies_beside_another_does_not_harm_it(directory: Path, operation: str, pattern: str) -> None:
    found = run_ranks(_save_beside_a_dying_job, 4, directory, operation, pattern, return_exceptions=True)
    assert isinstance(found[0], RankProcessError) and "SIGKILL" in str(found[0]), found
    assert found[1:] == [None, 7, 7]
    run_ranks(_save_once, 2, directory, 8)
    assert names_in(directory) == checkpoint_names(directory)


def _save_once(context: RankContext, directory: Path, tag: int) -> None:
    seat = Seat.of(context)
    seat.save(state_of(seat.rank, seat.world, tag), checkpoint_id=directory)


# --- ranks alone -------------------------------------------------------------------------------------

WORLD = 3


def _save_alone(seat: Seat, directory: Path, tag: int, **arguments: Any) -> None:
    """Each rank saves a state of its own: whole tensors, with its rank in every value."""
    seat.save(_own_state(seat.rank, tag), checkpoint_id=directory, **{"use_collectives": False} | arguments)


def _own_state(rank: int, tag: int) -> dict[str, Any]:
    return {"w": np.full((3, 2), 10.0 * tag + rank), "n": [tag, rank], "only": {f"r{rank}": tag}}


def _own_poison(rank: int) -> dict[str, Any]:
    return {"w": np.full((3, 2), np.nan), "n": ["poison"], "only": {f"r{rank}": -1}}


def _holds_own(target: dict[str, Any], rank: int, tag: int) -> bool:
    expected = _own_state(rank, tag)
    return (
        bool((target["w"] == expected["w"]).all())
        and target["n"] == expected["n"]
        and target["only"] == expected["only"]
    )


def _load_own(seat: Seat, directory: Path, **arguments: Any) -> tuple[Outcome, dict[str, Any]]:
    target = _own_poison(seat.rank)
    return outcome_of(seat.load, target, checkpoint_id=directory, **arguments), target


def _refuse_alone(context: RankContext, directory: Path) -> list[Outcome]:
    seat = Seat.of(context)
    seat.save(state_of(seat.rank, WORLD, 1), checkpoint_id=directory)
    seat.share()
    before = names_in(directory)
    seat.share()
    refusals = [outcome_of(_save_alone, seat, directory, 2), outcome_of(_save_alone, seat, directory, 2, no_dist=True)]
    seat.share()
    assert names_in(directory) == before
    assert loaded_tag(seat, directory) == 1
    return refusals


def test_ranks_alone_are_refused_where_a_whole_job_saved(directory: Path) -> None:
    for rank, refusals in enumerate(run_ranks(_refuse_alone, WORLD, directory)):
        for refusal in refusals:
            assert refusal.kind == "ArgumentError", refusal
            assert f"rank {rank}" in refusal.message and "'.metadata'" in refusal.message, refusal
            assert refusal.seconds < SOON_SECONDS


def _fall_back(context: RankContext, directory: Path) -> None:
    seat = Seat.of(context)
    _save_alone(seat, directory, 1)
    _save_alone(seat, directory, 2, no_dist=seat.rank == 1)  # both spellings leave the same files
    seat.share()
    names = names_in(directory)
    assert [name for name in names if name.endswith(".metadata")] == [f"{rank}.metadata" for rank in range(WORLD)]
    assert len(names) == 3 * WORLD  # the first saves' files are gone
    for arguments in ({}, {"use_collectives": False}, {"no_dist": True}, {"use_collectives": np.False_}):
        outcome, target = _load_own(seat, directory, **arguments)
        assert outcome.kind == "" and _holds_own(target, seat.rank, 2), (arguments, outcome, target)
        seat.share()


def test_all_ranks_fall_back_to_what_each_of_them_saved_alone(directory: Path) -> None:
    run_ranks(_fall_back, WORLD, directory)


def _lack_one(context: RankContext, directory: Path) -> list[tuple[Outcome, bool]]:
    """The metadata of one rank is gone, or is another's: no rank falls back."""
    seat = Seat.of(context)
    found = []
    for rank in range(WORLD):
        for other in (None, (rank + 1) % WORLD):
            _save_alone(seat, directory, 1)
            seat.share()
            if seat.rank == 0:
                (directory / f"{rank}.metadata").unlink()
                if other is not None:
                    content = (directory / f"{other}.metadata").read_bytes()
                    (directory / f"{rank}.metadata").write_bytes(content)
            seat.share()
            outcome, target = _load_own(seat, directory)
            untouched = repr(target) == repr(_own_poison(seat.rank))
            found.append((outcome, untouched))
            seat.share()
    return found


def test_ranks_fall_back_together_or_not_at_all(directory: Path) -> None:
    found = run_ranks(_lack_one, WORLD, directory)
    for number, ranks in enumerate(zip(*found, strict=True)):
        rank, replaced = divmod(number, 2)
        first = ranks[0][0]
        assert {(outcome.kind, outcome.message) for outcome, _ in ranks} == {(first.kind, first.message)}, ranks
        assert first.kind == ("CorruptError" if replaced else "NotFoundError"), ranks
        # Without a description of rank 0 there is nothing at all, as far as rank 0 can see.
        assert f"{rank}.metadata" in first.message or (rank == 0 and ".metadata" in first.message), first
        assert all(untouched for _, untouched in ranks), ranks
        assert max(outcome.seconds for outcome, _ in ranks) < SOON_SECONDS


def _replace_alone(context: RankContext, directory: Path) -> None:
    """A save of the whole job hides what ranks saved alone, and removes it; a failing one does not."""
    seat = Seat.of(context)
    _save_alone(seat, directory, 1)
    seat.share()
    before = names_in(directory)
    seat.share()
    operations = FaultyOperations(fail_at=1, operations=["rename"], name_pattern=".metadata")
    writer = FileSystemWriter(storage=LocalStorage(directory, operations if seat.rank == 0 else None))
    outcome = outcome_of(seat.save, state_of(seat.rank, WORLD, 2), storage_writer=writer)
    assert outcome.kind == "StorageError", outcome
    seat.share()
    assert names_in(directory) == before
    loaded, target = _load_own(seat, directory)
    assert loaded.kind == "" and _holds_own(target, seat.rank, 1), loaded
    seat.save(state_of(seat.rank, WORLD, 3), checkpoint_id=directory)
    seat.share()
    assert names_in(directory) == checkpoint_names(directory)
    assert loaded_tag(seat, directory) == 3


def test_a_save_of_the_whole_job_removes_what_ranks_saved_alone_after_its_commit(directory: Path) -> None:
    run_ranks(_replace_alone, WORLD, directory)


def _load_as_a_subset(context: RankContext, directory: Path) -> int | None:
    """Some ranks load what all saved, each by itself; the others do not come."""
    seat = Seat.of(context)
    seat.save(state_of(seat.rank, WORLD, 1), checkpoint_id=directory)
    seat.share()
    if seat.rank == 1:
        return None
    target = poison_of(seat.rank, WORLD, 1)
    seat.load(target, checkpoint_id=directory, use_collectives=False)
    return whole_tag(target, seat.rank, WORLD, 1)


def test_a_subset_of_the_ranks_loads_without_the_others(directory: Path) -> None:
    assert run_ranks(_load_as_a_subset, WORLD, directory) == [1, None, 1]


def _die_alone(context: RankContext, directory: Path, pattern: str, moment: Any) -> None:
    """Save alone, then save again; rank 1 dies in that."""
    seat = Seat.of(context)
    _save_alone(seat, directory, 1)
    seat.share()
    operations = FaultyOperations(kill_at=1, kill_moment=moment, operations=["rename"], name_pattern=pattern)
    writer = FileSystemWriter(storage=LocalStorage(directory, operations if seat.rank == 1 else None))
    seat.save(_own_state(seat.rank, 2), storage_writer=writer, use_collectives=False)


def _look_alone(context: RankContext, directory: Path) -> tuple[int, ...]:
    seat = Seat.of(context)
    tags = []
    for tag in (1, 2):
        outcome, target = _load_own(seat, directory)
        assert outcome.kind == "", outcome
        tags += [tag for tag in (1, 2, 3) if _holds_own(target, seat.rank, tag)]
        seat.share()
        if tag == 1:
            _save_alone(seat, directory, 3)
            seat.share()
    assert len(names_in(directory)) == 3 * WORLD, names_in(directory)
    return tuple(tags)


@pytest.mark.parametrize(
    ("pattern", "moment", "tag"),
    [(".intent-*", "after", 1), ("1.metadata", "before", 1), ("1.metadata", "after", 2)],
)
def test_a_rank_alone_that_dies_in_its_save_has_its_old_or_its_new_checkpoint(
    directory: Path, pattern: str, moment: str, tag: int
) -> None:
    ended = run_ranks(_die_alone, WORLD, directory, pattern, moment, return_exceptions=True)
    assert [isinstance(end, RankProcessError) for end in ended] == [False, True, False], ended
    assert run_ranks(_look_alone, WORLD, directory) == [(2, 3), (tag, 3), (2, 3)]


def _load_nothing(context: RankContext, directory: Path) -> list[tuple[Outcome, bool]]:
    seat = Seat.of(context)
    found = []
    for arguments in ({}, {"use_collectives": False}):
        target = poison_of(seat.rank, WORLD)
        outcome = outcome_of(seat.load, target, checkpoint_id=directory, **arguments)
        found.append((outcome, is_untouched(target, seat.rank, WORLD)))
    assert names_in(directory) == [] and not directory.exists()
    return found


def test_where_nothing_was_saved_every_kind_of_load_says_so_and_makes_no_directory(directory: Path) -> None:
    for seen in run_ranks(_load_nothing, WORLD, directory):
        for outcome, untouched in seen:
            assert outcome.kind == "NotFoundError" and str(directory) in outcome.message, outcome
            assert untouched
