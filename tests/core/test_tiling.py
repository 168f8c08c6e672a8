"""The tiling check, against marking every element of small tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.box import Box, contains, intersect
from dcp_core.errors import ArgumentError
from dcp_core.planning import tiling, tiling_corners
from dcp_core.planning.tiling import TilingFault, check_tiling

Int64 = npt.NDArray[np.int64]
EVERY_FAULT = 1_000


@dataclass(frozen=True)
class Cut:
    """A tensor and the boxes that it is cut into."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def columns(cuts: Sequence[Cut], width: int = 0) -> tuple[Int64, Int64, Int64, Int64, Int64]:
    """The arguments of `check_tiling`, rows in the order of the boxes."""
    ndims = [len(cut.shape) for cut in cuts]
    wide = max([*ndims, width])
    offsets = [box.offsets + (0,) * (wide - box.ndim) for cut in cuts for box in cut.boxes]
    sizes = [box.sizes + (1,) * (wide - box.ndim) for cut in cuts for box in cut.boxes]
    shapes = [cut.shape + (1,) * (wide - len(cut.shape)) for cut in cuts]
    tensor = [number for number, cut in enumerate(cuts) for _ in cut.boxes]
    return (
        np.array(tensor, np.int64),
        np.array(offsets, np.int64).reshape(len(tensor), wide),
        np.array(sizes, np.int64).reshape(len(tensor), wide),
        np.array(shapes, np.int64).reshape(len(cuts), wide),
        np.array(ndims, np.int64),
    )


def faults_of(*cuts: Cut, **options: Any) -> tuple[TilingFault, ...]:
    return check_tiling(*columns(cuts), **{"max_faults": EVERY_FAULT, **options})


def is_tiled(cut: Cut) -> bool:
    """The oracle: every element held once, and nothing outside."""
    counts = np.zeros(cut.shape, np.int64)
    for box in cut.boxes:
        counts[tuple(map(slice, box.offsets, box.ends))] += 1
    return bool((counts == 1).all()) and all(contains(Box.whole(cut.shape), box) for box in cut.boxes)


def is_true(fault: TilingFault, cut: Cut, first_row: int = 0) -> bool:
    """Whether the fault says something that is so."""
    involved = [cut.boxes[row - first_row] for row in fault.rows]
    if fault.kind == "outside":
        return involved == [fault.box] and not contains(Box.whole(cut.shape), fault.box)
    if not contains(Box.whole(cut.shape), fault.box) or fault.box.is_empty:
        return False
    if fault.kind == "overlap":
        return len(set(fault.rows)) == 2 and intersect(*involved) == fault.box
    return not any(intersect(fault.box, box) for box in cut.boxes) and all(touches(fault.box, box) for box in involved)


def touches(one: Box, other: Box) -> bool:
    pairs = zip(one.offsets, one.ends, other.offsets, other.ends, strict=True)
    return all(start <= other_end and other_start <= end for start, end, other_start, other_end in pairs)


def split(box: Box, random: Random, pieces: int) -> list[Box]:
    """Cut a box at random places into at most that many."""
    dims = [dim for dim in range(box.ndim) if box.sizes[dim] > 1]
    if pieces < 2 or not dims:
        return [box]
    dim = random.choice(dims)
    at = random.randint(1, box.sizes[dim] - 1)
    low_sizes = (*box.sizes[:dim], at, *box.sizes[dim + 1 :])
    high_sizes = (*box.sizes[:dim], box.sizes[dim] - at, *box.sizes[dim + 1 :])
    high_offsets = (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :])
    share = random.randint(1, pieces - 1)
    low, high = Box(box.offsets, low_sizes), Box(high_offsets, high_sizes)
    return split(low, random, share) + split(high, random, pieces - share)


