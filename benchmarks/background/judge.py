"""What is demanded of time in the call, and of what is staged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.background.calls import CallTimes
from benchmarks.background.cases import AsyncCase
from benchmarks.budgets import JUDGED_FROM_MIB, Verdict

TIMES_A_COPY = 1.3
PART_OF_TORCH = 0.25
STAGED_MARGIN = 1.05
"""A rank of several that hold the same stages at most this many times its fair share."""

_AGAINST = {"copy": ("call",), "torch-thread": ("call", "replicated", "small")}


def judge_calls(case: AsyncCase, found: Sequence[CallTimes]) -> Iterator[Verdict]:
    """The verdicts on a case; medians are compared."""
    by_name = {each.contestant: each for each in found}
    if case.mib < JUDGED_FROM_MIB or "ours" not in by_name:
        return
    ours = by_name["ours"]
    for against, limit in (("copy", TIMES_A_COPY), ("torch-thread", PART_OF_TORCH)):
        if against in by_name and case.measure in _AGAINST[against]:
            ratio = ours.call_seconds / by_name[against].call_seconds
            yield Verdict(f"the call of ours takes at most {limit:g}x {against}", ratio, "x", ratio <= limit)
    if case.of.is_replicated:
        part = ours.median("staged_nbytes") / case.nbytes
        limit = STAGED_MARGIN / case.world_size
        yield Verdict(f"a rank of ours stages at most {limit:.3f} of the state", part, "", part <= limit)
