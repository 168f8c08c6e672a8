"""The regions of a load: all found at once as box by box; the spans, items and targets that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.arrays import NumpyAdapter
from dcp_core.box import Box, contains, intersect, relative
from dcp_core.dtype import BY_NAME
from dcp_core.errors import CoverageError, DcpError, OverlapError, PlanningError
from dcp_core.formats.metadata_file import ColumnsSource, MetadataColumns
from dcp_core.metadata import (
    EVERY_RANK,
    ChunkColumns,
    FileColumns,
    Int64,
    Metadata,
    MetadataIndex,
    Nesting,
    ObjectColumns,
    SaveRecord,
    StoredTensor,
    TensorColumns,
    WriterRecord,
    box_of,
)
from dcp_core.planning import chunk_search, wanted
from dcp_core.planning.items import ItemType, ReadItem
from dcp_core.planning.load_plan import LoadPlan, ReadSpan, Wanted
from dcp_core.planning.planners import PlannerContext
from dcp_core.planning.read_spans import ReadSpans
from dcp_core.planning.regions import intersect_chunks
from dcp_core.planning.span_columns import SpanColumns, columns_of
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.wanted import WantedBoxes
from dcp_core.recipes.job import ObjectEncoding
from dcp_core.state_path import encode_path, key_path
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray
from tests.core.layouts import at, deal, random_cut, random_shape

SEEDS = st.integers(0, 2**32)
FLOAT = BY_NAME["float32"]
WAYS: dict[str, dict[str, int]] = {
    "at once": {},
    "in batches": {"BATCH_PAIRS": 3},
    "one by one": {"MANY_CHUNKS": 1},
    "sorted": {"MANY_CHUNKS": 1, "MANY_PAIRS": 0, "BATCH_PAIRS": 5},
    "mixed": {"MANY_CHUNKS": 4, "MANY_PAIRS": 12},
}


def in_this_way(patch: pytest.MonkeyPatch, way: str) -> None:
    for name, value in WAYS[way].items():
        patch.setattr(chunk_search, name, value)
        if name == "MANY_CHUNKS":
            patch.setattr(wanted, name, value)


def random_tensor(rng: Random, name: str, ranks: int) -> StoredTensor:
    """A tensor that may lack a chunk, or have one that overlaps others, or chunks that several ranks wrote."""
    shape = random_shape(rng)
    hands = deal(rng, random_cut(rng, shape), ranks, copies=rng.choice([0.0, 0.5]))
    rows = [(box.offsets, box.sizes, rank) for rank, hand in enumerate(hands) for box in hand]
    if rows and rng.random() < 0.1:
        rows.pop(rng.randrange(len(rows)))
    if 0 not in shape and rng.random() < 0.1:
        rows += [(box.offsets, box.sizes, 0) for box in rng.sample(random_cut(rng, shape), 1)]
    rows.sort()
    count, ndim = len(rows), len(shape)
    chunks = ChunkColumns(
        np.array([row[0] for row in rows], np.int64).reshape(count, ndim),
        np.array([row[1] for row in rows], np.int64).reshape(count, ndim),
        np.array([row[2] for row in rows], np.int32),
        np.array([rng.randrange(10**6) for _ in rows], np.int64),
    )
    return StoredTensor(name, key_path(name), EVERY_RANK, FLOAT, shape, chunks)


def random_wanted(rng: Random, ranks: int) -> list[Wanted]:
    """Boxes of some tensors, in no order, some wanted twice, some empty."""
    found = []
    for leaf in range(rng.randint(0, 4)):
        tensor = random_tensor(rng, f"stored {leaf}", ranks)
        boxes = [*random_cut(rng, tensor.shape), *random_cut(rng, tensor.shape)]
        if tensor.shape:
            boxes.append(Box((0,) * len(tensor.shape), (0, *tensor.shape[1:])))
        for ordinal, box in enumerate(rng.sample(boxes, rng.randint(0, len(boxes)))):
            found.append(Wanted(f"t{leaf}", leaf, ordinal, box, rng.choice((FLOAT, BY_NAME["float64"])), tensor))
    rng.shuffle(found)
    return found


def rows_by_brute_force(boxes: Sequence[Wanted], rank: int) -> list[tuple[int, int, Box]]:
    """(wanted, chunk, region); of equal chunks the rank's own, else the first."""
    found = []
    for index, want in enumerate(boxes):
        chosen: dict[Box, int] = {}
        for row in range(len(want.stored.chunks)):
            box = box_of(want.stored.chunks, row)
            is_better = box not in chosen or (
                want.stored.chunks.file[row] == rank and want.stored.chunks.file[chosen[box]] != rank
            )
            if is_better and not want.box.is_empty and intersect(want.box, box) is not None:
                chosen[box] = row
        for box, row in chosen.items():
            common = intersect(want.box, box)
            assert common is not None
            found.append((index, row, common))
    return sorted(found, key=lambda region: region[:2])


