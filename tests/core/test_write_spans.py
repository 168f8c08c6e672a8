"""What a save plan writes: the same as columns, as spans and as items; and bits by the batch as one by one."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_core.dtype import BY_CODE, BY_NAME
from dcp_core.errors import CorruptError
from dcp_core.formats.safetensors_file import HeaderColumns, HeaderEntry, build_header
from dcp_core.metadata import MetadataIndex
from dcp_core.planning import balance, layout
from dcp_core.planning.items import ItemType, WriteItem
from dcp_core.planning.leaves import DeviceBits
from dcp_core.planning.path_names import names_of_paths
from dcp_core.planning.planners import PlannerContext
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.planning.write_columns import WriteColumns, columns_of
from dcp_core.recipes.job import ObjectEncoding
from dcp_core.state_path import PathKey, StatePath, encode_path, key_path, plain_name
from dcp_core.testing.device_ranks import DeviceRankAdapter, ShardedDeviceArray
from dcp_core.testing.devices import SimulatedDevice
from dcp_core.testing.numpy_ranks import even_boxes
from tests.core.simulated_saves import Simulation, World, make_world, simulate

# -- names of paths ---------------------------------------------------------------------------------------------------

KEYS = st.one_of(
    st.text(max_size=5),
    st.text("abc.", min_size=1, max_size=4),
    st.sampled_from(["x" * 127, "x" * 128, "", "\ud800", "é", "s", "s\x03"]),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.binary(max_size=3),
    st.tuples(st.integers(0, 5), st.text(max_size=2)),
)
COMPONENTS = st.one_of(
    st.builds(lambda key: PathKey("key", key), KEYS),
    st.builds(PathKey, st.sampled_from(["list", "tuple"]), st.integers(0, 1000)),
)


@given(st.lists(st.lists(COMPONENTS, max_size=5).map(tuple), max_size=8))
@example([()])
@example([(), key_path("a"), (), key_path("b", "c")])
@example([key_path("a", "b"), key_path("é", "b"), key_path("a", 1), key_path("c", "d")])
def test_names_of_many_paths_are_those_of_each(paths: list[StatePath]) -> None:
    assert names_of_paths([encode_path(path) for path in paths]) == [plain_name(path) for path in paths]


def test_long_paths_have_names() -> None:
    path = key_path(*(f"component {i}" for i in range(128)))
    assert names_of_paths([encode_path(path), encode_path(key_path("a"))]) == [plain_name(path), "a"]


@pytest.mark.parametrize("junk", [b"s", b"s\x05abc", b"s\x01as", b"s\x01a?", b"?", b"s\x80\x01a"])
def test_bytes_that_are_no_path_are_refused_whatever_comes_after_them(junk: bytes) -> None:
    for paths in ([junk], [junk, encode_path(key_path("abcdef"))], [encode_path(key_path("abcdef")), junk]):
        with pytest.raises(CorruptError):
            names_of_paths(paths)


# -- spans, columns and items -----------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> World:
    return make_world(Random(draw(st.integers(0, 2**32))), draw(st.integers(1, 4)), draw(st.integers(1, 14)))


def planned(world: World) -> Simulation:
    """A plan in which small tensors are cut too, and few bytes are several files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "TINY_NBYTES", 8)
        patch.setattr(layout, "PART_NBYTES", 100)
        return simulate(world)


def item_by_hand(plan: SavePlan, row: int) -> WriteItem:
    table, writes = plan.table, plan.writes
    leaf, box = int(writes.leaf[row]), int(writes.ordinal[row])
    ndim, dtype = int(table.ndim[leaf]), BY_CODE[int(table.dtype[leaf])]
    held = int(table.boxes[:leaf].sum()) + box
    start, sizes = writes.start[row, :ndim].tolist(), writes.sizes[row, :ndim].tolist()
    offset = [a + b for a, b in zip(table.offsets[held, :ndim].tolist(), start, strict=True)]
    nbytes = dtype.itemsize
    for size in sizes:
        nbytes *= size
    return WriteItem(
        MetadataIndex(plan.names[leaf], tuple(offset)), ItemType.TENSOR, tuple(sizes), nbytes, leaf, box, tuple(start),
        dtype, tuple(table.shape[leaf, :ndim].tolist()),
    )  # fmt: skip


@given(worlds())
def test_items_are_what_the_write_list_says(world: World) -> None:
    sim = planned(world)
    for plan in sim.plans:
        tensors = [item_by_hand(plan, row) for row in range(len(plan.writes.leaf))]
        objects = [
            WriteItem(MetadataIndex(plan.names[leaf]), ItemType.BYTES, (), 0, leaf)
            for leaf in plan.writes.object_leaf.tolist()
        ]
        assert list(plan.items) == tensors + objects
        assert plan.objects() == objects
        assert len(plan.items) == len(tensors + objects)
        for row, item in enumerate(tensors + objects):
            assert plan.items[row] == item
            assert plan.items[row - len(plan.items)] == item
        assert plan.items[1:-1] == tuple((tensors + objects)[1:-1])
        with pytest.raises(IndexError):
            plan.items[len(plan.items)]


