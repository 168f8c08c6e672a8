"""Real ranks, really killed in the middle of a save: the old checkpoint or the new one loads, whole."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from dcp_core.api import clear_plan_cache
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.storage.commit import HEARTBEAT_EXPIRY_SECONDS
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.faults import FaultyOperations
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks
from tests.core.fault_jobs import (
    Outcome,
    Seat,
    checkpoint_names,
    loaded_tag,
    memory_directory,
    names_in,
    outcome_of,
    state_of,
)

pytestmark = pytest.mark.faults

WORLD = 2
LARGER_WORLD = 4
OLD, NEW, RETRY = 1, 2, 3

JOBS_AT_ONCE = 20
PATIENCE_SECONDS = 3.0  # what the survivors wait for the dead


@dataclass(frozen=True)
class Death:
    """A rank dies at the first operation of this kind on a file of this name."""

    rank: int
    operation: str
    pattern: str
    moment: Literal["before", "after"]
    committed: bool = False
    first_save: bool = True
    max_io_bytes: int | None = None

    @property
    def place(self) -> str:
        torn = "" if self.max_io_bytes is None else " torn"
        return f"rank {self.rank} {self.moment} {self.operation} {self.pattern}{torn}".replace("*", "+")

    def operations(self) -> FaultyOperations:
        return FaultyOperations(
            kill_at=1 if self.max_io_bytes is None else 2,
            kill_moment=self.moment,
            operations=[self.operation],
            name_pattern=self.pattern,
            max_io_bytes=self.max_io_bytes,
        )


def _around(rank: int, operation: str, pattern: str, **more: Any) -> list[Death]:
    return [Death(rank, operation, pattern, "before", **more), Death(rank, operation, pattern, "after", **more)]


def _around_files(rank: int) -> list[Death]:
    deaths = []
    for pattern in (f"_rank{rank}_*.safetensors", f"_rank{rank}_*.bytes"):
        deaths += _around(rank, "create", pattern)
        deaths += [Death(rank, "pwritev", pattern, "after", max_io_bytes=20)]
        deaths += _around(rank, "close_written", pattern)
    return deaths


COORDINATOR_DEATHS = [
    *_around(0, "rename", ".intent-*"),
    *_around_files(0),
    *_around(0, "create", ".metadata.*.tmp"),
    Death(0, "close_written", ".metadata.*.tmp", "after"),
    Death(0, "rename", ".metadata", "before"),
    Death(0, "rename", ".metadata", "after", committed=True),
    *_around(0, "unlink", "_rank*", committed=True, first_save=False),
    *_around(0, "unlink", ".intent-*", committed=True),
]
OTHER_DEATHS = [*_around_files(1), *_around(1, "fsync_directory", "*")]


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def _save(context: RankContext, directory: Path, tag: int) -> None:
    seat = Seat.of(context)
    seat.save(state_of(seat.rank, seat.world, tag), checkpoint_id=directory)


def _save_and_die(context: RankContext, root: Path, deaths: Sequence[Death]) -> Outcome:
    """Each pair of ranks saves into a directory of its own; one of each pair is killed."""
    seat = Seat.of(context, WORLD)
    death = deaths[seat.job]
    operations = death.operations() if death.rank == seat.rank else None
    writer = FileSystemWriter(storage=LocalStorage(root / death.place, operations))
    seat.share()
    state = state_of(seat.rank, seat.world, NEW)
    return outcome_of(seat.save, state, storage_writer=writer, timeout_seconds=PATIENCE_SECONDS)


@dataclass(frozen=True)
class Afterwards:
    """What a fresh job found: which save it loaded (or why not), and which after it had saved itself."""

    tag: int | None
    refusal: Outcome
    retried_tag: int


def _look_and_save_again(context: RankContext, root: Path, places: Sequence[str]) -> list[Afterwards]:
    seat = Seat.of(context)
    found = []
    for place in places:
        clear_plan_cache()
        tags: list[int] = []
        refusal = outcome_of(lambda into, where: into.append(loaded_tag(seat, where)), tags, root / place)
        seat.share()
        seat.save(state_of(seat.rank, seat.world, RETRY), checkpoint_id=root / place)
        found.append(Afterwards(tags[0] if tags else None, refusal, loaded_tag(seat, root / place)))
    return found


def _kill_and_look(root: Path, deaths: Sequence[Death]) -> dict[Death, list[Afterwards]]:
    """Kill one save at each death, then let a fresh job look at all directories; what each rank found, by death."""
    for start in range(0, len(deaths), JOBS_AT_ONCE):
        batch = deaths[start : start + JOBS_AT_ONCE]
        ended = run_ranks(_save_and_die, WORLD * len(batch), root, batch, return_exceptions=True)
        for number, death in enumerate(batch):
            _check_end(death, ended[WORLD * number : WORLD * (number + 1)])
    _expire_unfinished_records(root)
    found = run_ranks(_look_and_save_again, WORLD, root, [death.place for death in deaths])
    return {death: [ranks[number] for ranks in found] for number, death in enumerate(deaths)}


def _expire_unfinished_records(root: Path) -> None:
    """A record that its process did not finish says nothing about it: only time tells that it is dead."""
    past = time.time() - HEARTBEAT_EXPIRY_SECONDS - 1
    for path in root.glob("*/.intent-*.tmp"):
        os.utime(path, (past, past))


def _check_end(death: Death, ended: Sequence[Outcome | RankProcessError]) -> None:
    """The one is dead, and the other was told what it may believe."""
    dead, survivor = ended[death.rank], ended[1 - death.rank]
    assert isinstance(dead, RankProcessError), (death, dead)
    assert "was killed by SIGKILL" in str(dead), (death, dead)
    assert isinstance(survivor, Outcome), (death, survivor)
    if (death.rank == 0 and death.pattern != ".intent-*") or death.committed:
        assert survivor.kind == "InDoubtError", (death, survivor)
        assert re.search("may be committed, id [0-9a-f]{32}:", survivor.message), (death, survivor)
    else:
        assert survivor.kind == "CoordinationTimeoutError", (death, survivor)
        assert f"rank {death.rank}" in survivor.message


@pytest.mark.parametrize("deaths", [COORDINATOR_DEATHS, OTHER_DEATHS], ids=["coordinator", "other rank"])
def test_killed_while_saving_over_the_checkpoint_of_a_larger_world_one_of_the_two_loads_whole(
    root: Path, deaths: Sequence[Death]
) -> None:
    template = root / "template"
    run_ranks(_save, LARGER_WORLD, template, OLD)
    for death in deaths:
        shutil.copytree(template, root / death.place)
    for death, ranks in _kill_and_look(root, deaths).items():
        assert {found.tag for found in ranks} == {NEW if death.committed else OLD}, (death, ranks)
        assert {found.retried_tag for found in ranks} == {RETRY}, (death, ranks)
        assert names_in(root / death.place) == checkpoint_names(root / death.place), death


@pytest.mark.parametrize("deaths", [COORDINATOR_DEATHS, OTHER_DEATHS], ids=["coordinator", "other rank"])
def test_killed_in_a_first_save_there_is_no_checkpoint_and_a_retry_makes_one(
    root: Path, deaths: Sequence[Death]
) -> None:
    first = [death for death in deaths if death.first_save]
    for death, ranks in _kill_and_look(root, first).items():
        assert {found.tag for found in ranks} == {NEW if death.committed else None}, (death, ranks)
        if not death.committed:
            assert {found.refusal.kind for found in ranks} == {"NotFoundError"}, (death, ranks)
            assert len({found.refusal.message for found in ranks}) == 1
            assert "no checkpoint has been completed there" in ranks[0].refusal.message
        assert {found.retried_tag for found in ranks} == {RETRY}, (death, ranks)
        assert names_in(root / death.place) == checkpoint_names(root / death.place), death


# --- alive, but slow ---------------------------------------------------------------------------------

_STALL_SECONDS = 4.0


def _save_while_the_coordinator_stalls(context: RankContext, root: Path) -> tuple[Outcome, int, list[str]]:
    """The coordinator pauses right before its commit; the other rank gives up (job 0) or is interrupted (job 1)."""
    seat = Seat.of(context, WORLD)
    directory = root / str(seat.job)
    seat.save(state_of(seat.rank, seat.world, OLD), checkpoint_id=directory)
    seat.share()
    operations = FaultyOperations(
        operations=["rename"], name_pattern=".metadata", before=lambda record: time.sleep(_STALL_SECONDS)
    )
    writer = FileSystemWriter(storage=LocalStorage(directory, operations if seat.rank == 0 else None))
    if (seat.job, seat.rank) == (1, 1):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, _STALL_SECONDS / 2)
    patience = {"timeout_seconds": _STALL_SECONDS / 2} if seat.job == 0 else {}
    outcome = outcome_of(seat.save, state_of(seat.rank, seat.world, NEW), storage_writer=writer, **patience)
    seat.share()
    return outcome, loaded_tag(seat, directory), names_in(directory)


def test_what_a_slow_coordinator_commits_is_whole_although_the_others_have_given_up(root: Path) -> None:
    found = run_ranks(_save_while_the_coordinator_stalls, 2 * WORLD, root)
    outcomes = [outcome for outcome, _, _ in found]
    assert [outcome.kind for outcome in outcomes] == ["", "InDoubtError", "", "KeyboardInterrupt"], outcomes
    committed = FileSystemReader(root / "0").load_metadata().save_id
    assert f"may be committed, id {committed}:" in outcomes[1].message
    assert {tag for _, tag, _ in found} == {NEW}
    for job, names in enumerate(names for _, _, names in found[::WORLD]):
        assert names == checkpoint_names(root / str(job))
