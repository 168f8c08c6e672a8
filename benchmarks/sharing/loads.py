"""Loads against the clock: contestants in turn, in a new random order every round, in one job of ranks.

Every rank holds the whole state. Before each load all of it is overwritten; after it every bit is compared. The first
load of each contestant is kept apart: it pays for imports, new groups and connections.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Settings
from benchmarks.contestant import ContestantError
from benchmarks.machine import CpuTimes, MachineLoad, cpu_times
from benchmarks.ranks import Rank, run_job
from benchmarks.sharing.cases import SharedCase
from benchmarks.sharing.contestants import SHARED_CONTESTANTS, MeteredContestant, make
from benchmarks.sharing.metered import ReadMeter
from benchmarks.timing import orders
from benchmarks.trials import FIRST, Run, Timed, attempt, merge, run_timed, settle

if TYPE_CHECKING:
    from benchmarks.states import State


@dataclass(frozen=True, slots=True)
class RankLoads:
    """All loads as one rank saw them.

    Attributes:
        runs: When each began and ended.
        read_nbytes: What this rank read in each from storage.
        checkpoint_nbytes: Bytes of the files of each checkpoint, by who saved it.
        cpu_seconds: Of this process, while all this went on.
        machine: The machine's counters over the same time.
        seconds: The same time by the clock.
    """

    runs: tuple[Run, ...]
    read_nbytes: tuple[int, ...]
    checkpoint_nbytes: Mapping[str, int]
    cpu_seconds: float
    machine: CpuTimes
    seconds: float


@dataclass(frozen=True, slots=True)
class SharedLoads:
    """All loads of one contestant.

    Attributes:
        timed: Times, by round.
        read_nbytes: What each rank read from storage, by round, then by rank.
        checkpoint_nbytes: Bytes of the checkpoint's files.
    """

    timed: Timed
    read_nbytes: tuple[tuple[int, ...], ...]
    checkpoint_nbytes: int

    @property
    def contestant(self) -> str:
        return self.timed.contestant

    @property
    def times_read(self) -> float:
        """Bytes that all ranks together read, by the checkpoint's: the median."""
        return statistics.median(sum(by_rank) for by_rank in self.read_nbytes) / self.checkpoint_nbytes

    @property
    def imbalance(self) -> float | None:
        """Bytes of the rank that read most, by those of the one that read least: the median; None: one read nothing."""
        if not all(map(min, self.read_nbytes)):
            return None
        return statistics.median(max(by_rank) / min(by_rank) for by_rank in self.read_nbytes)

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "median_seconds": self.timed.median_seconds,
            "times_read": self.times_read,
            "imbalance": self.imbalance,
        }


def measure_shared_loads(
    case: SharedCase, settings: Settings, names: Sequence[str], directory: str
) -> tuple[tuple[SharedLoads, ...], MachineLoad]:
    """Save once for each kind of checkpoint, then load again and again; the machine's load beside it."""
    before = os.getloadavg()[0]
    by_rank: list[RankLoads] = run_job(
        load_rounds, case.world_size, case, settings, tuple(names), directory,
        directory=directory, timeout_seconds=settings.timeout_seconds,
    )  # fmt: skip
    return together(names, by_rank), _load_of(by_rank, before, os.getloadavg()[0])


def together(names: Sequence[str], by_rank: Sequence[RankLoads]) -> tuple[SharedLoads, ...]:
    """Put the ranks' views together; every rank ran the same in the same order."""
    read: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
    for number, run in enumerate(by_rank[0].runs):
        if run.round != FIRST:
            read[run.contestant].append(tuple(rank.read_nbytes[number] for rank in by_rank))
    sizes = by_rank[0].checkpoint_nbytes
    return tuple(
        SharedLoads(timed, tuple(read[timed.contestant]), sizes[SHARED_CONTESTANTS[timed.contestant].saved_by])
        for timed in merge(names, [rank.runs for rank in by_rank])
    )


def _load_of(by_rank: Sequence[RankLoads], before: float, after: float) -> MachineLoad:
    first = by_rank[0]
    others = first.machine.busy - sum(rank.cpu_seconds for rank in by_rank)
    return MachineLoad(before, after, max(others, 0.0) / first.seconds, first.machine.stolen / first.seconds)


# -- in the ranks -----------------------------------------------------------------------------------------------------


def load_rounds(rank: Rank, case: SharedCase, settings: Settings, names: Sequence[str], directory: str) -> RankLoads:
    """Save, then all rounds of loads."""
    import torch.distributed as dist

    from benchmarks.states import make_state

    state = make_state(case.tensors, Rank(0, 1))  # every rank holds all of it
    digests = state.digests()
    meter = ReadMeter(case.bytes_per_second)
    contestants = make(names, settings, rank, meter)
    sizes = _save(contestants, state, rank, directory)
    dist.barrier()
    began, machine, cpu = time.monotonic(), cpu_times(), time.process_time()
    runs, read = [], []
    for number, order in orders(names, settings):
        for name in order:
            contestant = contestants[name]
            state.zero()
            before = meter.nbytes
            runs.append(run_timed(name, number, contestant.load, state, os.path.join(directory, contestant.saved_by)))
            read.append(meter.nbytes - before)
            _check(name, state, digests)
    dist.barrier()
    seconds, cpu, machine = time.monotonic() - began, time.process_time() - cpu, cpu_times() - machine
    return RankLoads(tuple(runs), tuple(read), sizes, cpu, machine, seconds)


def _save(contestants: Mapping[str, MeteredContestant], state: State, rank: Rank, directory: str) -> dict[str, int]:
    """Save each kind of checkpoint once; give the bytes of its files."""
    savers = {contestant.saved_by: contestant for contestant in contestants.values()}
    for kind, contestant in savers.items():
        attempt(contestant.name, contestant.save, state, os.path.join(directory, kind))
    settle(rank, directory)
    return {kind: _nbytes_of(os.path.join(directory, kind)) for kind in savers}


def _nbytes_of(directory: str) -> int:
    with os.scandir(directory) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file())


def _check(contestant: str, state: State, digests: Mapping[str, bytes]) -> None:
    """Compare every bit of the targets with what was saved."""
    for name, digest in state.digests().items():
        if digest != digests[name]:
            raise ContestantError(contestant, f"loaded other bits than were saved: {name}")
