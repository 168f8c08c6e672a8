"""Saved under one layout, loaded under another: real models and optimizers, real processes, equal bit by bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import dcp_torch
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.states import assert_same, assert_same_leaf, poison, shard, tensors, values, whole

# -- a training job under many layouts -----------------------------------------------------------------------------


class Model(nn.Module):
    """Dimensions that no number of ranks divides, buffers, and a count without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, 12)
        self.norm = nn.BatchNorm1d(12)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.head = nn.Linear(12, 5, bias=False)
        self.register_buffer("running", torch.rand(3, 2))


_TP = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel()}
_WORLD = {
    "one": 1, "tp2": 2, "tp4": 4, "dp2tp2": 4, "fsdp2": 2, "fsdp3": 3, "fsdp4": 4, "hsdp4": 4, "fsdp2tp2": 4
}  # fmt: skip


def parallelize(model: nn.Module, layout: str, device: str) -> None:
    """Cut a model in place."""
    world = _WORLD[layout]
    if layout.startswith("tp"):
        parallelize_module(model, init_device_mesh(device, (world,)), dict(_TP))
    elif layout.startswith("fsdp") and layout != "fsdp2tp2":
        mesh = init_device_mesh(device, (world,))
        fully_shard(model.get_submodule("up"), mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "hsdp4":
        fully_shard(model, mesh=init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard")))
    elif layout != "one":
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], dict(_TP))
        if layout == "fsdp2tp2":
            fully_shard(model, mesh=mesh["dp"])


class Training:
    """A model in a layout, and its optimizer."""

    def __init__(self, rank: TorchRank, layout: str, optimizer: str, *, flat: bool, seed: int, rate: float) -> None:
        torch.manual_seed(seed)
        self.model = Model().to(rank.device)
        parallelize(self.model, layout, rank.device.type)
        groups = [
            {"params": [p for n, p in self.model.named_parameters() if "weight" in n], "lr": rate},
            {"params": [p for n, p in self.model.named_parameters() if "weight" not in n], "lr": rate / 2},
        ]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(groups, betas=(0.5, 0.75), amsgrad=True)
            if optimizer == "adam"
            else torch.optim.SGD(groups, momentum=0.5)
        )
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def train(self, steps: int) -> None:
        """Steps whose gradients differ from element to element."""
        for step in range(steps):
            for parameter in self.model.parameters():
                parameter.grad = parameter.detach() * (0.3 + step) + 0.1
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )


def extras(rank: TorchRank, seed: int) -> dict[str, Any]:
    """Whatever else a job holds: shards of its own, plain tensors, scalars, arrays, values, nested in all ways."""
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    cut = [shard(values((9, 7), torch.bfloat16, seed + 1), mesh, [placement]) for placement in (Shard(0), Shard(1))]
    return {
        "cut": cut,
        "plain": values((4, 3), torch.float64, seed + 3).to(rank.device),
        "zero_d": torch.tensor(seed + 0.25),
        "zero_d_cut": shard(torch.tensor(seed + 0.5), mesh, [Replicate()]),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3) * seed,
        "step": seed,
        "rate": seed / 7,
        "name": f"run {seed}",
        "sizes": [seed, (seed, "x")],
        "deep": {"list": [{"t": values((3,), torch.int32, seed + 4)}, (values((2,), torch.bool, seed + 5), seed)]},
        "nothing": {},
    }


def placements_of(tensor: Tensor) -> tuple[Placement, ...]:
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else ()


Variants = Sequence[tuple[str, bool]]


def save_first(rank: TorchRank, layout: str, root: Path, variants: Variants) -> None:
    """Train, save; the first rank writes down what every whole tensor was, by torch's own means."""
    for optimizer, flat in variants:
        place = root / optimizer
        training = Training(rank, layout, optimizer, flat=flat, seed=3, rate=0.125)
        training.train(2)
        if layout == "fsdp2tp2":
            assert any(isinstance(p, _StridedShard) for t in tensors(training.state()) for p in placements_of(t))
        state = {**training.state(), **extras(rank, 11)}
        truth = whole(training.state())
        if rank.rank == 0:
            place.mkdir()
            torch.save(truth, place / "truth.pt")
        dcp_torch.save(state, checkpoint_id=place / "step0")


