"""What was found in one case."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.budgets import Verdict
from benchmarks.cases import Case
from benchmarks.memory import Footprint
from benchmarks.trials import Timed


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case: times or footprints of all that took part, why others did not, and the budgets.

    Attributes:
        case: What was measured.
        storage: The kind of storage, with its file system.
        timed: One for each contestant, for a case against the clock.
        footprints: One for each contestant, for a case of peak memory.
        left_out: Who took no part, and why.
        verdicts: Budgets that name this case.
        failure: Why there are no figures, or None.
    """

    case: Case
    storage: str = ""
    timed: tuple[Timed, ...] = ()
    footprints: tuple[Footprint, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    failure: str | None = None
