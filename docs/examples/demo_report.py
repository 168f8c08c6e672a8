"""The tables of the demo, and what has to hold."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo_model import Layout


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank of a job found.

    Attributes:
        rank: Which one.
        seconds: How long its saves and loads took.
        digest: Of the whole state, when it was saved, or straight after the load.
        whole_bytes: Bytes of the tensors of the model and of the optimizer, each counted whole and once.
        held_bytes: Bytes of the shards that this rank holds.
        losses: One for each step since the first; the entry before that is not a number.
    """

    rank: int
    seconds: dict[str, float]
    digest: str
    whole_bytes: dict[str, int]
    held_bytes: int
    losses: list[float]


@dataclass(frozen=True, slots=True)
class JobResult:
    """What all ranks of a job found, by rank."""

    layout: Layout
    ranks: tuple[RankResult, ...]

    @property
    def losses(self) -> list[float]:
        return self.ranks[0].losses

    def slowest(self, action: str) -> str:
        return f"{max(rank.seconds[action] for rank in self.ranks):.3f} s"


def print_checkpoint(saved: JobResult, checkpoint: Path) -> None:
    """What the ranks held, what is on disk, who wrote how much, and how long it took."""
    files = {path.name: path.stat().st_size for path in sorted(checkpoint.iterdir())}
    by_rank = [
        sum(size for name, size in files.items() if re.match(rf"_rank{rank.rank}_.*\.safetensors", name))
        for rank in saved.ranks
    ]
    held, written = sum(rank.held_bytes for rank in saved.ranks), sum(files.values())
    print(f"\nSaved by {saved.layout.ranks} ranks, {saved.layout.name}\n")
    _print_table(
        ("", ""),
        [
            ("model", _mib(saved.ranks[0].whole_bytes["model"])),
            ("optimizer", _mib(saved.ranks[0].whole_bytes["optimizer"])),
            ("held by all ranks", _mib(held)),
            ("written", _mib(written)),
            ("held / written (dedup)", f"{held / written:.3f}"),
            ("largest rank / mean (balance)", f"{max(by_rank) * len(by_rank) / sum(by_rank):.3f}"),
            ("save, the first", saved.slowest("first save")),
            ("save, the second (plan from the cache)", saved.slowest("second save")),
            ("async_save, the first (makes its memory)", saved.slowest("first async_save")),
            ("async_save, the second, until it returns", saved.slowest("second async_save")),
            ("... until the checkpoint is complete", saved.slowest("commit")),
        ],
    )
    print()
    _print_table(("file", "bytes"), [(name, f"{size:,}") for name, size in files.items()])


def print_resumed(saved: JobResult, resumed: Sequence[JobResult], at: int) -> None:
    """Load timings, and the losses after step `at` side by side."""
    print("\nLoaded\n")
    _print_table(
        ("layout", "ranks", "load", "bits of the state", "largest difference of a loss"),
        [
            (
                job.layout.name,
                str(job.layout.ranks),
                job.slowest("load"),
                "equal" if _has_saved_state(saved, job) else "DIFFERENT",
                "none" if job.losses[1:] == saved.losses[1:] else f"{_difference(saved, job):.1e} (relative)",
            )
            for job in resumed
        ],
    )
    print("\n  (load includes the job's own state_dict and load_state_dict: making moments, handing tensors over)")
    print(f"\nLosses (steps 1 to {at} come with the checkpoint)\n")
    columns = (saved, *resumed)
    _print_table(
        ("step", "saved, went on", *(job.layout.name for job in resumed)),
        [(str(step), *(f"{job.losses[step]:.9g}" for job in columns)) for step in range(1, len(saved.losses))],
    )


def failures(saved: JobResult, resumed: Sequence[JobResult], tolerance: float) -> list[str]:
    """What should hold and does not, one line each."""
    found = []
    if len({rank.digest for rank in saved.ranks}) != 1:
        found.append(f"{saved.layout.name}: the ranks that saved disagree about the state")
    for job in resumed:
        if not _has_saved_state(saved, job):
            found.append(f"{job.layout.name}: the state after the load is not the one that was saved")
        allowed = 0.0 if job.layout == saved.layout else tolerance
        if len(job.losses) != len(saved.losses) or not _difference(saved, job) <= allowed:
            found.append(f"{job.layout.name}: losses differ by more than {allowed:g} (relative)")
        if any(rank.losses[1:] != job.losses[1:] for rank in job.ranks):
            found.append(f"{job.layout.name}: its ranks disagree about the losses")
    if not saved.losses[-1] < saved.losses[1]:
        found.append("training did not lower the loss")
    return found


def _has_saved_state(saved: JobResult, job: JobResult) -> bool:
    return {rank.digest for rank in job.ranks} == {rank.digest for rank in saved.ranks}


def _difference(saved: JobResult, job: JobResult) -> float:
    """The largest relative difference of a loss; infinite where one is not a number."""
    pairs = zip(saved.losses[1:], job.losses[1:], strict=False)
    differences = [abs(there - here) / abs(here) for here, there in pairs]
    return max(math.inf if math.isnan(difference) else difference for difference in differences)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as needed: the first to the left, the others to the right."""
    lines = [heads, *rows] if any(heads) else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for at, line in enumerate(lines):
        cells = [
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())
        if at == 0 and any(heads):
            print("  " + "  ".join("-" * width for width in widths))