def as_lists(columns: WriteColumns) -> list[Any]:
    arrays = (columns.part, columns.byte_offset, columns.nbytes, columns.dtype, columns.ndim)
    sizes = [row[:ndim] for row, ndim in zip(columns.sizes.tolist(), columns.ndim.tolist(), strict=True)]
    return [list(columns.keys), *(array.tolist() for array in arrays), sizes]


@given(worlds(), st.data())
def test_spans_and_their_columns_say_the_same(world: World, data: st.DataObject) -> None:
    for plan in planned(world).plans:
        spans = plan.spans()
        every = [spans[row] for row in range(len(spans))]
        assert list(spans) == every
        assert as_lists(spans.columns) == as_lists(columns_of(every))
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(every))] * 2)))
        part = spans[start:stop]
        assert list(part) == every[start:stop]
        assert as_lists(part.columns) == as_lists(columns_of(every[start:stop]))  # type: ignore[attr-defined]
        assert list(part[1:]) == every[start:stop][1:]
        assert list(spans[::-2]) == every[::-2]
        assert [(part, start, stop) for part, start, stop in spans.columns.part_bounds()] == [
            (part, *_first_and_stop([span.part for span in every], part)) for part in sorted({s.part for s in every})
        ]


def _first_and_stop(parts: Sequence[int], part: int) -> tuple[int, int]:
    return parts.index(part), len(parts) - parts[::-1].index(part)


@given(worlds())
def test_headers_made_of_columns_and_of_entries_are_the_same(world: World) -> None:
    for plan in planned(world).plans:
        spans = plan.spans()
        if len(spans):
            c = spans.columns
            for _, start, stop in c.part_bounds():
                own = c.some(start, stop)
                columns = HeaderColumns(own.keys, own.dtype, own.ndim, own.sizes, own.byte_offset, own.nbytes)
                entries = [
                    HeaderEntry(s.key, s.dtype, s.item.sizes, s.byte_offset, s.nbytes) for s in spans[start:stop]
                ]
                assert build_header(columns).header == build_header(entries).header


# -- bits -------------------------------------------------------------------------------------------------------------


@given(worlds())
def test_a_batch_of_bits_is_what_each_item_gives(world: World) -> None:
    sim = planned(world)
    for planner, plan in zip(sim.planners, sim.plans, strict=True):
        spans = plan.spans()
        singles = [planner.get_data(span.item) for span in spans]
        for batch in (planner.get_batch(spans), planner.get_batch(list(spans)), *_halves(planner, spans)):
            assert len(batch) == len(singles)
            for one, other in zip(batch, singles, strict=True):
                np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def _halves(planner: StandardSavePlanner, spans: Any) -> list[list[Any]]:
    middle = len(spans) // 2
    return [[*planner.get_batch(spans[:middle]), *planner.get_batch(spans[middle:])]]


class Doubling(StandardSavePlanner):
    """Changes what is written."""

    def get_data(self, item: WriteItem) -> Any:
        bits = super().get_data(item)
        return np.asarray(bits) * 2 if item.type is ItemType.TENSOR else bits


def planner_of(state: dict[str, Any], kind: type[StandardSavePlanner]) -> tuple[StandardSavePlanner, SavePlan]:
    planner = kind()
    planner.configure_planner(state, PlannerContext(DeviceRankAdapter().describe, ObjectEncoding()))
    return planner, planner.build_local_plan()


def test_a_batch_goes_through_a_planners_own_get_data() -> None:
    planner, plan = planner_of({"a": np.arange(3.0), "b": np.arange(4.0)}, Doubling)
    assert [np.asarray(bits).tolist() for bits in planner.get_batch(plan.spans())] == [[0, 2, 4], [0, 2, 4, 6]]
    planner, plan = planner_of({"a": np.arange(3.0)}, StandardSavePlanner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "get_data", lambda item: np.full(3, item.leaf + 7.0))
        assert [np.asarray(bits).tolist() for bits in planner.get_batch(plan.spans())] == [[7, 7, 7]]


def test_what_lies_on_a_device_is_not_copied_before_somebody_wants_it() -> None:
    device = SimulatedDevice()
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    boxes = even_boxes((6, 4), 2, 1)
    state = {"cut": ShardedDeviceArray.cut(device, array, boxes), "host": array.copy(), "whole": device.put(array)}
    planner, plan = planner_of(state, StandardSavePlanner)
    spans = plan.spans()
    for bits in ([planner.get_data(span.item) for span in spans], planner.get_batch(spans)):
        assert [type(one) for one in bits] == [DeviceBits, np.ndarray, DeviceBits]
        for one, span in zip(bits, spans, strict=True):
            assert not isinstance(one, bytes)
            assert (one.shape, one.dtype) == (span.item.sizes, BY_NAME["float32"].bits)
        np.testing.assert_array_equal(np.asarray(bits[0]), array[3:])
        np.testing.assert_array_equal(np.asarray(bits[2]), array)
