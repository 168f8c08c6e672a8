"""The tables of the demo, and its checks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo_model import Layout


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank of a job reports.

    Attributes:
        rank: Which one.
        seconds: How long its saves and loads took.
        digest: Of the whole state, when saved or straight after the load.
        whole_bytes: Bytes of the tensors of the model and of the optimizer, whole.
        held_bytes: Bytes of the tensors that this rank holds of the state.
        step: Where it stopped.
        losses: One a step, from the first of all; the one before it is not a number.
    """

    rank: int
    seconds: dict[str, float]
    digest: str
    whole_bytes: dict[str, int]
    held_bytes: int
    step: int
    losses: list[float]


class Report:
    """Compares jobs that resumed a checkpoint with the job that saved it and went on."""

    def __init__(self, layout: Layout, outcomes: Sequence[Outcome], checkpoint: Path, tolerance: float) -> None:
        self.layout = layout
        self.outcomes = outcomes
        self.checkpoint = checkpoint
        self.tolerance = tolerance
        self.resumed: list[tuple[Layout, Sequence[Outcome]]] = []
        self.failures: list[str] = []

    def add(self, layout: Layout, outcomes: Sequence[Outcome]) -> None:
        """Take in a job that resumed, and check it."""
        self.resumed.append((layout, outcomes))

    def print_checkpoint(self) -> None:
        """What the ranks held, what lies on disk, who wrote it, and how long that took."""