def is_tiled(want: Wanted, regions: Sequence[Box]) -> bool:
    times = np.zeros(want.box.sizes, dtype=np.int64)
    for region in regions:
        times[at(relative(region, want.box.offsets))] += 1
    return bool((times == 1).all())


@pytest.mark.parametrize("way", WAYS)
@given(SEEDS, st.integers(1, 4))
def test_regions_found_at_once_are_those_found_box_by_box(way: str, seed: int, ranks: int) -> None:
    rng = Random(seed)
    boxes = random_wanted(rng, ranks)
    rank = rng.randrange(ranks)
    expected = rows_by_brute_force(boxes, rank)
    faulty = [
        want.name
        for index, want in enumerate(boxes)
        if not is_tiled(want, [region for row, _, region in expected if row == index])
    ]
    with pytest.MonkeyPatch.context() as patch:
        in_this_way(patch, way)
        if faulty:
            with pytest.raises((CoverageError, OverlapError)) as caught:
                intersect_chunks(boxes, lambda chunks: chunks.file == rank)
            assert all(repr(name) in str(caught.value) for name in faulty[:8])
            return
        reads = intersect_chunks(boxes, lambda chunks: chunks.file == rank)
    regions = []
    for row, index in enumerate(reads.wanted.tolist()):
        ndim = boxes[index].box.ndim
        region = Box(tuple(reads.offsets[row, :ndim].tolist()), tuple(reads.sizes[row, :ndim].tolist()))
        assert (reads.offsets[row, ndim:] == 0).all()
        assert (reads.sizes[row, ndim:] == 1).all()
        regions.append((index, int(reads.chunk[row]), region))
    assert regions == expected
    assert (reads.source == -1).all()


def count_pairs(patch: pytest.MonkeyPatch, counts: list[int]) -> None:
    """Note how many pairs of a box and a chunk are compared at once."""
    meet = chunk_search._meet

    def counted(boxes: WantedBoxes, chunks: ChunkColumns, which: Int64, row: Int64) -> chunk_search.Meetings:
        counts.append(len(row))
        return meet(boxes, chunks, which, row)

    patch.setattr(chunk_search, "_meet", counted)


def test_the_work_does_not_grow_with_boxes_times_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many boxes as chunks of one tensor, cut alike: one pair a box is compared."""
    count = 2048
    offsets = np.zeros((count, 2), np.int64)
    offsets[:, 0] = np.arange(count)
    chunks = ChunkColumns(offsets, np.ones((count, 2), np.int64), np.zeros(count, np.int32), np.arange(count))
    tensor = StoredTensor("t", key_path("t"), EVERY_RANK, FLOAT, (count, 1), chunks)
    boxes = [Wanted("t", 0, row, Box((row, 0), (1, 1)), FLOAT, tensor) for row in range(count)]
    compared: list[int] = []
    count_pairs(monkeypatch, compared)
    monkeypatch.setattr(chunk_search, "_scan", None)
    assert intersect_chunks(boxes, lambda found: found.file < 0).chunk.tolist() == list(range(count))
    assert sum(compared) == count


def test_rows_turned_into_columns_are_found_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tensors, saved by rows and loaded by columns: all in a few steps."""
    boxes = []
    for leaf in range(500):
        offsets = np.zeros((8, 2), np.int64)
        offsets[:, 0] = np.arange(0, 32, 4)
        chunks = ChunkColumns(offsets, np.tile([4, 32], (8, 1)), np.arange(8, dtype=np.int32), np.full(8, leaf * 512))
        tensor = StoredTensor(f"t{leaf}", key_path("t"), EVERY_RANK, FLOAT, (32, 32), chunks)
        boxes.append(Wanted(f"t{leaf}", leaf, 0, Box((0, 8), (32, 8)), FLOAT, tensor))
    steps: list[int] = []
    count_pairs(monkeypatch, steps)
    monkeypatch.setattr(chunk_search, "_scan", None)
    reads = intersect_chunks(boxes, lambda found: found.file < 0)
    assert reads.wanted.tolist() == np.repeat(np.arange(500), 8).tolist()
    assert (reads.sizes == [4, 8]).all()
    assert steps == [4000]


# -- items and spans --------------------------------------------------------------------------------------------------


