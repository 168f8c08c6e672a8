"""What is demanded of loads that share reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.budgets import AUTO_AT_MOST, JUDGED_FROM_MIB, READ_ONCE_AT_MOST, Verdict
from benchmarks.sharing.cases import SharedCase
from benchmarks.sharing.loads import SharedLoads

CHOICES = ("ours", "ours-apart")
"""What "auto" chooses from."""


def judge_loads(case: SharedCase, found: Sequence[SharedLoads]) -> Iterator[Verdict]:
    """The verdicts on a case; medians are compared."""
    by_name = {each.contestant: each for each in found}
    if case.mib < JUDGED_FROM_MIB:
        return
    if "ours-auto" in by_name and all(name in by_name for name in CHOICES):
        better = min(by_name[name].timed.median_seconds for name in CHOICES)
        ratio = by_name["ours-auto"].timed.median_seconds / better
        demand = f"ours-auto takes at most {AUTO_AT_MOST:g}x the better of {' and '.join(CHOICES)}"
        yield Verdict(demand, ratio, "x", ratio <= AUTO_AT_MOST)
    if "ours" in by_name:
        times = by_name["ours"].times_read
        demand = f"all ranks of ours together read at most {READ_ONCE_AT_MOST:g}x the checkpoint"
        yield Verdict(demand, times, "x", times <= READ_ONCE_AT_MOST)
