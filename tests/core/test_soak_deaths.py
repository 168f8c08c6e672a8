"""Job after job in one directory, each of them killed at a random moment: the next one goes on from what is whole."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dcp_core.errors import DcpError
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.storage.base import Storage
from dcp_core.storage.commit import HEARTBEAT_EXPIRY_SECONDS
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.faults import FaultyOperations, OperationRecord
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks
from tests.background_processes import background_processes, children_of, wait_until
from tests.core.async_jobs import RESULT_SECONDS, checkpoint_directory
from tests.core.fault_jobs import Seat, checkpoint_names, names_in
from tests.core.soak_events import chosen_count, chosen_seed
from tests.core.soak_faults import Fate, Fateful, FatefulWriter
from tests.core.soak_numpy import number_in, state_of, target_of

pytestmark = pytest.mark.faults

WORLDS = (1, 2, 3, 4)
SAVES = 4
KEEP = 2
PATIENCE_SECONDS = 2.0  # what the survivors wait for the dead


@dataclass(frozen=True)
class Death:
    """How a job ends.

    Attributes:
        who: "one" trainer, "all" of them, all and their background processes ("node"), or one "child" of a trainer.
        rank: Whose operations decide when.
        save: In which save.
        at: At which operation of that save; where it has fewer, after it.
        in_background: Whether that save is one in the background: trainers die a moment after it has begun.
    """

    who: str
    rank: int
    save: int
    at: int
    in_background: bool

    @classmethod
    def at_random(cls, rng: Random, world: int) -> Death:
        who = rng.choice(("one", "all", "node", "child"))
        in_background = who == "child" or rng.random() < 0.4
        return cls(who, rng.randrange(world), rng.randrange(SAVES), rng.randint(1, 12), in_background)


class MortalManager(Fateful):
    """A manager whose next save, and what comes after its commit, goes through given operations."""

    operations: FileOperations | None = None

    def _open_root(self) -> Storage:
        return LocalStorage(self.root, self.operations)

    def _place(self, name: str) -> dict[str, Any]:
        place = Path(self.root) / name
        if self.fate is not None:
            return {"storage_writer": FatefulWriter(place, asdict(self.fate))}
        if self.operations is None:
            return {"storage_writer": FileSystemWriter(place)}
        return {"storage_writer": FileSystemWriter(storage=LocalStorage(place, self.operations))}


@dataclass
class Job:
    """One rank of a job: goes on from the newest checkpoint, saves a few times, and dies on the way."""

    seat: Seat
    root: Path
    seed: int
    round: int
    death: Death | None

    def __post_init__(self) -> None:
        self.pids = [int(said) for said in self.seat.share(str(os.getpid()).encode())]
        self.manager = MortalManager(
            self.root,
            keep=KEEP,
            durable=False,
            adapter=NumpyRankAdapter(),
            timeout_seconds=PATIENCE_SECONDS if self.death else 60.0,
        )

    def resume(self) -> int:
        """Load the newest checkpoint; it is no older than one that somebody was told is complete.

        A background process of the job before may commit meanwhile: a newer step, or this one once more.
        """
        path = self.manager.latest()
        completed = [int(name.partition(" ")[0]) for name in names_in(self.root.with_name("completed"))]
        if path is None:
            assert not completed, f"no checkpoint is whole, and completed were {completed}"
            return 0
        step = int(path.rpartition("_")[2])
        assert step >= max(completed, default=0), (path, completed)
        numbers = self._numbers_in(path)
        number = int(numbers[0])
        assert f"{step} {number}" in names_in(self.root.with_name("begun")), (path, number)
        target = target_of(self.seed, number, f"{self.round} resume", self.seat)
        resumed = self.manager.resume(target.state, step=step)
        assert resumed == step, (resumed, step)
        if {*numbers, *self._numbers_in(path)} != {numbers[0]}:
            return self.resume()
        target.check()
        self.seat.share()
        return step

    def _numbers_in(self, path: str) -> list[bytes]:
        """Which save each rank finds in a directory."""
        return self.seat.share(str(number_in(path)).encode())

    def save(self, step: int, count: int) -> None:
        """Save a step; the job may end in it."""
        rng = Random(f"{self.seed} {self.round} {count}")
        number = 100 * self.round + count
        is_last = self.death is not None and self.death.save == count
        in_background = self.death.in_background if is_last and self.death else rng.random() < 0.5
        state = state_of(self.seed, number, rng.randrange(3), self.seat)
        if self.seat.rank == 0:
            (self.root.with_name("begun") / f"{step} {number}").touch()
        if in_background:
            self._save_in_the_background(step, state, is_last)
        else:
            self._save_here(step, state, is_last)
        (self.root.with_name("completed") / f"{step} {number}").touch()

    def _save_here(self, step: int, state: dict[Any, Any], is_last: bool) -> None:
        if self.death is not None and is_last and self.death.rank == self.seat.rank:
            self.manager.operations = FaultyOperations(before=self._die_at(self.death.at))
        self.manager.save(step, state)
        if is_last:
            self._die()

    def _save_in_the_background(self, step: int, state: dict[Any, Any], is_last: bool) -> None:
        if is_last and self.death is not None and self.death.who == "child":
            kind = "kill" if self.death.rank == self.seat.rank else ""
            self.manager.fate = Fate(kind, self.death.at, spared=os.getpid())  # type: ignore[arg-type]  # both are kinds
        response = self.manager.async_save(step, state)
        if is_last and self.death is not None and self.death.who != "child":
            time.sleep(0.003 * (self.death.at - 1))
            self._die()
        response.get_result(RESULT_SECONDS)

    def _die_at(self, number: int) -> Callable[[OperationRecord], None]:
        return lambda record: self._die() if record.number == number else None

    def _die(self) -> None:
        """End who is to end, this process last."""
        death = self.death
        if death is None or death.who == "child":
            return
        if death.rank != self.seat.rank:
            time.sleep(0 if death.who == "one" else 30)  # killed meanwhile
            return
        pids = self.pids if death.who != "one" else [os.getpid()]
        if death.who == "node":
            pids = [child for pid in self.pids for child in children_of(pid)] + pids
        for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
            os.kill(pid, signal.SIGKILL)
        time.sleep(60)


def _train(context: RankContext, root: Path, seed: int, number: int, death: Death | None) -> str:
    """Go on, save, and say how it ended."""
    job = Job(Seat.of(context), root, seed, number, death)
    step = job.resume()
    try:
        for count in range(SAVES):
            job.save(step + 1 + count, count)
    except DcpError as error:
        if death is None:
            raise
        return type(error).__name__
    return "done"


@pytest.fixture
def root() -> Iterator[Path]:
    with checkpoint_directory() as path:
        for name in ("begun", "completed"):
            path.with_name(name).mkdir()
        yield path


def _kill_jobs(root: Path, seed: int, rounds: int) -> dict[str, int]:
    """Kill one job after the other; how many ended how."""
    sys.stdout.write(f"DCP_SOAK_SEED={seed} DCP_SOAK_EVENTS={rounds} does the same again\n")
    counts: dict[str, int] = {}
    for number in range(1, rounds + 1):
        rng = Random(f"{seed} {number}")
        world = rng.choice(WORLDS)
        death = Death.at_random(rng, world)
        ended = run_ranks(_train, world, root, seed, number, death, return_exceptions=True)
        killed = [rank for rank, end in enumerate(ended) if isinstance(end, RankProcessError)]
        for end in ended:
            assert isinstance(end, str) or "was killed by SIGKILL" in str(end), (seed, number, death, ended)
        expected = {"one": [death.rank], "all": list(range(world)), "node": list(range(world)), "child": []}
        assert set(killed) <= set(expected[death.who]), (seed, number, death, ended)
        name = f"{death.who}, in a save {'in the background' if death.in_background else 'that waits'}"
        counts[name] = counts.get(name, 0) + bool(killed or "RankFailedError" in ended)
    return counts


def _check_the_end(root: Path, seed: int, rounds: int) -> None:
    """A job that nobody kills goes on, and tidies up."""
    wait_until(lambda: not background_processes(), "the end of the background processes", 90)
    past = time.time() - HEARTBEAT_EXPIRY_SECONDS - 1
    for path in [*root.glob("*/.intent-*.tmp"), *root.glob("*/.mailbox-*")]:  # only time tells that these are dead
        os.utime(path, (past, past))
    assert run_ranks(_train, 2, root, seed, rounds + 1, None) == ["done"] * 2
    wait_until(lambda: not background_processes(), "the end of the background processes", 90)
    steps = [name for name in names_in(root) if name != "latest"]
    assert len(steps) == KEEP, {name: names_in(root / name) for name in steps}
    for name in names_in(root):
        assert names_in(root / name) == checkpoint_names(root / name), name


@pytest.mark.timeout(170)
def test_jobs_that_are_killed_one_after_the_other_go_on_from_what_is_whole(root: Path) -> None:
    seed = chosen_seed(1)
    counts = _kill_jobs(root, seed, 5)
    _check_the_end(root, seed, 5)
    assert sum(counts.values()) >= 3, counts


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_jobs_that_are_killed_go_on_from_what_is_whole(
    root: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if "soak" not in request.config.option.markexpr:
        pytest.skip("takes minutes; `nox -s soak` runs it")
    seed, rounds = chosen_seed(Random().randrange(10**6)), chosen_count(100)
    with capsys.disabled():
        counts = _kill_jobs(root, seed, rounds)
        sys.stdout.write("".join(f"{number:4} {name}\n" for name, number in sorted(counts.items())))
    _check_the_end(root, seed, rounds)
    assert sum(counts.values()) > rounds // 2, counts
