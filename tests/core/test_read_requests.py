"""Which bytes are read for regions, and how reads are put together: all of what is wanted, little else, few calls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.box import Box, slices
from dcp_core.dtype import BY_NAME
from dcp_core.errors import PlanningError
from dcp_core.execution import read_ranges, read_requests
from dcp_core.execution.read_ranges import (
    GAP_BYTES,
    LONG_BYTES,
    cut_at_blocks,
    element_ranges,
    element_strides,
    hulls_of,
    run_dim,
    run_starts,
)
from dcp_core.execution.read_requests import ALIGNMENT, TASK_BYTES, TASK_PIECES, Task, joined_calls, plan_tasks
from dcp_core.metadata import MetadataIndex
from dcp_core.planning.items import ItemType, ReadItem
from dcp_core.planning.span_columns import columns_of
from tests.core.engine_fakes import Region

Shape = tuple[int, ...]
OVERREAD = 1.1


@st.composite
def chunk_and_region(draw: st.DrawFn, least: int = 1) -> tuple[Shape, Box]:
    shape = draw(st.lists(st.integers(1, 7), max_size=4).map(tuple))
    sizes = tuple(draw(st.integers(least, size)) for size in shape)
    offsets = tuple(draw(st.integers(0, size - length)) for size, length in zip(shape, sizes, strict=True))
    return shape, Box(offsets, sizes)


def wanted_elements(shape: Shape, box: Box) -> list[int]:
    found: list[int] = np.arange(prod(shape)).reshape(shape)[slices(box)].ravel().tolist()
    return found


def region_of(shape: Shape, box: Box, file: int = 0, byte_offset: int = 0, name: str = "float32") -> Region:
    dtype = BY_NAME[name]
    item = ReadItem(ItemType.TENSOR, MetadataIndex("k"), box.offsets, MetadataIndex("k"), box.offsets, box.sizes)
    return Region(item, file, byte_offset, shape, dtype, dtype)


# --- regions as columns ------------------------------------------------------------------------------


@given(st.lists(st.tuples(chunk_and_region(0), st.sampled_from(["float32", "uint8", "complex128"])), max_size=6))
def test_columns_say_what_spans_say_and_hulls_reach_from_the_first_to_the_last_byte(
    cases: list[tuple[tuple[Shape, Box], str]],
) -> None:
    spans = [region_of(shape, box, i, 7 * i, name) for i, ((shape, box), name) in enumerate(cases)]
    columns = columns_of(spans)
    hulls = hulls_of(columns)
    assert len(columns) == len(spans)
    for row, span in enumerate(spans):
        ndim, itemsize = len(span.chunk_sizes), span.dtype.itemsize
        box = Box(span.item.storage_offsets, span.item.lengths)
        assert (int(columns.file[row]), int(columns.byte_offset[row])) == (span.file, span.byte_offset)
        assert (int(columns.ndim[row]), int(columns.itemsize[row])) == (ndim, itemsize)
        assert tuple(columns.chunk_sizes[row].tolist()) == span.chunk_sizes + (1,) * (columns.sizes.shape[1] - ndim)
        assert int(columns.dtype[row]) == span.dtype.code
        assert columns.same_dtype[row]
        wanted = wanted_elements(span.chunk_sizes, box)
        assert int(hulls.nbytes[row]) == len(wanted) * itemsize
        assert int(hulls.chunk_nbytes[row]) == prod(span.chunk_sizes) * itemsize
        low, high = (wanted[0], wanted[-1] + 1) if wanted else (0, 0)
        assert (int(hulls.start[row]), int(hulls.stop[row])) == (low * itemsize, high * itemsize)
        assert bool(hulls.is_run[row]) == (wanted == list(range(low, high)))
    part = columns.part(1, 3)
    assert part.sizes.tolist() == columns.sizes[1:3].tolist()
    assert len(part) == max(0, min(len(spans), 3) - 1)


def test_columns_of_a_target_of_another_type_say_so() -> None:
    span = region_of((2,), Box((0,), (2,)))
    other = Region(span.item, 0, 0, (2,), BY_NAME["float32"], BY_NAME["float64"])
    assert columns_of([span, other]).same_dtype.tolist() == [True, False]


@pytest.mark.parametrize("chunk", [(4,), (4, 4, 4)])
def test_a_region_of_another_number_of_dimensions_is_refused(chunk: Shape) -> None:
    with pytest.raises(PlanningError, match="k: a region of another rank than its chunk"):
        columns_of([region_of(chunk, Box((0, 0), (1, 1)))])


# --- ranges of one region ----------------------------------------------------------------------------


@given(chunk_and_region(), st.sampled_from([1, 4, 3000, 30_000]))
def test_ranges_are_ascending_and_disjoint_and_cover_the_region(case: tuple[Shape, Box], itemsize: int) -> None:
    shape, box = case
    ranges = element_ranges(shape, box, itemsize)
    starts, wanted = ranges.starts.tolist(), wanted_elements(shape, box)
    assert all(a + ranges.length <= b for a, b in itertools.pairwise(starts))
    covered = [element for start in starts for element in range(start, start + ranges.length)]
    assert set(covered) >= set(wanted)
    assert {covered[0], covered[-1]} <= set(wanted)
    assert ranges.is_exact == (covered == wanted)


def test_long_runs_cost_at_most_a_tenth_more_bytes_than_needed() -> None:
    draw = random.Random(1)
    run = LONG_BYTES // 4
    for _ in range(2000):
        inner = draw.choice([run, run + 5, 3 * run, 20 * run])
        shape = (draw.randint(1, 6), draw.randint(1, 6), inner + draw.choice([0, 1, 40, 600, GAP_BYTES // 4, 8 * run]))
        sizes = (draw.randint(1, shape[0]), draw.randint(1, shape[1]), inner)
        offsets = tuple(draw.randint(0, a - b) for a, b in zip(shape, sizes, strict=True))
        ranges = element_ranges(shape, Box(offsets, sizes), 4)
        assert len(ranges.starts) * ranges.length <= OVERREAD * prod(sizes)


def test_short_runs_that_lie_close_together_are_one_range_and_a_wide_gap_is_never_read_over() -> None:
    assert element_ranges((1000, 512), Box((0, 100), (1000, 50)), 4).starts.tolist() == [100]
    narrow = element_ranges((100, 1 << 20), Box((0, 5), (100, 3)), 4)
    assert len(narrow.starts) * narrow.length == 300
    assert narrow.is_exact
    for gap in (GAP_BYTES // 4, GAP_BYTES // 4 + 1):
        found = element_ranges((5, 10 + gap), Box((0, 0), (5, 10)), 4)
        assert len(found.starts) == (1 if 4 * gap <= GAP_BYTES else 5)
    planes = element_ranges((7, 100, 5000), Box((1, 0, 0), (6, 40, 5000)), 4)
    assert planes.starts.tolist() == [500_000 * plane for plane in range(1, 7)]
    assert planes.length == 40 * 5000


@given(chunk_and_region())
def test_runs_are_what_lies_together_in_the_chunk(case: tuple[Shape, Box]) -> None:
    shape, box = case
    dim, strides = run_dim(shape, box.sizes), element_strides(shape)
    first = sum(a * b for a, b in zip(box.offsets, strides, strict=True))
    starts = (run_starts(strides[:dim], box.sizes[:dim]) + first).tolist()
    length = prod(box.sizes[dim:])
    wanted = wanted_elements(shape, box)
    assert [element for start in starts for element in range(start, start + length)] == wanted
    assert dim == 0 or box.sizes[dim - 1] > 1
    assert all(a + length < b for a, b in itertools.pairwise(starts)) or len(starts) == 1


# --- blocks ------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 90)), max_size=8), st.integers(1, 40))
def test_pieces_are_the_ranges_cut_at_every_edge_of_a_block(ranges: list[tuple[int, int]], block: int) -> None:
    start = np.array([low for low, _ in ranges], np.int64)
    stop = start + np.array([length for _, length in ranges], np.int64)
    found = zip(*(column.tolist() for column in cut_at_blocks(start, stop, block)), strict=True)
    expected = []
    for source, (low, length) in enumerate(ranges):
        edges = [low, *(edge for edge in range(low + 1, low + length) if edge % block == 0), low + length]
        expected += [(a, b, source) for a, b in itertools.pairwise(edges)]
    assert list(found) == expected


# --- calls and tasks ---------------------------------------------------------------------------------


def shares_call(pieces: Sequence[tuple[int, int]], index: int) -> bool:
    """Whether piece `index` is read together with the one before it, said in another way."""

    def touching(position: int, step: int) -> int:
        total = pieces[position][1] - pieces[position][0]
        while 0 <= position + step < len(pieces):
            edge = max(position, position + step)
            if pieces[edge - 1][1] != pieces[edge][0]:
                break
            position += step
            total += pieces[position][1] - pieces[position][0]
        return total

    gap = pieces[index][0] - pieces[index - 1][1]
    before, after = touching(index - 1, -1), touching(index, 1)
    if gap <= 0 or gap > read_ranges.GAP_BYTES:
        return gap == 0
    return max(before, after) < read_ranges.LONG_BYTES or gap * read_ranges.GAP_SHARE <= min(before, after)


@pytest.mark.parametrize("seed", range(300))
def test_tasks_are_all_pieces_in_order_in_calls_of_neighbours_and_as_large_as_allowed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    most_bytes, most_pieces = draw.choice([64, 100, 1000]), draw.choice([1, 2, 5, 100])
    monkeypatch.setattr(read_requests, "TASK_BYTES", most_bytes)
    monkeypatch.setattr(read_requests, "TASK_PIECES", most_pieces)
    monkeypatch.setattr(read_ranges, "GAP_BYTES", draw.choice([1, 10, 30]))
    monkeypatch.setattr(read_ranges, "LONG_BYTES", draw.choice([1, 20, 50, 500]))
    position, pieces = 0, list[tuple[int, int]]()
    lanes: list[int] = []
    for _ in range(draw.randint(0, 40)):
        position = max(0, position + draw.choice([0, 0, 0, 1, 3, 9, 10, 11, 31, 100, -5, -40]))
        pieces.append((position, position + draw.choice([1, 4, 7, 16, 20, 50, 90])))
        lanes.append(lanes[-1] if lanes and draw.random() < 0.9 else draw.randint(0, 2))
        position = pieces[-1][1]
    start, stop = (np.array(column, np.int64) for column in (list(zip(*pieces, strict=True)) or [(), ()]))
    tasks = plan_tasks(start, stop, np.array(lanes, np.int64))
    assert [index for task in tasks for index in range(task.first, task.last)] == list(range(len(pieces)))
    rooms = [-(-(high - low) // ALIGNMENT) * ALIGNMENT for low, high in pieces]
    for task in tasks:
        assert len(set(lanes[task.first : task.last])) == 1
        assert task.last - task.first <= most_pieces
        assert sum(rooms[task.first : task.last]) <= most_bytes or task.last - task.first == 1
        if task.last < len(pieces) and lanes[task.last] == lanes[task.first]:
            is_full = sum(rooms[task.first : task.last + 1]) > most_bytes
            assert is_full or task.last - task.first == most_pieces
        assert [index for call in task.calls for index in range(*call)] == list(range(task.first, task.last))
        begun = {low for low, _ in task.calls}
        for index in range(task.first + 1, task.last):
            assert (index in begun) != shares_call(pieces, index)


@pytest.mark.parametrize("seed", range(200))
def test_calls_are_joined_over_small_gaps_and_no_further_than_allowed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    gap_bytes, most_bytes = draw.choice([0, 1, 10, 40]), draw.choice([30, 100, 1000])
    monkeypatch.setattr(read_requests, "JOINED_BYTES", most_bytes)
    position, start, nbytes, calls = 0, list[int](), list[int](), list[tuple[int, int]]()
    for _ in range(draw.randint(0, 30)):
        position = max(0, position + draw.choice([0, 1, 9, 10, 11, 40, 41, -20]))
        low = len(start)
        for _ in range(draw.randint(1, 3)):
            start.append(position)
            nbytes.append(draw.choice([0, 1, 7, 30]))
            position += nbytes[-1]
        calls.append((low, len(start)))
    joined = joined_calls(calls, start, nbytes, gap_bytes)
    assert [index for call in joined for index in range(*call)] == list(range(len(start)))
    begun = {low for low, _ in joined}
    assert begun <= {low for low, _ in calls}
    first = 0
    for low, high in calls[1:]:
        gap = start[low] - start[low - 1] - nbytes[low - 1]
        is_near = gap_bytes > 0 and 0 <= gap <= gap_bytes
        fits = start[high - 1] + nbytes[high - 1] - start[first] <= most_bytes
        assert (low not in begun) == (is_near and fits)
        first = first if low not in begun else low


def test_between_long_stretches_at_most_a_tenth_is_read_in_vain_however_they_are_cut() -> None:
    draw, seen = random.Random(3), 0
    for _ in range(300):
        position, edges = 0, []
        for _ in range(draw.randint(1, 12)):
            position += draw.choice([1, 100, 4000, 5000, GAP_BYTES])
            for _ in range(draw.choice([1, 16])):
                length = LONG_BYTES // draw.choice([1, 16]) if draw.random() < 0.5 else LONG_BYTES
                edges.append((position, position + length))
                position += length
        stretches = [list(group) for group in _stretches(edges)]
        if any(group[-1][1] - group[0][0] < LONG_BYTES for group in stretches):
            continue
        seen += 1
        start, stop = (np.array(column, np.int64) for column in zip(*edges, strict=True))
        tasks = plan_tasks(start, stop, np.zeros(len(edges), np.int64))
        read = sum(edges[high - 1][1] - edges[low][0] for task in tasks for low, high in task.calls)
        assert read <= OVERREAD * sum(high - low for low, high in edges)
    assert seen > 50


def _stretches(edges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    groups: list[list[tuple[int, int]]] = []
    for low, high in edges:
        if groups and groups[-1][-1][1] == low:
            groups[-1].append((low, high))
        else:
            groups.append([(low, high)])
    return groups


def test_twenty_thousand_neighbours_of_64_kib_are_read_by_a_call_of_dozens_each() -> None:
    start = np.arange(20_000, dtype=np.int64) * 65536
    tasks = plan_tasks(start, start + 65536, np.zeros(20_000, np.int64))
    assert {len(task.calls) for task in tasks} == {1}
    assert len(tasks) == -(-20_000 * 65536 // TASK_BYTES)
    tiny = plan_tasks(start // 4096, start // 4096 + 16, np.zeros(20_000, np.int64))
    assert max(task.last - task.first for task in tiny) == TASK_PIECES
    assert plan_tasks(start[:0], start[:0], start[:0]) == []
    assert plan_tasks(start[:1], start[:1] + 5, start[:1]) == [Task(0, 1, ((0, 1),))]
