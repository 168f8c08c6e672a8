"""Ragged and flat shards: uneven ranges of flattened tensors, from and to every other layout, equal bit by bit."""

from __future__ import annotations

import doctest
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

import dcp_torch
from dcp_core.box import slices as box_slices
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning import packed
from dcp_core.planning.leaves import LocalTensor
from dcp_torch import flat_buffers, parts
from dcp_torch.adapter import TorchAdapter
from dcp_torch.parts import describe_parts
from dcp_torch.sharding import ragged_part
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.states import assert_same, poison, shard, values

ADAPTER = TorchAdapter()

# -- 7 ragged -> 3 by rows -> 2 by columns -> 5 ragged ---------------------------------------------------------------

_SHAPES = {"matrix": (13, 11), "deep": (3, 5, 2, 4), "row": (1, 29), "vector": (31,), "scalar": (), "thin": (17, 1)}
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.complex64, torch.bool)
_WHOLES = {name: (shape, _DTYPES[at % len(_DTYPES)], at) for at, (name, shape) in enumerate(_SHAPES.items())}


def wholes() -> dict[str, Tensor]:
    return {name: values(shape, dtype, seed) for name, (shape, dtype, seed) in _WHOLES.items()}


def ragged_state(rank: TorchRank, seed: str) -> dict[str, Tensor]:
    """This rank's range of every flattened tensor; all ranks draw the same bounds. Some ranges are empty."""
    found = {}
    for name, whole in wholes().items():
        draw = random.Random(f"{seed} {name}")
        inner = sorted(draw.randrange(whole.numel() + 1) for _ in range(rank.world_size - 1))
        bounds = [0, *inner, whole.numel()]
        start, stop = bounds[rank.rank], bounds[rank.rank + 1]
        part = whole.reshape(-1)[start:stop].clone().to(rank.device)
        found[name] = dcp_torch.annotate_shard(part, offsets=(start,), global_shape=whole.shape)
    return found


def cut_state(rank: TorchRank, dim: int) -> dict[str, Tensor]:
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    return {
        name: shard(whole, mesh, [Shard(dim) if whole.ndim > dim else Replicate()]) for name, whole in wholes().items()
    }


def state_of(rank: TorchRank, layout: str) -> dict[str, Tensor]:
    return {"rows": lambda: cut_state(rank, 0), "columns": lambda: cut_state(rank, 1)}.get(
        layout, lambda: ragged_state(rank, layout)
    )()


def pass_on(rank: TorchRank, source: Path | None, target: Path, layout: str) -> int:
    """Load from a checkpoint, unless this is the first; compare with what this layout should hold; save."""
    state = state_of(rank, layout)
    if source is not None:
        poison(state)
        dcp_torch.load(state, checkpoint_id=source, verify="full")
        assert_same(state, state_of(rank, layout))
    dcp_torch.save(state, checkpoint_id=target, durable=False)
    return sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in state.values())


def test_ragged_on_7_ranks_to_rows_on_3_to_columns_on_2_to_ragged_on_5(shared_path: Path) -> None:
    elements = sum(int(np.prod(shape, dtype=int)) for shape in _SHAPES.values())
    found = run_gloo(pass_on, 7, None, shared_path / "seven", "seven ragged")
    assert sum(found) == elements
    run_gloo(pass_on, 3, shared_path / "seven", shared_path / "rows", "rows")
    run_gloo(pass_on, 2, shared_path / "rows", shared_path / "columns", "columns")
    found = run_gloo(pass_on, 5, shared_path / "columns", shared_path / "five", "five ragged")
    assert sum(found) == elements
    for name, whole in wholes().items():
        bits = dcp_torch.read(shared_path / "five", name)
        assert bits.tobytes() == whole.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(), name


# -- buffers that many tensors are packed into ------------------------------------------------------------------------


