"""What planners of users' own are asked for: once per item, on the calling thread, applied when the bytes are there."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from dcp_core.api import read
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME
from dcp_core.errors import CorruptError, DcpError
from dcp_core.execution import read_engine
from dcp_core.planning.items import ReadItem, WriteItem
from dcp_core.planning.load_plan import LoadPlan
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.testing.numpy_ranks import ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import memory_directory, names_in
from tests.core.io_probes import TornOperations, reader_over
from tests.core.io_samples import LAYOUTS, MEBIBYTE, Layout, Memory, Sample, Shards, same_bits
from tests.core.layouts import at
from tests.core.rank_jobs import load, save, together

pytestmark = pytest.mark.timeout(120)

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "large": ("float32", (1500, 1100)),
    "wide": ("uint8", (2, 2 * MEBIBYTE + 3)),
    "scalar": ("float64", ()),
    **{f"small.{number:02}": ("int32", (5, 20 + number)) for number in range(60)},
    **{f"odd.{number:02}": ("bfloat16", (1 + number * 7,)) for number in range(20)},
}
OBJECTS = {"step": 5, "notes": ["a", 1]}


def sample_of(name: str) -> Sample:
    dtype, shape = SHAPES[name]
    return Sample(name, BY_NAME[dtype], shape, list(SHAPES).index(name))


def shards_of(ranks: int, rank: int, dim: int, *, poisoned: bool = False) -> list[Shards]:
    shards = []
    for name, (_, shape) in SHAPES.items():
        boxes = even_boxes(shape, ranks, rank, min(dim, len(shape) - 1)) if shape else [Box.whole(shape)]
        shards.append(Shards.cut(sample_of(name), boxes, Random(name), poisoned=poisoned))
    return shards


def state_of(shards: list[Shards]) -> dict[str, Any]:
    return {part.sample.name: part.value for part in shards} | OBJECTS


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "checkpoint"


# --- saves -------------------------------------------------------------------------------------------


class RecordingSavePlanner(StandardSavePlanner):
    """Notes what it is asked for, and by which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[WriteItem] = []
        self.asked: list[WriteItem] = []
        self.threads: set[int] = set()

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        self.planned = list(plan.items)
        return super().finalize_plan(plan)

    def get_data(self, item: WriteItem) -> Any:
        self.asked.append(item)
        self.threads.add(threading.get_ident())
        return super().get_data(item)


def save_recorded(context: RankContext, directory: str) -> int:
    planned = 0
    for _ in range(2):  # the second save knows the plan
        planner = RecordingSavePlanner()
        with together(context):
            save(state_of(shards_of(context.world_size, context.rank, 0)), directory, planner=planner)
        assert planner.threads <= {threading.get_ident()}
        assert Counter(planner.asked) == Counter(planner.planned)
        assert set(Counter(planner.asked).values()) <= {1}
        planned += len(planner.planned)
    return planned


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_item_is_asked_for_once_by_the_calling_thread(ranks: int, directory: Path) -> None:
    assert sum(run_ranks(save_recorded, ranks, str(directory))) >= 2 * (len(SHAPES) + len(OBJECTS))


def test_a_planner_is_called_by_the_thread_that_called_save_or_load(directory: Path) -> None:
    saving, loading = RecordingSavePlanner(), RecordingLoadPlanner()
    shards = shards_of(1, 0, 1, poisoned=True)

    def run() -> None:
        save(state_of(shards_of(1, 0, 0)), str(directory), planner=saving)
        load(state_of(shards), str(directory), planner=loading)

    caller = threading.Thread(target=run)
    caller.start()
    caller.join()
    assert saving.threads == loading.threads == {caller.ident}
    for part in shards:
        part.check()


class ChangingPlanner(StandardSavePlanner):
    """Stores something else than what the state holds, in memory of some layout."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def get_data(self, item: WriteItem) -> Any:
        found = super().get_data(item)
        if isinstance(found, bytes):
            return found
        changed = Memory.of(np.asarray(found)[::-1] if item.sizes else np.asarray(found), self._layout).view
        changed.setflags(write=False)
        return changed


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_what_get_data_gives_is_what_is_stored(layout: Layout, directory: Path) -> None:
    save(state_of(shards_of(1, 0, 0)), str(directory), planner=ChangingPlanner(layout))
    for name, (_, shape) in SHAPES.items():
        bits = sample_of(name).bits
        assert same_bits(read(directory, name), bits[::-1] if shape else bits), name


class WrongPlanner(StandardSavePlanner):
    """Answers one item with something of another shape or type."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    def get_data(self, item: WriteItem) -> Any:
        return self._answer if item.index.fqn == "small.30" else super().get_data(item)


