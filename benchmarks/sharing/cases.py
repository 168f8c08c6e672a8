"""What a run of `shared_reads` measures: for every selected measure the state, numbers of ranks, kinds of storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.workloads import TensorSpec, layers, small, total_nbytes

MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class Measure:
    """One kind of measurement.

    Attributes:
        name: What selects it.
        about: One line for the table.
        mib: Size of the state, which every rank holds, by default.
        tensors: The state's tensors, by size in MiB.
        contestants: Who takes part.
        is_throttled: Whether storage is slow.
    """

    name: str
    about: str
    mib: int
    tensors: Callable[[int], tuple[TensorSpec, ...]]
    contestants: tuple[str, ...]
    is_throttled: bool = False


_COMMON = ("ours", "ours-apart", "ours-auto", "torch-dcp")

MEASURES: Mapping[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure(
            "batches", "tensors of 64 KiB, sent together and one by one", 32, small,
            ("ours", "ours-unbatched", *_COMMON[1:]),
        ),
        Measure("warm", "storage as fast as the page cache", 1024, layers, _COMMON),
        Measure("throttled", "slow storage", 1024, layers, _COMMON, is_throttled=True),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SharedCase:
    """One thing to measure.

    Attributes:
        measure: Which kind.
        mib: Size of the state.
        world_size: How many ranks hold it, each all of it.
        place: "memory" (a memory-backed file system) or "disk".
        bytes_per_second: What storage gives to each rank at most; None: as much as it can.
    """

    measure: str
    mib: int
    world_size: int
    place: str
    bytes_per_second: float | None

    @property
    def of(self) -> Measure:
        return MEASURES[self.measure]

    @property
    def about(self) -> str:
        rate = self.bytes_per_second
        return self.of.about if rate is None else f"{self.of.about}, {rate / MEGABYTE:g} MB/s for each rank"

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.of.tensors(self.mib)

    @property
    def nbytes(self) -> int:
        """Bytes of the state, counted once."""
        return total_nbytes(self.tensors)

    @property
    def title(self) -> str:
        return f"{self.measure}, {self.place}, {self.world_size} ranks"


def cases_of(
    measures: Sequence[str],
    world_sizes: Sequence[int],
    places: Sequence[str],
    mib: int | None = None,
    bytes_per_second: float = 100 * MEGABYTE,
) -> Iterator[SharedCase]:
    """The cases of a selection, in the order in which they run.

    Args:
        measures: Names of measures.
        world_sizes: Numbers of ranks, two or more.
        places: "memory", "disk", or both.
        mib: Size of every state; each measure's own by default.
        bytes_per_second: What slow storage gives to each rank.
    """
    for measure in (MEASURES[name] for name in measures):
        for world_size in world_sizes:
            for place in places:
                rate = bytes_per_second if measure.is_throttled else None
                yield SharedCase(measure.name, mib or measure.mib, world_size, place, rate)
