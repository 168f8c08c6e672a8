"""Shows results: tables for people, plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from benchmarks.background.calls import CallTimes
from benchmarks.background.cases import AsyncCase
from benchmarks.background.contestants import ASYNC_CONTESTANTS
from benchmarks.budgets import Verdict
from benchmarks.workloads import MIB

_HEADINGS = (
    "call ms", "min ms", "max ms", "first ms", "/ copy", "/ torch", "agree ms", "stage ms", "waited ms", "staged MiB",
    "committed s",
)  # fmt: skip


class Finding(Protocol):
    """What one measure found."""

    def lines(self) -> Iterator[str]:
        """For people."""

    def values(self) -> dict[str, Any]:
        """For JSON."""


@dataclass(frozen=True, slots=True)
class CallsFound:
    """Times in the call, of all that took part."""

    rows: tuple[CallTimes, ...]

    def lines(self) -> Iterator[str]:
        yield _row("", _HEADINGS)
        by_name = {each.contestant: each for each in self.rows}
        yield from (_row(each.contestant, tuple(_cells(each, by_name))) for each in self.rows)

    def values(self) -> dict[str, Any]:
        return {"calls": [each.values() for each in self.rows]}


@dataclass(frozen=True, slots=True)
class AsyncResult:
    """One case.

    Attributes:
        case: What was measured.
        storage: The kind of storage, with its file system.
        found: The figures.
        left_out: Who took no part, and why.
        verdicts: Budgets that name this case.
        failure: Why there are no figures, or None.
    """

    case: AsyncCase
    storage: str = ""
    found: Finding | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    failure: str | None = None

    def text(self) -> str:
        """As lines of text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        case = self.case
        size = f"{len(case.tensors):,} of {case.nbytes / MIB:,.0f} MiB"
        yield f"{case.title} ({self.storage}); {case.of.about}; tensors: {size}"
        if self.failure is not None:
            yield f"  FAILED: {self.failure}"
        if self.found is not None:
            yield from self.found.lines()
        yield from (f"  {name:20}{reason}" for name, reason in self.left_out.items())
        yield from (f"  {_spelled(verdict)}" for verdict in self.verdicts)

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self.case),
            "storage": self.storage,
            "tensors": len(self.case.tensors),
            "needed_bytes": self.case.nbytes,
            **({} if self.found is None else self.found.values()),
            "left_out": self.left_out,
            "budgets": [asdict(verdict) for verdict in self.verdicts],
            "failure": self.failure,
        }


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:20}" + "".join(f"{cell:>12}" for cell in cells)


def _cells(times: CallTimes, by_name: dict[str, CallTimes]) -> Iterator[str]:
    seconds = [run.call_seconds for run in times.rounds]
    for value in (times.call_seconds, min(seconds), max(seconds), times.first.call_seconds):
        yield f"{value * 1e3:.1f}"
    for against in ("copy", "torch-thread"):
        yield f"{times.call_seconds / by_name[against].call_seconds:.2f}" if against in by_name else "-"
    if times.contestant.startswith("ours"):
        for name in ("agree_seconds", "stage_seconds", "waited_seconds"):
            yield f"{times.median(name) * 1e3:.1f}"
        yield f"{times.median('staged_nbytes') / MIB:.1f}"
    else:
        yield from "----"
    yield f"{times.median('committed_seconds'):.3f}" if ASYNC_CONTESTANTS[times.contestant].saves else "-"


def _spelled(verdict: Verdict) -> str:
    return (
        f"{'met    ' if verdict.is_met else 'NOT MET'}  {verdict.demand}: {verdict.found:.2f} {verdict.unit}".rstrip()
    )


def legend_of(results: Sequence[AsyncResult]) -> str:
    """Who the contestants of some results are."""
    named = {name for result in results for name in result.case.contestants}
    return "\n".join(f"  {name:20}{each.about}" for name, each in ASYNC_CONTESTANTS.items() if name in named)


def summary_of(results: Sequence[AsyncResult]) -> str:
    """How many budgets are met, and which are not."""
    judged = [(result.case, verdict) for result in results for verdict in result.verdicts]
    missed = [f"  {case.title}: {_spelled(verdict)}" for case, verdict in judged if not verdict.is_met]
    failed = [f"  {result.case.title}: FAILED" for result in results if result.failure is not None]
    count = f"{len(judged) - len(missed)} of {len(judged)} budgets met" if judged else "no budgets were judged"
    return "\n".join([count, *missed, *failed])