WRONG = {
    "another shape": np.zeros((5, 51), np.int32),
    "as many elements in another shape": np.zeros((50, 5), np.int32),
    "another type": np.zeros((5, 50), np.int64),
    "nothing": None,
    "an object": b"bytes",
}


@pytest.mark.parametrize("answer", list(WRONG))
def test_an_answer_that_does_not_fit_its_item_is_an_error_that_names_it(answer: str, directory: Path) -> None:
    with pytest.raises(DcpError, match="small.30"):
        save(state_of(shards_of(1, 0, 0)), str(directory), planner=WrongPlanner(WRONG[answer]))
    assert names_in(directory) == []


# --- loads -------------------------------------------------------------------------------------------


class RecordingLoadPlanner(StandardLoadPlanner):
    """Notes the calls for each item, and looks at what has come when it is told that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[ReadItem] = []
        self.calls: list[tuple[str, ReadItem]] = []
        self.threads: set[int] = set()
        self.early: list[ReadItem] = []

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        final = super().finalize_plan(plan)
        self.planned = list(final.items)
        return final

    def acquire_tensor(self, item: ReadItem) -> Any:
        self._note("acquire", item)
        return super().acquire_tensor(item)

    def apply_tensor(self, item: ReadItem, tensor: Any) -> None:
        self._note("apply", item)
        if not same_bits(np.ascontiguousarray(tensor), stored_bits(item)):
            self.early.append(item)
        super().apply_tensor(item, tensor)

    def apply_bytes(self, item: ReadItem, value: bytes) -> None:
        self._note("bytes", item)
        super().apply_bytes(item, value)

    def _note(self, call: str, item: ReadItem) -> None:
        self.calls.append((call, item))
        self.threads.add(threading.get_ident())

    def check(self) -> None:
        """Once each, acquired before applied, on this thread, and applied with the bytes in."""
        assert self.threads <= {threading.get_ident()}
        assert self.early == []
        tensors = [item for item in self.planned if item.dest_index.fqn in SHAPES]
        objects = [item for item in self.planned if item.dest_index.fqn not in SHAPES]
        expected = Counter(
            [*(("acquire", item) for item in tensors), *(("apply", item) for item in tensors)]
            + [("bytes", item) for item in objects]
        )
        assert Counter(self.calls) == expected
        assert set(expected.values()) <= {1}
        place = {call: number for number, call in enumerate(self.calls)}
        assert all(place["acquire", item] < place["apply", item] for item in tensors)


def overriding(method: str, calls: list[ReadItem]) -> StandardLoadPlanner:
    """A planner that overrides one method, and notes the items that it is called with."""

    def instead(self: StandardLoadPlanner, item: ReadItem, *more: Any) -> Any:
        calls.append(item)
        return getattr(super(made, self), method)(item, *more)

    made: Any = type("Overriding", (StandardLoadPlanner,), {method: instead})
    planner: StandardLoadPlanner = made()
    return planner


def stored_bits(item: ReadItem) -> Any:
    """What a region holds."""
    chunk = item.storage_index.offset or ()
    start = tuple(map(sum, zip(chunk, item.storage_offsets, strict=True)))
    return np.ascontiguousarray(sample_of(item.storage_index.fqn).bits[at(Box(start, item.lengths))])


def load_recorded(context: RankContext, directory: str, dim: int, verify: Any, torn: bool) -> int:
    shards = shards_of(context.world_size, context.rank, dim, poisoned=True)
    planner = RecordingLoadPlanner()
    options = {"storage_reader": reader_over(TornOperations(context.rank))} if torn else {}
    load(state_of(shards), directory, planner=planner, verify=verify, **options)
    planner.check()
    for part in shards:
        part.check()
    return len(planner.planned)


def save_plainly(context: RankContext, directory: str) -> None:
    save(state_of(shards_of(context.world_size, context.rank, 0)), directory)


@pytest.mark.parametrize("loaders", [1, 2])
def test_each_region_is_acquired_and_applied_once_with_its_bytes_in(loaders: int, directory: Path) -> None:
    run_ranks(save_plainly, 2, str(directory))
    for dim, verify, torn in [(0, True, False), (1, "full", False), (1, True, True), (0, False, True)]:
        planned = run_ranks(load_recorded, loaders, str(directory), dim, verify, torn)
        assert min(planned) >= len(OBJECTS) + len(SHAPES) // 2


@pytest.mark.parametrize("method", ["acquire_tensor", "access", "apply_tensor", "apply_bytes"])
def test_a_method_that_is_overridden_alone_is_called_for_every_item(method: str, directory: Path) -> None:
    save(state_of(shards_of(1, 0, 0)), str(directory))
    calls: list[ReadItem] = []
    shards = shards_of(1, 0, 0, poisoned=True)
    load(state_of(shards), str(directory), planner=overriding(method, calls))
    expected = OBJECTS if method == "apply_bytes" else SHAPES
    assert sorted({item.dest_index.fqn for item in calls}) == sorted(expected)
    assert len(calls) == len(expected) or method == "access"
    for part in shards:
        part.check()


def test_only_targets_that_are_there_anyway_are_asked_for_many_at_a_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(state_of(shards_of(1, 0, 0)), str(directory))
    monkeypatch.setattr(read_engine, "BATCH_BYTES", 1)
    batches: list[int] = []
    cut = read_engine._batches

    def counting(*args: Any) -> Any:
        found = list(cut(*args))
        batches.append(len(found))
        return found

    monkeypatch.setattr(read_engine, "_batches", counting)
    for planner, expected in [(StandardLoadPlanner(), 1), (overriding("acquire_tensor", []), len(SHAPES))]:
        batches.clear()
        shards = shards_of(1, 0, 0, poisoned=True)
        load(state_of(shards), str(directory), planner=planner)
        assert max(batches) == expected
        for part in shards:
            part.check()


def test_a_region_that_is_corrupt_is_not_applied(directory: Path) -> None:
    save(state_of(shards_of(1, 0, 0)), str(directory))
    (file,) = directory.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[content.index(sample_of("small.30").bits.tobytes()) + 10] ^= 4
    file.write_bytes(content)
    planner = RecordingLoadPlanner()
    with pytest.raises(CorruptError, match="small.30"):
        load(state_of(shards_of(1, 0, 0, poisoned=True)), str(directory), planner=planner)
    assert "small.30" not in {item.dest_index.fqn for call, item in planner.calls if call == "apply"}
    assert planner.early == []
    assert planner.threads == {threading.get_ident()}


class ElsewherePlanner(StandardLoadPlanner):
    """Has every region put elsewhere."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.memories: dict[ReadItem, Memory] = {}
        self.applied: dict[ReadItem, Any] = {}

    def acquire_tensor(self, item: ReadItem) -> Any:
        place = super().acquire_tensor(item)
        self.memories[item] = Memory.of(np.zeros(place.shape, place.dtype), self.layout)
        return self.memories[item].view

    def apply_tensor(self, item: ReadItem, tensor: Any) -> None:
        self.applied[item] = tensor


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_regions_land_where_acquire_tensor_says(layout: Layout, directory: Path) -> None:
    save(state_of(shards_of(1, 0, 0)), str(directory))
    target = {name: np.zeros(shape, sample_of(name).dtype.bits) for name, (_, shape) in SHAPES.items()}
    state = {
        name: ShardedArray(array.shape, [Box.whole(array.shape)], [array], SHAPES[name][0])
        for name, array in target.items()
    }
    planner = ElsewherePlanner(layout)
    load(state, str(directory), planner=planner)
    assert all(not array.view(np.uint8).any() if array.ndim else array == 0 for array in target.values())
    assert planner.memories.keys() == planner.applied.keys()
    for item, memory in planner.memories.items():
        assert planner.applied[item] is memory.view
        assert same_bits(np.ascontiguousarray(memory.view), stored_bits(item)) and memory.is_clean_beside(), item
