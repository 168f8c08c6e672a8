"""Device matrix and tensor map to boxes, against an oracle that enumerates devices, pieces and elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.box import slices as box_slices
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.cuts import Cut, LocalLayout, cut_runs, local_layout
from dcp_core.planning.ragged import ragged_range
from dcp_core.planning.tensor_map import ALL_REPLICAS, TensorMapLayout

Holdings = dict[int, npt.NDArray[np.bool_]]


def layout_of(layout: TensorMapLayout, shape: Sequence[int], rank: int) -> LocalLayout:
    cuts = layout.cuts(shape, rank)
    assert cuts is not None
    return local_layout(shape, cuts)


def held_by(found: LocalLayout, shape: Sequence[int]) -> npt.NDArray[np.bool_]:
    mask = np.zeros(shape, dtype=bool)
    for box in found.boxes:
        assert not mask[box_slices(box)].any(), "boxes of one rank overlap"
        mask[box_slices(box)] = True
    return mask


def enumerated(
    matrix: Sequence[int],
    tensor_map: Sequence[Sequence[int]],
    ranks: Sequence[int],
    shape: Sequence[int],
    virtual: bool,
) -> Holdings:
    """Which elements each rank holds: every device, every element, one by one.

    An element's place along a dimension is spelled in the mixed base of the axes that cut it, coarsest first; a rank
    holds it if all digits but that of the virtual axis are the rank's own coordinates.
    """
    real = matrix[:-1] if virtual else matrix
    found: Holdings = {}
    for rank, coordinate in zip(ranks, itertools.product(*map(range, real)), strict=True):
        mask = np.zeros(shape, dtype=bool)
        for index in itertools.product(*map(range, shape)):
            held = True
            for at, size, axes in zip(index, shape, tensor_map, strict=True):
                left = [len(matrix) - 1 - axis for axis in axes]
                place = at // (size // math.prod(matrix[axis] for axis in left))
                for axis in reversed(left):
                    place, digit = divmod(place, matrix[axis])
                    held &= axis >= len(real) or digit == coordinate[axis]
            mask[index] = held
        found[rank] = mask
    return found


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TensorMapLayout, tuple[int, ...], Holdings]:
    matrix = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    virtual = draw(st.booleans())
    ndim = draw(st.integers(0, 3))
    order = draw(st.permutations(range(len(matrix))))
    tensor_map: list[list[int]] = [[] for _ in range(ndim)]
    for axis in order:
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            tensor_map[dim].append(axis)
    parts = [math.prod(matrix[len(matrix) - 1 - axis] for axis in axes) for axes in tensor_map]
    shape = tuple(part * draw(st.integers(0, 2)) for part in parts)
    devices = math.prod(matrix[:-1] if virtual else matrix)
    ranks = draw(st.permutations(range(devices + 2)))[:devices]
    expected = enumerated(matrix, tensor_map, ranks, shape, virtual)
    spelled: list[Any] = [_spelled(draw, axes) for axes in tensor_map]
    listed = draw(st.sampled_from((1, matrix[-1]))) if virtual else 1
    rank_list = tuple(rank for rank in ranks for _ in range(listed))
    return TensorMapLayout(tuple(matrix), tuple(spelled), rank_list, interleaved=virtual), shape, expected


def _spelled(draw: st.DrawFn, axes: list[int]) -> object:
    """One of the ways in which frameworks write an entry."""
    if not axes:
        return draw(st.sampled_from((-1, (-1,), (), [-1])))
    if len(axes) == 1:
        return draw(st.sampled_from((axes[0], tuple(axes), (axes[0], -1))))
    return draw(st.sampled_from((tuple(axes), [*axes])))


@given(drawn=layouts())
def test_boxes_are_what_enumerating_all_devices_and_elements_gives(
    drawn: tuple[TensorMapLayout, tuple[int, ...], Holdings],
) -> None:
    layout, shape, expected = drawn
    whole = np.arange(math.prod(shape)).reshape(shape)
    for rank, mask in expected.items():
        found = layout_of(layout, shape, rank)
        assert np.array_equal(held_by(found, shape), mask)
        local = np.full(found.local_shape, -1)
        for box, part in zip(found.boxes, found.slices, strict=True):
            local[part] = whole[box_slices(box)]
        assert np.array_equal(local.reshape(-1), whole[mask]), "the local tensor is in the order of the global one"


@given(drawn=layouts())
def test_replica_ranks_share_everything_and_miss_nobody_who_shares(
    drawn: tuple[TensorMapLayout, tuple[int, ...], Holdings],
) -> None:
    layout, shape, _ = drawn
    filled = tuple(size or math.prod(layout.device_matrix) for size in shape)
    expected = enumerated(layout.device_matrix, layout.tensor_map, layout.ranks, filled, layout.interleaved)
    for rank, mask in expected.items():
        alike = tuple(sorted(other for other, its in expected.items() if np.array_equal(its, mask)))
        assert layout.replica_ranks(rank) == alike


def test_an_interleaved_axis_before_others_makes_several_boxes() -> None:
    layout = TensorMapLayout((2, 2), ((0, 1), -1), interleaved=True)
    found = layout_of(layout, (8, 3), 1)
    assert [(box.offsets, box.sizes) for box in found.boxes] == [((2, 0), (2, 3)), ((6, 0), (2, 3))]
    assert found.local_shape == (4, 3)
    after = TensorMapLayout((2, 2), ((1, 0), -1), interleaved=True)
    assert [box.offsets for box in layout_of(after, (8, 3), 1).boxes] == [(4, 0)]


def test_the_ranks_of_an_interleaved_layout_without_a_list_of_its_own_are_the_first_ones() -> None:
    default = TensorMapLayout((2, 2, 2), (2, -1), tuple(range(8)), interleaved=True)
    assert default.ranks == (0, 1, 2, 3)
    assert default.replica_ranks(3) == (2, 3)


def test_a_rank_outside_the_list_holds_nothing() -> None:
    layout = TensorMapLayout((2,), (0,), (4, 6))
    assert layout.cuts((4,), 5) is None
    assert layout.replica_ranks(5) == ()
    assert [layout_of(layout, (4,), rank).boxes[0].offsets for rank in (4, 6)] == [(0,), (2,)]


def test_what_does_not_come_out_even_is_refused_on_every_rank_and_says_why() -> None:
    layout = TensorMapLayout((2, 2), ((1, 0), -1))
    for rank in (0, 3, 17):
        with pytest.raises(
            UnsupportedValueError, match=r"dimension 0 of 6 elements is cut into 4 parts .*annotate_shard"
        ):
            layout.cuts((6, 4), rank)
    with pytest.raises(UnsupportedValueError, match="dimensions"):
        layout.cuts((8,), 0)


def uneven_sizes(size: int, matrix: Sequence[int], rounded_up: Sequence[int]) -> list[list[int]]:
    """The oracle of uneven cuts: split the list of indices by each axis in turn, as numpy or torch split it."""
    parts = [list(range(size))]
    for axis, count in enumerate(matrix):
        cut: list[list[int]] = []
        for part in parts:
            step = -(-len(part) // count)
            chunks = [part[step * at : step * (at + 1)] for at in range(count)]
            balanced = [list(map(int, found)) for found in np.array_split(np.array(part, dtype=int), count)]
            cut.extend(chunks if axis in rounded_up else balanced)
        parts = cut
    return parts


@given(
    size=st.integers(0, 40),
    matrix=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    rounded_up=st.sets(st.integers(0, 2)),
)
def test_uneven_cuts_are_made_as_told(size: int, matrix: list[int], rounded_up: set[int]) -> None:
    axes = tuple(reversed(range(len(matrix))))
    layout = TensorMapLayout(tuple(matrix), (axes,), rounded_up_axes=tuple(rounded_up))
    for rank, expected in enumerate(uneven_sizes(size, matrix, tuple(rounded_up))):
        found = layout_of(layout, (size,), rank)
        assert [at for box in found.boxes for at in range(box.offsets[0], box.ends[0])] == expected


def test_uneven_pieces_of_an_interleaved_axis_are_refused() -> None:
    layout = TensorMapLayout((2, 2), ((0, 1),), interleaved=True, rounded_up_axes=())
    with pytest.raises(UnsupportedValueError, match="does not come out even"):
        layout.cuts((6,), 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((2, 0), (0,)), "at least one device"),
        (((2,), (1,)), "does not have"),
        (((2,), (-2,)), "does not have"),
        (((2, 2), (0, 0)), "twice"),
        (((2, 2), ((0, 0),)), "twice"),
        (((2,), (0,), (1,)), "does not fit the 2 devices"),
        (((2,), (0,), (1, 1)), "does not fit the 2 devices"),
        (((2, 2), (0,), (0, 1, 1, 0), True), "last axis is interleaved"),
        (((), (), None, True), "at least one device"),
        (((2,), ("0",)), "whole numbers"),
        (((2,), 0), "a sequence"),
        (("ab", (0,)), "whole numbers"),
        (((2,), (0,), (0.5, 1)), "whole numbers"),
    ],
)
def test_numbers_that_are_no_layout_are_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        TensorMapLayout(*arguments)


def test_a_tensor_without_dimensions_is_whole_on_every_rank() -> None:
    layout = TensorMapLayout((2, 2), ())
    assert [box.sizes for box in layout_of(layout, (), 2).boxes] == [()]
    assert layout.replica_ranks(2) == (0, 1, 2, 3)


@given(length=st.integers(0, 40), chunks=st.integers(1, 9))
def test_balanced_cuts_are_those_of_numpy(length: int, chunks: int) -> None:
    expected = [[int(at) for at in part] for part in np.array_split(np.arange(length), chunks)]
    runs = [(0, length)] if length else []
    for index in range(chunks):
        found = cut_runs(runs, Cut(0, chunks, index, balanced=True))
        assert [at for start, stop in found for at in range(start, stop)] == expected[index]


# -- ragged --------------------------------------------------------------------------------------------------------


@given(
    units=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    times=st.integers(1, 3),
    columns=st.integers(1, 3),
)
def test_ragged_parts_follow_each_other_and_have_their_share(units: list[int], times: int, columns: int) -> None:
    rows = sum(units) * times
    at = 0
    for index, unit in enumerate(units):
        start, stop = ragged_range((rows, columns), (0,), units, index)
        assert (start, stop - start) == (at, unit * times * columns)
        at = stop
    assert at == rows * columns
    assert ragged_range((rows, columns, 2), (0, 1), units, 0) == (0, units[0] * times * columns * 2)


@pytest.mark.parametrize(
    ("dims", "units", "index", "words"),
    [
        ((1,), (1, 1), 0, "first dimensions"),
        ((), (1, 1), 0, "first dimensions"),
        ((0, 1, 2), (1, 1), 0, "first dimensions"),
        ((0,), (1, 1), 2, "no meaning"),
        ((0,), (0, 0), 0, "no meaning"),
        ((0,), (2, -1), 0, "no meaning"),
        ((0,), (2, 1), 0, "no multiple"),
    ],
)
def test_ragged_units_that_do_not_fit_are_refused(dims: Any, units: Any, index: int, words: str) -> None:
    with pytest.raises(UnsupportedValueError, match=words):
        ragged_range((4, 3), dims, units, index)


# -- parallel optimizers -------------------------------------------------------------------------------------------


@st.composite
def optimizer_layouts(draw: st.DrawFn) -> tuple[TensorMapLayout, tuple[int, ...]]:
    matrix = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    ndim = draw(st.integers(1, 3))
    tensor_map: list[list[int]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(range(len(matrix)))):
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            tensor_map[dim].append(axis)
    whole = TensorMapLayout(matrix, tuple(tensor_map))
    replicas = len(whole.replica_ranks(0))
    parts = draw(st.sampled_from([n for n in range(1, replicas + 1) if replicas % n == 0]))
    counts = [math.prod(matrix[len(matrix) - 1 - axis] for axis in axes) for axes in tensor_map]
    shape = [count * draw(st.integers(1, 2)) for count in counts]
    shape[0] *= parts
    return replace(whole, optimizer_parts=parts), tuple(shape)


@given(drawn=optimizer_layouts())
def test_a_parallel_optimizer_cuts_once_more_between_neighbours_that_hold_the_same(
    drawn: tuple[TensorMapLayout, tuple[int, ...]],
) -> None:
    layout, shape = drawn
    whole, parts = np.arange(math.prod(shape)).reshape(shape), layout.optimizer_parts
    uncut = replace(layout, optimizer_parts=1)
    held = [whole[box_slices(layout_of(uncut, shape, rank).boxes[0])] for rank in layout.ranks]
    expected = []
    for rank, own in enumerate(held):
        before = sum(np.array_equal(own, other) for other in held[:rank])
        expected.append(np.split(own, parts)[before % parts])
    for rank, own in enumerate(expected):
        (box,) = layout_of(layout, shape, rank).boxes
        assert np.array_equal(whole[box_slices(box)], own)
        alike = tuple(other for other, its in enumerate(expected) if np.array_equal(its, own))
        assert layout.replica_ranks(rank) == alike


def test_a_parallel_optimizer_may_take_all_replicas_and_no_more() -> None:
    assert TensorMapLayout((2, 2, 2), (0, -1), optimizer_parts=ALL_REPLICAS).optimizer_parts == 4
    for tensor_map, parts in (((0, -1), 8), ((0, -1), 3), ((), 2), ((0, -1), 0)):
        with pytest.raises(ArgumentError, match="parallel optimizer"):
            TensorMapLayout((2, 2, 2), tensor_map, optimizer_parts=parts)
    with pytest.raises(UnsupportedValueError, match="does not come out even"):
        TensorMapLayout((2, 2), (0, -1), optimizer_parts=2).cuts((6, 3), 0)