@st.composite
def tilings(draw: st.DrawFn, min_boxes: int = 1) -> Cut:
    """A tensor of 1 to 4 dimensions, cut recursively or as a grid, boxes in any order."""
    shape = tuple(draw(st.lists(st.integers(2, 6), min_size=1, max_size=4)))
    random = draw(st.randoms(use_true_random=False))
    if draw(st.booleans()):
        boxes = split(Box.whole(shape), random, draw(st.integers(2, 24)))
    else:
        boxes = grid(shape, [sorted(random.sample(range(1, side), random.randint(0, side - 1))) for side in shape])
    if len(boxes) < min_boxes:
        boxes = split(Box.whole(shape), random, min_boxes)
    random.shuffle(boxes)
    return Cut(shape, tuple(boxes))


def grid(shape: Sequence[int], inner_edges: Sequence[Sequence[int]]) -> list[Box]:
    """All cells between edges, in row-major order."""
    boxes = [Box((), ())]
    for side, inner in zip(shape, inner_edges, strict=True):
        edges = [0, *inner, side]
        spans = list(pairwise(edges))
        boxes = [Box((*box.offsets, low), (*box.sizes, high - low)) for box in boxes for low, high in spans]
    return boxes


@st.composite
def arbitrary_cuts(draw: st.DrawFn) -> Cut:
    """A small tensor and any boxes: mostly faulty, in many ways at once."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    offsets = st.tuples(*(st.integers(0, side) for side in shape))
    sizes = st.tuples(*(st.integers(1, max(1, side)) for side in shape))
    return Cut(shape, tuple(draw(st.lists(st.builds(Box, offsets, sizes), max_size=6))))


def changed(cut: Cut, row: int, *replacement: Box) -> Cut:
    return Cut(cut.shape, (*cut.boxes[:row], *replacement, *cut.boxes[row + 1 :]))


def scaled(cut: Cut, factors: Sequence[int]) -> Cut:
    """The same arrangement with every coordinate multiplied."""

    def times(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number * factor for number, factor in zip(numbers, factors, strict=True))

    return Cut(times(cut.shape), tuple(Box(times(box.offsets), times(box.sizes)) for box in cut.boxes))


PINWHEEL = Cut(
    (3, 3), (Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1)), Box((2, 1), (1, 2)))
)
"""Five boxes of which no two can be merged."""


@given(tilings())
def test_boxes_cut_from_a_tensor_tile_it(cut: Cut) -> None:
    assert faults_of(cut) == ()


@given(tilings())
def test_sorted_boxes_cut_from_a_tensor_tile_it(cut: Cut) -> None:
    assert faults_of(Cut(cut.shape, tuple(sorted(cut.boxes))), is_sorted=True) == ()


@given(arbitrary_cuts())
@settings(max_examples=400)
def test_any_boxes_are_faulty_exactly_when_an_element_is_not_held_once(cut: Cut) -> None:
    assert (not faults_of(cut)) == is_tiled(cut)


@given(arbitrary_cuts())
@settings(max_examples=400)
def test_every_fault_found_among_any_boxes_is_one(cut: Cut) -> None:
    assert all(is_true(fault, cut) for fault in faults_of(cut))


@given(tilings(min_boxes=2), st.data())
def test_a_missing_box_is_reported_as_a_hole_of_just_its_elements(cut: Cut, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(cut.boxes) - 1))
    faulty = changed(cut, row)
    (fault,) = faults_of(faulty)
    assert (fault.kind, fault.box) == ("hole", cut.boxes[row])
    assert is_true(fault, faulty)


@given(tilings(min_boxes=2), st.data())
def test_a_repeated_box_is_reported_as_an_overlap_of_the_two(cut: Cut, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(cut.boxes) - 1))
    faulty = Cut(cut.shape, (*cut.boxes, cut.boxes[row]))
    assert faults_of(faulty) == (TilingFault(0, "overlap", cut.boxes[row], (row, len(cut.boxes))),)


@given(tilings(), st.data())
def test_an_extra_box_is_reported_as_an_overlap_with_it(cut: Cut, data: st.DataObject) -> None:
    offsets = data.draw(st.tuples(*(st.integers(0, side - 1) for side in cut.shape)))
    sizes = data.draw(st.tuples(*(st.integers(1, side - o) for side, o in zip(cut.shape, offsets, strict=True))))
    faulty = Cut(cut.shape, (*cut.boxes, Box(offsets, sizes)))
    (fault,) = faults_of(faulty)
    assert (fault.kind, fault.rows[-1]) == ("overlap", len(cut.boxes))
    assert is_true(fault, faulty)


@given(tilings(min_boxes=2), st.data())
def test_a_box_shifted_inside_the_tensor_is_reported_as_an_overlap_and_a_hole(cut: Cut, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(cut.boxes) - 1))
    box = cut.boxes[row]
    room = [side - size for side, size in zip(cut.shape, box.sizes, strict=True)]
    moved = Box(data.draw(st.tuples(*(st.integers(0, most) for most in room))), box.sizes)
    faulty = changed(cut, row, moved)
    faults = faults_of(faulty)
    assert sorted(fault.kind for fault in faults) == ([] if moved == box else ["hole", "overlap"])
    assert all(is_true(fault, faulty) for fault in faults)


@given(tilings(), st.data())
def test_a_box_shifted_out_of_the_tensor_is_reported_as_outside(cut: Cut, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(cut.boxes) - 1))
    dim = data.draw(st.integers(0, len(cut.shape) - 1))
    box = cut.boxes[row]
    by = cut.shape[dim] - box.ends[dim] + data.draw(st.integers(1, 20))
    moved = Box((*box.offsets[:dim], box.offsets[dim] + by, *box.offsets[dim + 1 :]), box.sizes)
    assert faults_of(changed(cut, row, moved)) == (TilingFault(0, "outside", moved, (row,)),)


@given(tilings(), st.data())
def test_a_box_grown_over_the_edge_is_reported_as_outside(cut: Cut, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(cut.boxes) - 1))
    dim = data.draw(st.integers(0, len(cut.shape) - 1))
    box = cut.boxes[row]
    grown = Box(box.offsets, (*box.sizes[:dim], cut.shape[dim] - box.offsets[dim] + 1, *box.sizes[dim + 1 :]))
    assert faults_of(changed(cut, row, grown)) == (TilingFault(0, "outside", grown, (row,)),)


@given(tilings(min_boxes=2), st.data())
def test_a_hole_and_an_overlap_far_apart_are_found(cut: Cut, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(cut.boxes) - 2))
    without = changed(cut, row)
    again = data.draw(st.integers(0, len(without.boxes) - 1))
    faulty = Cut(cut.shape, (*without.boxes, without.boxes[again]))
    faults = faults_of(faulty)
    assert faults
    assert all(is_true(fault, faulty) for fault in faults)


@given(st.lists(st.one_of(tilings(), arbitrary_cuts()), max_size=8), st.randoms(use_true_random=False))
def test_among_many_tensors_exactly_the_faulty_ones_are_named(cuts: list[Cut], random: Random) -> None:
    tensor, offsets, sizes, shapes, ndims = columns(cuts)
    order = random.sample(range(len(tensor)), len(tensor))
    found = check_tiling(tensor[order], offsets[order], sizes[order], shapes, ndims, max_faults=EVERY_FAULT)
    assert {fault.tensor for fault in found} == {number for number, cut in enumerate(cuts) if not is_tiled(cut)}


@given(st.lists(st.one_of(tilings(), arbitrary_cuts()), max_size=8))
def test_among_many_tensors_every_fault_is_one_of_its_tensor(cuts: list[Cut]) -> None:
    first_rows = np.cumsum([0, *(len(cut.boxes) for cut in cuts)])
    found = faults_of(*cuts)
    assert all(is_true(fault, cuts[fault.tensor], int(first_rows[fault.tensor])) for fault in found)
    assert [fault.tensor for fault in found] == sorted(fault.tensor for fault in found)


@given(st.lists(st.one_of(tilings(), arbitrary_cuts()), max_size=8), st.integers(1, 9), st.integers(1, 64))
def test_the_size_of_a_batch_changes_nothing(cuts: list[Cut], batch_rows: int, batch_corners: int) -> None:
    expected = faults_of(*cuts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "_BATCH_ROWS", batch_rows)
        patch.setattr(tiling_corners, "_BATCH_CORNERS", batch_corners)
        assert faults_of(*cuts) == expected


@given(st.lists(st.one_of(tilings(), arbitrary_cuts()), max_size=4))
def test_claiming_unsorted_rows_to_be_sorted_changes_nothing(cuts: list[Cut]) -> None:
    assert faults_of(*cuts, is_sorted=True) == faults_of(*cuts)


@given(st.lists(st.one_of(tilings(), arbitrary_cuts()), min_size=1, max_size=4), st.integers(0, 3))
def test_padding_changes_nothing(cuts: list[Cut], more: int) -> None:
    wide = max(len(cut.shape) for cut in cuts) + more
    assert check_tiling(*columns(cuts, wide), max_faults=EVERY_FAULT) == faults_of(*cuts)


@given(st.one_of(tilings(), arbitrary_cuts(), st.just(PINWHEEL)), st.integers(1, 3), st.data())
def test_tensors_of_up_to_2_to_the_62_elements_are_checked_as_small_ones(
    cut: Cut, copies: int, data: st.DataObject
) -> None:
    factors = []
    room = (1 << 62) // math.prod(side for side in cut.shape if side)
    for _ in cut.shape:
        factors.append(data.draw(st.one_of(st.just(room), st.integers(1, room))))
        room //= factors[-1]
    expected = []
    for number in range(copies):
        for fault in faults_of(cut):
            (box,) = scaled(Cut(cut.shape, (fault.box,)), factors).boxes
            rows = tuple(row + number * len(cut.boxes) for row in fault.rows)
            expected.append(TilingFault(number, fault.kind, box, rows))
    assert faults_of(*[scaled(cut, factors)] * copies) == tuple(expected)


@pytest.mark.parametrize("copies", [1, 5])
@pytest.mark.parametrize("scale", [1, 1 << 20, (1 << 31) // 3])
def test_boxes_that_cannot_be_merged_are_checked_whether_keys_fit_or_not(scale: int, copies: int) -> None:
    good = scaled(PINWHEEL, (scale, scale))
    center = good.boxes[3]
    assert faults_of(*[good] * copies) == ()
    found = faults_of(*[good, changed(good, 3), changed(good, 3, center, center)] * copies)
    expected = [(3 * copy + number, kind) for copy in range(copies) for number, kind in [(1, "hole"), (2, "overlap")]]
    assert [(fault.tensor, fault.kind) for fault in found] == expected
    assert all(fault.box == center for fault in found)


def test_a_hole_and_an_overlap_that_cancel_in_every_half_are_found() -> None:
    part = [(0, 2), (1, 2)]
    boxes = [Box((start + offset,), (size,)) for start in range(0, 64, 4) for offset, size in part]
    cut = Cut((64,), tuple(boxes))
    faults = faults_of(cut)
    assert sorted(fault.kind for fault in faults) == ["hole", "overlap"]
    assert all(is_true(fault, cut) for fault in faults)


def test_a_tensor_without_elements_needs_no_box() -> None:
    assert faults_of(Cut((0,), ()), Cut((4, 0, 3), ()), Cut((1 << 62, 1 << 62, 0), ())) == ()


def test_a_box_of_a_tensor_without_elements_is_outside() -> None:
    (fault,) = faults_of(Cut((1 << 62, 1 << 62, 0), (Box((1, 2, 0), (3, 4, 1)),)))
    assert (fault.kind, fault.box) == ("outside", Box((1, 2, 0), (3, 4, 1)))


def test_a_tensor_with_elements_and_no_box_is_one_hole() -> None:
    faults = faults_of(Cut((2,), (Box((0,), (2,)),)), Cut((3, 4), ()), Cut((), ()))
    assert faults == (TilingFault(1, "hole", Box.whole((3, 4)), ()), TilingFault(2, "hole", Box((), ()), ()))


def test_a_tensor_without_dimensions_is_tiled_by_its_one_box() -> None:
    scalar = Box((), ())
    assert faults_of(Cut((), (scalar,)), Cut((), (scalar,))) == ()
    assert faults_of(Cut((), (scalar, scalar))) == (TilingFault(0, "overlap", scalar, (0, 1)),)


def test_no_tensors_are_well_tiled() -> None:
    assert faults_of() == ()


def test_a_dimension_of_5_over_8_ranks_is_tiled_by_the_5_that_hold_something() -> None:
    assert faults_of(Cut((5, 3), tuple(Box((row, 0), (1, 3)) for row in range(5)))) == ()


def test_no_more_faults_are_reported_than_asked_for() -> None:
    cuts = [Cut((3,), (Box((0,), (2,)), Box((0,), (2,))))] * 40
    assert len(faults_of(*cuts, max_faults=7)) == 7
    assert len(check_tiling(*columns(cuts))) == 16
    assert faults_of(*cuts, max_faults=7) == faults_of(*cuts)[:7]


def test_one_fault_among_more_tensors_than_16_bits_count_is_found_in_unsorted_rows() -> None:
    count = 200_000
    tensor = np.random.default_rng(0).permutation(count)
    row = count // 3
    zeros, ones = np.zeros((count, 1), np.int64), np.ones((count, 1), np.int64)
    sizes = ones.copy()
    assert check_tiling(tensor, zeros, sizes, ones, ones[:, 0]) == ()
    sizes[row] = 2
    assert check_tiling(tensor, zeros, sizes, ones, ones[:, 0]) == (
        TilingFault(int(tensor[row]), "outside", Box((0,), (2,)), (row,)),
    )


@pytest.mark.parametrize("across", [0, 1])
def test_a_shifted_box_among_a_hundred_thousand_irregular_ones_is_found(across: int) -> None:
    side = 142
    corners = [(3 * row, 3 * column) for row in range(side) for column in range(side)]
    boxes = [
        Box((row + box.offsets[0], column + box.offsets[1]), box.sizes)
        for row, column in corners
        for box in PINWHEEL.boxes
    ]
    cut = Cut((3 * side, 3 * side), tuple(boxes))
    assert faults_of(cut) == ()
    row = len(boxes) // 2 + 3
    offsets = boxes[row].offsets
    faulty = changed(cut, row, Box((offsets[0] + across, offsets[1] + 1 - across), boxes[row].sizes))
    faults = faults_of(faulty)
    assert sorted(fault.kind for fault in faults) == ["hole", "overlap"]
    assert all(is_true(fault, faulty) for fault in faults)


def test_the_sides_of_a_grid_may_be_cut_anywhere() -> None:
    shape = (40, 30, 20)
    boxes = grid(shape, [range(1, 40), [1, 7, 8, 29], range(3, 20, 5)])
    assert faults_of(Cut(shape, tuple(boxes))) == ()
    (fault,) = faults_of(Cut(shape, (*boxes[:100], *boxes[101:])))
    assert (fault.kind, fault.box) == ("hole", boxes[100])


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (0, [1], "not among the 1"),
        (0, [-1], "not among the 1"),
        (0, [0, 0], "do not belong together"),
        (1, [[0, 0]], "do not belong together"),
        (1, [[-1]], "starts below 0"),
        (2, [[0]], "is empty"),
        (3, [[-4]], "negative extent"),
        (3, [[(1 << 62) + 4096]], "more than"),
        (4, [1, 1], "do not belong together"),
    ],
)
def test_columns_that_cannot_be_are_refused(column: int, value: list[Any], message: str) -> None:
    arguments = list(columns([Cut((4,), (Box((0,), (4,)),))]))
    arguments[column] = np.array(value, np.int64)
    with pytest.raises(ArgumentError, match=message):
        check_tiling(*arguments)
