"""Boxes of layouts by device matrix and tensor map, against numpy's own splitting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.box import slices as box_slices
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.device_layout import ALL_REPLICAS, DeviceLayout, device_part, replica_ranks

Array = npt.NDArray[Any]


def split_for(whole: Array, layout: DeviceLayout, at: tuple[int, ...]) -> Array:
    """The oracle: numpy splits the tensor once for each axis that cuts it, outermost first."""
    matrix = layout.device_matrix
    for dim, axes in enumerate(layout.tensor_map):
        for axis in axes:
            position = len(matrix) - 1 - axis
            whole = np.split(whole, matrix[position], axis=dim)[at[position]]
    return whole


def model_shards(whole: Array, layout: DeviceLayout) -> list[Array]:
    """What each device holds before a parallel optimizer cuts it, in the order of the devices."""
    matrix = layout.device_matrix
    if not layout.is_interleaved:
        return [split_for(whole, layout, at) for at in np.ndindex(matrix)]
    dim = next((dim for dim, axes in enumerate(layout.tensor_map) if 0 in axes), None)
    found = []
    for at in np.ndindex(matrix[:-1]):
        parts = [split_for(whole, layout, (*at, inner)) for inner in range(matrix[-1])]
        found.append(parts[0] if dim is None else np.concatenate(parts, axis=dim))
    return found


def shards(whole: Array, layout: DeviceLayout) -> list[Array]:
    """What each device holds: a parallel optimizer cuts a shard between those that hold the same, in their order."""
    found = model_shards(whole, layout)
    cut = []
    for number, own in enumerate(found):
        place = sum(np.array_equal(own, other) for other in found[:number])
        parts = layout.optimizer_parts
        cut.append(np.split(own, parts)[place % parts] if parts > 1 else own)
    return cut


def assert_is_what_the_oracle_says(layout: DeviceLayout, shape: tuple[int, ...]) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape)
    expected = shards(whole, layout)
    assert len(expected) == len(layout.rank_list)
    for rank, local in zip(layout.rank_list, expected, strict=True):
        part = device_part(layout, shape, rank)
        assert part is not None
        assert part.local_shape == local.shape
        seen = np.full(local.shape, -1)
        for box, place in zip(part.boxes, part.slices, strict=True):
            assert (seen[place] == -1).all()
            seen[place] = whole[box_slices(box)]
        assert np.array_equal(seen, local)
        same = [other for other, held in zip(layout.rank_list, expected, strict=True) if np.array_equal(held, local)]
        assert replica_ranks(layout, rank) == tuple(sorted(same))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[DeviceLayout, tuple[int, ...]]:
    matrix = tuple(draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=4)))
    is_interleaved = draw(st.booleans())
    ndim = draw(st.integers(1, 3))
    axes = draw(st.permutations(range(len(matrix))))
    used = axes[: draw(st.integers(0, len(matrix)))]
    tensor_map: list[list[int]] = [[] for _ in range(ndim)]
    for axis in used:
        tensor_map[draw(st.integers(0, ndim - 1))].append(axis)
    spelled = [
        (of_dim[0] if len(of_dim) == 1 and draw(st.booleans()) else (*of_dim, -1)) if of_dim else -1
        for of_dim in tensor_map
    ]
    free = [size for position, size in enumerate(matrix) if len(matrix) - 1 - position not in used]
    if is_interleaved and 0 not in used:
        free = free[:-1]
    replicas = math.prod(free)
    parts = draw(st.sampled_from([n for n in range(1, replicas + 1) if replicas % n == 0]))
    devices = math.prod(matrix[:-1] if is_interleaved else matrix)
    ranks = draw(st.one_of(st.none(), st.permutations([3 + 2 * number for number in range(devices)])))
    cuts = [math.prod(matrix[len(matrix) - 1 - axis] for axis in of_dim) for of_dim in tensor_map]
    shape = [cut * draw(st.integers(1, 2)) for cut in cuts]
    shape[0] *= parts
    made = DeviceLayout(matrix, spelled, ranks, is_interleaved=is_interleaved, optimizer_parts=parts)
    return made, tuple(shape)


@given(layouts())
def test_every_rank_holds_the_boxes_that_numpy_splits_off(drawn: tuple[DeviceLayout, tuple[int, ...]]) -> None:
    assert_is_what_the_oracle_says(*drawn)


def test_tensor_and_data_parallel_by_hand() -> None:
    columns = DeviceLayout((2, 2), (-1, 0))
    held = [device_part(columns, (8, 4), rank) for rank in range(4)]
    assert [part.boxes[0].offsets for part in held if part] == [(0, 0), (0, 2), (0, 0), (0, 2)]
    assert replica_ranks(columns, 1) == (1, 3)
    reversed_axes = DeviceLayout((2, 2), ((0, 1), -1))
    held = [device_part(reversed_axes, (8, 4), rank) for rank in range(4)]
    assert [part.boxes[0].offsets for part in held if part] == [(0, 0), (4, 0), (2, 0), (6, 0)]


def test_an_interleaved_axis_that_cuts_first_gives_a_device_several_boxes() -> None:
    apart = DeviceLayout((2, 2), ((0, 1), -1), is_interleaved=True)
    part = device_part(apart, (8, 4), 1)
    assert part is not None
    assert [(box.offsets, box.sizes) for box in part.boxes] == [((2, 0), (2, 4)), ((6, 0), (2, 4))]
    assert part.slices == ((slice(0, 2), slice(0, 4)), (slice(2, 4), slice(0, 4)))
    together = device_part(DeviceLayout((2, 2), ((1, 0), -1), is_interleaved=True), (8, 4), 1)
    assert together is not None and [box.offsets for box in together.boxes] == [(4, 0)]


@pytest.mark.parametrize("ranks", [[4, 5], [4, 5, 6, 7], [4, 4, 5, 5]])
def test_an_interleaved_layout_names_each_device_once_or_for_each_of_its_parts(ranks: list[int]) -> None:
    layout = DeviceLayout((2, 2), ((0, 1), -1), ranks, is_interleaved=True)
    assert layout.rank_list == (4, 5)
    assert_is_what_the_oracle_says(layout, (8, 4))


def test_a_parallel_optimizer_cuts_between_all_replicas_by_default_or_between_neighbours() -> None:
    everything = DeviceLayout((2, 2, 2), (0, -1), optimizer_parts=ALL_REPLICAS)
    assert everything.optimizer_parts == 4
    assert_is_what_the_oracle_says(everything, (16, 3))
    assert_is_what_the_oracle_says(DeviceLayout((2, 2, 2), (0, -1), optimizer_parts=2), (16, 3))


def test_a_rank_outside_the_layout_holds_nothing() -> None:
    layout = DeviceLayout((2,), (0,), [4, 6])
    assert device_part(layout, (4,), 5) is None
    assert replica_ranks(layout, 5) == ()


def test_without_a_tensor_map_nothing_is_cut() -> None:
    assert_is_what_the_oracle_says(DeviceLayout((2, 2), ()), (3, 5))
    part = device_part(DeviceLayout((2, 2), ()), (), 3)
    assert part is not None and part.boxes[0].sizes == ()


def test_a_dimension_without_elements_gives_no_box() -> None:
    part = device_part(DeviceLayout((2,), (0, -1)), (0, 3), 1)
    assert part is not None and part.boxes == () and part.local_shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 2), (2, -1)), "lacks"),
        (((2, 2), (0, 0)), "twice"),
        (((2, 2), ((0, 1), 1)), "twice"),
        (((2, 2), (-2,)), "below -1"),
        (((2, 0), (0,)), "below 1"),
        ((("2",), (0,)), "whole numbers"),
        (((2,), ("tp",)), "whole numbers"),
        (((2,), 0), "an entry a dimension"),
        (((2,), (0,), [0, 1, 2]), "2 different ranks"),
        (((2,), (0,), [1, 1]), "2 different ranks"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DeviceLayout(*arguments)


def test_a_parallel_optimizer_cuts_only_between_replicas() -> None:
    with pytest.raises(ArgumentError, match="2 ranks hold the same shard"):
        DeviceLayout((2, 2), (0, -1), optimizer_parts=4)


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        (DeviceLayout((2,), (0, -1)), (5, 3), "5 elements cannot be cut into 2 equal parts"),
        (DeviceLayout((2,), (0,)), (4, 4), "one entry a dimension"),
        (DeviceLayout((2, 2), (0, -1), optimizer_parts=2), (6, 3), "3 elements cannot be cut into 2 equal parts"),
        (DeviceLayout((2,), (), optimizer_parts=2), (), "0-d"),
    ],
)
def test_a_layout_that_does_not_fit_the_shape_is_refused(
    layout: DeviceLayout, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UnsupportedValueError, match=message):
        device_part(layout, shape, 0)
