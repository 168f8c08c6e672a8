"""Something goes wrong on one rank: all ranks raise the same error at once, nothing is lost, and the next call works.

The deadline is a minute everywhere but in the tests about deadlines, and every error must be there in a few seconds:
so nobody waited for a rank that does not come. Each job runs through many failures in turn, which also shows that the
ranks stay in step.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from dcp_core import plugins
from dcp_core.adapter import AdapterSet
from dcp_core.errors import AdapterError
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations, OperationRecord
from dcp_core.testing.ranks import RankContext, run_ranks
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
)
from tests.core.load_faults import LOAD_FAULTS
from tests.core.one_rank_faults import RANKS, WORLD, Arguments, FailingState, Fault
from tests.core.save_faults import SAVE_FAULTS

pytestmark = pytest.mark.faults

FAILED_TAG = 1000  # what the failing saves would have saved


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "checkpoint"


@dataclass(frozen=True)
class Aftermath:
    """What one rank saw of a fault, once every rank was done with it.

    Attributes:
        outcome: Of the failing call.
        added: Names that had come into the directory.
        removed: Names that had gone.
        tag: Which save a load gave then; None where it found none.
        untouched: Of a load: whether its target still held poison only.
    """

    outcome: Outcome
    added: tuple[str, ...]
    removed: tuple[str, ...]
    tag: int | None
    untouched: bool = True


def _aftermath(
    outcome: Outcome, before: set[str], after: set[str], tag: int | None, untouched: bool = True
) -> Aftermath:
    return Aftermath(outcome, tuple(sorted(after - before)), tuple(sorted(before - after)), tag, untouched)


def _check_one_error(name: str, ranks: Sequence[Aftermath], kind: str, text: str) -> None:
    """All ranks raised the same error, and soon."""
    outcomes = [seen.outcome for seen in ranks]
    assert {(outcome.kind, outcome.message) for outcome in outcomes} == {(kind, outcomes[0].message)}, (name, outcomes)
    assert text in outcomes[0].message, (name, outcomes[0])
    assert max(outcome.seconds for outcome in outcomes) < SOON_SECONDS, (name, outcomes)


def _check_fault(fault: Fault, ranks: Sequence[Aftermath]) -> None:
    told = list(ranks)
    if fault.interrupt:  # the rank itself is interrupted; the others are told
        assert told.pop(fault.rank).outcome.kind == fault.interrupt, (fault.name, ranks)
    _check_one_error(fault.name, told, fault.kind, fault.text)


# --- in code, arguments and states -------------------------------------------------------------------


def _call_save(seat: Seat, directory: Path, tag: int, arguments: Arguments) -> None:
    given: Arguments = {"checkpoint_id": directory, "state_dict": state_of(seat.rank, WORLD, tag)}
    arguments = given | arguments
    state = arguments.pop("state_dict")
    if "more" in arguments:
        state = state | arguments.pop("more")
    seat.save(state, **arguments)


def _run_saves(context: RankContext, directory: Path, group: str) -> list[Aftermath]:
    """Save; then for each fault: fail over it, look, and save again."""
    seat = Seat.of(context)
    seat.save(state_of(seat.rank, WORLD, 1), checkpoint_id=directory)
    found = []
    for tag, fault in enumerate(SAVE_FAULTS[group], 1):
        if fault.warm:
            _call_save(seat, directory, tag, fault.arguments(False))
        seat.share()
        before = set(names_in(directory))
        seat.share()
        arguments = fault.arguments(seat.rank == fault.rank)
        outcome = outcome_of(_call_save, seat, directory, FAILED_TAG + tag, arguments)
        seat.share()
        after = set(names_in(directory))
        found.append(_aftermath(outcome, before, after, loaded_tag(seat, directory)))
        seat.save(state_of(seat.rank, WORLD, tag + 1), checkpoint_id=directory)
    assert loaded_tag(seat, directory) == len(SAVE_FAULTS[group]) + 1
    assert names_in(directory) == checkpoint_names(directory)
    return found


@pytest.mark.parametrize("group", SAVE_FAULTS)
def test_a_failing_save_is_one_error_on_all_ranks_and_leaves_the_old_checkpoint_alone(
    directory: Path, group: str
) -> None:
    found = run_ranks(_run_saves, WORLD, directory, group, timeout_seconds=150)
    for number, fault in enumerate(SAVE_FAULTS[group]):
        ranks = [seen[number] for seen in found]
        _check_fault(fault, ranks)
        for seen in ranks:
            assert (seen.added, seen.removed, seen.tag) == ((), (), number + 1), (fault.name, seen)


def _run_loads(context: RankContext, directory: Path, group: str) -> list[Aftermath]:
    """Save once; then for each fault: fail to load, look at the target, and load well."""
    seat = Seat.of(context)
    state = state_of(seat.rank, WORLD, 1)
    seat.save(state | {"stateful": FailingState(1)}, checkpoint_id=directory)
    before = set(names_in(directory))
    found = []
    for fault in LOAD_FAULTS[group]:
        target = poison_of(seat.rank, WORLD)
        arguments: Arguments = {"checkpoint_id": directory, "state_dict": target}
        arguments |= fault.arguments(seat.rank == fault.rank)
        given = arguments.pop("state_dict")
        if "more" in arguments:
            given = given | arguments.pop("more")
        outcome = outcome_of(seat.load, given, **arguments)
        untouched = _holds_poison(given, seat.rank)
        found.append(_aftermath(outcome, before, set(names_in(directory)), loaded_tag(seat, directory), untouched))
    return found


def _holds_poison(given: Any, rank: int) -> bool:
    """Whether those parts of a target that `poison_of` makes are as it made them."""
    target = poison_of(rank, WORLD)
    if not isinstance(given, Mapping) or not target.keys() <= given.keys():
        return True
    return is_untouched({key: given[key] for key in target}, rank, WORLD)


def _check_failed_loads(directory: Path, group: str, *, untouched: bool) -> None:
    found = run_ranks(_run_loads, WORLD, directory, group, timeout_seconds=150)
    for number, fault in enumerate(LOAD_FAULTS[group]):
        ranks = [seen[number] for seen in found]
        _check_fault(fault, ranks)
        for rank, seen in enumerate(ranks):
            assert (seen.added, seen.removed, seen.tag) == ((), (), 1), (fault.name, seen)
            assert seen.untouched or not untouched, (fault.name, "a target was touched")
            if not untouched and not (fault.interrupt and rank == fault.rank):
                told = (
                    "the targets are undefined now on all ranks", "load_state_dict() of 'stateful'",
                    "what load_state_dict had to set is undefined now",
                )  # fmt: skip
                assert any(text in seen.outcome.message for text in told), (fault.name, seen)


@pytest.mark.parametrize("group", ["before reading", "bad arguments", "different arguments", "misfits"])
def test_an_error_found_before_reading_is_one_error_on_all_ranks_and_touches_no_target(
    directory: Path, group: str
) -> None:
    _check_failed_loads(directory, group, untouched=True)


def test_an_error_while_reading_is_one_error_on_all_ranks(directory: Path) -> None:
    _check_failed_loads(directory, "while reading", untouched=False)


def _call_differently(context: RankContext, directory: Path) -> list[Outcome]:
    seat = Seat.of(context)
    outcomes = []
    for saving in ([0], [1], [2], [0, 2]):
        call = seat.save if seat.rank in saving else seat.load
        outcomes.append(outcome_of(call, state_of(seat.rank, WORLD, 1), checkpoint_id=directory))
        seat.share()
    seat.save(state_of(seat.rank, WORLD, 2), checkpoint_id=directory)
    assert loaded_tag(seat, directory) == 2
    return outcomes


def test_ranks_that_save_while_others_load_are_told_so(directory: Path) -> None:
    for outcomes in zip(*run_ranks(_call_differently, WORLD, directory), strict=True):
        assert {outcome.kind for outcome in outcomes} == {"ArgumentsDifferError"}, outcomes
        assert len({outcome.message for outcome in outcomes}) == 1
        assert "save/agree" in outcomes[0].message and "load/metadata" in outcomes[0].message
        assert max(outcome.seconds for outcome in outcomes) < SOON_SECONDS


def _have_broken_plugins(context: RankContext, directory: Path) -> list[Outcome]:
    seat = Seat.of(context)
    api: Any = importlib.import_module("dcp_core.api")
    find = plugins.active_adapters
    outcomes = []
    for rank in RANKS:
        for call in (seat.save, seat.load):
            if seat.rank == rank:
                api.active_adapters = _find_broken_plugins
            outcomes.append(outcome_of(call, state_of(seat.rank, WORLD, 1), checkpoint_id=directory))
            api.active_adapters = find
    assert names_in(directory) == []
    return outcomes


def _find_broken_plugins() -> AdapterSet:
    raise AdapterError("two plugins claim one name")


def test_plugins_that_are_broken_on_one_rank_are_an_error_on_all(directory: Path) -> None:
    for number, outcomes in enumerate(zip(*run_ranks(_have_broken_plugins, WORLD, directory), strict=True)):
        told = ("AdapterError", f"rank {number // 2}: two plugins claim one name")
        assert {(outcome.kind, outcome.message) for outcome in outcomes} == {told}, outcomes


# --- on the disk -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one rank saw of the save whose operation N failed."""

    record: OperationRecord | None
    seen: Aftermath
    old_tag: int | None


