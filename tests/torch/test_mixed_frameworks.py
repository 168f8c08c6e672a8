"""One state with leaves of torch, of numpy and of a third party's type, on several ranks."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_torch as dcp
from dcp_core import plugins
from dcp_core.arrays import NumpyAdapter
from dcp_core.box import Box
from dcp_core.dtype import numpy_dtype
from dcp_core.hookspecs import DescriberEntry, hookimpl
from dcp_core.planning.leaves import LocalTensor
from tests.torch.gloo_ranks import TorchRank, run_gloo

pytestmark = pytest.mark.timeout(90)


class Columns:
    """A matrix that keeps its columns apart."""

    def __init__(self, matrix: np.ndarray[Any, np.dtype[Any]]) -> None:
        self.columns = [column.copy() for column in matrix.T]


class ColumnsDescriber:
    def describe(self, value: Columns) -> LocalTensor | None:
        first = value.columns[0]
        dtype = numpy_dtype(first.dtype)
        assert dtype is not None
        boxes = tuple(Box((0, place), (len(first), 1)) for place in range(len(value.columns)))
        views = tuple(column.reshape(-1, 1) for column in value.columns)
        return LocalTensor((len(first), len(boxes)), dtype, boxes, views, NumpyAdapter())


def register() -> None:
    entry = DescriberEntry(f"{__name__}.Columns", framework="numpy", factory=f"{__name__}:ColumnsDescriber")
    plugins.register(types.SimpleNamespace(dcp_describers=hookimpl(lambda: [entry])), "columns")


def state(rank: TorchRank, factor: float) -> dict[str, Any]:
    whole = torch.arange(24.0).reshape(6, 4) * factor
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    return {
        "torch": {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "plain": whole.to(rank.device)},
        "numpy": [whole.numpy().copy(), np.array(factor)],
        "foreign": Columns(whole.numpy()),
        f"own of {rank.rank}": np.full(3, factor + rank.rank),
        "plain": {"factor": factor},
    }


def save_state(rank: TorchRank, directory: str) -> None:
    register()
    dcp.save(state(rank, 2.0), checkpoint_id=directory)


def load_state(rank: TorchRank, directory: str) -> list[str]:
    register()
    target, expected = state(rank, 0.0), state(rank, 2.0)
    del target[f"own of {rank.rank}"]
    if rank.rank < 2:
        target[f"own of {1 - rank.rank}"] = np.zeros(3)
    dcp.load(target, checkpoint_id=directory)
    sharded = target["torch"]["sharded"]
    assert isinstance(sharded, DTensor)
    right = {
        "sharded": torch.equal(sharded.to_local(), expected["torch"]["sharded"].to_local()),
        "plain": torch.equal(target["torch"]["plain"], expected["torch"]["plain"]),
        "numpy": all(map(np.array_equal, target["numpy"], expected["numpy"])),
        "foreign": all(map(np.array_equal, target["foreign"].columns, expected["foreign"].columns)),
        "other": rank.rank > 1 or bool((target[f"own of {1 - rank.rank}"] == 2.0 + 1 - rank.rank).all()),
        "factor": target["plain"] == {"factor": 2.0},
    }
    return [name for name, is_right in right.items() if not is_right]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_state_that_mixes_frameworks_is_saved_and_loaded(world: int, tmp_path: Path) -> None:
    run_gloo(save_state, 2, str(tmp_path))
    assert run_gloo(load_state, world, str(tmp_path)) == [[]] * world
