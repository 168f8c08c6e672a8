"""A manager in torch jobs: replicas of DDP, FSDP2 and HSDP are compared, runs go on where they stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dcp_torch as dcp
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.states import local_of, raised, shard, values

pytestmark = pytest.mark.timeout(150)

DIFFER = dcp.ReplicasDifferError.__name__


def network(rank: TorchRank) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)).to(rank.device)


def train(run: dict[str, Any]) -> None:
    """One step, on the same batch on every rank."""
    device = next(run["model"].parameters()).device
    run["optimizer"].zero_grad()
    run["model"](torch.ones(4, 16, device=device)).square().mean().backward()
    run["optimizer"].step()


def flip_a_bit(tensor: torch.Tensor, element: int = 3, bit: int = 1) -> None:
    """Turn one bit of a float32 tensor, or of this rank's shard of it, around."""
    local_of(tensor).view(-1)[element : element + 1].view(torch.int32).bitwise_xor_(1 << bit)


def report(state: dict[str, Any], directory: Path, way: str) -> tuple[str, str]:
    """Save with a comparison, and give the class and the text of what was raised."""

    def call() -> None:
        if way == "save":
            dcp.save(state, checkpoint_id=directory, check_replicas=True)
        else:
            dcp.async_save(state, checkpoint_id=directory, check_replicas=True).get_result(60)

    return raised(call)