def _tag_or_none(seat: Seat, directory: Path) -> int | None:
    """Which save is there; None where all ranks find none."""
    tags: list[int] = []
    outcome = outcome_of(lambda: tags.append(loaded_tag(seat, directory)))
    assert tags or outcome.kind == "NotFoundError", outcome
    return tags[0] if tags else None


def _sweep(
    context: RankContext, directory: Path, rank: int, error_number: int, forever: bool, first_save: bool
) -> list[Step]:
    """Save again and again; fail operation 1, 2, ... of one rank, until a save has no more.

    After each, a save with a sound disk leaves nothing but itself; only a record that was never finished, and that the
    disk would not let go either, must wait for its time.
    """
    seat = Seat.of(context)
    steps: list[Step] = []
    for number in itertools.count(1):
        seat.share()
        if first_save and seat.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        elif not first_save:
            seat.save(state_of(seat.rank, WORLD, number), checkpoint_id=directory)
        seat.share()
        before = set(names_in(directory))
        seat.share()
        operations = FaultyOperations(fail_at=number, error_number=error_number, forever=forever)
        storage = LocalStorage(directory, operations if seat.rank == rank else None)
        state = state_of(seat.rank, WORLD, FAILED_TAG + number)
        outcome = outcome_of(seat.save, state, storage_writer=FileSystemWriter(storage=storage))
        failed = len(operations.log) >= number
        if not any(answer == b"failed" for answer in seat.share(b"failed" if failed else b"")):
            assert outcome.kind == ""
            return steps
        after = set(names_in(directory))
        record = operations.log[number - 1] if failed else None
        seen = _aftermath(outcome, before, after, _tag_or_none(seat, directory))
        steps.append(Step(record, seen, None if first_save else number))
        seat.save(state_of(seat.rank, WORLD, number), checkpoint_id=directory)
        seat.share()
        unfinished = {name for name in names_in(directory) if fnmatch(name, ".intent-*.tmp")}
        assert forever or not unfinished
        assert set(names_in(directory)) - unfinished == set(checkpoint_names(directory)), record
    raise AssertionError("unreachable")


