"""Boxes of sharded tensors against what torch itself lays out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard

from dcp_core.box import slices as box_slices
from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.cuts import Cut, cut_runs, local_layout
from dcp_core.planning.leaves import LocalTensor
from dcp_torch.adapter import TorchAdapter
from dcp_torch.sharding import placement_cuts
from tests.torch.gloo_ranks import TorchRank, run_gloo

ADAPTER = TorchAdapter()


def counted(shape: Sequence[int]) -> torch.Tensor:
    """A tensor whose every element is its own flat index."""
    return torch.arange(int(np.prod(shape, dtype=np.int64))).reshape(tuple(shape))


def assert_boxes_hold(found: LocalTensor, whole: torch.Tensor, local: torch.Tensor) -> None:
    """Every view holds the elements of its box, and the views are the local tensor."""
    assert found.global_shape == tuple(whole.shape)
    for box, view in zip(found.boxes, found.views, strict=True):
        expected = whole.numpy()[box_slices(box)]
        assert tuple(view.shape) == box.sizes
        assert np.array_equal(ADAPTER.read_out(view), expected), (box, view)
    assert sum(view.numel() for view in found.views) == local.numel()
    seen = sorted(value for view in found.views for value in view.reshape(-1).tolist())
    assert seen == sorted(local.reshape(-1).tolist())


# -- pure ----------------------------------------------------------------------------------------------------------


def torch_indices(size: int, cuts: Sequence[Cut]) -> list[int]:
    """The oracle: torch's own splitting of a tensor of indices."""
    indices = torch.arange(size)
    for cut in cuts:
        placement = Shard(0) if cut.split_factor == 1 else _StridedShard(0, split_factor=cut.split_factor)
        parts, _ = placement._split_tensor(indices, cut.chunks, with_padding=False, contiguous=True)
        indices = parts[cut.index]
    found: list[int] = indices.tolist()
    return found


@st.composite
def cut_lists(draw: st.DrawFn) -> list[Cut]:
    cuts = []
    for _ in range(draw(st.integers(0, 3))):
        chunks = draw(st.integers(1, 5))
        cuts.append(Cut(0, chunks, draw(st.integers(0, chunks - 1)), draw(st.integers(1, 4))))
    return cuts


@given(size=st.integers(0, 60), cuts=cut_lists())
def test_runs_are_what_torch_splits_off(size: int, cuts: list[Cut]) -> None:
    runs = [(0, size)] if size else []
    for cut in cuts:
        runs = cut_runs(runs, cut)
    assert [index for start, stop in runs for index in range(start, stop)] == torch_indices(size, cuts)
    assert all(start < stop for start, stop in runs)


@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    choice=st.randoms(use_true_random=False),
)
def test_the_boxes_of_all_ranks_tile_the_tensor(shape: list[int], sizes: list[int], choice: Any) -> None:
    dims = [choice.choice([None, *range(len(shape))]) for _ in sizes]
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
    held = np.zeros(shape, dtype=int)
    for coordinate in itertools.product(*map(range, sizes)):
        layout = local_layout(shape, placement_cuts(placements, sizes, coordinate, len(shape)))
        local = np.zeros(layout.local_shape, dtype=int)
        for box, slices in zip(layout.boxes, layout.slices, strict=True):
            held[box_slices(box)] += 1
            local[slices] += 1
        assert (local == 1).all()
    copies = int(np.prod([size for size, dim in zip(sizes, dims, strict=True) if dim is None], dtype=int))
    assert (held == copies).all()


def test_five_rows_on_eight_ranks_leave_three_ranks_without_boxes() -> None:
    layouts = [local_layout((5, 2), [Cut(0, 8, rank)]) for rank in range(8)]
    assert [len(layout.boxes) for layout in layouts] == [1] * 5 + [0] * 3
    assert [layout.local_shape for layout in layouts[5:]] == [(0, 2)] * 3


def test_a_tensor_without_dimensions_is_one_box() -> None:
    layout = local_layout((), ())
    assert [box.sizes for box in layout.boxes] == [()]
    assert layout.slices == ((),)


def test_a_dimension_of_length_zero_has_no_boxes() -> None:
    assert local_layout((0, 3), [Cut(0, 2, 0)]).boxes == ()


def test_negative_shard_dimensions_count_from_the_end() -> None:
    assert placement_cuts([Shard(-1)], [2], [1], 3) == (Cut(2, 2, 1),)


def test_a_partial_placement_is_refused_with_an_explanation() -> None:
    with pytest.raises(UnsupportedValueError, match=r"partial sum .* redistribute"):
        placement_cuts([Partial()], [2], [0], 2)


def test_an_unknown_placement_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedValueError, match="not known"):
        placement_cuts([Placement()], [2], [0], 2)


def test_a_shard_beyond_the_dimensions_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="dimension 2 of a 2-d"):
        placement_cuts([Shard(2)], [2], [0], 2)