def on_all(results: list[list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """What every rank reports."""
    assert all(found == results[0] for found in results), results
    return results[0]


# -- replicas ----------------------------------------------------------------------------------------------------------


def ddp(rank: TorchRank, directory: Path, way: str) -> list[tuple[str, str]]:
    """Healthy twice (the plan is made, then known); a weight, a bias, and an optimizer's state with a flipped bit."""
    model = DistributedDataParallel(network(rank))
    run: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    train(run)
    found = [report(run, directory, way)]
    train(run)
    found.append(report(run, directory, way))
    weight, bias = model.module[0].weight, model.module[2].bias
    for tensor in (weight, bias, run["optimizer"].state[weight]["exp_avg"]):
        if rank.rank == 1:
            flip_a_bit(tensor)
        found.append(report(run, directory, way))
        if rank.rank == 1:
            flip_a_bit(tensor)
    found.append(report(run, directory, way))
    saved = dcp.read(directory, "model.module.0.weight")
    assert (saved == weight.detach().cpu().numpy()).all()
    return found


@pytest.mark.parametrize("way", ["save", "async"])
def test_a_flipped_bit_in_a_replica_of_ddp_is_named(tmp_path: Path, way: str) -> None:
    found = on_all(run_gloo(ddp, 3, tmp_path / "step_1", way, timeout_seconds=120))
    kinds = [kind for kind, _ in found]
    assert kinds == ["", "", DIFFER, DIFFER, DIFFER, ""], found
    names = ("model.module.0.weight", "model.module.2.bias", "optimizer.state.0.exp_avg")
    for (_, text), name in zip(found[2:5], names, strict=True):
        assert f"{name}' at offsets" in text and "rank 1 differs from ranks 0, 2, which agree" in text, text
        assert "Against the majority: rank 1 in 1 of 1" in text
        assert all(other not in text for other in names if other != name)


def hsdp(rank: TorchRank, directory: Path) -> list[tuple[str, str]]:
    """Two replicas of two shards, and a tensor that is whole everywhere; then FSDP2, without replicas."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network(rank)
    fully_shard(model, mesh=mesh)
    run: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}
    train(run)
    run["whole"] = shard(values((5, 3)), mesh, [Replicate(), Replicate()])
    found = [report(run, directory, "save"), report(run, directory, "async")]
    if rank.rank == 3:
        flip_a_bit(model.get_parameter("0.weight"))
    if rank.rank == 0:
        flip_a_bit(run["whole"])
    found += [report(run, directory, "save"), report(run, directory, "async")]
    sharded = network(rank)
    fully_shard(sharded, mesh=init_device_mesh(rank.device.type, (4,)))
    if rank.rank == 2:
        flip_a_bit(sharded.get_parameter("0.weight"))  # nobody else holds it
    found.append(report({"model": sharded}, directory, "save"))
    return found


def test_replicas_of_hsdp_are_compared_and_shards_are_nobodys_copies(tmp_path: Path) -> None:
    good, good_async, bad, bad_async, sharded = on_all(run_gloo(hsdp, 4, tmp_path / "s", timeout_seconds=120))
    assert (good[0], good_async[0], sharded[0]) == ("", "", ""), (good, good_async, sharded)
    assert bad[0] == bad_async[0] == DIFFER
    assert "'model.0.weight' at offsets (32, 0), sizes (32, 16): rank 1 against rank 3: no majority" in bad[1]
    assert "'whole' at offsets (0, 0), sizes (5, 3): rank 0 differs from ranks 1, 2, 3, which agree" in bad[1]
    assert bad[1] == bad_async[1]


def tensor_parallel(rank: TorchRank, directory: Path) -> list[tuple[str, str]]:
    """The bias of a layer that is cut by rows is whole on all ranks, whose shards differ."""
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    model: Any = parallelize_module(network(rank), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert model[0].weight.placements == (Shard(0),) and model[2].bias.placements == (Replicate(),)
    found = [report({"model": model}, directory, "save")]
    if rank.rank == 1:
        flip_a_bit(model[2].bias)
    return [*found, report({"model": model}, directory, "save")]


def test_what_tensor_parallel_ranks_all_hold_is_compared(tmp_path: Path) -> None:
    good, bad = on_all(run_gloo(tensor_parallel, 2, tmp_path / "s"))
    assert good[0] == "" and bad[0] == DIFFER
    assert "'model.2.bias'" in bad[1] and "weight" not in bad[1]


# -- runs --------------------------------------------------------------------------------------------------------------


def run_for(rank: TorchRank, root: Path, first: int, last: int) -> tuple[int | None, list[torch.Tensor]]:
    """Train up to a step, from wherever the run stopped; every second step is saved, in turn in both ways."""
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    model: Any = network(rank)
    fully_shard(model, mesh=mesh)
    run = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    train(run)  # makes the optimizer's state
    with dcp.CheckpointManager(root, keep=2, every=2, durable=False) as manager:
        resumed = manager.resume(run)
        for step in range((resumed or first) + 1, last + 1):
            train(run)
            if manager.should_save(step):
                (manager.save if step % 4 == 0 else manager.async_save)(step, run)
    dist.barrier()  # rank 0 is the one that removes
    found = dcp.latest_checkpoint(root)
    assert found == str(root / f"step_{last}") == dcp.survey_checkpoints(root, verify=True).path
    return resumed, [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]


def test_a_run_goes_on_where_it_stopped_under_another_number_of_ranks(tmp_path: Path) -> None:
    straight = run_gloo(run_for, 2, tmp_path / "straight", 0, 8)
    halted = run_gloo(run_for, 2, tmp_path / "halted", 0, 4)
    going_on = run_gloo(run_for, 4, tmp_path / "halted", 0, 8)
    assert [resumed for resumed, _ in halted + going_on] == [None] * 2 + [4] * 4
    for resumed, expected in zip(going_on[0][1], straight[0][1], strict=True):
        torch.testing.assert_close(resumed, expected)
    assert sorted(path.name for path in (tmp_path / "halted").iterdir()) == ["latest", "step_6", "step_8"]


def test_a_process_without_a_group_looks_and_saves_alone(tmp_path: Path) -> None:
    assert dcp.latest_checkpoint(tmp_path) is None
    with dcp.CheckpointManager(tmp_path, keep=1) as manager:
        for step in (1, 2):
            manager.async_save(step, {"w": torch.full((3,), float(step))})
    target = {"w": torch.zeros(3)}
    assert manager.resume(target) == 2 and target["w"].tolist() == [2.0, 2.0, 2.0]
    assert dcp.latest_checkpoint(tmp_path) == str(tmp_path / "step_2")
