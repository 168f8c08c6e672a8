"""Boxes of MindSpore tensors, against MindSpore's own slicer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import COOTensor, Parameter, Tensor, nn
from mindspore.nn.utils import no_init_parameters
from mindspore.parallel import Layout
from mindspore.parallel._tensor import (
    _construct_tensor_layout_for_opt_shard,
    _expand_layout,
    _load_tensor,
    _load_tensor_by_layout,
)
from mindspore.parallel.strategy import _NetStrategyInfo

from dcp_core.box import Box
from dcp_core.box import slices as box_slices
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.leaves import LocalTensor
from dcp_core.planning.strategy_layouts import known_layout
from dcp_mindspore.annotate import annotate_shard
from dcp_mindspore.describers import describe_tensor
from tests.mindspore.laid_out import DTensor

Array = npt.NDArray[Any]


def counted(*shape: int) -> Array:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def described(value: Any, rank: int = 0) -> LocalTensor:
    found = describe_tensor(value, lambda: rank)
    assert found is not None
    return found


def by_layout(source: Any, rank: int, shape: tuple[int, ...], whole: Array) -> Array:
    """What our boxes select, put together along the dimension that several of them cut."""
    here = known_layout(source, rank).holding(shape, rank)
    assert here is not None and here.cut is not None
    local = np.empty(here.cut.local_shape, whole.dtype)
    for box, place in zip(here.cut.boxes, here.cut.slices, strict=True):
        local[place] = whole[box_slices(box)]
    return local


def mindspore_slice(whole: Array, matrix: Sequence[int], tensor_map: Sequence[Any], rank: int) -> Array:
    """What MindSpore's own slicer gives a rank; dimensions that several axes cut are taken apart by MindSpore too."""
    matrix, flat, shape = _expand_layout(list(matrix), list(tensor_map), list(whole.shape))
    found: Array = _load_tensor(Tensor(whole.reshape(shape)), matrix, flat, None, rank)
    return found


# -- layouts -------------------------------------------------------------------------------------------------------


def test_boxes_are_what_mindspores_own_slicer_gives() -> None:
    whole, compared = counted(8, 8), 0
    for matrix in ((2, 2), (4, 1), (1, 4), (2, 1, 2), (2, 2, 2)):
        axes = [*range(len(matrix))]
        entries: list[Any] = [-1, *axes, *map(list, itertools.permutations(axes, 2))]
        for tensor_map in itertools.product(entries, repeat=2):
            used = [axis for entry in tensor_map for axis in (entry if isinstance(entry, list) else [entry])]
            named = [axis for axis in used if axis != -1]
            if len(set(named)) != len(named):
                continue
            source: Any = (matrix, tensor_map, [], 0, True, "", [8, 8])
            for rank in range(math.prod(matrix)):
                ours = by_layout(source, rank, (8, 8), whole)
                assert np.array_equal(ours.reshape(-1), mindspore_slice(whole, matrix, tensor_map, rank).reshape(-1))
                compared += 1
    assert compared > 500


@pytest.mark.parametrize(
    ("matrix", "tensor_map", "size"),
    [
        ((2, 2), (0, -1), 2),
        ((2, 2), (1, -1), 2),
        ((2, 2, 2), (0, -1), 2),
        ((2, 2, 2), (1, -1), 2),
        ((2, 2, 2), (1, -1), 4),
        ((2, 2, 2), (2, 0), 2),
        ((4, 2), (0, -1), 2),
        ((2, 4), (1, -1), 2),
        ((4, 2), (-1, 0), 2),
        ((2, 2, 2), ([1, 0], -1), 2),
        ((4, 2, 2), ([1, 0], -1), 2),
    ],
)
def test_the_cut_of_a_parallel_optimizer_is_mindspores(matrix: Any, tensor_map: Any, size: int) -> None:
    whole = counted(16, 4)
    free = [at for at in range(len(matrix)) if len(matrix) - 1 - at not in np.hstack([*map(np.ravel, tensor_map)])]
    step = math.prod(matrix[max(free) + 1 :])
    new_matrix, new_map, new_shape = _construct_tensor_layout_for_opt_shard(
        list(matrix), list(tensor_map), step, size, list(whole.shape)
    )
    source = {"dev_matrix": matrix, "tensor_map": tensor_map, "opt_weight_shard_size": size}
    for rank in range(math.prod(matrix)):
        theirs = _load_tensor(Tensor(whole.reshape([int(n) for n in new_shape])), new_matrix, new_map, None, rank)
        assert np.array_equal(by_layout(source, rank, (16, 4), whole).reshape(-1), theirs.reshape(-1)), rank


