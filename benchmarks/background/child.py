"""The background process: how long it takes to be ready, what memory it needs, and that it loads no framework."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.background.calls import blamed_on, state_of
from benchmarks.background.cases import AsyncCase, AsyncSettings
from benchmarks.background.contestants import make
from benchmarks.background.processes import FRAMEWORKS, mapped_frameworks, private_nbytes
from benchmarks.budgets import Verdict
from benchmarks.ranks import Rank, run_job
from benchmarks.trials import remove
from benchmarks.workloads import MIB
from dcp_core.background.persister import Persister
from dcp_core.background.process import BackgroundProcess
from dcp_core.background.service import service

READY_SECONDS = 0.7
PRIVATE_NBYTES = 60 * MIB

_SAVES = 2
_END_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ChildUse:
    """What was found.

    Attributes:
        ready_seconds: From its start until it answered, each time.
        ready_nbytes: Private memory then; the median.
        saved_nbytes: Private memory of one that has saved.
        frameworks: What it has loaded and should not have.
    """

    ready_seconds: tuple[float, ...]
    ready_nbytes: int
    saved_nbytes: int
    frameworks: tuple[str, ...]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.ready_seconds)

    def lines(self) -> Iterator[str]:
        times = ", ".join(f"{seconds:.3f}" for seconds in sorted(self.ready_seconds))
        yield f"  ready after {self.median_seconds:.3f} s (median of {times})"
        ready, saved = self.ready_nbytes / MIB, self.saved_nbytes / MIB
        yield f"  private memory: {ready:.1f} MiB when ready, {saved:.1f} MiB after saves"
        yield f"  frameworks loaded: {', '.join(self.frameworks) or 'none'}"

    def values(self) -> dict[str, Any]:
        return {**asdict(self), "median_seconds": self.median_seconds}


def judge_child(found: ChildUse) -> Iterator[Verdict]:
    """The verdicts on the background process."""
    seconds, nbytes = found.median_seconds, max(found.ready_nbytes, found.saved_nbytes)
    yield Verdict(f"ready within {READY_SECONDS:g} s", seconds, "s", seconds <= READY_SECONDS)
    demand = f"at most {PRIVATE_NBYTES // MIB} MiB of private memory"
    yield Verdict(demand, nbytes / MIB, "MiB", nbytes <= PRIVATE_NBYTES)
    yield Verdict("no framework is loaded", len(found.frameworks), "loaded", not found.frameworks)


def measure_child(case: AsyncCase, settings: AsyncSettings, names: Sequence[str], directory: str) -> ChildUse:
    """Start some, then save with one."""
    del names
    [found] = run_job(
        start_and_save, 1, case, settings, directory, directory=directory, timeout_seconds=settings.timeout_seconds
    )
    assert isinstance(found, ChildUse)
    return found


class Confessing(Persister):
    """Serves the trainer, and says which modules it has loaded."""

    def handle(self, what: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if what == "modules":
            return {"modules": sorted(sys.modules)}
        return super().handle(what, message)


# -- in the rank ------------------------------------------------------------------------------------------------------


def start_and_save(rank: Rank, case: AsyncCase, settings: AsyncSettings, directory: str) -> ChildUse:
    """All of it, in a process that has torch loaded, as trainers have."""
    with blamed_on("ours"):
        started = [_start() for _ in range(settings.starts + 1)][1:]
        frameworks = _loaded()
        pid = _save(rank, case, settings, directory)
        return ChildUse(
            tuple(seconds for seconds, _ in started),
            int(statistics.median(nbytes for _, nbytes in started)),
            private_nbytes(pid),
            tuple(sorted({*frameworks, *mapped_frameworks(pid)})),
        )


def _start() -> tuple[float, int]:
    began = time.perf_counter()
    process = BackgroundProcess()
    process.request({"do": "hello"}).result()
    seconds = time.perf_counter() - began
    nbytes = private_nbytes(process.pid)
    process.close(_END_SECONDS)
    return seconds, nbytes


def _loaded() -> list[str]:
    process = BackgroundProcess(handler=f"{Confessing.__module__}:{Confessing.__qualname__}")
    modules = process.request({"do": "modules"}).result()["modules"]
    process.close(_END_SECONDS)
    return sorted({module.partition(".")[0] for module in modules} & set(FRAMEWORKS))


def _save(rank: Rank, case: AsyncCase, settings: AsyncSettings, directory: str) -> int:
    """Save a few times; the process that did it."""
    state, ours = state_of(case, rank), make(["ours"], case, settings, rank)["ours"]
    for number in range(_SAVES):
        target = os.path.join(directory, f"save-{number}")
        ours.begin(state, target).result()
        remove(rank, target)
    return service().process("light").pid
