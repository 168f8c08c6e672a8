"""Shows results: tables for people, plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.background.calls import CallTimes
from benchmarks.background.cases import AsyncCase
from benchmarks.background.contestants import ASYNC_CONTESTANTS
from benchmarks.findings import FoundResult
from benchmarks.workloads import MIB

_HEADINGS = (
    "call ms", "min ms", "max ms", "first ms", "/ copy", "/ torch", "agree ms", "stage ms", "waited ms", "staged MiB",
    "committed s",
)  # fmt: skip


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
class AsyncResult(FoundResult[AsyncCase]):
    """One case of a command that saves in the background."""


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


def legend_of(results: Sequence[AsyncResult]) -> str:
    """Who the contestants of some results are."""
    named = {name for result in results for name in result.case.contestants}
    return "\n".join(f"  {name:20}{each.about}" for name, each in ASYNC_CONTESTANTS.items() if name in named)