@given(data=st.data())
def test_the_parts_of_packed_buffers_are_the_tensors_and_share_their_memory(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4))
    named = {f"t{at}": tuple(shape) for at, shape in enumerate(shapes)}
    gaps = [data.draw(st.integers(0, 3)) for _ in named]
    begins, size = {}, 0
    for (name, shape), gap in zip(named.items(), gaps, strict=True):
        begins[name] = size + gap
        size = begins[name] + int(np.prod(shape, dtype=int))
    packed = np.arange(size + data.draw(st.integers(0, 3)))
    inner = sorted(data.draw(st.lists(st.integers(0, len(packed)), max_size=4)))
    seen = {name: np.full(shape, -1) for name, shape in named.items()}
    bounds = [0, *inner, len(packed)]
    for start, stop in itertools.pairwise(bounds):
        buffer = torch.from_numpy(packed[start:stop].copy())
        before = buffer.clone()
        places = begins if any(gaps) else None
        for name, part in dcp_torch.split_flat(buffer, start=start, shapes=named, begins=places).items():
            local = ADAPTER.describe(part)
            assert local is not None
            assert local.global_shape == named[name]
            for box, view in zip(local.boxes, local.views, strict=True):
                assert (seen[name][box_slices(box)] == -1).all()
                seen[name][box_slices(box)] = view.numpy()
            part.neg_()
        padding = np.isin(
            packed[start:stop], np.concatenate([found.reshape(-1) for found in seen.values()]), invert=True
        )
        assert torch.equal(buffer, torch.where(torch.from_numpy(padding), before, -before))
    for name, shape in named.items():
        expected = packed[begins[name] : begins[name] + seen[name].size].reshape(shape)
        assert np.array_equal(seen[name], expected), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"buffer": torch.zeros(2, 2)}, "1-d tensor"),
        ({"buffer": [1.0]}, "1-d tensor"),
        ({"start": -1}, "start must not be negative"),
        ({"start": 0.5}, "start must be made of whole numbers, found 0.5"),
        ({"shapes": {"w": (2, -1)}}, "the shape of w must not be negative"),
        ({"shapes": {"w": (2, "x")}}, "the shape of w must be made of whole numbers"),
        ({"begins": {"v": 0}}, "only in one of them: v, w"),
        ({"begins": {"w": -1}}, "the begin of w must not be negative"),
    ],
)
def test_buffers_that_cannot_be_taken_apart_are_refused(arguments: dict[str, Any], words: str) -> None:
    given_arguments: dict[str, Any] = {"buffer": torch.zeros(4), "start": 0, "shapes": {"w": (2, 2)}, **arguments}
    buffer = given_arguments.pop("buffer")
    with pytest.raises(ArgumentError, match=words):
        dcp_torch.split_flat(buffer, **given_arguments)