def items_by_brute_force(plan: LoadPlan) -> list[ReadItem]:
    """The items of a plan, written down one by one."""
    items = []
    reads = plan.reads
    for row, index in enumerate(reads.wanted.tolist()):
        want = plan.wanted[index]
        ndim, chunk = want.box.ndim, int(reads.chunk[row])
        box = box_of(want.stored.chunks, chunk)
        start = reads.offsets[row, :ndim].tolist()
        items.append(
            ReadItem(
                ItemType.TENSOR,
                MetadataIndex(want.name, want.box.offsets, want.ordinal),
                tuple(a - b for a, b in zip(start, want.box.offsets, strict=True)),
                MetadataIndex(want.stored.name, box.offsets, chunk),
                tuple(a - b for a, b in zip(start, box.offsets, strict=True)),
                tuple(reads.sizes[row, :ndim].tolist()),
            )
        )
    return items


def random_plan(rng: Random) -> LoadPlan:
    """A plan of boxes that the checkpoint fills."""
    boxes = []
    for want in random_wanted(rng, 3):
        try:
            intersect_chunks([want], lambda chunks: chunks.file == 0)
        except DcpError:
            continue
        boxes.append(want)
    return LoadPlan(boxes, (), intersect_chunks(boxes, lambda chunks: chunks.file == 0))


def span_of(plan: LoadPlan, row: int, item: ReadItem) -> ReadSpan:
    want, chunk = plan.wanted[int(plan.reads.wanted[row])], int(plan.reads.chunk[row])
    chunks = want.stored.chunks
    file, byte_offset = int(chunks.file[chunk]), int(chunks.byte_offset[chunk])
    return ReadSpan(item, file, byte_offset, box_of(chunks, chunk).sizes, want.stored.dtype, want.dtype)


def assert_same_columns(found: SpanColumns, expected: SpanColumns) -> None:
    for name in SpanColumns.__slots__:
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype, name
        if one.ndim == 2:  # padding may be wider
            filler = 0 if name == "offsets" else 1
            assert (one[:, other.shape[1] :] == filler).all(), name
            one = one[:, : other.shape[1]]
        np.testing.assert_array_equal(one, other, err_msg=name)


@given(SEEDS)
def test_items_and_spans_are_those_written_down_one_by_one(seed: int) -> None:
    plan = random_plan(Random(seed))
    items = items_by_brute_force(plan)
    assert list(plan.items) == items
    assert [(item.dest_index.index, item.storage_index.index) for item in plan.items] == [
        (item.dest_index.index, item.storage_index.index) for item in items
    ]
    expected = [span_of(plan, row, item) for row, item in enumerate(items)]
    expected.sort(key=lambda span: (span.file, span.byte_offset))
    assert list(plan.spans()) == expected
    assert [plan.spans()[row] for row in range(len(expected))] == expected
    assert_same_columns(plan.spans().columns, columns_of(expected))
    assert plan.nbytes == sum(4 * int(np.prod(item.lengths)) for item in items)


@given(SEEDS, st.integers(-12, 12), st.integers(-12, 12))
def test_slices_of_spans_are_spans(seed: int, start: int, stop: int) -> None:
    spans = random_plan(Random(seed)).spans()
    rows = range(len(spans))[start:stop]
    part = spans[start:stop]
    assert isinstance(part, ReadSpans)
    assert list(part) == list(spans)[start:stop] == [spans[row] for row in rows]
    assert len(part) == len(rows)
    assert_same_columns(part.columns, columns_of(list(part)))
    assert list(part[1:]) == list(spans)[start:stop][1:]
    assert list(spans[::-2]) == list(spans)[::-2]
    with pytest.raises(IndexError):
        part[len(rows)]


@given(SEEDS)
def test_a_plan_of_fewer_and_smaller_items_reads_just_these(seed: int) -> None:
    rng = Random(seed)
    plan = random_plan(rng)
    chosen = []
    for item in plan.items:
        if item.lengths and item.lengths[0] > 1 and rng.random() < 0.5:
            shorter = (item.lengths[0] - 1, *item.lengths[1:])
            chosen.append(replace(item, lengths=shorter, source=rng.choice((None, 1))))
        elif rng.random() < 0.5:
            chosen.append(item)
    again = plan.with_items(rng.sample(chosen, len(chosen)))
    key: Callable[[ReadItem], Any] = lambda item: (item.dest_index.fqn, item.dest_index.index, item.storage_index.index)  # noqa: E731
    assert sorted(again.items, key=key) == sorted(chosen, key=key)
    assert sorted((span.item for span in again.spans()), key=key) == sorted(chosen, key=key)