_MAY_FAIL = {"unlink", "touch", "fsync_directory", "rmdir"}
"""Operations of which some come after the commit, or only clean up."""


def _check_sweep(found: Sequence[Sequence[Step]], rank: int, error_number: int, *, forever: bool) -> set[str]:
    """Check every step; return the operations that made a save fail."""
    fatal = set()
    code = f"[{errno.errorcode[error_number]}]"
    for number, steps in enumerate(zip(*found, strict=True), 1):
        record = steps[rank].record
        assert record is not None
        ranks, old_tag = [step.seen for step in steps], steps[0].old_tag
        if ranks[0].outcome.kind == "":
            assert {seen.tag for seen in ranks} == {FAILED_TAG + number}, (record, ranks)
            assert {seen.outcome.kind for seen in ranks} == {""}, (record, ranks)
            assert record.operation in _MAY_FAIL, (record, ranks)
            continue
        fatal.add(record.operation)
        _check_one_error(str(record), ranks, "StorageError", code)
        assert {seen.outcome.blamed for seen in ranks} == {(rank,)}, (record, ranks[0])
        for seen in ranks:
            assert seen.tag == old_tag, (record, seen)
            assert seen.removed == () and (forever or seen.added == ()), (record, seen)
    return fatal


@pytest.mark.parametrize(
    ("rank", "error_number", "forever", "first_save"),
    [
        (2, errno.EACCES, False, False),
        (0, errno.EACCES, True, False),
        (2, errno.EROFS, True, False),
        (0, errno.ENOSPC, False, True),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) and value > WORLD else str(value),
)
def test_whatever_the_disk_refuses_on_one_rank_all_ranks_say_so_and_the_old_checkpoint_stays(
    directory: Path, rank: int, error_number: int, forever: bool, first_save: bool
) -> None:
    """A disk that fails once, in every way, has a test of its own in `test_error_points_ranks`."""
    found = run_ranks(_sweep, WORLD, directory, rank, error_number, forever, first_save, timeout_seconds=150)
    fatal = _check_sweep(found, rank, error_number, forever=forever)
    expected = {"create", "preallocate", "pwritev", "fsync", "close_written", "fsync_directory"}
    if rank == 0:
        expected |= {"rename", "mkdir"} if first_save else {"rename"}
    assert expected <= fatal


