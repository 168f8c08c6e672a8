"""Shows results: a table for people, plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.cases import Case
from benchmarks.cold import WAS_COLD
from benchmarks.contestants import CONTESTANTS
from benchmarks.findings import spelled
from benchmarks.memory import Footprint
from benchmarks.results import CaseResult
from benchmarks.trials import Timed
from benchmarks.workloads import MIB

_TIME_HEADINGS = ("median s", "min s", "max s", "first s", "GiB/s", "x ours", "bytes", "device")
_MEMORY_HEADINGS = ("save peak", "save kept", "load peak", "load kept", "save plan", "load plan")


def table_of(result: CaseResult) -> str:
    """A case as lines of text."""
    return "\n".join(_lines(result))


def _lines(result: CaseResult) -> Iterator[str]:
    case = result.case
    size = f"{len(case.tensors):,} of {case.nbytes / MIB:,.0f} MiB"
    yield f"{case.title} ({result.storage}); {case.of.about}; tensors: {size}"
    if result.failure is not None:
        yield f"  FAILED: {result.failure}"
    if result.timed:
        yield _row("", _TIME_HEADINGS)
        ours = next((each for each in result.timed if each.contestant in ("ours", "ours-open")), None)
        yield from (_row(each.contestant, _time_cells(case, each, ours)) for each in result.timed)
    if case.measure == "cold" and (warm := [each.contestant for each in result.timed if not was_cold(case, each)]):
        yield f"  NOT COLD: {', '.join(warm)}: less than {WAS_COLD:.0%} of the needed bytes came from the device"
    if result.footprints:
        yield _row("MiB", _MEMORY_HEADINGS)
        yield from (_row(each.contestant, _memory_cells(each)) for each in result.footprints)
    yield from (f"  {name:20}{reason}" for name, reason in result.left_out.items())
    yield from (f"  {spelled(verdict)}" for verdict in result.verdicts)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:20}" + "".join(f"{cell:>11}" for cell in cells)


def _time_cells(case: Case, timed: Timed, ours: Timed | None) -> tuple[str, ...]:
    by_call, by_device = moved_parts(case, timed)
    first, ratio = timed.first_seconds, ours and timed.median_seconds / ours.median_seconds
    return (
        f"{timed.median_seconds:.3f}",
        f"{min(timed.seconds):.3f}",
        f"{max(timed.seconds):.3f}",
        "-" if first is None else f"{first:.3f}",
        f"{case.nbytes / timed.median_seconds / 1024**3:.2f}",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{by_call:.2f}",
        f"{by_device:.2f}",
    )


def moved_parts(case: Case, timed: Timed) -> tuple[float, float]:
    """Bytes that went through calls, and bytes to or from a device, as parts of the needed bytes."""
    moved = timed.moved
    pair = (moved.wchar, moved.write_bytes) if case.measure == "save" else (moved.rchar, moved.read_bytes)
    return pair[0] / case.nbytes, pair[1] / case.nbytes


def was_cold(case: Case, timed: Timed) -> bool:
    """Whether a cold load came from the device."""
    return moved_parts(case, timed)[1] >= WAS_COLD


def _memory_cells(footprint: Footprint) -> tuple[str, ...]:
    nbytes = [footprint.save.peak, footprint.save.kept, footprint.load.peak, footprint.load.kept]
    tables = ["-" if use is None else _mib(use.peak) for use in (footprint.save_tables, footprint.load_tables)]
    return (*map(_mib, nbytes), *tables)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


def legend_of(results: Sequence[CaseResult]) -> str:
    """Who the contestants of some results are."""
    names = {name for result in results for name in (*_taking_part(result), *result.left_out)}
    return "\n".join(f"  {name:20}{contestant.about}" for name, contestant in CONTESTANTS.items() if name in names)


def _taking_part(result: CaseResult) -> list[str]:
    return [each.contestant for each in result.timed] + [each.contestant for each in result.footprints]


def summary_of(results: Sequence[CaseResult]) -> str:
    """How many budgets are met, and which are not."""
    judged = [(result.case, verdict) for result in results for verdict in result.verdicts]
    missed = [f"  {case.title}: {spelled(verdict)}" for case, verdict in judged if not verdict.is_met]
    failed = [f"  {result.case.title}: FAILED" for result in results if result.failure is not None]
    count = f"{len(judged) - len(missed)} of {len(judged)} budgets met" if judged else "no budgets were judged"
    return "\n".join([count, *missed, *failed])


def plain_values(result: CaseResult) -> dict[str, Any]:
    """A case for JSON."""
    case = result.case
    return {
        **asdict(case),
        "storage": result.storage,
        "tensors": len(case.tensors),
        "needed_bytes": case.nbytes,
        "timed": [_timed_values(case, each) for each in result.timed],
        "footprints": [asdict(each) for each in result.footprints],
        "left_out": result.left_out,
        "budgets": [asdict(verdict) for verdict in result.verdicts],
        "failure": result.failure,
    }


def _timed_values(case: Case, timed: Timed) -> dict[str, Any]:
    values = asdict(timed) | {"median_seconds": timed.median_seconds, "min_seconds": min(timed.seconds)}
    return values | ({"was_cold": was_cold(case, timed)} if case.measure == "cold" else {})
