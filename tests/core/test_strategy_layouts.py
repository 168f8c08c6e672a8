"""Layouts of compiled networks: every form says the same, and what is none says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dcp_core.arrays import ArrayAccess
from dcp_core.box import Box
from dcp_core.box import slices as box_slices
from dcp_core.dtype import dtype_named
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.chunk_info import ChunkInfo
from dcp_core.planning.leaves import LocalTensor, whole_shape, whole_tensor
from dcp_core.planning.placed_shards import place_by_chunk, place_by_layout
from dcp_core.planning.strategy_layouts import KnownLayout, known_layout, layouts_of_rank

SHAPE = (8, 4)
DICT = {"device_matrix": (2, 2), "tensor_map": (1, 0), "rank_list": [0, 1, 2, 3]}
STRATEGY = {"dev_matrix": [2, 2], "tensor_map": [[1], [0]], "opt_weight_shard_size": 0, "opt_weight_shard_step": 0}

FORMS: dict[str, Any] = {
    "a dict": DICT,
    "a dict of HyperParallel": {"mesh_shape": (2, 2), "tensor_map": ((1,), 0), "rank_list": (0, 1, 2, 3)},
    "an object": SimpleNamespace(**DICT),
    "an object that makes a dict": SimpleNamespace(to_dict=lambda: DICT),
    "an entry of parameter_layout_dict": ([2, 2], [1, 0], [4, 2], 0, True, "", [8, 4]),
    "one without a full shape": ([2, 2], [1, 0], [4, 2], 0, True, "", []),
    "a triple": [DICT, "Float32", [8, 4]],
    "an entry of a strategy file": STRATEGY,
    "an object of a strategy": SimpleNamespace(**STRATEGY, rank_list=[0, 1, 2, 3], tensor_shape=[8, 4]),
}


def boxes(source: Any, rank: int, shape: tuple[int, ...] = SHAPE) -> tuple[Box, ...]:
    here = known_layout(source, rank).holding(shape, rank)
    assert here is not None and here.cut is not None
    return here.cut.boxes


def plain(array: np.ndarray[Any, Any]) -> LocalTensor:
    dtype = dtype_named("float32")
    return whole_tensor(whole_shape(array.shape), dtype, array, ArrayAccess(dtype), "cpu", None)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_layout_gives_the_same_boxes_and_shape(form: str) -> None:
    for rank in range(4):
        assert boxes(FORMS[form], rank) == (Box((rank // 2 * 4, rank % 2 * 2), (4, 2)),)
        assert known_layout(FORMS[form], rank).whole_shape((4, 2)) == SHAPE


@pytest.mark.parametrize(
    "form",
    [
        ([2, 2], [-1, 0], [4, 2], 0, True, "2-1234567", [8, 4]),
        ([2, 2], [-1, 0], [], 0, True, "2-1234567", [8, 4]),
        {"dev_matrix": [2, 2], "tensor_map": [-1, 0], "opt_weight_shard_size": 2, "opt_weight_shard_step": 2},
        {"dev_matrix": [2, 2], "tensor_map": [-1, 0], "opt_weight_shard_size": -1, "opt_weight_shard_step": -1},
        # what get_strategy_metadata makes of it: the axis of the parallel optimizer cuts the first dimension
        [{"device_matrix": (2, 2), "tensor_map": (1, 0), "rank_list": [0, 1, 2, 3]}, "Float32", [8, 4]],
    ],
)
def test_the_cut_of_a_parallel_optimizer_is_read_from_every_form(form: Any) -> None:
    assert [boxes(form, rank)[0].offsets for rank in range(4)] == [(0, 0), (0, 2), (4, 0), (4, 2)]
    assert known_layout(form, 0).whole_shape((4, 2)) == SHAPE


def test_a_layout_that_names_no_ranks_is_for_the_stage_that_the_rank_lies_in() -> None:
    form = ([2, 2], [1, 0], [4, 2], 0, True, "", [8, 4])
    assert [boxes(form, rank) for rank in range(4, 8)] == [boxes(form, rank) for rank in range(4)]
    assert known_layout(form, 6).layout.ranks == (4, 5, 6, 7)
    named = known_layout({"device_matrix": (2,), "tensor_map": (0, -1), "rank_list": [4, 6]}, 5)
    assert named.holding(SHAPE, 5) is None


def test_without_a_tensor_map_a_tensor_is_whole_everywhere() -> None:
    assert boxes(([2, 2], [], [], 0, True, "", []), 3) == (Box((0, 0), SHAPE),)
    assert boxes(([2, 2], [], [], 0, True, "", []), 3, ()) == (Box((), ()),)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ({**DICT, "partial": [None, "sum"]}, UnsupportedValueError, "Partial"),
        (SimpleNamespace(**DICT, is_partial=lambda: True), UnsupportedValueError, "Partial"),
        (([2, 2], [1, 0], [4, 2], 3, True, "", [8, 4]), UnsupportedValueError, "field"),
        ({**STRATEGY, "field": 3}, UnsupportedValueError, "field"),
        (([2, 2], [1, 0], [4, 2], 0, False, "", [8, 4]), UnsupportedValueError, "unequal"),
        (([2, 2], [1, 0]), ArgumentError, "2 values are no layout"),
        (([2, 2], [5, 0], [4, 2], 0, True, "", [8, 4]), ArgumentError, "does not have"),
        (([2, 2], [-1, 0], [3, 2], 0, True, "group", [8, 4]), ArgumentError, "no equal part"),
        ({"device_matrix": (2, 2), "tensor_map": None, "rank_list": None}, UnsupportedValueError, "says nothing"),
        ("fc1", UnsupportedValueError, "says nothing"),
        ([DICT, "Float32", "8x4"], ArgumentError, "whole numbers"),
        ((2, [1, 0], [4, 2], 0, True, "", [8, 4]), ArgumentError, "device_matrix"),
        (([2, 2], None, [4, 2], 0, True, "", [8, 4]), ArgumentError, "no layout"),
        (([2, 2], ["tp", 0], [4, 2], 0, True, "", [8, 4]), ArgumentError, "whole numbers"),
        ([3, "Float32", [8, 4]], UnsupportedValueError, "says nothing"),
    ],
)
def test_what_is_no_layout_is_refused_and_shown(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        known_layout(source, 0)
    assert "the layout: " in str(raised.value)


def test_layouts_are_given_by_name_or_by_rank_and_name() -> None:
    by_name = {"w": DICT}
    assert layouts_of_rank(by_name, 3) == by_name
    assert layouts_of_rank({0: {}, 3: by_name}, 3) == by_name
    assert layouts_of_rank({0: by_name}, 3) == by_name
    with pytest.raises(ArgumentError, match=r"for the ranks \[0, 1\], and not for rank 3"):
        layouts_of_rank({0: by_name, 1: by_name}, 3)
    for wrong in (["w"], {1: DICT, "w": DICT}, {("w",): DICT}):
        with pytest.raises(ArgumentError, match="must map names"):
            layouts_of_rank(wrong, 0)


def test_a_plain_tensor_becomes_the_shard_that_its_layout_says() -> None:
    whole = np.arange(32, dtype=np.float32).reshape(SHAPE)
    interleaved = {"device_matrix": (2, 2), "tensor_map": ((0, 1), -1), "interleaved_parallel": True}
    for source in (*FORMS.values(), {**interleaved, "rank_list": [0, 1]}):
        known = known_layout(source, 1)
        expected = [whole[box_slices(box)] for box in boxes(source, 1)]
        local = np.concatenate(expected)
        shard = place_by_layout(plain(local), known, 1)
        assert shard.global_shape == SHAPE and not shard.plain
        assert all(np.array_equal(view, part) for view, part in zip(shard.views, expected, strict=True))
        assert all(np.shares_memory(view, local) for view in shard.views)


def test_a_local_tensor_that_its_layout_does_not_fit_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match=r"local tensor of shape \(4, 2\) on this rank; found .*\(8, 2\)"):
        place_by_layout(plain(np.zeros((8, 2), np.float32)), known_layout([DICT, "Float32", SHAPE], 0), 0)
    with pytest.raises(UnsupportedValueError, match="another number of dimensions"):
        place_by_layout(plain(np.zeros(8, np.float32)), known_layout(DICT, 0), 0)
    elsewhere = known_layout({"device_matrix": (2,), "tensor_map": (0, -1), "rank_list": [4, 6]}, 0)
    with pytest.raises(UnsupportedValueError, match=r"lies on rank 0, and its layout is for the ranks \[4, 6\]"):
        place_by_layout(plain(np.zeros((4, 4), np.float32)), elsewhere, 0)


def test_a_flat_range_becomes_boxes_that_share_its_memory() -> None:
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    local = whole.reshape(-1)[2:11].copy()
    shard = place_by_chunk(plain(local), ChunkInfo((2,), (9,), (3, 4)))
    assert len(shard.boxes) == 3
    for box, view in zip(shard.boxes, shard.views, strict=True):
        assert np.array_equal(view, whole[box_slices(box)]) and np.shares_memory(view, local)
    empty = place_by_chunk(plain(np.zeros(0, np.float32)), ChunkInfo((12,), (0,), (3, 4)))
    assert empty.boxes == () and empty.views == () and empty.global_shape == (3, 4)


def test_the_whole_shape_counts_an_interleaved_axis_once() -> None:
    layout = known_layout({**DICT, "tensor_map": ((0, 1), -1), "interleaved_parallel": True, "rank_list": [0, 1]}, 0)
    assert isinstance(layout, KnownLayout) and layout.whole_shape((4, 4)) == SHAPE
