"""Box algebra, against marking every element of a small tensor."""

from __future__ import annotations

import math
import pickle
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.box import Box, contains, flat_range_to_boxes, intersect, relative, slices, subtract, uncovered
from dcp_core.errors import ArgumentError

SIDE = 6
Counts = npt.NDArray[np.int64]


def marks(ndim: int, *boxes: Box) -> Counts:
    """How many of the boxes hold each element of a tensor large enough for all of them."""
    counts = np.zeros((2 * SIDE,) * ndim, np.int64)
    for box in boxes:
        counts[tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))] += 1
    return counts


def boxes_of(ndim: int) -> st.SearchStrategy[Box]:
    numbers = st.tuples(*[st.integers(0, SIDE)] * ndim)
    return st.builds(Box, numbers, numbers)


@st.composite
def box_lists(draw: st.DrawFn, count: int) -> tuple[Box, ...]:
    """That many boxes of one tensor of 0 to 3 dimensions."""
    ndim = draw(st.integers(0, 3))
    return tuple(draw(boxes_of(ndim)) for _ in range(count))


@st.composite
def wanted_and_boxes(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    ndim = draw(st.integers(0, 3))
    return draw(boxes_of(ndim)), draw(st.lists(boxes_of(ndim), max_size=6))


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


@given(box_lists(1))
def test_a_box_counts_its_elements(boxes: tuple[Box]) -> None:
    (box,) = boxes
    assert box.numel == marks(box.ndim, box).sum()


@given(box_lists(1))
def test_a_box_is_empty_when_it_has_no_element(boxes: tuple[Box]) -> None:
    assert boxes[0].is_empty == (boxes[0].numel == 0)


@given(box_lists(2))
def test_an_intersection_holds_the_elements_of_both(boxes: tuple[Box, Box]) -> None:
    one, other = boxes
    common = intersect(one, other)
    expected = marks(one.ndim, one) * marks(one.ndim, other)
    assert np.array_equal(marks(one.ndim, *([common] if common else [])), expected)


@given(box_lists(2))
def test_an_intersection_is_none_or_not_empty(boxes: tuple[Box, Box]) -> None:
    common = intersect(*boxes)
    assert common is None or not common.is_empty


@given(box_lists(2))
def test_intersecting_does_not_depend_on_the_order(boxes: tuple[Box, Box]) -> None:
    one, other = boxes
    assert intersect(one, other) == intersect(other, one)


@given(box_lists(2))
def test_a_difference_holds_the_elements_of_the_first_only_and_each_once(boxes: tuple[Box, Box]) -> None:
    one, other = boxes
    expected = marks(one.ndim, one) * (1 - marks(one.ndim, other))
    assert np.array_equal(marks(one.ndim, *subtract(one, other)), expected)


@given(box_lists(2))
def test_a_difference_is_at_most_two_boxes_a_dimension_none_of_them_empty(boxes: tuple[Box, Box]) -> None:
    pieces = subtract(*boxes)
    assert len(pieces) <= max(1, 2 * boxes[0].ndim)
    assert not any(piece.is_empty for piece in pieces)


@given(box_lists(2))
def test_a_box_contains_another_when_nothing_of_it_is_left_outside(boxes: tuple[Box, Box]) -> None:
    outer, inner = boxes
    assert contains(outer, inner) == bool((marks(outer.ndim, inner) <= marks(outer.ndim, outer)).all())


@given(wanted_and_boxes())
def test_what_is_uncovered_is_each_element_that_no_box_holds_once(case: tuple[Box, list[Box]]) -> None:
    wanted, boxes = case
    expected = marks(wanted.ndim, wanted) * (marks(wanted.ndim, *boxes) == 0)
    assert np.array_equal(marks(wanted.ndim, *uncovered(wanted, boxes)), expected)


@given(wanted_and_boxes())
def test_what_is_uncovered_does_not_depend_on_the_order(case: tuple[Box, list[Box]]) -> None:
    wanted, boxes = case
    assert uncovered(wanted, boxes) == uncovered(wanted, reversed(boxes))


@given(box_lists(2))
def test_a_box_relative_to_an_origin_moves_back_by_adding_it(boxes: tuple[Box, Box]) -> None:
    box, start = boxes
    shifted = Box(tuple(a + b for a, b in zip(box.offsets, start.offsets, strict=True)), box.sizes)
    assert relative(shifted, start.offsets) == box


@given(box_lists(1))
def test_slices_select_the_elements_of_the_box(boxes: tuple[Box]) -> None:
    (box,) = boxes
    selected = np.zeros((2 * SIDE,) * box.ndim, np.int64)
    selected[slices(box)] = 1
    assert np.array_equal(selected, marks(box.ndim, box))


@given(box_lists(2))
def test_slices_from_an_origin_select_in_the_part_that_starts_there(boxes: tuple[Box, Box]) -> None:
    outer, inner = boxes
    common = intersect(outer, inner)
    if common is not None:
        numbers = np.arange((2 * SIDE) ** outer.ndim).reshape((2 * SIDE,) * outer.ndim)
        part = numbers[slices(outer)]
        assert np.array_equal(part[slices(common, outer.offsets)], numbers[slices(common)])


@given(flat_ranges())
def test_the_boxes_of_a_flat_range_hold_its_elements_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    parts = [numbers[slices(box)].ravel() for box in flat_range_to_boxes(shape, start, stop)]
    assert np.array_equal(np.concatenate([np.zeros(0, np.int64), *parts]), np.arange(start, stop))


@given(flat_ranges())
def test_a_flat_range_is_split_into_as_few_boxes_as_can_be(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    assert len(flat_range_to_boxes(shape, start, stop)) == fewest_runs(shape, start, stop)


def fewest_runs(shape: tuple[int, ...], start: int, stop: int) -> int:
    """The shortest way from start to stop over all boxes that are contiguous in the flattened tensor."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    runs: dict[int, set[int]] = {}
    sides = [[(low, high) for low in range(extent) for high in range(low + 1, extent + 1)] for extent in shape]
    for bounds in product(*sides):
        part = numbers[tuple(slice(low, high) for low, high in bounds)].ravel()
        if part[-1] - part[0] == len(part) - 1:
            runs.setdefault(int(part[0]), set()).add(int(part[-1]) + 1)
    best = {start: 0}
    for place in range(start, stop):
        for end in runs.get(place, set()) if place in best else ():
            if end <= stop:
                best[end] = min(best.get(end, stop), best[place] + 1)
    return best[stop]


def test_a_box_without_dimensions_holds_the_one_element() -> None:
    scalar = Box.whole(())
    assert (scalar.numel, scalar.is_empty, scalar.ends) == (1, False, ())
    assert intersect(scalar, scalar) == scalar
    assert subtract(scalar, scalar) == ()
    assert flat_range_to_boxes((), 0, 1) == (scalar,)
    assert np.array(5.0)[slices(scalar)] == 5.0


def test_boxes_sort_by_offsets_then_sizes() -> None:
    boxes = [Box((1, 0), (1, 1)), Box((0, 2), (9, 9)), Box((0, 2), (1, 1))]
    assert sorted(boxes) == [boxes[2], boxes[1], boxes[0]]


def test_integers_of_other_kinds_become_plain_ones() -> None:
    box = Box(tuple(np.array([1, 2])), (np.uint8(3), True))  # type: ignore[arg-type]  # that is the point
    assert box == Box((1, 2), (3, 1))
    assert all(type(number) is int for number in box.offsets + box.sizes)


def test_a_list_becomes_a_tuple() -> None:
    assert hash(Box([0], [4])) == hash(Box((0,), (4,)))  # type: ignore[arg-type]  # that is the point


def test_a_box_survives_pickling() -> None:
    box = Box((1, 2), (3, 4))
    assert pickle.loads(pickle.dumps(box)) == box


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [((0,), (1, 1)), ((-1,), (1,)), ((0,), (-1,)), ((0.0,), (1,)), ((0,), ("1",)), (0, (1,)), ((None,), (1,))],
)
def test_numbers_that_make_no_box_are_refused(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="box"):
        Box(offsets, sizes)


def test_boxes_of_different_tensors_are_refused() -> None:
    one, other = Box.whole((2,)), Box.whole((2, 2))
    for function in (intersect, subtract, contains):
        with pytest.raises(ArgumentError, match="same number of dimensions"):
            function(one, other)
    with pytest.raises(ArgumentError, match="as many dimensions"):
        relative(one, (0, 0))


def test_a_box_before_the_origin_is_refused() -> None:
    with pytest.raises(ArgumentError, match="negative"):
        slices(Box((1,), (2,)), (2,))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_flat_range_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ArgumentError, match="not a range"):
        flat_range_to_boxes((2, 3), start, stop)