@pytest.mark.parametrize("change", [{"index": 1}, {"index": -1}, {"index": None}])
def test_an_item_of_a_chunk_that_is_not_there_is_refused(change: dict[str, Any]) -> None:
    chunks = ChunkColumns(np.zeros((1, 1), np.int64), np.full((1, 1), 3), np.zeros(1, np.int32), np.zeros(1, np.int64))
    boxes = [Wanted("t", 0, 0, Box((0,), (3,)), FLOAT, StoredTensor("t", (), EVERY_RANK, FLOAT, (3,), chunks))]
    plan = LoadPlan(boxes, (), intersect_chunks(boxes, lambda found: found.file < 0))
    (item,) = plan.items
    assert list(plan.with_items([item]).items) == [item]
    with pytest.raises(PlanningError, match="derive the items"):
        plan.with_items([replace(item, storage_index=replace(item.storage_index, **change))])


# -- the standard planner's targets -----------------------------------------------------------------------------------


def metadata_of(*tensors: tuple[str, tuple[int, ...], list[Box], list[int]]) -> Metadata:
    """(name, shape, chunks, byte offsets) of tensors of float32, sorted by name, as columns in memory."""
    boxes = [box for _, _, own, _ in tensors for box in own]
    width = max(len(shape) for _, shape, _, _ in tensors)
    none, rows = np.zeros(0, np.int32), len(tensors)
    described = TensorColumns(
        [name for name, *_ in tensors],
        [encode_path(key_path(name)) for name, *_ in tensors],
        np.full(rows, EVERY_RANK, np.int32),
        np.full(rows, FLOAT.code, np.uint8),
        np.array([len(shape) for _, shape, _, _ in tensors], np.uint8),
        np.array([(*shape, *(1,) * (width - len(shape))) for _, shape, _, _ in tensors], np.int64),
        np.cumsum([0, *(len(own) for _, _, own, _ in tensors)]),
    )
    chunks = ChunkColumns(
        np.array([(*box.offsets, *(0,) * (width - box.ndim)) for box in boxes], np.int64),
        np.array([(*box.sizes, *(1,) * (width - box.ndim)) for box in boxes], np.int64),
        np.zeros(len(boxes), np.int32),
        np.array([offset for *_, offsets in tensors for offset in offsets], np.int64),
    )
    one = np.zeros(1, np.int32)
    files = FileColumns(one, one, one.astype(np.uint8), *(one.astype(np.int64),) * 4, np.zeros((1, 2), np.uint64))
    columns = MetadataColumns(
        described, chunks, ObjectColumns((), (), none, none.astype(np.uint8), none, none), Nesting()
    )
    return Metadata(ColumnsSource(columns, files, SaveRecord("0" * 32, ""), WriterRecord("dcp", "numpy", "1", 1)))


def planned(planner: StandardLoadPlanner, state: dict[str, Any], metadata: Metadata) -> LoadPlan:
    describe = NumpyRankAdapter().describe
    planner.configure_planner(state, PlannerContext(describe, ObjectEncoding(), metadata=metadata))
    return planner.finalize_plan(planner.build_local_plan())


def rows_and_columns() -> tuple[dict[str, Any], Metadata]:
    """`a` by columns from chunks by rows, two boxes of `b` from one chunk, `c` as it was stored."""
    rows = [Box((row, 0), (2, 6)) for row in (0, 2)]
    metadata = metadata_of(
        ("a", (4, 6), rows, [0, 100]), ("b", (6,), [Box((0,), (6,))], [200]), ("c", (), [Box((), ())], [300])
    )
    columns = [Box((0, 1), (4, 2)), Box((2, 4), (2, 2))]
    state = {
        "a": ShardedArray((4, 6), columns, [np.zeros(box.sizes, "f4") for box in columns]),
        "b": ShardedArray((6,), [Box((4,), (2,)), Box((0,), (3,))], [np.zeros(2, "f4"), np.zeros(3, "f4")]),
        "c": np.zeros((), "f4"),
    }
    return state, metadata


def test_targets_of_many_regions_are_those_of_each() -> None:
    planner = StandardLoadPlanner()
    spans = planned(planner, *rows_and_columns()).spans()
    assert len(spans) == 6
    for start, stop in ((0, 6), (0, 3), (3, 6), (2, 2)):
        found = planner.acquire_batch(spans[start:stop])
        assert len(found) == stop - start
        for (view, access), span in zip(found, spans[start:stop], strict=True):
            expected = planner.acquire_tensor(span.item)
            assert access is planner.access(span.item)
            assert view.shape == span.item.lengths
            assert view.__array_interface__ == expected.__array_interface__


