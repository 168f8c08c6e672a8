"""What was found in one case of any command: text for people, plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from benchmarks.budgets import Verdict
from benchmarks.workloads import MIB, TensorSpec


class MeasuredCase(Protocol):
    """One thing to measure; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def title(self) -> str: ...

    @property
    def about(self) -> str: ...

    @property
    def tensors(self) -> tuple[TensorSpec, ...]: ...

    @property
    def nbytes(self) -> int: ...


class Finding(Protocol):
    """What one measure found."""

    def lines(self) -> Iterator[str]:
        """For people."""

    def values(self) -> dict[str, Any]:
        """For JSON."""


_Case = TypeVar("_Case", bound=MeasuredCase)


@dataclass(frozen=True, slots=True)
class FoundResult(Generic[_Case]):
    """One case.

    Attributes:
        case: What was measured.
        storage: The kind of storage, with its file system.
        found: The figures.
        left_out: Who took no part, and why.
        verdicts: Budgets that name this case.
        failure: Why there are no figures, or None.
    """

    case: _Case
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
        yield f"{case.title} ({self.storage}); {case.about}; tensors: {size}"
        if self.failure is not None:
            yield f"  FAILED: {self.failure}"
        if self.found is not None:
            yield from self.found.lines()
        yield from (f"  {name:20}{reason}" for name, reason in self.left_out.items())
        yield from (f"  {spelled(verdict)}" for verdict in self.verdicts)

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


def spelled(verdict: Verdict) -> str:
    """A verdict in one line."""
    met = "met    " if verdict.is_met else "NOT MET"
    return f"{met}  {verdict.demand}: {verdict.found:.2f} {verdict.unit}".rstrip()


def summary_of(results: Sequence[FoundResult[Any]]) -> str:
    """How many budgets are met, and which are not."""
    judged = [(result.case, verdict) for result in results for verdict in result.verdicts]
    missed = [f"  {case.title}: {spelled(verdict)}" for case, verdict in judged if not verdict.is_met]
    failed = [f"  {result.case.title}: FAILED" for result in results if result.failure is not None]
    count = f"{len(judged) - len(missed)} of {len(judged)} budgets met" if judged else "no budgets were judged"
    return "\n".join([count, *missed, *failed])
