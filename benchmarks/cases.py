"""What a run measures: every selected workload, number of ranks, kind of storage and measure, one case each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.workloads import WORKLOADS, TensorSpec, Workload, total_nbytes

MEASURES = ("save", "load", "cold", "memory")
PLACES = ("memory", "disk")


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure.

    Attributes:
        workload: Name of the state.
        mib: Its size.
        world_size: How many ranks.
        place: "memory" (a memory-backed file system) or "disk".
        measure: "save", "load" (from the page cache), "cold" (load from the device) or "memory" (peak, of both).
    """

    workload: str
    mib: int
    world_size: int
    place: str
    measure: str

    @property
    def of(self) -> Workload:
        return WORKLOADS[self.workload]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.of.tensors(self.mib)

    @property
    def nbytes(self) -> int:
        """Bytes that have to move: what all ranks together hold."""
        return total_nbytes(self.tensors)

    @property
    def title(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{self.workload}, {self.measure}, {self.place}, {ranks}"


@dataclass(frozen=True, slots=True)
class Settings:
    """How all cases are run.

    Attributes:
        verify: Whether loads check checksums.
        durable: Whether saves end with the bytes on the device.
        rounds: How often each contestant is run, apart from a first time.
        seed: Of the order within rounds.
        timeout_seconds: For one job of ranks.
    """

    verify: bool = True
    durable: bool = True
    rounds: int = 5
    seed: int = 0
    timeout_seconds: float = 1800.0


def cases_of(
    workloads: Sequence[str],
    world_sizes: Sequence[int],
    places: Sequence[str],
    measures: Sequence[str],
    mib: int | None = None,
) -> Iterator[Case]:
    """The cases of a selection, in the order in which they run.

    Args:
        workloads: Names of states.
        world_sizes: Numbers of ranks; a workload has some of its own.
        places: "memory", "disk", or both.
        measures: Some of `MEASURES`. Cold loads are measured on disk, peak memory on the first of the places.
        mib: Size of every state; each workload's own by default.
    """
    for name in workloads:
        workload = WORKLOADS[name]
        for world_size in (size for size in workload.world_sizes if size in world_sizes):
            for place in places:
                for measure in (measure for measure in workload.measures if measure in measures):
                    skipped = (measure == "cold" and place != "disk") or (measure == "memory" and place != places[0])
                    if not skipped:
                        yield Case(name, mib or workload.mib, world_size, place, measure)
