"""What is demanded of this project's engines, and whether a measurement meets it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.cases import Case, Settings
from benchmarks.counters import MemoryUse
from benchmarks.memory import Footprint
from benchmarks.trials import Timed
from benchmarks.workloads import MIB

READ_AT_MOST = 1.1
"""Resharded loads read at most this many times the bytes that they need, for runs of 64 KiB and more."""
OPEN_READ_AT_MOST = 1.05
"""The same for loads of whole tensors into shards of rows."""
ABOVE_STATE_NBYTES = 128 * MIB
"""What a save or a load may need in memory above the state, plan tables apart."""
AUTO_AT_MOST = 1.25
"""A load with "auto" takes at most this many times as long as the better one of sharing reads and not."""
READ_ONCE_AT_MOST = 1.01
"""Ranks that share reads take at most this many times the bytes of the checkpoint from storage."""

JUDGED_FROM_MIB = 64
"""Smaller states than this show fixed costs, which no budget is about."""

_WHOLE = ("transformer", "huge", "checksums")
_RESHARD = ("reshard", "reshard_short")
_BOTH = ("memory", "disk")


@dataclass(frozen=True, slots=True)
class SpeedBudget:
    """How much less time one of ours takes than somebody else.

    Attributes:
        measure: "save" or "load".
        workloads: For which states.
        places: On which storage.
        ours: Whose time.
        against: Compared with whom.
        at_least: Their time divided by ours.
    """

    measure: str
    workloads: tuple[str, ...]
    places: tuple[str, ...]
    ours: str
    against: str
    at_least: float

    def applies(self, case: Case) -> bool:
        return case.measure == self.measure and case.workload in self.workloads and case.place in self.places


SPEED_BUDGETS = (
    SpeedBudget("save", _WHOLE, ("memory",), "ours", "torch-dcp", 1.5),
    SpeedBudget("save", _WHOLE, ("memory",), "ours", "plain", 0.8),
    SpeedBudget("save", _WHOLE, ("disk",), "ours", "plain", 0.9),
    SpeedBudget("load", _WHOLE, _BOTH, "ours", "torch-dcp", 2.2),
    SpeedBudget("load", _WHOLE, _BOTH, "ours-unverified", "torch-dcp", 2.5),
    SpeedBudget("load", _WHOLE, _BOTH, "ours", "torch-hf", 1.2),
    SpeedBudget("load", _WHOLE, _BOTH, "ours", "plain", 0.8),
    SpeedBudget("load", _RESHARD, _BOTH, "ours", "torch-dcp", 2.0),
    SpeedBudget("load", ("open_weights",), _BOTH, "ours-open", "torch-open", 1.2),
    SpeedBudget("save", ("small",), _BOTH, "ours", "torch-dcp", 7.0),
    SpeedBudget("load", ("small",), _BOTH, "ours", "torch-dcp", 20.0),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One budget and what was found."""

    demand: str
    found: float
    unit: str
    is_met: bool


def judge_times(case: Case, settings: Settings, timed: Sequence[Timed]) -> Iterator[Verdict]:
    """The verdicts on a case against the clock, and on the bytes that it read."""
    if case.mib < JUDGED_FROM_MIB:
        return
    by_name = {each.contestant: each for each in timed}
    for budget in SPEED_BUDGETS:
        ours = budget.ours if settings.verify else budget.ours.removesuffix("-unverified")
        present = ours in by_name and budget.against in by_name
        if not (present and budget.applies(case) and _is_fair(budget, settings)):
            continue
        ratio = by_name[budget.against].median_seconds / by_name[ours].median_seconds
        demand = f"{ours} at least {budget.at_least:g}x as fast as {budget.against}"
        yield Verdict(demand, ratio, "x", ratio >= budget.at_least)
    if case.workload == "reshard" and case.measure in ("load", "cold") and "ours" in by_name:
        times = by_name["ours"].moved.rchar / case.nbytes
        yield Verdict(f"ours reads at most {READ_AT_MOST:g}x the needed bytes", times, "x", times <= READ_AT_MOST)
    if case.workload == "open_weights" and "ours-open" in by_name:
        times, most = by_name["ours-open"].moved.rchar / case.nbytes, OPEN_READ_AT_MOST
        yield Verdict(f"ours-open reads at most {most:g}x the needed bytes", times, "x", times <= most)


def _is_fair(budget: SpeedBudget, settings: Settings) -> bool:
    """Budgets hold with checksums and fsync on, but for the one that is of loads without checks."""
    if budget.measure == "save":
        return settings.durable
    return settings.verify or budget.ours == "ours-unverified"


def judge_memory(case: Case, footprints: Sequence[Footprint]) -> Iterator[Verdict]:
    """The verdicts on ours' peak memory."""
    judged = [each for each in footprints if each.contestant == "ours" and case.mib >= JUDGED_FROM_MIB]
    for footprint in judged:
        peaks = {
            "save": footprint.save.peak - _peak(footprint.save_tables),
            "load": footprint.load.peak - _peak(footprint.load_tables),
        }
        for operation, peak in peaks.items():
            demand = f"a {operation} of ours needs at most {ABOVE_STATE_NBYTES // MIB} MiB above state and plan"
            yield Verdict(demand, max(peak, 0) / MIB, "MiB", peak <= ABOVE_STATE_NBYTES)


def _peak(use: MemoryUse | None) -> int:
    return 0 if use is None else use.peak
