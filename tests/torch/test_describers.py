"""What ranks hold: DTensor, ShardedTensor, annotated shards, ranks outside the mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from dcp_core.box import Box
from dcp_core.box import slices as box_slices
from dcp_core.dtype import dtype_named
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.leaves import LocalTensor
from dcp_torch import annotate, describers
from dcp_torch.adapter import TorchAdapter
from dcp_torch.annotate import ChunkInfo, annotate_shard, chunk_of
from tests.torch.gloo_ranks import TorchRank, run_gloo

ADAPTER = TorchAdapter()


def described(value: Any) -> LocalTensor:
    found = ADAPTER.describe(value)
    assert found is not None
    return found


# -- plain tensors -------------------------------------------------------------------------------------------------


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())


def annotated(tensor: torch.Tensor) -> torch.Tensor:
    return annotate_shard(tensor, offsets=(0,) * tensor.dim(), global_shape=tensor.shape)


def grown(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point()) * 1


VARIANTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda tensor: tensor, as_parameter, grown, annotated, lambda tensor: annotated(tensor).detach(),
    lambda tensor: tensor[..., None].expand(*tensor.shape, 2), lambda tensor: tensor[..., None].transpose(-1, 0),
    lambda tensor: tensor.t() if tensor.dim() == 2 else tensor[:1], lambda tensor: tensor.reshape(-1)[1::2],
    torch._neg_view, torch.conj, lambda tensor: tensor.to(torch.complex64).conj().imag,
]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.float8_e4m3fn, torch.complex64]


def check_same(found: LocalTensor, expected: LocalTensor) -> None:
    for field in fields(LocalTensor):
        if field.name != "views":
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    for view, other in zip(found.views, expected.views, strict=True):
        assert not view.requires_grad
        assert (view.data_ptr(), view.shape, view.stride()) == (other.data_ptr(), other.shape, other.stride())
        assert ADAPTER.read_out(view).tobytes() == ADAPTER.read_out(other).tobytes()


@given(
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    variant=st.sampled_from(VARIANTS),
)
@example(shape=[2], dtype=torch.complex64, variant=torch.conj)
@example(shape=[2], dtype=torch.float32, variant=torch._neg_view)
def test_the_short_way_to_describe_a_tensor_and_the_long_way_say_the_same(
    shape: list[int], dtype: torch.dtype, variant: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    try:
        tensor = variant(torch.ones(shape).to(dtype))
        tensor.resolve_conj().resolve_neg()
    except (RuntimeError, NotImplementedError):
        return  # torch has no such operation for the dtype
    found = described(tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(describers, "_describe_simple", lambda value, access: None)
        expected = described(tensor)
    check_same(found, expected)


@pytest.mark.parametrize("make", [lambda: torch.ones(3), lambda: torch.nn.Parameter(torch.ones(3))])
def test_a_plain_tensor_takes_the_short_way(make: Callable[[], torch.Tensor]) -> None:
    assert describers._describe_simple(make(), ADAPTER) is not None


def test_a_note_is_found_on_the_memory_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotate, "_noted_storages", False)
    tensor = torch.ones(2)
    assert described(tensor).plain
    annotate_shard(tensor, offsets=(2,), global_shape=(4,))
    assert described(tensor.detach()).boxes == (Box((2,), (2,)),)
    assert described(torch.ones(2)).plain


# -- DTensor -------------------------------------------------------------------------------------------------------


def check_subset(rank: TorchRank) -> tuple[int, str, tuple[int, ...]]:
    mesh = DeviceMesh(rank.device.type, [1, 3])
    tensor = DTensor.from_local(
        torch.full((2, 3), float(rank.rank), dtype=torch.float16), mesh, [Shard(0)], run_check=False
    )
    found = described(tensor)
    return len(found.boxes), found.dtype.name, found.global_shape


def test_ranks_outside_the_mesh_hold_nothing_and_know_shape_and_dtype() -> None:
    found = run_gloo(check_subset, 4)
    assert found == [(count, "float16", (4, 3)) for count in (0, 1, 0, 1)]


def check_both_ways(rank: TorchRank) -> None:
    mesh = init_device_mesh(rank.device.type, (2,))
    for shape, dtype in [
        ((6, 3), torch.float32),
        ((5,), torch.bfloat16),
        ((1, 2), torch.int8),
        ((0, 2), torch.float16),
    ]:
        whole = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
        plain = distribute_tensor(whole, mesh, [Shard(0)])
        locals_ = [plain._local_tensor, torch.cat([plain._local_tensor] * 2)[len(plain._local_tensor) :]]
        if dtype.is_floating_point:
            locals_ += [torch.nn.Parameter(plain._local_tensor), torch._neg_view(plain._local_tensor.clone())]
        if len(shape) == 2:
            locals_.append(plain._local_tensor.t().contiguous().t())
        for local in locals_:
            tensor: Any = DTensor(local, plain._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            found = described(tensor)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(describers, "_simple_memory", lambda value: None)
                check_same(found, described(tensor))


def test_the_short_way_to_describe_a_dtensor_and_the_long_way_say_the_same() -> None:
    run_gloo(check_both_ways, 2)


def check_meshes_in_turn(rank: TorchRank) -> None:
    for _ in range(3):
        meshes = {order: DeviceMesh(rank.device.type, list(order)) for order in ((0, 1), (1, 0), (1,))}
        for _ in range(2):
            for order, mesh in meshes.items():
                tensor = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False)
                expected = [Box((2 * order.index(rank.rank),), (2,))] if rank.rank in order else []
                assert list(described(tensor).boxes) == expected


def test_a_rank_has_another_place_on_every_mesh() -> None:
    run_gloo(check_meshes_in_turn, 2)


def check_layouts_of_one_shape(rank: TorchRank) -> None:
    mesh = init_device_mesh(rank.device.type, (2,))
    local = torch.zeros(4, device=rank.device)
    own = rank.rank * 4
    expected = {
        Shard(0): [Box((own,), (4,))],
        _StridedShard(0, split_factor=2): [Box((rank.rank * 2,), (2,)), Box((4 + rank.rank * 2,), (2,))],
        _StridedShard(0, split_factor=4): [Box((start + rank.rank,), (1,)) for start in (0, 2, 4, 6)],
    }
    for _ in range(2):
        for placement, boxes in expected.items():
            tensor = DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size([8]), stride=(1,))
            assert list(described(tensor).boxes) == boxes, placement
    other = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    assert described(other).boxes == (Box((0,), (4,)),)
    assert described(distribute_tensor(torch.zeros(4), mesh, [Shard(0)])).boxes == (Box((rank.rank * 2,), (2,)),)


def test_tensors_of_one_shape_that_are_placed_differently_are_told_apart() -> None:
    run_gloo(check_layouts_of_one_shape, 2)


def test_more_layouts_than_are_remembered_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describers, "_layouts", {})
    monkeypatch.setattr(describers, "_MOST_LAYOUTS", 2)
    spec = SimpleNamespace(placements=(Shard(0),), shard_order=None)
    for size in (*range(6), *range(6)):
        layout = describers._layout((size,), spec, (2,), (0,))
        assert layout.local_shape == (-(-size // 2),)
        assert len(describers._layouts) <= 2


def check_partial(rank: TorchRank) -> None:
    mesh = init_device_mesh(rank.device.type, (2,))
    tensor = DTensor.from_local(torch.ones(2, device=rank.device), mesh, [Partial()])
    with pytest.raises(UnsupportedValueError, match="partial sum"):
        ADAPTER.describe(tensor)
    tensor = DTensor.from_local(torch.ones(2, device=rank.device), mesh, [Shard(0)], shape=torch.Size([5]), stride=(1,))
    if rank.rank == 0:
        with pytest.raises(UnsupportedValueError, match=r"local tensor of shape \(3,\) here, found \(2,\)"):
            ADAPTER.describe(tensor)
    with pytest.raises(UnsupportedValueError, match="meta"):
        ADAPTER.describe(distribute_tensor(torch.ones(4, device="meta"), mesh, [Shard(0)]))


def test_partial_sums_wrong_local_shapes_and_meta_tensors_are_refused() -> None:
    run_gloo(check_partial, 2)


def check_after_collective(rank: TorchRank) -> list[float]:
    mesh = init_device_mesh(rank.device.type, (2,))
    tensor = DTensor.from_local(torch.ones(2, device=rank.device), mesh, [Partial()])
    reduced = tensor.redistribute(placements=[Replicate()], async_op=True)
    found = described(reduced)
    assert found.boxes == (Box((0,), (2,)),)
    values: list[float] = ADAPTER.read_out(found.views[0]).tolist()
    return values


def test_a_tensor_whose_collective_is_in_flight_is_waited_for() -> None:
    assert run_gloo(check_after_collective, 2) == [[2.0, 2.0]] * 2


def check_in_place(rank: TorchRank) -> None:
    mesh = init_device_mesh(rank.device.type, (2,))
    model = torch.nn.Linear(3, 5).to(rank.device)
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    for tensor in state.values():
        found = described(tensor)
        for box, view in zip(found.boxes, found.views, strict=True):
            bits = np.full(box.sizes, 7 + rank.rank, dtype=np.float32)
            ADAPTER.copy_into(view, bits, dtype_named("float32"))
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert (parameter.to_local() == 7 + rank.rank).all()
        assert described(parameter).storage == described(parameter.detach()).storage


def test_what_is_written_into_the_views_of_fsdp_parameters_is_in_the_model() -> None:
    run_gloo(check_in_place, 2)


def check_one_dimension_of_length_one(rank: TorchRank) -> int:
    mesh = init_device_mesh(rank.device.type, (8,))
    found = [described(distribute_tensor(torch.ones(size, 2), mesh, [Shard(0)])) for size in (5, 1, 0)]
    assert all(tensor.storage is None for tensor in found if not tensor.boxes)
    return sum(len(tensor.boxes) for tensor in found)


def test_empty_shards_have_no_boxes() -> None:
    assert run_gloo(check_one_dimension_of_length_one, 8) == [2, 1, 1, 1, 1, 0, 0, 0]


# -- ShardedTensor -------------------------------------------------------------------------------------------------


def check_sharded_tensor(rank: TorchRank) -> None:
    whole = torch.arange(24).reshape(8, 3)
    starts = [rank.rank * 2, 4 + rank.rank * 2]
    shards = [
        LocalShard.from_tensor_and_offsets(whole[start : start + 2].clone(), [start, 0], rank.rank) for start in starts
    ]
    tensor = init_from_local_shards(shards, 8, 3)
    assert isinstance(tensor, ShardedTensor)
    found = described(tensor)
    assert found.global_shape == (8, 3)
    assert found.dtype.name == "int64"
    assert not found.plain
    assert found.boxes == tuple(Box((start, 0), (2, 3)) for start in starts)
    for box, view in zip(found.boxes, found.views, strict=True):
        assert np.array_equal(ADAPTER.read_out(view), whole.numpy()[box_slices(box)])


def test_a_sharded_tensor_gives_a_box_for_each_local_shard() -> None:
    run_gloo(check_sharded_tensor, 2)


def check_sharded_tensor_of_one_rank(rank: TorchRank) -> int:
    shards = []
    if rank.rank == 1:
        shards = [LocalShard.from_tensor_and_offsets(torch.ones(2, 3, dtype=torch.float16), [0, 0], 1)]
    found = described(init_from_local_shards(shards, 2, 3))
    assert found.dtype.name == "float16"
    return len(found.boxes)


def test_a_rank_without_local_shards_holds_nothing() -> None:
    assert run_gloo(check_sharded_tensor_of_one_rank, 2) == [0, 1]


# -- annotated shards ----------------------------------------------------------------------------------------------


def test_an_annotated_tensor_is_a_shard() -> None:
    tensor = annotate_shard(torch.ones(2, 3), offsets=(4, 0), global_shape=(8, 3), replica_ranks=[0, 1])
    found = described(tensor)
    assert found.global_shape == (8, 3)
    assert found.boxes == (Box((4, 0), (2, 3)),)
    assert found.replica_ranks == (0, 1)
    assert not found.plain
    assert chunk_of(tensor) == ChunkInfo((4, 0), (2, 3), (8, 3), (0, 1))


def test_an_annotated_parameter_is_a_shard_in_the_state_dict_of_its_module() -> None:
    module = torch.nn.Linear(3, 2)
    annotate_shard(module.weight, offsets=(2, 0), global_shape=(4, 3))
    assert described(module.state_dict()["weight"]).boxes == (Box((2, 0), (2, 3)),)
    assert described(module.state_dict()["bias"]).plain
    assert described(module.weight.t()).plain
    assert described(module.weight.detach().clone()).plain


def test_the_last_annotation_counts() -> None:
    tensor = annotate_shard(torch.ones(2), offsets=(0,), global_shape=(4,))
    annotate_shard(tensor, offsets=(2,), global_shape=(4,))
    assert described(tensor).boxes == described(tensor.detach()).boxes == (Box((2,), (2,)),)


def test_an_annotated_tensor_that_was_resized_is_refused() -> None:
    tensor = annotate_shard(torch.ones(2), offsets=(0,), global_shape=(4,))
    tensor.resize_(3)
    with pytest.raises(UnsupportedValueError, match=r"sizes \(2,\) and now has the shape \(3,\)"):
        ADAPTER.describe(tensor)


@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=2, max_size=3))
def test_a_flat_shard_becomes_boxes_of_its_elements(data: st.DataObject, shape: list[int]) -> None:
    numel = int(np.prod(shape))
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    step = data.draw(st.integers(1, 2))
    whole = torch.arange(numel).reshape(shape)
    memory = torch.zeros((stop - start) * step, dtype=torch.int64)[::step]
    memory.copy_(whole.reshape(-1)[start:stop])
    found = described(annotate_shard(memory, offsets=(start,), global_shape=shape))
    assert sum(box.numel for box in found.boxes) == stop - start
    for box, view in zip(found.boxes, found.views, strict=True):
        assert np.array_equal(ADAPTER.read_out(view), whole.numpy()[box_slices(box)])
        ADAPTER.copy_into(view, -ADAPTER.read_out(view), dtype_named("int64"))
    assert torch.equal(memory, -whole.reshape(-1)[start:stop])


@pytest.mark.parametrize(
    ("shape", "offsets", "global_shape", "words"),
    [
        ((2,), (3,), (4,), "beyond"),
        (
            (2, 2),
            (0,),
            (4, 2),
            r"differ in length: a part keeps all dimensions .*local\[at : at \+ 1\]",
        ),
        ((2,), (-1,), (4,), "negative"),
        ((2, 2), (0, 0), (4, 2, 2), "dimensions"),
        ((5,), (0,), (2, 2), "beyond"),
    ],
)
def test_annotations_that_do_not_fit_are_refused(shape: Any, offsets: Any, global_shape: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        annotate_shard(torch.zeros(shape), offsets=offsets, global_shape=global_shape)


def test_a_deep_copy_of_an_annotated_tensor_is_the_same_shard() -> None:
    tensor = annotate_shard(torch.ones(2), offsets=(2,), global_shape=(4,))
    assert described(copy.deepcopy(tensor)).boxes == (Box((2,), (2,)),)


def check_one_rank_describes(rank: TorchRank) -> None:
    tensor = distribute_tensor(torch.ones(4), init_device_mesh(rank.device.type, (2,)), [Shard(0)])
    if rank.rank == 0:
        assert described(tensor).boxes == (Box((0,), (2,)),)
    dist.barrier()


def test_describing_needs_no_other_rank() -> None:
    run_gloo(check_one_rank_describes, 2)


def test_a_tensor_whose_memory_was_freed_is_refused_as_it_would_be_read_out_of_bounds() -> None:
    whole, part = torch.ones(10), torch.ones(20)[5:15]
    for tensor in (whole, part, torch.nn.Parameter(torch.ones(4, 4)), torch.ones(3, 4).t()):
        assert ADAPTER.describe(tensor) is not None
        tensor.untyped_storage().resize_(0)
        with pytest.raises(UnsupportedValueError, match="its memory was freed"):
            ADAPTER.describe(tensor)
