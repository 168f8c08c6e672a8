"""Tensors with the surface of HyperParallel's DTensor: described, saved, loaded, and turned into DTensor and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import dcp_torch
from dcp_core.box import slices as box_slices
from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.foreign_layouts import read_layout
from dcp_torch.adapter import TorchAdapter
from dcp_torch.laid_out import layout_of
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.laid_out_stand_ins import LaidOutHolder, LaidOutTensor, Layout, OlderLayout, laid_out
from tests.torch.states import assert_same, shard, values

ADAPTER = TorchAdapter()
_INTERLEAVED = ("dp", "tp", "interleaved_parallel")

# Shape, and the layout of it on 4 ranks or some of them.
LAYOUTS: dict[str, tuple[tuple[int, ...], Layout]] = {
    "columns": ((8, 6), Layout((2, 2), (-1, 0))),
    "both": ((8, 6), OlderLayout((2, 2), (0, 1))),
    "one dimension by two axes": ((8, 3), Layout((2, 2), ((1, 0), -1))),
    "by two axes, the last coarsest": ((8, 3), Layout((2, 2), [[0, 1], [-1]])),
    "other order of ranks": ((4, 3, 2), Layout((4,), (0, -1, -1), rank_list=(3, 1, 0, 2))),
    "two ranks of four": ((6, 2), OlderLayout((2,), (0, -1), rank_list=[3, 1])),
    "whole": ((5,), Layout((2, 2), (-1,))),
    "scalar": ((), Layout((4,), ())),
    "pieces in a row": ((8, 4), Layout((2, 2, 2), ((2, 0), 1), range(8), _INTERLEAVED)),
    "several boxes": ((8, 8), Layout((2, 2, 2), ((0, 2), 1), range(8), _INTERLEAVED)),
    "boxes in a list of ranks": ((8, 4), Layout((2, 2, 2), ((0, 1, 2), -1), (2, 3, 0, 1), _INTERLEAVED)),
    "empty": ((0, 4), Layout((2, 2), (1, 0))),
}
_HOLDERS = ("columns", "several boxes", "two ranks of four")


def whole_of(name: str, seed: int = 0) -> Tensor:
    return values(LAYOUTS[name][0], torch.float32, seed + len(name))


def laid_out_state(seed: int = 0) -> dict[str, Any]:
    return {
        name: laid_out(whole_of(name, seed), layout, LaidOutHolder if name in _HOLDERS else LaidOutTensor)
        for name, (_, layout) in LAYOUTS.items()
    }


def locals_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.to_local() for name, tensor in state.items()}


def dtensor_state(rank: TorchRank, seed: int = 0) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (rank.world_size,))
    return {
        name: shard(whole_of(name, seed), mesh, [Shard(0) if shape else Replicate()])
        for name, (shape, _) in LAYOUTS.items()
    }


# -- described -----------------------------------------------------------------------------------------------------


def check_described(rank: TorchRank) -> dict[str, Any]:
    found = {}
    for name, value in laid_out_state().items():
        local = ADAPTER.describe(value)
        assert local is not None, name
        whole = whole_of(name)
        assert (local.global_shape, local.dtype.name, local.plain) == (tuple(whole.shape), "float32", False)
        assert sum(box.numel for box in local.boxes) == value.to_local().numel()
        for box, view in zip(local.boxes, local.views, strict=True):
            assert view.numpy().tobytes() == whole[box_slices(box)].contiguous().numpy().tobytes(), (name, box)
            assert view.untyped_storage().data_ptr() == value.to_local().untyped_storage().data_ptr()
        found[name] = local.boxes, local.replica_ranks
    return found


def test_each_rank_holds_what_the_layout_says_and_knows_who_holds_the_same() -> None:
    ranks = run_gloo(check_described, 4)
    for name, (shape, _) in LAYOUTS.items():
        held = np.zeros(shape, dtype=int)
        for boxes, replicas in (found[name] for found in ranks):
            for box in boxes:
                held[box_slices(box)] += 1
            if boxes:
                assert replicas == tuple(rank for rank in range(4) if ranks[rank][name][0] == boxes), name
        copies = len(ranks[0][name][1] or ranks[1][name][1])
        assert (held == copies).all(), name
    assert len(ranks[0]["several boxes"][0]) == 2
    assert ranks[0]["two ranks of four"] == ((), None)


# -- saved and loaded ------------------------------------------------------------------------------------------------


def save_laid_out(rank: TorchRank, path: Path) -> None:
    dcp_torch.save(laid_out_state(), checkpoint_id=path, durable=False)
    dcp_torch.async_save(laid_out_state(seed=5), checkpoint_id=f"{path}-async", durable=False)
    dcp_torch.wait_all()


def to_dtensor(rank: TorchRank, path: Path, target: Path) -> None:
    state = dtensor_state(rank, seed=1)
    dcp_torch.load(state, checkpoint_id=path, verify="full")
    assert_same(state, dtensor_state(rank))
    dcp_torch.load(state, checkpoint_id=f"{path}-async", verify="full")
    assert_same(state, dtensor_state(rank, seed=5))
    dcp_torch.save(dtensor_state(rank, seed=7), checkpoint_id=target, durable=False)


def to_laid_out(rank: TorchRank, path: Path) -> None:
    state = laid_out_state(seed=1)
    kept = locals_of(state)
    dcp_torch.load(state, checkpoint_id=path, verify="full")
    assert_same(kept, locals_of(laid_out_state(seed=7)))


def test_saved_on_4_ranks_loaded_as_dtensor_on_3_and_back(tmp_path: Path) -> None:
    run_gloo(save_laid_out, 4, tmp_path / "laid-out")
    run_gloo(to_dtensor, 3, tmp_path / "laid-out", tmp_path / "dtensor")
    run_gloo(to_laid_out, 4, tmp_path / "dtensor")


def check_parameter(rank: TorchRank, path: Path) -> None:
    parameter = torch.nn.Parameter(laid_out(whole_of("columns"), LAYOUTS["columns"][1]), requires_grad=True)
    described = ADAPTER.describe(parameter)
    assert described is not None
    assert described.boxes == (dcp_torch.Box((0, 3 * rank.rank % 6), (8, 3)),)


def test_a_parameter_of_such_a_tensor_is_one_too(tmp_path: Path) -> None:
    run_gloo(check_parameter, 2, tmp_path)


# -- a ragged layout -------------------------------------------------------------------------------------------------


def ragged(whole: Tensor, rank: int, units: Sequence[int], dims: tuple[int, ...] = (0,)) -> LaidOutTensor:
    """Two rows of ranks that hold the same, each row cut by units."""
    layout = Layout(
        (2, len(units)),
        (-1,) * whole.ndim,
        ragged_shard=(1, SimpleNamespace(dims=dims, local_units=tuple(units))),
    )
    step, at = whole.numel() // sum(units), rank % len(units)
    start = sum(units[:at]) * step
    return LaidOutTensor(whole.reshape(-1)[start : start + units[at] * step].clone(), layout, whole.shape)


def check_ragged(rank: TorchRank, path: Path) -> None:
    whole = values((6, 2, 5), torch.float32, 3)
    state = {"w": ragged(whole, rank.rank, (1, 5), (0,)), "d": ragged(whole, rank.rank, (7, 5), (0, 1))}
    dcp_torch.save(state, checkpoint_id=path, durable=False)
    target: dict[str, Any] = {"w": ragged(whole * 0, rank.rank, (4, 2)), "d": torch.zeros_like(whole)}
    dcp_torch.load(target, checkpoint_id=path)
    assert_same(
        {"w": target["w"].to_local(), "d": target["d"]}, {"w": ragged(whole, rank.rank, (4, 2))._local, "d": whole}
    )
    described = ADAPTER.describe(state["w"])
    assert described is not None
    assert described.replica_ranks == (rank.rank % 2, rank.rank % 2 + 2)


def test_a_ragged_layout_is_a_range_of_the_flattened_tensor(tmp_path: Path) -> None:
    run_gloo(check_ragged, 4, tmp_path)


# -- refused and passed over -----------------------------------------------------------------------------------------


class _Placement:
    def is_partial(self) -> bool:
        return True


class Partial:
    """A placement that is known by its name alone."""


@pytest.mark.parametrize(
    "more",
    [
        {"partial": (None, "sum")},
        {"is_partial": lambda: True},
        {"placements": [_Placement()]},
        {"placements": [Partial()]},
    ],
)
def test_a_partial_tensor_is_refused(more: dict[str, Any]) -> None:
    value = LaidOutTensor(torch.ones(4), Layout((1, 1), (-1,), **more), (4,))
    with pytest.raises(UnsupportedValueError, match=r"Partial.* reduce_partial\(\), or redistribute\(\)"):
        ADAPTER.describe(value)


@pytest.mark.parametrize("partial", [(), (None,), None])
def test_a_layout_without_unreduced_axes_is_not_partial(partial: Any) -> None:
    layout = Layout((1,), (0,), partial=partial or ())
    layout.partial = partial
    assert ADAPTER.describe(LaidOutHolder(torch.ones(4), layout, (4,))) is not None


def with_layout(layout: Any, local: tuple[int, ...] = (2, 4), shape: tuple[int, ...] = (4, 4)) -> LaidOutHolder:
    return LaidOutHolder(torch.zeros(local), layout, shape)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (with_layout(Layout((2,), (0, -1)), local=(3, 4)), r"local tensor of shape \(2, 4\) on rank 0, found \(3, 4\)"),
        (with_layout(Layout((2,), None)), "says nothing of a tensor"),
        (with_layout(Layout((3,), (0, -1))), "does not come out even"),
        (with_layout(Layout((2,), (0,))), "another number of dimensions"),
        (with_layout(Layout((2,), (1, -1))), "does not have"),
        (with_layout(Layout((2,), (0, -1), rank_list=(0, 0))), "rank_list"),
        (
            with_layout(Layout((2,), (0, -1), ragged_shard=(0, SimpleNamespace(dims=(0,), local_units=(1, 1))))),
            "cuts nothing besides",
        ),
        (
            with_layout(Layout((2,), (-1, -1), ragged_shard=(0, SimpleNamespace(dims=(0,), local_units=(1,))))),
            "as many units",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused(value: LaidOutHolder, words: str) -> None:
    with pytest.raises(UnsupportedValueError, match=words):
        ADAPTER.describe(value)


def test_a_layout_that_says_how_it_cuts_may_be_uneven() -> None:
    rounded = with_layout(Layout((3,), (0, -1), uneven_shard_mesh_dims=(0,)), local=(2, 4))
    balanced = with_layout(Layout((3,), (0, -1), uneven_shard_mesh_dims=()), local=(2, 4), shape=(4, 4))
    assert [box.sizes for value in (rounded, balanced) for box in ADAPTER.describe(value).boxes] == [(2, 4)] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "value",
    [
        LaidOutHolder(np.zeros(4), Layout((1,), (0,)), (4,)),
        LaidOutHolder(torch.zeros(4), object(), (4,)),
        LaidOutHolder(torch.zeros(4), None, (4,)),
        SimpleNamespace(to_local=lambda: torch.zeros(4), layout=Layout((1,), (0,)), shape=(4,)),
        Layout((1,), (0,)),
        3,
        LaidOutTensor,
    ],
    ids=lambda value: re.sub(r"\W+", " ", type(value).__name__),
)
def test_what_lacks_the_surface_is_left_to_others(value: Any) -> None:
    assert ADAPTER.describe(value) is None


def test_tensors_of_torch_have_another_layout() -> None:
    for tensor in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2).to_sparse()):
        assert layout_of(tensor) is None


class Touchy(Tensor):
    """A tensor of another library: it does not like to be asked for anything."""

    def to_local(self) -> Tensor:
        raise AssertionError("called")

    @classmethod
    def __torch_function__(cls, *arguments: Any, **more: Any) -> Any:
        raise AssertionError("called")


def test_a_tensor_of_another_library_is_told_apart_without_a_call() -> None:
    assert layout_of(Tensor._make_subclass(Touchy, torch.ones(2))) is None


def test_layouts_of_mindspore_are_read_by_their_to_dict() -> None:
    plain = {
        "device_matrix": (2, 2, 2),
        "tensor_map": ((2, 0), 1),
        "interleaved_parallel": True,
        "alias_name": _INTERLEAVED,
        "rank_list": [0, 1, 2, 3, 4, 5, 6, 7],
    }
    from_object = read_layout(SimpleNamespace(to_dict=lambda: plain))
    assert from_object == read_layout(plain)
    assert (from_object.tensor_map, from_object.ranks, from_object.interleaved) == (((2, 0), (1,)), (0, 1, 2, 3), True)

    def unplaced() -> dict[str, Any]:
        raise ValueError("The tensor_map of layout is None")

    with pytest.raises(UnsupportedValueError, match="cannot be read: The tensor_map of layout is None"):
        read_layout(SimpleNamespace(to_dict=unplaced))
