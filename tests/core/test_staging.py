"""Staging: what lies in the arena is what the state was at the moment of the call, and shares nothing with it."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.background import device_copies, host_copies, staging
from dcp_core.background.arena import Arena, SegmentViews
from dcp_core.background.device_copies import DeviceCopies
from dcp_core.background.host_copies import HostCopies, copying_threads
from dcp_core.background.staging import Staged, StagedSource, stage
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, DTYPES
from dcp_core.errors import CoordinationError, DcpError, PlanningError, StorageError
from dcp_core.execution import staging as rings
from dcp_core.execution.interfaces import WriteContext
from dcp_core.execution.write_engine import write_files
from dcp_core.metadata import MetadataIndex
from dcp_core.planning import layout
from dcp_core.planning.items import ItemType, WriteItem
from dcp_core.planning.leaves import DeviceBits
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.state_path import PerRank
from dcp_core.storage.local import LocalStorage
from dcp_core.testing.devices import DeviceArray, SimulatedDevice
from dcp_core.testing.numpy_ranks import ShardedArray
from dcp_core.testing.streams import Pace
from tests.core.engine_fakes import SAVE_ID
from tests.core.io_samples import LAYOUTS, Memory, poison_of, random_bits, same_bits
from tests.core.layouts import deal, random_cut, random_shape
from tests.core.staging_samples import Array, Rank, differing, everything, plan_together, staged_values

pytestmark = pytest.mark.timeout(60)
PACES: tuple[Pace, ...] = ("late", "thread", "at once")


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """Errors that tests have seen hold arenas, and tests elsewhere count those."""
    yield
    gc.collect()


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


def whole(bits: Array, name: str) -> ShardedArray:
    """A tensor of raw bits, held whole."""
    return ShardedArray(bits.shape, [Box.whole(bits.shape)], [bits], name)


def overwrite(array: Array) -> None:
    array[...] = poison_of(array)


# -- the values of the moment -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_tensors_of_every_type_and_layout_keep_the_bits_of_the_moment(arena: Arena, layout: Any) -> None:
    shapes = ((5, 7), (3,), (), (2, 3, 4), (1, 1, 1))
    expected = {
        f"{dtype.name}-{shape}": random_bits(seed, shape, dtype)
        for seed, dtype in enumerate(DTYPES)
        for shape in shapes
    }
    memories = {name: Memory.of(bits, layout) for name, bits in expected.items()}
    state = {name: whole(memory.view, name.partition("-")[0]) for name, memory in memories.items()}
    rank = Rank.of(state)
    staged = rank.stage_all(arena)
    for memory in memories.values():
        overwrite(memory.view)
    found = everything(rank.source(staged, arena), rank.table)
    assert sorted(found) == sorted(expected)
    assert differing(found, expected) == []


def test_numpy_arrays_of_every_kind_keep_the_values_of_the_moment(arena: Arena) -> None:
    base = np.arange(24.0).reshape(4, 6)
    state = {
        "contiguous": base.copy(), "transposed": base.copy().T, "steps": base.copy()[1:, ::2],
        "backwards": base.copy()[::-1, ::-1], "scalar": np.array(2.5), "bool": base > 7, "complex": base * 1j,
        "repeated": np.broadcast_to(np.array([1, 2, 3], np.int16), (4, 3)), "big-endian": base.astype(">f4"),
        "one row": base.copy()[2], "window": np.lib.stride_tricks.sliding_window_view(np.arange(9), 3),
    }  # fmt: skip
    expected = {name: np.array(array) for name, array in state.items()}
    state["empty"] = np.zeros((0, 3))
    rank = Rank.of(state)
    staged = rank.stage_all(arena)
    for array in state.values():
        if array.flags.writeable:
            array[...] = np.logical_not(array) if array.dtype == bool else -1
    found = everything(rank.source(staged, arena), rank.table)
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        value = found[name]
        assert isinstance(value, np.ndarray) and value.dtype == array.dtype.newbyteorder("<")
        np.testing.assert_array_equal(value, array)
        assert not np.shares_memory(value, state[name])


def test_objects_keep_what_they_were_at_the_moment(arena: Arena) -> None:
    inner = np.arange(3)
    state: dict[str, Any] = {"set": {1, 2}, "text": "x", "own": PerRank([2, {"k": inner}]), "empty": b""}
    rank = Rank.of(state)
    before = {item.index.fqn: rank.planner.get_data(item) for item in rank.plan.objects()}
    staged = rank.stage_all(arena)
    inner += 7
    state["set"].add(3)
    state["own"].value.append(3)
    assert everything(rank.source(staged, arena), rank.table) == before


def test_what_is_staged_survives_the_state(arena: Arena) -> None:
    array = np.arange(1000)
    died = weakref.ref(array)
    rank = Rank.of({"a": array})
    staged, table, payload = rank.stage_all(arena), rank.table, rank
    source = payload.source(staged, arena)
    del array, rank, payload
    gc.collect()
    assert died() is None
    assert differing(everything(source, table), {"a": np.arange(1000)}) == []


def test_a_state_of_nothing_is_staged(arena: Arena) -> None:
    assert staged_values({}, arena) == {}
    assert staged_values({"empty": np.zeros((3, 0))}, arena) == {}


def test_the_next_save_uses_the_same_memory(arena: Arena) -> None:
    state = {str(number): np.full(1000 + number, number) for number in range(50)}
    first = Rank.of(state).stage_all(arena)
    nbytes, generation = arena.nbytes, arena.generation
    for number, array in enumerate(state.values()):
        array[...] = number + 100
    found = staged_values(state, arena)
    assert (arena.nbytes, arena.generation) == (nbytes, generation)
    assert first.offset.tolist() == Rank.of(state).stage_all(arena).offset.tolist()
    assert differing(found, state) == []


# -- what is staged ---------------------------------------------------------------------------------------------------


def test_on_a_hit_a_rank_stages_only_what_it_writes(arena: Arena) -> None:
    values = {f"t{number}": np.full((64, 16), float(number)) for number in range(4)}
    ranks = [Rank.of(values | {"o": {3}}, rank=rank, world=2) for rank in range(2)]
    lists = plan_together(*ranks)
    staged = [rank.stage_own(writes, arena) for rank, writes in zip(ranks, lists, strict=True)]
    assert [int(part.nbytes.sum()) for part in staged] == [2 * 64 * 16 * 8] * 2
    assert [len(part.object_leaf) for part in staged] == [1, 0]


def _random_ranks(rng: Random, count: int) -> list[Rank]:
    """Sharded tensors, replicated ones, objects, and second names that share memory on some ranks only."""
    states: list[dict[str, Any]] = [{} for _ in range(count)]
    for number in range(10):
        dtype, name = rng.choice(DTYPES), f"t{number}"
        bits = random_bits(number, random_shape(rng), dtype)
        hands = deal(rng, random_cut(rng, bits.shape), count)
        is_named_twice = rng.random() < 0.5
        for state, hand in zip(states, hands, strict=True):
            state[name] = ShardedArray.cut(bits, hand, dtype.name)
            if is_named_twice:
                is_tied = rng.random() < 0.7
                state[f"s{number}"] = state[name] if is_tied else ShardedArray.cut(bits, hand, dtype.name)
    large = np.arange(rng.randint(1, 60_000))
    for rank, state in enumerate(states):
        state |= {"replicated": large.copy(), "o": {1, "x"}, "own": PerRank(rank), f"only {rank}": np.ones(rank + 1)}
    return [Rank.of(state, rank=rank, world=count) for rank, state in enumerate(states)]


@pytest.mark.parametrize("on_hit", [False, True], ids=["miss", "hit"])
@pytest.mark.parametrize("seed", range(15))
def test_any_plan_that_ranks_agree_on_is_served(seed: int, on_hit: bool) -> None:
    rng = Random(seed)
    ranks = _random_ranks(rng, rng.randint(1, 4))
    for rank, writes in zip(ranks, plan_together(*ranks), strict=True):
        arena = Arena()
        source = rank.source(rank.stage_own(writes, arena) if on_hit else rank.stage_all(arena), arena)
        plan, planner = SavePlan(rank.table, writes), rank.planner
        spans, objects = plan.spans(), plan.objects()
        expected = {span.key: np.asarray(planner.get_data(span.item)) for span in spans}
        batch = dict(zip([span.key for span in spans], source.get_batch(spans), strict=True))
        assert differing(batch, expected) == []
        assert differing({span.key: source.get_data(span.item) for span in spans}, expected) == []
        assert [source.get_data(item) for item in objects] == [planner.get_data(item) for item in objects]
        arena.close()


def test_memory_of_two_names_is_staged_once(arena: Arena) -> None:
    shared = np.arange(4096.0)
    rank = Rank.of({"a": shared, "b": shared, "c": shared.copy(), "d": shared[:]})
    staged = rank.stage_all(arena)
    places = list(zip(staged.segment.tolist(), staged.offset.tolist(), strict=True))
    assert len(places) == 4 and len(set(places)) == 2
    shared += 1
    found = everything(rank.source(staged, arena), rank.table)
    assert differing(found, dict.fromkeys("abcd", np.arange(4096.0))) == []


def test_a_tied_name_that_another_rank_has_apart_is_served_under_its_own_name(arena: Arena) -> None:
    shared = np.arange(4096.0)
    tied = Rank.of({"a": shared, "b": shared, "more": np.zeros(4)}, rank=0, world=2)
    apart = Rank.of({"a": shared.copy(), "b": shared.copy(), "big": np.zeros(100_000)}, rank=1, world=2)
    writes = plan_together(tied, apart)[0]
    final = SavePlan(tied.table, writes)
    assert {"a", "b"} <= {span.item.index.fqn for span in final.spans()}
    for staged in (tied.stage_all(arena), tied.stage_own(writes, arena)):
        assert len(set(staged.offset.tolist())) == len(staged.offset) - 1
        values = tied.source(staged, arena).get_batch(final.spans())
        by_name = {span.item.index.fqn: value for span, value in zip(final.spans(), values, strict=True)}
        np.testing.assert_array_equal(by_name["b"], shared)


class Shifted(StandardSavePlanner):
    """Stores something else under each name."""

    asked: list[str]

    def get_data(self, item: WriteItem) -> Any:
        self.asked = [*getattr(self, "asked", []), item.index.fqn]
        found = super().get_data(item)
        return b"other" if item.type is ItemType.BYTES else np.asarray(found) + len(item.index.fqn)


def test_a_planner_of_ones_own_is_obeyed_under_every_name(arena: Arena) -> None:
    shared = np.arange(5.0)
    rank = Rank.of({"a": shared, "bbb": shared, "object": {1}}, Shifted())
    found = everything(rank.source(rank.stage_all(arena), arena), rank.table)
    assert differing(found, {"a": shared + 1}) == []
    assert differing(found, {"bbb": shared + 3}) == []
    assert found["object"] == b"other"
    assert isinstance(rank.planner, Shifted) and sorted(rank.planner.asked) == ["a", "bbb", "object"]


class Batched(StandardSavePlanner):
    def get_batch(self, spans: Sequence[Any]) -> Sequence[Any]:
        return [np.asarray(self.get_data(span.item)) * 2 for span in spans]


def test_a_planner_that_gives_batches_of_its_own_is_obeyed(arena: Arena) -> None:
    found = staged_values({"a": np.arange(5), "b": np.ones(3)}, arena, planner=Batched())
    assert differing(found, {"a": np.arange(5) * 2}) == []
    assert differing(found, {"b": np.ones(3) * 2}) == []


class Narrowing(StandardSavePlanner):
    """Leaves some of the state out, and cuts the rest."""

    def build_local_plan(self) -> SavePlan:
        plan = super().build_local_plan()
        items = []
        for item in plan.items:
            if item.index.fqn == "cut":
                for start in (6, 1):
                    index = MetadataIndex("cut", (start, 0))
                    items.append(WriteItem(index, item.type, (2, 3), 48, item.leaf, 0, (start, 0), item.dtype, (9, 3)))
            elif item.index.fqn != "left out":
                items.append(item)
        return plan.with_items(items)


def test_a_plan_of_less_than_the_state_is_staged_in_the_terms_that_travel(arena: Arena) -> None:
    cut = np.arange(27.0).reshape(9, 3)
    state = {"a first": np.ones(3), "cut": cut, "left out": np.ones(9), "x": np.arange(4), "y": {1}}
    rank = Rank.of(state, Narrowing())
    assert rank.plan.held()[1] is not None
    staged = rank.stage_all(arena)
    assert int(staged.nbytes.sum()) == 24 + 2 * 48 + 32
    source = rank.source(staged, arena)
    plan = SavePlan.of_everything(rank.table)
    values = {(span.item.index.fqn, span.item.index.offset): source.get_data(span.item) for span in plan.spans()}
    assert sorted(values) == [("a first", (0,)), ("cut", (1, 0)), ("cut", (6, 0)), ("x", (0,))]
    by_name = {f"{name} {offset}": value for (name, offset), value in values.items()}
    assert differing(by_name, {"cut (1, 0)": cut[1:3], "cut (6, 0)": cut[6:8]}) == []


def test_a_plan_that_lost_items_since_it_was_agreed_is_refused(arena: Arena) -> None:
    rank = Rank.of({"a": np.ones(3), "b": np.ones(3), "o": {1}})
    plan = SavePlan.of_everything(rank.table)
    for items in (plan.items[1:], plan.items[:-1]):
        with pytest.raises(PlanningError, match="rank 3.*finalize_plan must keep the items of the plan"):
            stage(rank.plan.with_items(items), plan.writes, rank.planner, arena, rank=3)


# -- what the planner gives is checked as the write engine checks it --------------------------------------------------


def _giving(give: Callable[[WriteItem, Any], Any]) -> StandardSavePlanner:
    class Giving(StandardSavePlanner):
        def get_data(self, item: WriteItem) -> Any:
            return give(item, super().get_data(item)) if item.index.fqn in ("b", "o") else super().get_data(item)

    return Giving()


class TooFew(StandardSavePlanner):
    def get_batch(self, spans: Sequence[Any]) -> Sequence[Any]:
        return list(super().get_batch(spans))[1:]


FAULTY: dict[str, Callable[[], StandardSavePlanner]] = {
    "another shape": lambda: _giving(lambda item, value: value[:1] if item.index.fqn == "b" else value),
    "another number of dimensions": lambda: _giving(
        lambda item, value: value[None] if item.index.fqn == "b" else value
    ),
    "another dtype": lambda: _giving(lambda item, value: value.astype("f4") if item.index.fqn == "b" else value),
    "no array": lambda: _giving(lambda item, value: [1.0] if item.index.fqn == "b" else value),
    "an object that is no bytes": lambda: _giving(lambda item, value: "x" if item.index.fqn == "o" else value),
    "too few": TooFew,
    "nothing": lambda: _giving(lambda item, value: None),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_planner_that_gives_something_else_fails_as_in_a_save_that_waits(
    arena: Arena, tmp_path: Path, fault: str
) -> None:
    state = {"a": np.ones((4, 2)), "b": np.arange(6.0).reshape(3, 2), "o": {1}}
    rank = Rank.of(state, FAULTY[fault]())
    context = WriteContext(3, 4, False, SAVE_ID, "")
    with pytest.raises(DcpError) as expected:
        write_files(LocalStorage(tmp_path), context, rank.plan.spans(), rank.plan.objects(), rank.planner)
    with pytest.raises(DcpError) as found:
        rank.stage_all(arena)
    assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))


def test_what_a_planner_raises_is_raised(arena: Arena) -> None:
    def give(item: WriteItem, value: Any) -> Any:
        raise KeyError(item.index.fqn)

    with pytest.raises(KeyError, match="b"):
        Rank.of({"a": np.ones(3), "b": np.ones(3)}, _giving(give)).stage_all(arena)
    assert differing(staged_values({"a": np.ones(3)}, arena), {"a": np.ones(3)}) == []


def test_a_lack_of_memory_names_the_bytes_and_what_to_do(arena: Arena) -> None:
    def give(item: WriteItem, value: Any) -> Any:
        raise MemoryError("none left")

    rank = Rank.of({"a": np.ones(3), "b": np.ones(5)}, _giving(give))
    with pytest.raises(StorageError, match=r"rank 3: no memory to stage 64 bytes \(none left\).*use save\(\)"):
        rank.stage_all(arena)
    huge = np.broadcast_to(np.float64(1), (1 << 55,))
    with pytest.raises(StorageError, match=r"no shared memory of 288230376151711744 bytes.*use save\(\)"):
        Rank.of({"huge": huge}).stage_all(arena)


def test_a_planner_is_asked_for_a_bounded_number_of_bytes_at_a_time(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "BATCH_BYTES", 4096)
    monkeypatch.setattr(staging, "BATCH_REGIONS", 10)
    asked: list[list[int]] = []

    class Watching(StandardSavePlanner):
        def get_batch(self, spans: Sequence[Any]) -> Sequence[Any]:
            asked.append([span.nbytes for span in spans])
            return super().get_batch(spans)

    sizes = [*[16] * 25, 700, 800, 900, 4096, 4097, 1, 100_000]
    state = {f"{number:02}": np.full(size, number, np.uint8) for number, size in enumerate(sizes)}
    found = staged_values(state, arena, planner=Watching())
    assert [number for batch in asked for number in batch] == sizes
    assert all(len(batch) <= 10 and (sum(batch) <= 4096 or len(batch) == 1) for batch in asked)
    assert [len(batch) for batch in asked] == [10, 10, 8, 1, 1, 1, 1]
    assert differing(found, state) == []


def test_copies_that_a_planner_makes_do_not_pile_up(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BATCH_BYTES", 1 << 16)
    alive: list[weakref.ref[Any]] = []
    most = 0

    class Copying(StandardSavePlanner):
        def get_data(self, item: WriteItem) -> Any:
            nonlocal most
            most = max(most, sum(made() is not None for made in alive))
            made = np.asarray(super().get_data(item)).copy()
            alive.append(weakref.ref(made))
            return made

    staged_values({str(number): np.zeros(1 << 13) for number in range(20)}, arena, planner=Copying())
    assert len(alive) == 20 and most <= 1


# -- several threads --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_arrays_of_any_shape_and_strides_are_cut_and_copied_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=4)))
    dtype = BY_NAME[data.draw(st.sampled_from(["uint8", "bfloat16", "complex128"]))]
    bits = random_bits(data.draw(st.integers(0, 99)), shape, dtype)
    source = Memory.of(bits, data.draw(st.sampled_from(LAYOUTS))).view
    target = np.zeros(shape, dtype.bits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "PIECE_BYTES", data.draw(st.sampled_from([16, 17, 64, 200])))
        with HostCopies(data.draw(st.integers(1, 3))) as copies:
            copies.copy(target, source)
    assert same_bits(target, bits)


def test_before_a_large_region_is_asked_for_earlier_ones_are_done_with(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "copying_threads", lambda: 2)
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 1 << 15)
    monkeypatch.setattr(staging, "_LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(staging, "BATCH_BYTES", 1)
    copyto = np.copyto
    alive: list[weakref.ref[Any]] = []

    def slowly(target: Array, source: Array) -> None:
        time.sleep(0 if threading.current_thread() is threading.main_thread() else 0.01)
        copyto(target, source)

    class Copying(StandardSavePlanner):
        def get_data(self, item: WriteItem) -> Any:
            assert [made for made in alive if made() is not None] == []
            made = np.asarray(super().get_data(item)).copy()
            alive.append(weakref.ref(made))
            return made

    monkeypatch.setattr(np, "copyto", slowly)
    staged_values({str(number): np.ones(1 << 13) for number in range(4)}, arena, planner=Copying())
    assert len(alive) == 4


def test_large_arrays_are_copied_by_several_threads_that_end_with_the_call(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(staging, "copying_threads", lambda: 3)
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(staging, "_LARGE_BYTES", 1 << 18)
    copiers: set[str] = set()
    copyto = np.copyto

    def watch(target: Array, source: Array) -> None:
        copiers.add(threading.current_thread().name.rpartition("_")[0])
        copyto(target, source)

    monkeypatch.setattr(np, "copyto", watch)
    state = {
        "flat": np.random.default_rng(1).integers(0, 99, 1 << 15), "matrix": np.ones((64, 1000)).view(np.matrix),
        "steps": np.arange(1 << 16)[::3], "columns": np.arange(60_000).reshape(3, 20_000).T,
    }  # fmt: skip
    state["matrix"] = np.asarray(state["matrix"])
    found = staged_values(state, arena)
    assert copiers == {"", "dcp-stage"}
    assert differing(found, state) == []
    assert set(threading.enumerate()) <= before


def test_a_failure_leaves_no_thread_that_copies(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(staging, "copying_threads", lambda: 3)
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(staging, "BATCH_BYTES", 1 << 12)

    def give(item: WriteItem, value: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Rank.of({"a": np.ones(1 << 20), "b": np.ones(3)}, _giving(give)).stage_all(arena)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("waiting", [0, 1000], ids=["seen early", "seen at the end"])
def test_a_copy_that_fails_in_a_thread_fails_the_call(monkeypatch: pytest.MonkeyPatch, waiting: int) -> None:
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 400)
    monkeypatch.setattr(host_copies, "_PIECES_WAITING", waiting)
    target = np.zeros(1000, np.uint8)
    target.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"), HostCopies(2) as copies:
        copies.copy(target, np.ones(1000, np.uint8))


@pytest.mark.parametrize(
    ("cores", "neighbours", "expected"),
    [(1, None, 1), (2, None, 2), (16, None, 4), (16, "8", 2), (16, "5", 3), (8, "16", 1), (8, "0", 4), (8, "x", 4)],
)
def test_ranks_of_one_host_share_its_processors(
    monkeypatch: pytest.MonkeyPatch, cores: int, neighbours: str | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if neighbours is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", neighbours)
    assert copying_threads() == expected


# -- devices ----------------------------------------------------------------------------------------------------------


def _device_state(device: SimulatedDevice) -> tuple[dict[str, Any], dict[str, Array]]:
    """Tensors of every type on a device, others beside them on the host; and their bits."""
    state: dict[str, Any] = {"host": np.arange(7)}
    bits: dict[str, Array] = {"host": np.arange(7)}
    for seed, dtype in enumerate(DTYPES):
        for shape in ((5, 7), (), (3,)):
            name = f"{dtype.name}-{shape}"
            bits[name] = random_bits(seed, shape, dtype)
            state[name] = device.put(bits[name], dtype.name)
    whole = device.put(random_bits(99, (8, 6), BY_NAME["int32"]))
    state["part"] = DeviceArray(device, whole.dtype, whole.memory[1::2, ::-2])
    bits["part"] = whole.memory[1::2, ::-2].copy()
    state["nothing"] = device.put(np.zeros((0, 4)))
    return state, bits


def _spoil(state: Mapping[str, Any]) -> None:
    for value in state.values():
        overwrite(value.memory if isinstance(value, DeviceArray) else value)


@pytest.mark.parametrize("pace", PACES)
def test_device_tensors_are_copied_straight_into_the_arena_and_awaited_once(arena: Arena, pace: Pace) -> None:
    with SimulatedDevice(pace=pace, host_limit_nbytes=0) as device:
        state, bits = _device_state(device)
        for _ in range(2):
            rank = Rank.of(state)
            staged = rank.stage_all(arena)
            assert device.registered_nbytes == arena.nbytes
            _spoil(state)
            found = everything(rank.source(staged, arena), rank.table)
            assert differing(found, bits) == []
            _spoil(state)
        assert device.blocking_nbytes == 0
        assert device.copies_out == 2 * (len(bits) - 1)
        assert pace != "late" or device.most_in_flight == len(bits) - 1, "one wait at the end"
        arena.close()
        assert device.registered_nbytes == 0


@pytest.mark.parametrize("pace", PACES)
def test_where_memory_cannot_be_registered_bits_pass_through_a_few_buffers(
    arena: Arena, pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "DEVICE_BUFFER_BYTES", 1 << 20)
    with SimulatedDevice(pace=pace, can_register=False, host_limit_nbytes=4 << 20) as device:
        state, bits = _device_state(device)
        bits["large"] = random_bits(5, (3 << 20,), BY_NAME["bfloat16"])
        state["large"] = device.put(bits["large"], "bfloat16")
        found = staged_values(state, arena)
        assert differing(found, bits) == []
        assert device.blocking_nbytes == 0 and device.copies_out > len(bits)
        gc.collect()
        assert device.host_nbytes == 0


def test_a_device_whose_adapter_knows_nothing_of_registering_will_do(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SimulatedDevice, "register_memory")
    with SimulatedDevice() as device:
        state, bits = _device_state(device)
        found = staged_values(state, arena)
        assert differing(found, bits) == []


def test_a_device_that_only_blocks_will_do(arena: Arena) -> None:
    with SimulatedDevice(has_streams=False) as device:
        state, bits = _device_state(device)
        found = staged_values(state, arena)
        assert differing(found, bits) == []
        assert device.copies_out == 0


def test_two_devices_share_the_arena(arena: Arena) -> None:
    with SimulatedDevice("simulated:0") as first, SimulatedDevice("simulated:1") as second:
        (one, bits_of_one), (other, bits_of_other) = _device_state(first), _device_state(second)
        found = staged_values({"one": one, "other": other}, arena)
        for key, bits in (("one", bits_of_one), ("other", bits_of_other)):
            assert differing(found, {f"{key}.{name}": array for name, array in bits.items()}) == []


def test_large_device_tensors_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "PART_BYTES", 1 << 10)
    bits = np.random.default_rng(3).integers(0, 99, (3, 700, 5)).astype(np.int16)
    with SimulatedDevice() as device:
        target = np.empty(bits.nbytes, np.uint8)

        class Memory:
            def pinned_by(self, register: Any) -> None:
                register(target)

            def is_pinned(self, segment: int, register: Any) -> bool:
                return segment == 4

        view = device.put(bits)
        with DeviceCopies(Memory()) as copies:
            copies.copy(DeviceBits(view, device, bits.shape, bits.dtype), target, 4)
        assert same_bits(target.view(np.int16).reshape(bits.shape), bits)
        assert device.copies_out > bits.nbytes >> 10


@pytest.mark.parametrize("can_register", [True, False])
@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("failing", [0, 5, 20])
def test_when_a_copy_fails_all_others_are_awaited(arena: Arena, pace: Pace, failing: int, can_register: bool) -> None:
    faults = {failing: RuntimeError("the device fell off")}
    with SimulatedDevice(pace=pace, faults=faults, can_register=can_register) as device:  # its check finds others
        state, _ = _device_state(device)
        with pytest.raises(RuntimeError, match="the device fell off"):
            Rank.of(state).stage_all(arena)
        device.check()
        state, bits = _device_state(device)
        found = staged_values(state, arena)
        assert differing(found, bits) == []


@pytest.mark.parametrize("can_register", [True, False])
@pytest.mark.parametrize("pace", PACES)
def test_when_the_planner_fails_the_copies_that_run_are_awaited(
    arena: Arena, pace: Pace, can_register: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(item: WriteItem, value: Any) -> Any:
        raise KeyError("later")

    with SimulatedDevice(pace=pace, can_register=can_register) as device:
        rank = Rank.of({"a": device.put(np.arange(9)), "b": np.ones(2)}, _giving(give))
        monkeypatch.setattr(staging, "BATCH_REGIONS", 1)
        with pytest.raises(KeyError, match="later"):
            rank.stage_all(arena)
        assert device.copies_out == 1
        device.check()


# -- on the way out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 4])
def test_files_written_from_the_arena_are_those_written_from_the_state(
    arena: Arena, tmp_path: Path, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parts > 1:
        monkeypatch.setattr(layout, "PART_NBYTES", 1 << 18)
    rng = np.random.default_rng(0)
    state: dict[str, Any] = {f"w{number}": rng.standard_normal((number * 97 % 300, 64)) for number in range(40)}
    state |= {"t": state["w7"].T, "tied": state["w9"], "z": np.array(1.0), "o": {1, 2}, "l": [1, {"x": None}]}
    ranks = [Rank.of(state, rank=number, world=2) for number in range(2)]
    for number, (rank, writes) in enumerate(zip(ranks, plan_together(*ranks), strict=True)):
        staged = rank.stage_all(arena)
        views = SegmentViews()
        views.replace([(os.dup(descriptor), nbytes) for descriptor, nbytes in arena.descriptors()])
        final, direct = SavePlan(rank.table, writes), rank.in_planner_terms(writes)
        context = WriteContext(number, 2, False, SAVE_ID, "")
        for name, plan, source in (
            ("staged", final, rank.source(staged, views)), ("direct", direct, rank.planner)
        ):  # fmt: skip
            (tmp_path / name).mkdir(exist_ok=True)
            write_files(LocalStorage(tmp_path / name), context, plan.spans(), plan.objects(), source)
    names = sorted(path.name for path in (tmp_path / "direct").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "staged").iterdir()) and len(names) >= 2
    for name in names:
        assert (tmp_path / "staged" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes(), name


def test_the_memory_of_answers_is_the_arena_itself(arena: Arena) -> None:
    rank = Rank.of({"a": np.arange(12.0).reshape(4, 3)})
    staged = rank.stage_all(arena)
    source = rank.source(staged, arena)
    (array,) = source.get_batch(SavePlan.of_everything(rank.table).spans())
    start = int(staged.offset[0])
    arena.buffer(staged_place(staged))[:] = 7
    assert array.tobytes() == bytes([7]) * 96 and start % 64 == 0


def staged_place(staged: Staged, row: int = 0) -> Any:
    from dcp_core.background.arena import Place

    return Place(int(staged.segment[row]), int(staged.offset[row]), int(staged.nbytes[row]))


def test_parts_of_boxes_and_of_boxes_staged_in_pieces_are_found(arena: Arena) -> None:
    bits = np.arange(60).reshape(10, 6)
    rank = Rank.of({"a": bits})
    (item,) = rank.plan.items

    def part(start: tuple[int, int], sizes: tuple[int, int]) -> WriteItem:
        nbytes = sizes[0] * sizes[1] * 8
        return WriteItem(MetadataIndex("a", start), item.type, sizes, nbytes, 0, 0, start, item.dtype, (10, 6))

    pieces = [part((6, 0), (4, 6)), part((0, 0), (3, 6)), part((3, 0), (3, 6))]
    writes = rank.plan.with_items(pieces).laid_out().writes
    staged = stage(rank.plan.with_writes(writes), writes, rank.planner, arena)
    source = StagedSource(staged, rank.table, arena)
    wanted = [part((1, 1), (2, 4)), part((3, 5), (3, 1)), part((6, 0), (4, 6)), part((9, 5), (1, 1))]
    spans = rank.plan.with_items(wanted).spans()
    for span, array in zip(spans, source.get_batch(spans), strict=True):
        box = Box(span.item.start, span.item.sizes)
        expected = bits[tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))]
        assert (
            differing({"one": array, "again": source.get_data(span.item)}, {"one": expected, "again": expected}) == []
        )
    assert len(spans) == 4
    for missing in (part((2, 0), (2, 6)), part((0, 0), (10, 6))):
        with pytest.raises(PlanningError, match="'a': the region at .* was not staged on this rank"):
            source.get_data(missing)
        with pytest.raises(PlanningError, match="'a': the region at .* was not staged on this rank"):
            source.get_batch(rank.plan.with_items([missing]).spans())
        with pytest.raises(PlanningError, match="'a': the region at .* was not staged on this rank"):
            source.get_batch(list(rank.plan.with_items([missing]).spans()))


def test_what_was_not_staged_is_refused(arena: Arena) -> None:
    rank = Rank.of({"a": np.ones(3), "o": {1}})
    plan = rank.plan.with_items([])
    empty = stage(plan, plan.writes, rank.planner, arena)
    source = StagedSource(empty, rank.table, arena)
    for item in rank.plan.items:
        with pytest.raises(PlanningError, match=f"'{item.index.fqn}'.*was not staged"):
            source.get_data(item)


def test_a_cancelled_save_gets_no_more_bytes(arena: Arena) -> None:
    rank = Rank.of({"a": np.ones(3), "o": {1}})
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 3:
            raise StorageError("cancelled")

    source = rank.source(rank.stage_all(arena), arena, check=check)
    plan = SavePlan.of_everything(rank.table)
    source.get_batch(plan.spans())
    source.get_batch(list(plan.spans()))
    source.get_data(plan.items[1])
    for ask in (
        lambda: source.get_batch(plan.spans()), lambda: source.get_batch(list(plan.spans())),
        lambda: source.get_data(plan.items[0]), lambda: source.get_data(plan.items[1]),
    ):  # fmt: skip
        with pytest.raises(StorageError, match="cancelled"):
            ask()


def test_many_regions_are_found_by_columns_with_one_look_at_each_segment(arena: Arena) -> None:
    memory = np.arange(20_000)
    rank = Rank.of({f"layer.{row}": memory[row : row + 1] for row in range(20_000)})
    staged = rank.stage_all(arena)
    looks: list[Any] = []

    class Watched:
        def buffer(self, place: Any) -> Any:
            looks.append(place)
            return arena.buffer(place)

    source = rank.source(staged, Watched())
    spans = SavePlan.of_everything(rank.table).spans()
    values = [array for first in range(0, 20_000, 512) for array in source.get_batch(spans[first : first + 512])]
    assert len(looks) == len(arena.descriptors())
    assert "spans" not in vars(spans.every) and "columns" not in vars(spans.every), "no item was made"
    assert sorted(int(array[0]) for array in values) == memory.tolist()


def test_columns_that_are_not_those_of_what_was_staged_are_refused(arena: Arena) -> None:
    plain = Rank.of({"a": np.ones(3)}).stage_all(arena).to_plain()
    with pytest.raises(CoordinationError, match="expected arrays"):
        Staged.from_plain({name: column for name, column in plain.items() if name != "offset"})
    with pytest.raises(CoordinationError, match="expected arrays"):
        Staged.from_plain(plain | {"offset": [0]})