def test_the_shard_order_decides_which_mesh_dimension_cuts_first() -> None:
    left_first = placement_cuts([Shard(0), Shard(0)], [2, 3], [1, 2], 1)
    right_first = placement_cuts([Shard(0), Shard(0)], [2, 3], [1, 2], 1, {0: (1, 0)})
    assert left_first == (Cut(0, 2, 1), Cut(0, 3, 2))
    assert right_first == (Cut(0, 3, 2), Cut(0, 2, 1))


# -- real meshes ---------------------------------------------------------------------------------------------------

_SHAPES = [(8,), (5,), (1,), (0,), (7, 3), (2, 9), (4, 4, 6), (3, 0, 2), ()]


def check_distributed(rank: TorchRank, mesh_shape: tuple[int, ...]) -> int:
    mesh = init_device_mesh(rank.device.type, mesh_shape)
    checked = 0
    for shape in _SHAPES:
        choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placements in itertools.product(choices, repeat=len(mesh_shape)):
            whole = counted(shape)
            tensor = distribute_tensor(whole.to(rank.device), mesh, placements, src_data_rank=None)
            found = ADAPTER.describe(tensor)
            assert found is not None
            assert_boxes_hold(found, whole, tensor.to_local())
            assert len(found.boxes) <= 1
            checked += 1
    return checked


@pytest.mark.parametrize("mesh_shape", [(4,), (3,), (2, 2), (2, 3), (2, 2, 2)])
def test_boxes_of_distributed_tensors_hold_the_local_elements(mesh_shape: tuple[int, ...]) -> None:
    counts = run_gloo(check_distributed, int(np.prod(mesh_shape)), mesh_shape)
    assert len(set(counts)) == 1


def check_strided(rank: TorchRank) -> list[int]:
    mesh = init_device_mesh(rank.device.type, (2, 2))
    counts = []
    for shape, factor in itertools.product([(8, 2), (7, 3), (2, 2), (1,), (13,)], [2, 3]):
        whole = counted(shape)
        placements: list[_StridedShard | Shard] = [_StridedShard(0, split_factor=factor), Shard(0)]
        local = whole
        for placement, chunks, index in zip(placements, (2, 2), mesh.get_coordinate() or (), strict=True):
            parts, _ = placement._split_tensor(local, chunks, with_padding=False, contiguous=True)
            local = parts[index]
        tensor = DTensor.from_local(
            local.to(rank.device), mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False
        )
        found = ADAPTER.describe(tensor)
        assert found is not None
        assert_boxes_hold(found, whole, local)
        counts.append(len(found.boxes))
    return counts


def test_boxes_of_strided_shards_hold_the_local_elements() -> None:
    run_gloo(check_strided, 4)


class Block(torch.nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, inner)
        self.down = torch.nn.Linear(inner, 6, bias=False)


def check_fsdp_over_tp(rank: TorchRank, inner: int, mesh_shape: tuple[int, int]) -> list[int]:
    mesh = init_device_mesh(rank.device.type, mesh_shape, mesh_dim_names=("dp", "tp"))
    block = Block(inner).to(rank.device)
    wholes = {}
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            wholes[name] = counted(parameter.shape)
            parameter.copy_(wholes[name])
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
    counts = []
    for name, tensor in block.state_dict().items():
        assert isinstance(tensor, DTensor)
        found = ADAPTER.describe(tensor)
        assert found is not None
        assert_boxes_hold(found, wholes[name].float(), tensor.to_local())
        counts.append(len(found.boxes))
    return counts


@pytest.mark.parametrize(("inner", "mesh_shape"), [(8, (2, 2)), (12, (2, 2)), (16, (2, 4))])
def test_fsdp_over_tensor_parallelism_gives_the_boxes_of_its_elements(inner: int, mesh_shape: tuple[int, int]) -> None:
    counts = run_gloo(check_fsdp_over_tp, int(np.prod(mesh_shape)), inner, mesh_shape)
    assert all(count >= 1 for of_rank in counts for count in of_rank)


def check_hybrid(rank: TorchRank) -> None:
    mesh = init_device_mesh(rank.device.type, (2, 2, 2), mesh_dim_names=("replica", "dp", "tp"))
    block = Block(8).to(rank.device)
    wholes = {}
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            wholes[name] = counted(parameter.shape)
            parameter.copy_(wholes[name])
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["replica", "dp"])
    for name, tensor in block.state_dict().items():
        assert isinstance(tensor, DTensor)
        found = ADAPTER.describe(tensor)
        assert found is not None
        assert_boxes_hold(found, wholes[name].float(), tensor.to_local())


def test_hybrid_sharding_over_tensor_parallelism_on_a_three_dimensional_mesh() -> None:
    run_gloo(check_hybrid, 8)