def test_targets_of_regions_that_fill_their_box_are_found_without_items(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = metadata_of(("a", (4, 6), [Box((0, 0), (4, 6))], [0]), ("b", (6,), [Box((0,), (6,))], [200]))
    state = {"a": np.zeros((4, 6), "f4"), "b": np.zeros(6, "f4")}
    planner = StandardLoadPlanner()
    spans = planned(planner, state, metadata).spans()
    monkeypatch.setattr("dcp_core.planning.read_items.made_of_columns", None)
    monkeypatch.setattr("dcp_core.planning.read_spans.made_of_columns", None)
    (a, _), (b, _) = planner.acquire_batch(spans)
    assert a is state["a"]
    assert b is state["b"]
    planner.apply_batch(spans, (a, b))
    with pytest.raises(TypeError):
        list(spans)


def test_a_planner_that_is_extended_is_asked_about_each_region() -> None:
    asked: list[tuple[str, ReadItem]] = []

    class Curious(StandardLoadPlanner):
        def acquire_tensor(self, item: ReadItem) -> Any:
            asked.append(("acquire", item))
            return super().acquire_tensor(item)

    class Told(StandardLoadPlanner):
        def apply_tensor(self, item: ReadItem, tensor: Any) -> None:
            asked.append(("apply", item))

    extended: list[tuple[StandardLoadPlanner, str]] = [(Curious(), "acquire"), (Told(), "apply")]
    for planner, what in extended:
        spans = planned(planner, *rows_and_columns()).spans()
        planner.apply_batch(spans, [view for view, _ in planner.acquire_batch(spans)])
        assert asked == [(what, span.item) for span in spans]
        asked.clear()
    heard: list[ReadItem] = []
    planner = StandardLoadPlanner()
    spans = planned(planner, *rows_and_columns()).spans()
    planner.apply_tensor = lambda item, tensor: heard.append(item)  # type: ignore[method-assign]  # as users may
    planner.apply_batch(spans, [None] * len(spans))
    assert heard == [span.item for span in spans]


def test_spans_of_another_plan_are_looked_up_by_their_items() -> None:
    planner, other = StandardLoadPlanner(), StandardLoadPlanner()
    state, metadata = rows_and_columns()
    planned(planner, state, metadata)
    spans = planned(other, *rows_and_columns()).spans()
    targets = [view for view, _ in planner.acquire_batch(spans)]
    for view, span in zip(targets, spans, strict=True):
        assert view.__array_interface__ == planner.acquire_tensor(span.item).__array_interface__


def test_targets_that_share_memory_are_known_where_the_order_of_writing_matters() -> None:
    whole, half = [Box((0,), (6,))], [Box((0,), (3,)), Box((3,), (3,))]
    metadata = metadata_of(
        ("alone", (6,), whole, [0]),
        ("tied", (6,), whole, [100]),
        ("tied.too", (6,), whole, [100]),
        ("w", (6,), half, [7, 9]),
    )
    one, other = np.zeros(6, "f4"), np.zeros(6, "f4")
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"alone": one, "tied": other}, False),
        ({"tied": one, "tied.too": one}, False),
        ({"tied": one, "alone": one}, True),
        ({"w": one, "alone": one, "tied": other}, True),
        ({"tied": one, "tied.too": one[::1][:6], "w": other}, False),
        ({"tied": ShardedArray((6,), half[:1], [one[:3]]), "tied.too": ShardedArray((6,), half[1:], [one[:3]])}, True),
    ]
    for state, expected in cases:
        plan = planned(StandardLoadPlanner(), state, metadata)
        assert plan.share_memory is expected, state.keys()
        part = plan.with_items(plan.items).spans()[0:1]
        assert isinstance(part, ReadSpans)
        assert part.share_memory is expected
        assert plan.with_sources(plan.reads.source).spans().share_memory is expected


def test_a_planner_that_is_configured_again_forgets_the_targets_before() -> None:
    metadata = metadata_of(("a", (6,), [Box((0,), (6,))], [0]))
    planner = StandardLoadPlanner()
    first, second = np.zeros(6, "f4"), np.zeros(6, "f4")
    planned(planner, {"a": first}, metadata)
    spans = planned(planner, {"a": second}, metadata).spans()
    assert planner.acquire_batch(spans)[0][0] is second
    assert planner.acquire_tensor(spans[0].item) is second


def test_regions_lie_inside_their_chunks_and_boxes() -> None:
    planner = StandardLoadPlanner()
    for span in planned(planner, *rows_and_columns()).spans():
        assert contains(Box.whole(span.chunk_sizes), Box(span.item.storage_offsets, span.item.lengths))
        assert NumpyAdapter().narrow(planner.acquire_tensor(span.item), Box.whole(span.item.lengths)) is not None
