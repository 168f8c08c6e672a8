"""Sharded torch tensors in a real S3 server: two gloo ranks save, in the foreground and behind; other layouts load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_torch
from dcp_core.testing import ranks
from tests.core.object_store import BUCKET, ObjectStore
from tests.torch.gloo_ranks import TorchRank, run_gloo

ranks.preload("s3fs", "aiobotocore.session")
pytestmark = pytest.mark.timeout(120)

SECONDS = 30.0


def state_of(world: int, placements: list[Any], factor: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(60.0).reshape(10, 6) * factor
    return {
        "weight": distribute_tensor(whole, mesh, placements),
        "bias": distribute_tensor(torch.arange(7, dtype=torch.bfloat16), mesh, [Replicate()]),
        "step": int(factor),
    }


def save_and_load(rank: TorchRank, url: str) -> list[int]:
    steps = []
    for factor, is_async in ((1.0, False), (2.0, True), (3.0, True)):
        state = state_of(rank.world_size, [Shard(0)], factor)
        if is_async:
            response = dcp_torch.async_save(state, checkpoint_id=url, timeout_seconds=SECONDS)
            state["weight"].to_local().zero_()
            response.get_result(60)
        else:
            dcp_torch.save(state, checkpoint_id=url, timeout_seconds=SECONDS)
        target = state_of(rank.world_size, [Shard(1)], 0.0)
        torch.distributed.barrier()
        dcp_torch.load(target, checkpoint_id=url, timeout_seconds=SECONDS)
        torch.distributed.barrier()
        expected = state_of(rank.world_size, [Shard(1)], factor)
        for name in ("weight", "bias"):
            assert isinstance(target[name], DTensor)
            assert torch.equal(target[name].to_local(), expected[name].to_local()), (factor, name)
        steps.append(target["step"])
    return steps


def test_two_ranks_save_and_load_in_another_layout(object_store: ObjectStore) -> None:
    url = f"s3://{BUCKET}/torch/step 1"
    assert run_gloo(save_and_load, 2, url) == [[1, 2, 3]] * 2
    assert (dcp_torch.read(url, "weight") == torch.arange(60.0).reshape(10, 6).numpy() * 3).all()