def load_on(rank: TorchRank, layout: str, root: Path, variants: Variants, step: int) -> None:
    """Load into a job that holds other values everywhere, compare, go on with the model and save from here."""
    for optimizer, flat in variants:
        place = root / optimizer
        training = Training(rank, layout, optimizer, flat=flat, seed=99, rate=1.0)
        state = {**training.state(), **extras(rank, 11)}
        poison(state)
        state.update(step=0, rate=0.0, name="", sizes=None)
        dcp_torch.load(state, checkpoint_id=place / f"step{step}")
        assert_same({key: value for key, value in state.items() if key not in ("model", "optimizer")}, extras(rank, 11))
        training.restore(state)
        truth = torch.load(place / "truth.pt", weights_only=True)
        found = whole(training.state())
        assert found.keys() == truth.keys()
        for name, value in truth.items():
            assert_same_leaf(name, found[name], value)
        dcp_torch.save({**training.state(), **extras(rank, 11)}, checkpoint_id=place / f"step{step + 1}")


_ADAM_FLAT, _SGD_FLAT = (("adam", True), ("sgd", False)), (("adam", False), ("sgd", True))


@pytest.mark.parametrize(
    ("layouts", "variants"),
    [
        (("tp4", "tp2"), _ADAM_FLAT),
        (("tp4", "dp2tp2"), _SGD_FLAT),
        (("dp2tp2", "tp2"), _ADAM_FLAT),
        (("fsdp4", "fsdp2", "fsdp3"), _SGD_FLAT),
        (("fsdp2tp2", "one", "fsdp4"), _ADAM_FLAT),
        (("hsdp4", "fsdp3", "hsdp4"), _ADAM_FLAT),
        (("fsdp2tp2", "tp4", "one", "tp4"), _SGD_FLAT),
    ],
    ids=lambda value: " to ".join(value) if isinstance(value[0], str) else f"{value[0][0]} flat {value[0][1]}",
)
def test_model_and_optimizer_survive_every_change_of_layout(
    layouts: tuple[str, ...], variants: Variants, shared_path: Path
) -> None:
    """`variants` are optimizers, and whether their state is flattened."""
    run_gloo(save_first, _WORLD[layouts[0]], layouts[0], shared_path, variants)
    for step, layout in enumerate(layouts[1:]):
        run_gloo(load_on, _WORLD[layout], layout, shared_path, variants, step)


# -- random layouts ------------------------------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
_MESHES = (
    [0, 1, 2, 3, 4, 5, 6, 7],
    [7, 5, 3, 1, 6, 4, 2, 0],
    [[0, 1, 2, 3], [4, 5, 6, 7]],
    [[0, 4], [1, 5], [2, 6], [3, 7]],
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
    [[2, 5, 6], [1, 0, 3]],
    [1, 3, 6],
    [5],
)
_BY_MESH, _BY_BOXES, _BY_RANGES = "DTensor", "boxes", "flat ranges"


def drawn_shape(draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.choice((0, 1, 2, 3, 5, 8, 9, 13)) for _ in range(draw.randrange(4)))


def drawn_placement(draw: random.Random, ndim: int, is_last: bool) -> Placement:
    if not ndim or draw.random() < 0.3:
        return Replicate()
    dim = draw.randrange(ndim)
    return Shard(dim) if is_last or draw.random() < 0.6 else _StridedShard(dim, split_factor=draw.choice((2, 3)))


def drawn_boxes(draw: random.Random, shape: Sequence[int], parts: int) -> list[tuple[slice, ...]]:
    """Cut a box by random planes until there are enough."""
    boxes = [tuple(slice(0, size) for size in shape)]
    for _ in range(parts - 1):
        box = boxes.pop(draw.randrange(len(boxes)))
        splittable = [dim for dim, part in enumerate(box) if part.stop - part.start > 1]
        if not splittable:
            boxes.append(box)
            continue
        dim = draw.choice(splittable)
        at = draw.randrange(box[dim].start + 1, box[dim].stop)
        for part in (slice(box[dim].start, at), slice(at, box[dim].stop)):
            boxes.append((*box[:dim], part, *box[dim + 1 :]))
    return boxes