def fsdp1_state(seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """The flat parameter of FSDP1, taken apart; and the flat parameter."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 7, bias=False))
    handle = FullyShardedDataParallel(model, device_id=torch.device("cpu"))._handle
    assert handle is not None
    flat: Any = handle.flat_param
    begins, at = {}, 0
    fqns = iter(flat._fqns)
    for size, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            begins[next(fqns)] = at
        at += size
    shapes = dict(zip(flat._fqns, flat._shapes, strict=True))
    start = dist.get_rank() * flat.numel()
    return dcp_torch.split_flat(flat, start=start, shapes=shapes, begins=begins), flat


def save_fsdp1(rank: TorchRank, path: Path) -> list[int]:
    state, flat = fsdp1_state(seed=3)
    dcp_torch.save(state, checkpoint_id=path, durable=False)
    return [flat.numel(), sum(part.numel() for part in state.values())]


def load_fsdp1(rank: TorchRank, path: Path) -> None:
    state, flat = fsdp1_state(seed=8)
    before = flat.detach().clone()
    dcp_torch.load(state, checkpoint_id=path)
    assert not torch.equal(flat.detach(), before), "the flat parameter itself is filled"
    assert_same(state, fsdp1_state(seed=3)[0])


def test_flat_parameters_of_fsdp1_load_into_plain_models_and_into_fsdp1_on_other_ranks(tmp_path: Path) -> None:
    found = run_gloo(save_fsdp1, 3, tmp_path)
    assert sum(held for _, held in found) == 3 * 5 + 5 + 5 * 7 < sum(size for size, _ in found), "there is padding"
    torch.manual_seed(3)
    expected = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 7, bias=False)).state_dict()
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp_torch.load(state, checkpoint_id=tmp_path)
    assert_same(state, dict(expected))
    run_gloo(load_fsdp1, 2, tmp_path)


# -- RaggedShard, as extensions of DTensor have it --------------------------------------------------------------------


class RaggedShard(Placement):
    """The placement that extensions of DTensor bring: parts of the flattened first dimensions, by units."""

    def __init__(self, dims: tuple[int, ...], local_units: tuple[int, ...]) -> None:
        super().__init__()
        self.dims, self.local_units = dims, local_units


def ragged_dtensor(
    whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], bounds: tuple[int, int]
) -> DTensor:
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    local = whole.reshape(-1)[slice(*bounds)].clone()
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch has no types here


def check_ragged_dtensor(rank: TorchRank, path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 3))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    whole = values((6, 2, 3), torch.float32, 5)
    units = (1, 0, 3)
    bounds = [(0, 9), (9, 9), (9, 36)][coordinate[1]]
    placements = [Replicate(), RaggedShard((0, 1), units)]
    tensor = ragged_dtensor(whole, mesh, placements, bounds)
    found = ADAPTER.describe(tensor)
    assert found is not None
    for box, view in zip(found.boxes, found.views, strict=True):
        assert view.numpy().tobytes() == whole[box_slices(box)].numpy().tobytes()
    assert sum(box.numel for box in found.boxes) == bounds[1] - bounds[0]
    dcp_torch.save({"w": tensor}, checkpoint_id=path, durable=False)
    target = {"w": ragged_dtensor(torch.zeros_like(whole), mesh, placements, bounds)}
    dcp_torch.load(target, checkpoint_id=path)
    assert target["w"].to_local().numpy().tobytes() == tensor.to_local().numpy().tobytes()
    plain = {"w": shard(torch.zeros_like(whole), init_device_mesh("cpu", (6,)), [Shard(0)])}
    dcp_torch.load(plain, checkpoint_id=path)
    assert_same(plain, {"w": shard(whole, init_device_mesh("cpu", (6,)), [Shard(0)])})
    short = ragged_dtensor(whole, mesh, placements, (0, 5))
    with pytest.raises(UnsupportedValueError, match=r"hold elements \d+ to \d+ of the flattened tensor"):
        ADAPTER.describe(short)


def test_a_dtensor_with_a_ragged_shard_is_a_range_of_the_flattened_tensor(shared_path: Path) -> None:
    run_gloo(check_ragged_dtensor, 6, shared_path)


def test_ragged_shards_that_do_not_fit_are_refused() -> None:
    ragged = RaggedShard((0,), (1, 1))
    assert ragged_part([ragged], [2], [1], (4, 3)) == (6, 12)
    assert ragged_part([Shard(0)], [2], [1], (4, 3)) is None
    for placements, mesh in (([ragged], [3]), ([ragged, Shard(0)], [2, 2]), ([Partial(), ragged], [2, 2])):
        with pytest.raises(UnsupportedValueError, match="as many units as ranks"):
            ragged_part(placements, mesh, [0] * len(mesh), (4, 3))


# -- what describers of other types call ------------------------------------------------------------------------------


def test_parts_of_a_tensor_are_described_as_they_lie() -> None:
    expert, flat = torch.ones(1, 2, 3), torch.zeros(4)
    found = describe_parts(
        [(expert, (2, 0, 0)), (flat, (20,))], global_shape=(4, 2, 3), replica_ranks=[1, 3], ragged=True
    )
    assert isinstance(found, LocalTensor)
    assert [(box.offsets, box.sizes) for box in found.boxes] == [
        ((2, 0, 0), (1, 2, 3)),
        ((3, 0, 2), (1, 1, 1)),
        ((3, 1, 0), (1, 1, 3)),
    ]
    assert (found.global_shape, found.dtype.name, found.plain) == ((4, 2, 3), "float32", False)
    assert (found.replica_ranks, found.ragged) == ((1, 3), True)
    found.views[2].fill_(7)
    assert flat.tolist() == [0, 7, 7, 7]


def test_a_rank_without_parts_tells_its_dtype() -> None:
    assert describe_parts([], global_shape=(4,), dtype=torch.int8).dtype.name == "int8"
    with pytest.raises(UnsupportedValueError, match="pass dtype="):
        describe_parts([], global_shape=(4,))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([(torch.ones(2), (3,))], "reaches beyond"),
        ([(torch.ones(2, 1), (0, 0))], "as many dimensions"),
        ([(torch.ones(2), (0,)), (torch.ones(2).double(), (2,))], "float32 and torch.float64"),
        ([(torch.ones(2, device="meta"), (0,))], "meta device"),
    ],
)
def test_parts_that_cannot_be_described_are_refused(found: Any, words: str) -> None:
    with pytest.raises(UnsupportedValueError, match=words):
        describe_parts(found, global_shape=(4,))


@pytest.mark.parametrize("module", [packed, flat_buffers, parts])
def test_the_examples_in_the_docs_are_true(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


@pytest.mark.parametrize(
    ("part", "found"),
    [
        (((0, 0), torch.zeros(2, 6)), r"\(tuple, Tensor\)"),
        ((np.zeros((2, 6)), (0, 0)), r"\(ndarray, tuple\)"),
        (torch.zeros(2, 6), "a Tensor"),
        ((torch.zeros(2, 6),), r"\(Tensor\)"),
        ((torch.zeros(6), 4), r"\(a tensor, 4\)"),
    ],
)
def test_what_is_no_part_is_refused_in_words(part: Any, found: str) -> None:
    with pytest.raises(ArgumentError, match=rf"given {found} as a part: a part is \(torch tensor, start\)"):
        describe_parts([part], global_shape=(4, 6))