def test_layouts_of_every_form_give_the_same_boxes() -> None:
    whole = counted(8, 4)
    layout = Layout((2, 2), ("dp", "tp"))("dp", "tp")
    net = nn.Dense(4, 8)
    net.parameter_layout_dict = {"weight": ([2, 2], [1, 0], [4, 2], 0, True, "", [8, 4])}
    forms = [
        layout,
        layout.to_dict(),
        net.parameter_layout_dict["weight"],
        [layout, "Float32", [8, 4]],
        strategy_metadata(tensor_map=[[1], [0]])[0]["w"],
        SimpleNamespace(mesh_shape=(2, 2), tensor_map=(1, 0), rank_list=(0, 1, 2, 3), partial=[None, None]),
    ]
    for rank in range(4):
        expected = _load_tensor_by_layout(Tensor(whole), net.parameter_layout_dict["weight"], rank).asnumpy()
        for form in forms:
            assert np.array_equal(by_layout(form, rank, (8, 4), whole), expected)


def strategy_metadata(**entry: Any) -> Any:
    """What `get_strategy_metadata` makes of a compiled network's strategy: the network is stood in for."""
    strategy = {"dev_matrix": [2, 2], "tensor_map": [[0], [-1]], "tensor_shape": [8, 4], "tensor_type": "Float32"}
    strategy |= {"rank_list": [0, 1, 2, 3], "opt_weight_shard_size": 0, "opt_weight_shard_step": 0, **entry}
    compiled = {"phase": {0: {"w": SimpleNamespace(**strategy)}}}
    return _NetStrategyInfo(SimpleNamespace(compile_phase="phase"), compiled, compiled).get_rank_layout()


@pytest.mark.parametrize("size", [-1, 2, 4])
def test_the_parallel_optimizer_of_a_strategy_triple_is_that_of_the_strategy(size: int) -> None:
    whole = counted(16, 4)
    strategy = {"dev_matrix": [2, 2, 2], "tensor_map": [[1], [-1]], "rank_list": list(range(8))}
    triple = strategy_metadata(**strategy, tensor_shape=[16, 4], opt_weight_shard_size=size)[0]["w"]
    entry = {**strategy, "opt_weight_shard_size": size}
    for rank in range(8):
        ours = by_layout(entry, rank, (16, 4), whole)
        assert np.array_equal(by_layout(triple, rank, (16, 4), whole), ours)


@given(first=st.permutations(["dp", "interleaved_parallel"]), ranks=st.permutations([5, 6, 7, 8]))
def test_an_interleaved_layout_gives_each_device_all_its_pieces(first: list[str], ranks: list[int]) -> None:
    layout = Layout((2, 2, 2), ("dp", "sp", "interleaved_parallel"), rank_list=[*ranks, *range(20, 24)])
    called = layout(tuple(first), "sp")
    whole = counted(8, 4)
    for device, rank in enumerate(ranks):
        dp, sp = divmod(device, 2)
        starts = [dp * 4, dp * 4 + 2] if first[0] == "dp" else [dp * 2, 4 + dp * 2]
        expected = np.concatenate([whole[start : start + 2, sp * 2 : sp * 2 + 2] for start in starts])
        assert np.array_equal(by_layout(called, rank, (8, 4), whole), expected)


# -- tensors -------------------------------------------------------------------------------------------------------


def hyper_layout(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"mesh_shape": (2, 2), "tensor_map": (1, 0), "rank_list": (0, 1, 2, 3), **fields})


@pytest.mark.parametrize("is_parameter", [False, True])
def test_a_dtensor_and_a_parameter_of_one_are_shards_that_share_the_local_memory(is_parameter: bool) -> None:
    local = Tensor(counted(4, 2))
    value: Any = DTensor(local, hyper_layout(), (8, 4))
    if is_parameter:
        value = Parameter(value, name="w")
        assert isinstance(value, Parameter)
    found = described(value, rank=3)
    assert found.global_shape == (8, 4) and not found.plain
    assert found.boxes == (Box((4, 2), (4, 2)),) and found.replica_ranks == (3,)
    found.views[0][...] = 7
    assert (local.asnumpy() == 7).all()


def test_a_dtensor_on_a_rank_outside_its_layout_holds_nothing() -> None:
    found = described(DTensor(Tensor(counted(4, 2)), hyper_layout(rank_list=(4, 5, 6, 7)), (8, 4)), rank=3)
    assert found.boxes == () and found.global_shape == (8, 4)


