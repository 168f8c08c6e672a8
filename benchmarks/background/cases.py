"""What a run of `async_save` measures: for every selected measure the states, numbers of ranks and kinds of storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cases import Settings
from benchmarks.workloads import MIB, TensorSpec, small, total_nbytes

_TABLES = 32
_COLUMNS = 1024
_ITEM_NBYTES = 4


def tables(mib: int) -> tuple[TensorSpec, ...]:
    """A few dozen tensors of the same size."""
    rows = mib * MIB // (_TABLES * _COLUMNS * _ITEM_NBYTES)
    return tuple(TensorSpec(f"tables.{number}.weight", (rows, _COLUMNS), "float32") for number in range(_TABLES))


@dataclass(frozen=True, slots=True)
class Measure:
    """One kind of measurement.

    Attributes:
        name: What selects it.
        about: One line for the table.
        mib: Size of the state, of all ranks together, by default.
        world_sizes: On how many ranks.
        contestants: Who takes part, on the first kind of storage that is asked for.
        elsewhere: Who takes part on the other kinds; nobody: it is not measured there.
        tensors: The state's tensors, by size in MiB.
        is_replicated: Whether every rank holds the whole state, in plain tensors. Otherwise several ranks hold
            DTensors that are cut along dimension 0.
    """

    name: str
    about: str
    mib: int
    world_sizes: tuple[int, ...]
    contestants: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()
    tensors: Callable[[int], tuple[TensorSpec, ...]] = tables
    is_replicated: bool = False


_PEERS = ("torch-thread", "torch-process")
_COPIES = ("copy", "copy-1")

MEASURES: Mapping[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure(
            "call", "time in the call", 1024, (1, 2), ("ours", "ours-gloo", "ours-alone", *_PEERS, *_COPIES),
            elsewhere=("ours", "torch-thread", "copy"),
        ),
        Measure(
            "fixed", "next to no bytes: what a call costs in any case", 1, (1, 2, 4),
            ("ours", "ours-gloo", "ours-alone", "torch-thread"),
        ),
        Measure(
            "replicated", "every rank holds the same state", 512, (4,), ("ours", "torch-thread", "copy"),
            is_replicated=True,
        ),
        Measure("small", "tensors of 64 KiB", 1250, (1,), ("ours", "torch-thread", "copy"), tensors=small),
        Measure("child", "the background process", 1024, (1,), ("ours",)),
        Measure("training", "steps while a save goes on", 1024, (1, 2), ("none", "ours", "torch-thread")),
        Measure("many", "one save after another", 64, (2,), ("ours",)),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AsyncCase:
    """One thing to measure.

    Attributes:
        measure: Which kind.
        mib: Size of the state.
        world_size: How many ranks.
        place: "memory" (a memory-backed file system) or "disk".
        contestants: Who may take part.
    """

    measure: str
    mib: int
    world_size: int
    place: str
    contestants: tuple[str, ...]

    @property
    def of(self) -> Measure:
        return MEASURES[self.measure]

    @property
    def about(self) -> str:
        return self.of.about

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.of.tensors(self.mib)

    @property
    def nbytes(self) -> int:
        """Bytes of the state, what several ranks hold counted once."""
        return total_nbytes(self.tensors)

    @property
    def held_nbytes(self) -> int:
        """Bytes that all ranks together hold."""
        return self.nbytes * (self.world_size if self.of.is_replicated else 1)

    @property
    def title(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{self.measure}, {self.place}, {ranks}"


@dataclass(frozen=True, slots=True)
class AsyncSettings(Settings):
    """How all cases are run.

    Attributes:
        steps: Training steps of a run.
        every: How many steps after one save the next begins.
        saves: How many saves follow each other in `many`.
        starts: How often the background process is started.
    """

    steps: int = 30
    every: int = 15
    saves: int = 100
    starts: int = 7


def cases_of(
    measures: Sequence[str], world_sizes: Sequence[int], places: Sequence[str], mib: int | None = None
) -> Iterator[AsyncCase]:
    """The cases of a selection, in the order in which they run.

    Args:
        measures: Names of measures.
        world_sizes: Numbers of ranks; a measure has some of its own.
        places: "memory", "disk", or both.
        mib: Size of every state; each measure's own by default.
    """
    for measure in (MEASURES[name] for name in measures):
        for world_size in (size for size in measure.world_sizes if size in world_sizes):
            for place in places:
                contestants = measure.contestants if place == places[0] else measure.elsewhere
                if contestants:
                    yield AsyncCase(measure.name, mib or measure.mib, world_size, place, contestants)
