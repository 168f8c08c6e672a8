"""The plugin: found by its entry point alone, and sharded tensors go through checkpoints into every other layout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from toy_parallel import Average, Columns, Cut, Experts, Mlp, Ragged, Rows, ShardedTensor

import dcp_torch
from dcp_core.errors import CoverageError
from dcp_core.plugins import plugins, problems


def whole(name: str) -> torch.Tensor:
    """What a tensor holds everywhere, NaNs and all: random bits."""
    shape = {"matrix": (9, 7), "stack": (5, 3, 4)}[name]
    random = torch.Generator().manual_seed(len(name))
    return torch.randint(-(2**31), 2**31, shape, generator=random, dtype=torch.int32).view(torch.float32)


def cut_of(name: str, ranks: int) -> Cut:
    cuts: dict[str, Cut] = {
        "rows": Rows(),
        "columns": Columns(),
        "experts": Experts(),
        "ragged": Ragged(tuple((3 * rank + 1) % 4 for rank in range(ranks))),
    }
    return cuts[name]


def share(name: str, cut: str, ranks: int) -> ShardedTensor:
    return ShardedTensor.of(whole(name), cut_of(cut, ranks))


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.detach().view(torch.int32), expected.detach().view(torch.int32))


CUTS = ("rows", "columns", "experts", "ragged")


def test_the_plugin_is_found_by_its_entry_point() -> None:
    (found,) = (plugin for plugin in plugins() if plugin.name == "toy_parallel")
    assert problems("toy_parallel") == []
    assert [entry.name for entry in found.entries] == ["toy_parallel.sharded.ShardedTensor"]
    assert found.origin.startswith("toy-parallel")


def test_finding_the_plugin_imports_neither_torch_nor_the_framework() -> None:
    code = "import sys, dcp_core.plugins as p; p.plugins(); print({'torch', 'toy_parallel'} & set(sys.modules))"
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"


# -- save, load, reshard ---------------------------------------------------------------------------------------------


def save(rank: int, ranks: int, path: Path) -> None:
    state = {cut: {name: share(name, cut, ranks) for name in ("matrix", "stack")} for cut in CUTS}
    dcp_torch.save(state, checkpoint_id=path)


def load(rank: int, ranks: int, path: Path) -> None:
    for source in CUTS:
        for target in CUTS:
            state = {source: {name: share(name, target, ranks) for name in ("matrix", "stack")}}
            for tensor in state[source].values():
                for local in tensor.local:
                    local.zero_()
            dcp_torch.load(state, checkpoint_id=path)
            for name, tensor in state[source].items():
                for found, expected in zip(tensor.local, share(name, target, ranks).local, strict=True):
                    assert_same_bits(found, expected)


def test_every_cut_loads_into_every_other_on_another_number_of_ranks(tmp_path: Path) -> None:
    on_ranks(3, save, tmp_path / "checkpoint")
    on_ranks(2, load, tmp_path / "checkpoint")
    on_ranks(5, load, tmp_path / "checkpoint")
    bits = dcp_torch.read(tmp_path / "checkpoint", "ragged.stack")
    assert_same_bits(torch.from_numpy(bits.copy()), whole("stack"))


def to_dtensor(rank: int, ranks: int, source: Path, target: Path) -> None:
    mesh = init_device_mesh("cpu", (ranks,))

    def cut(tensor: torch.Tensor, dim: int) -> DTensor:
        return distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)

    places = {cut_name: {"matrix": 1, "stack": at % 3} for at, cut_name in enumerate(CUTS)}
    state = {
        cut_name: {name: cut(torch.zeros_like(whole(name)), dim) for name, dim in dims.items()}
        for cut_name, dims in places.items()
    }
    dcp_torch.load(state, checkpoint_id=source)
    for cut_name, dims in places.items():
        for name, dim in dims.items():
            assert_same_bits(state[cut_name][name].to_local(), cut(whole(name), dim).to_local())
    dcp_torch.save(state, checkpoint_id=target)


def test_sharded_tensors_become_dtensors_and_come_back(tmp_path: Path) -> None:
    on_ranks(3, save, tmp_path / "toy")
    on_ranks(4, to_dtensor, tmp_path / "toy", tmp_path / "dtensor")
    on_ranks(2, load, tmp_path / "dtensor")


# -- a training job --------------------------------------------------------------------------------------------------


def state_of(network: Mlp, average: Average, step: int) -> dict[str, Any]:
    return {"network": network.state(), "average": average.value, "step": step}


def job(rank: int, ranks: int, path: Path, is_first: bool) -> None:
    network = Mlp(seed=1 if is_first else 2)
    average = Average(network.up, tuple(range(1, ranks + 1)))
    rows = torch.rand(12, 6, generator=torch.Generator().manual_seed(5))
    if is_first:
        for _ in range(3):
            network.step(rows, rows.flip(1))
            average.update(network.up)
        dcp_torch.async_save(state_of(network, average, 3), checkpoint_id=path)
        wholes = {name: weight.whole() for name, weight in network.state().items()} | {"average": average.value.whole()}
        network.step(rows, rows)  # what is saved is the state of before
        dcp_torch.wait_all()
        if rank == 0:
            torch.save(wholes, path / "wholes.pt")
        return
    state = state_of(network, average, 0)
    dcp_torch.load(state, checkpoint_id=path)
    assert state["step"] == 3
    for name, expected in torch.load(path / "wholes.pt").items():
        found = average.value if name == "average" else network.state()[name]
        assert_same_bits(found.whole(), expected)
    network.step(rows, rows.flip(1))


def test_a_job_saves_in_the_background_and_goes_on_with_other_ranks(tmp_path: Path) -> None:
    on_ranks(4, job, tmp_path, True)
    on_ranks(3, job, tmp_path, False)


# -- what goes wrong -------------------------------------------------------------------------------------------------


def save_with_a_hole(rank: int, ranks: int, path: Path) -> str:
    tensor = share("matrix", "rows", ranks)
    lost = ShardedTensor(tensor.shape, tensor.dtype, (), ())
    with pytest.raises(CoverageError) as caught:
        dcp_torch.save({"w": lost if rank == 1 else tensor}, checkpoint_id=path)
    assert not (path / ".metadata").exists()
    return str(caught.value)


def test_a_share_that_is_missing_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    messages = on_ranks(3, save_with_a_hole, tmp_path / "hole")
    assert len(set(messages)) == 1
    assert "w" in messages[0]
