"""Shows results: tables for people, plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.findings import FoundResult
from benchmarks.machine import MachineLoad
from benchmarks.sharing.cases import SharedCase
from benchmarks.sharing.contestants import SHARED_CONTESTANTS
from benchmarks.sharing.judge import CHOICES
from benchmarks.sharing.loads import SharedLoads

_HEADINGS = ("median s", "min s", "max s", "first s", "GiB/s", "x ours", "least", "most", "read", "max/min")


@dataclass(frozen=True, slots=True)
class LoadsFound:
    """All loads of a case, and what else the machine did.

    Attributes:
        nbytes: Bytes of the state.
        rows: One for each contestant.
        load: The machine's.
    """

    nbytes: int
    rows: tuple[SharedLoads, ...]
    load: MachineLoad

    def lines(self) -> Iterator[str]:
        yield _row("", _HEADINGS)
        by_name = {each.contestant: each for each in self.rows}
        yield from (_row(each.contestant, tuple(self._cells(each, by_name))) for each in self.rows)
        if "ours-auto" in by_name and all(name in by_name for name in CHOICES):
            ratios = sorted(_auto_ratios(by_name))
            yield f"  auto / the better of both, by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
        yield f"  machine: {self.load}"

    def values(self) -> dict[str, Any]:
        return {"loads": [each.values() for each in self.rows], "machine_load": asdict(self.load)}

    def _cells(self, loads: SharedLoads, by_name: Mapping[str, SharedLoads]) -> Iterator[str]:
        timed = loads.timed
        for seconds in (timed.median_seconds, min(timed.seconds), max(timed.seconds), timed.first_seconds):
            yield "-" if seconds is None else f"{seconds:.3f}"
        yield f"{self.nbytes / timed.median_seconds / 1024**3:.2f}"
        if "ours" in by_name:
            ours = by_name["ours"].timed
            ratios = [theirs / its for theirs, its in zip(timed.seconds, ours.seconds, strict=True)]
            yield from (f"{x:.2f}" for x in (timed.median_seconds / ours.median_seconds, min(ratios), max(ratios)))
        else:
            yield from "---"
        yield f"{loads.times_read:.3f}"
        yield "-" if loads.imbalance is None else f"{loads.imbalance:.2f}"


def _auto_ratios(by_name: Mapping[str, SharedLoads]) -> Iterator[float]:
    better = zip(*(by_name[name].timed.seconds for name in CHOICES), strict=True)
    return (auto / min(both) for auto, both in zip(by_name["ours-auto"].timed.seconds, better, strict=True))


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:20}" + "".join(f"{cell:>10}" for cell in cells)


@dataclass(frozen=True, slots=True)
class SharedResult(FoundResult[SharedCase]):
    """One case of a command that shares reads."""


def legend_of(results: Sequence[SharedResult]) -> str:
    """Who the contestants of some results are."""
    named = {name for result in results for name in result.case.of.contestants}
    return "\n".join(f"  {name:20}{each.about}" for name, each in SHARED_CONTESTANTS.items() if name in named)