@dataclass(frozen=True)
class Removal:
    """The whole directory goes before the first operation of this kind on one rank."""

    rank: int
    operation: str
    pattern: str


_REMOVALS = [
    *(Removal(rank, "create", f"_rank{rank}_*.safetensors") for rank in RANKS),
    *(Removal(rank, "close_written", f"_rank{rank}_*.bytes") for rank in RANKS),
    Removal(0, "create", ".metadata.*.tmp"),
    Removal(0, "fsync", ".metadata.*.tmp"),
    Removal(0, "rename", ".metadata"),
    Removal(1, "fsync_directory", "*"),
]


def _save_while_it_goes(context: RankContext, directory: Path) -> list[Aftermath]:
    seat = Seat.of(context)
    found = []
    for removal in _REMOVALS:
        seat.save(state_of(seat.rank, WORLD, 1), checkpoint_id=directory)
        seat.share()
        operations = FaultyOperations(
            operations=[removal.operation],
            name_pattern=removal.pattern,
            before=lambda record: shutil.rmtree(directory) if record.number == 1 else None,
        )
        storage = LocalStorage(directory, operations if seat.rank == removal.rank else None)
        state = state_of(seat.rank, WORLD, 2)
        outcome = outcome_of(seat.save, state, storage_writer=FileSystemWriter(storage=storage))
        seat.share()
        names = set(names_in(directory))
        found.append(_aftermath(outcome, set(), names, _tag_or_none(seat, directory)))
        seat.save(state_of(seat.rank, WORLD, 3), checkpoint_id=directory)
        assert loaded_tag(seat, directory) == 3
        assert names_in(directory) == checkpoint_names(directory)
    return found


def test_a_directory_that_is_removed_during_a_save_is_one_error_on_all_ranks(directory: Path) -> None:
    found = run_ranks(_save_while_it_goes, WORLD, directory, timeout_seconds=100)
    for removal, ranks in zip(_REMOVALS, zip(*found, strict=True), strict=True):
        kind = ranks[0].outcome.kind
        assert kind in ("StorageError", "IncompleteError", "NotFoundError"), (removal, ranks)
        _check_one_error(str(removal), ranks, kind, "removed" if kind == "IncompleteError" else str(directory))
        for seen in ranks:
            assert (seen.added, seen.tag) == ((), None), (removal, seen)


# --- ranks that do not come --------------------------------------------------------------------------

_PATIENCE_SECONDS = 4.0
_ABSENTEES = [(0, "save"), (2, "save"), (0, "load"), (1, "load")]


def _come_late(context: RankContext, root: Path) -> tuple[Outcome, bool]:
    """One rank of each job comes only when the others have given up; then all call together."""
    seat = Seat.of(context, WORLD)
    absentee, verb = _ABSENTEES[seat.job]
    directory = root / str(seat.job)
    if verb == "load":
        seat.save(state_of(seat.rank, WORLD, 1), checkpoint_id=directory)
    target = poison_of(seat.rank, WORLD)
    state, call = (target, seat.load) if verb == "load" else (state_of(seat.rank, WORLD, 1), seat.save)
    seat.share()
    if seat.rank == absentee:
        seat.share()
    outcome = outcome_of(call, state, checkpoint_id=directory, timeout_seconds=_PATIENCE_SECONDS)
    if seat.rank != absentee:
        seat.share()
    untouched = verb == "save" or is_untouched(target, seat.rank, WORLD)
    seat.share()
    assert verb == "load" or names_in(directory) == []
    seat.save(state_of(seat.rank, WORLD, 2), checkpoint_id=directory)
    assert loaded_tag(seat, directory) == 2
    return outcome, untouched


def test_a_rank_that_never_calls_is_named_and_one_that_comes_late_is_in_step_again(directory: Path) -> None:
    found = run_ranks(_come_late, WORLD * len(_ABSENTEES), directory)
    for job, (absentee, verb) in enumerate(_ABSENTEES):
        ranks = found[job * WORLD : (job + 1) * WORLD]
        waited = max(outcome.seconds for rank, (outcome, _) in enumerate(ranks) if rank != absentee)
        assert waited >= _PATIENCE_SECONDS, (absentee, verb, ranks)  # not a moment less
        for rank, (outcome, untouched) in enumerate(ranks):
            assert outcome.kind == "CoordinationTimeoutError", (absentee, verb, rank, outcome)
            assert f"rank {absentee}" in outcome.message or rank == absentee, (absentee, verb, rank, outcome)
            assert untouched, (absentee, verb, rank)