def drawn_part(draw: random.Random, whole: Tensor, rank: TorchRank, meshes: Sequence[DeviceMesh]) -> Tensor | None:
    """This rank's part of a tensor in a random layout, which all ranks draw alike; None if it has no part."""
    kind = draw.choice((_BY_MESH, _BY_BOXES, _BY_RANGES) if whole.numel() else (_BY_MESH,))
    if kind == _BY_MESH:
        mesh = draw.choice(meshes)
        return shard(whole, mesh, [drawn_placement(draw, whole.ndim, i == mesh.ndim - 1) for i in range(mesh.ndim)])
    source = whole if kind == _BY_BOXES else whole.reshape(-1)
    boxes = drawn_boxes(draw, source.shape, draw.randrange(1, rank.world_size + 1))
    holders = [*range(len(boxes)), *(draw.randrange(-1, len(boxes)) for _ in range(rank.world_size - len(boxes)))]
    draw.shuffle(holders)
    mine = holders[rank.rank]
    if mine < 0:
        return None
    part = source[boxes[mine]].clone().to(rank.device)
    return dcp_torch.annotate_shard(part, offsets=[cut.start for cut in boxes[mine]], global_shape=whole.shape)


def drawn_state(
    draw: random.Random, wholes: Sequence[Tensor], rank: TorchRank, meshes: Sequence[DeviceMesh]
) -> dict[str, Tensor]:
    parts = {f"t{at}": drawn_part(draw, each, rank, meshes) for at, each in enumerate(wholes)}
    return {name: part for name, part in parts.items() if part is not None}


def drawn_options(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """How to save and how to load: nothing of it may change a value."""
    planner = dcp_torch.StandardSavePlanner(
        enable_plan_caching=draw.random() < 0.5,
        remove_redundancy=draw.random() < 0.7,
        save_to_minimum_rank=draw.random() < 0.3,
    )
    loading = {
        "verify": draw.choice((True, "full", False)),
        "broadcast_replicated_tensors": draw.choice((True, False, "auto")),
        "broadcast_batch_bytes": draw.choice((0, 100, 1 << 20)),
    }
    return {"planner": planner, "durable": False}, loading


def check_random(rank: TorchRank, root: Path, seed: int, rounds: int) -> int:
    meshes = [DeviceMesh(rank.device.type, ranks) for ranks in _MESHES]
    compared = 0
    for number in range(rounds):
        draw = random.Random(f"{seed} {number}")
        wholes = [values(drawn_shape(draw), draw.choice(_DTYPES), draw.randrange(99)) for _ in range(5)]
        saving, loading = drawn_options(draw)
        dcp_torch.save(drawn_state(draw, wholes, rank, meshes), checkpoint_id=root / f"{number}", **saving)
        target = draw.getrandbits(64)
        found, expected = (drawn_state(random.Random(target), wholes, rank, meshes) for _ in range(2))
        poison(found)
        dcp_torch.load(found, checkpoint_id=root / f"{number}", **loading)
        assert_same(found, expected)
        compared += sum(tensor.numel() for tensor in found.values())
    return compared


@pytest.mark.parametrize("seed", range(2))
def test_any_layout_loads_into_any_other(seed: int, shared_path: Path) -> None:
    compared = run_gloo(check_random, 8, shared_path, seed, 16)
    assert sum(compared) > 1000


def check_random_alone(rank: TorchRank, directory: Path, rounds: int) -> None:
    meshes = [DeviceMesh(rank.device.type, ranks) for ranks in _MESHES]
    for number in range(rounds):
        seed = f"alone {number}"
        wholes = [values((6, 5), dtype, number) for dtype in _DTYPES]
        found, expected = (drawn_state(random.Random(seed), wholes, rank, meshes) for _ in range(2))
        dcp_torch.save(found, checkpoint_id=directory, use_collectives=False, durable=False)
        dist.barrier()
        poison(found)
        dcp_torch.load(found, checkpoint_id=directory)
        assert_same(found, expected)


def test_any_layout_saved_by_each_rank_alone_comes_back(shared_path: Path) -> None:
    run_gloo(check_random_alone, 8, shared_path, 8)