def test_interleaved_dtensors_are_several_boxes() -> None:
    layout = hyper_layout(tensor_map=((0, 1), -1), alias_name=("dp", "interleaved_parallel"), rank_list=(0, 1))
    local = Tensor(counted(4, 4))
    found = described(DTensor(local, layout, (8, 4)), rank=1)
    assert [box.offsets for box in found.boxes] == [(2, 0), (6, 0)]
    for number, view in enumerate(found.views):
        view[...] = number
    assert (local.asnumpy() == np.array([0, 0, 1, 1])[:, None]).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partial": [None, "sum"]}, "Partial"),
        ({"is_partial": lambda: True}, "Partial"),
        ({"placements": [SimpleNamespace(is_partial=lambda: True)]}, "Partial"),
        ({"tensor_map": (0, -1)}, r"local tensor of shape \(4, 4\) on this rank; found one of shape \(4, 2\)"),
    ],
)
def test_a_partial_dtensor_and_one_that_is_not_shaped_as_it_says_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(UnsupportedValueError, match=message):
        described(DTensor(Tensor(counted(4, 2)), hyper_layout(**fields), (8, 4)), rank=0)


def test_plain_tensors_and_parameters_are_whole() -> None:
    for value in (Tensor(counted(3, 4)), Parameter(Tensor(counted(3, 4)), name="w")):
        found = described(value)
        assert found.plain and found.boxes == (Box((0, 0), (3, 4)),)
        assert np.array_equal(found.views[0], counted(3, 4))
    assert described(Tensor(counted(0, 4))).boxes == ()
    assert described(Tensor(np.float32(3))).boxes == (Box((), ()),)
    for value in (None, 3, "w", np.zeros(3), [Tensor(counted(3))]):
        assert describe_tensor(value, lambda: 0) is None


def test_one_parameter_under_two_names_is_one_storage() -> None:
    net = nn.Dense(4, 8)
    optimizer = nn.Adam(net.trainable_params())
    assert described(net.weight).storage == described(optimizer.state_dict()["weight"]).storage
    assert described(net.weight).storage != described(optimizer.state_dict()["moment1.weight"]).storage


def test_a_parameter_whose_initialisation_was_put_off_is_initialised_and_stays_the_same() -> None:
    with no_init_parameters():
        net = nn.Dense(4, 8)
    parameter = net.weight
    assert parameter.has_init
    found = described(parameter)
    assert net.weight is parameter and not parameter.has_init
    found.views[0][...] = 5
    net.init_parameters_data()
    assert (net.weight.asnumpy() == 5).all()


def test_what_has_no_plain_memory_is_refused() -> None:
    sparse = COOTensor(Tensor([[0, 1]], mindspore.int32), Tensor([1.0], mindspore.float32), (3, 4))
    with pytest.raises(UnsupportedValueError, match="COOTensor has no plain memory"):
        describe_tensor(sparse, lambda: 0)
    with pytest.raises(UnsupportedValueError, match="MapParameter is a table"):
        describe_tensor(mindspore.experimental.MapParameter(name="table"), lambda: 0)

    class Strange(Tensor):  # type: ignore[misc]  # MindSpore has no types
        pass

    with pytest.raises(UnsupportedValueError, match=r"Strange.*dcp_describers"):
        described(Strange(counted(3)))


def test_an_annotated_shard_and_a_flat_one_lie_where_the_note_says() -> None:
    whole = counted(8, 4)
    shard = annotate_shard(Parameter(Tensor(whole[4:6]), name="w"), offsets=(4, 0), global_shape=(8, 4))
    found = described(shard)
    assert found.boxes == (Box((4, 0), (2, 4)),) and found.global_shape == (8, 4) and not found.plain
    flat = annotate_shard(Tensor(whole.reshape(-1)[6:21]), offsets=[6], global_shape=[8, 4], replica_ranks=[0, 2])
    found = described(flat)
    assert found.replica_ranks == (0, 2)
    for box, view in zip(found.boxes, found.views, strict=True):
        assert np.array_equal(view, whole[box_slices(box)])
        view[...] = -1
    assert (flat.asnumpy() == -1).all()


def test_notes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ArgumentError, match="reaches beyond"):
        annotate_shard(Tensor(counted(4, 4)), offsets=(6, 0), global_shape=(8, 4))
    with pytest.raises(ArgumentError, match="a ndarray"):
        annotate_shard(counted(4, 4), offsets=(0, 0), global_shape=(8, 4))
    changed = annotate_shard(Parameter(Tensor(counted(4, 4)), name="w"), offsets=(0, 0), global_shape=(8, 4))
    changed.set_data(Tensor(counted(2, 4)), slice_shape=True)
    with pytest.raises(UnsupportedValueError, match="call annotate_shard"):
        described(changed)
