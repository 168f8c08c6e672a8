"""Checkpoints that torch DCP wrote, on real ranks, load bit for bit under other layouts."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcp_torch as dcp
from dcp_core.convert.to_dcp import convert_to_dcp
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_torch.offline_transform import convert_torch_dcp_to_dcp, dcp_to_full_state_dict
from dcp_torch.torch_dcp import TorchDCPReader
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.states import assert_same, poison, values, whole

SIZES = (32, 64)


def save_quietly(state: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        torch_dcp.save(state, checkpoint_id=str(path))  # type: ignore[attr-defined]  # torch lists no exports


def make_state(layout: str) -> dict[str, Any]:
    """A model and its optimizer after a step, laid out over all ranks; equal in all layouts."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(SIZES[0], SIZES[1]), nn.GELU(), nn.Linear(SIZES[1], SIZES[0]), nn.LayerNorm(SIZES[0])
    )
    size = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "tp":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif layout == "fsdp_tp":
        both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("fsdp", "tp"))
        parallelize_module(model, both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=both["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    model(torch.randn(8, SIZES[0])).square().mean().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": 7, "notes": {"names": ["a", "b"], "none": None}}


def save_as(rank: TorchRank, path: Path, layout: str) -> dict[str, Any]:
    state = make_state(layout)
    save_quietly(state, path)
    return whole(state)


def load_as(rank: TorchRank, path: Path, layout: str, options: dict[str, Any]) -> dict[str, Any]:
    state = make_state(layout)
    poison(state)
    state["step"], state["notes"] = 0, {"names": [], "none": 1}
    dcp.load(state, storage_reader=TorchDCPReader(path), **options)
    return whole(state)


@pytest.fixture(scope="module", params=["fsdp", "tp", "fsdp_tp"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("torch") / request.param
    return path, run_gloo(save_as, 4, path, request.param)[0]


@pytest.mark.parametrize(
    ("layout", "ranks"), [("plain", 1), ("fsdp", 2), ("fsdp", 3), ("tp", 4), ("fsdp_tp", 4), ("plain", 2)]
)
def test_a_model_and_its_optimizer_load_under_another_layout(
    saved: tuple[Path, dict[str, Any]], layout: str, ranks: int
) -> None:
    path, expected = saved
    for found in run_gloo(load_as, ranks, path, layout, {}):
        assert_same(found, expected)


def test_reads_are_shared_or_not_and_ranks_may_load_alone(saved: tuple[Path, dict[str, Any]]) -> None:
    path, expected = saved
    for options in ({"broadcast_replicated_tensors": False}, {"use_collectives": False}, {"verify": "full"}):
        for found in run_gloo(load_as, 2, path, "plain", options):
            assert_same(found, expected)


def test_it_becomes_a_checkpoint_of_ours(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, expected = saved
    metadata = convert_torch_dcp_to_dcp(path, tmp_path / "dcp", durable=False)
    assert metadata.state_dict_metadata.keys() >= {"step", "notes.names", "model.0.weight"}
    found = dcp_to_full_state_dict(tmp_path / "dcp")
    assert_same(found, dcp_to_full_state_dict(TorchDCPReader(path)))
    assert found["notes"] == {"names": ["a", "b"], "none": None}
    assert_same({name: value for name, value in whole(found).items() if name in expected}, expected)


# -- one process ------------------------------------------------------------------------------------------------------


def odd_tensors() -> dict[str, Tensor]:
    """Tensors that torch saves in other ways than row by row."""
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(2, 3, 4, 5, generator=generator)
    complexes = torch.randn(4, 3, dtype=torch.complex64, generator=generator)
    return {
        "channels_last": image.to(memory_format=torch.channels_last),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "permuted": image.permute(3, 1, 0, 2),
        "conjugate": complexes.conj(),
        "conjugate_transposed": complexes.t().conj(),
        "negative": torch._neg_view(torch.randn(5, generator=generator)),
        "rows_of_a_larger_one": torch.randn(10, 4, generator=generator)[2:5],
        "columns_of_a_larger_one": torch.randn(10, 4, generator=generator)[:, 1:3],
        "scalar": torch.tensor(5.0),
        "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(torch.randn(3, generator=generator)),
    }


def test_tensors_in_any_order_of_elements_load(tmp_path: Path) -> None:
    state = odd_tensors()
    save_quietly(state, tmp_path / "a")
    target = {name: torch.full(value.shape, 7, dtype=value.dtype) for name, value in state.items()}
    dcp.load(target, storage_reader=TorchDCPReader(tmp_path / "a"))
    for name, value in state.items():
        assert torch.equal(target[name], value.detach()), name
    convert_torch_dcp_to_dcp(tmp_path / "a", tmp_path / "b", durable=False)
    for name, value in dcp_to_full_state_dict(tmp_path / "b").items():
        assert torch.equal(value, state[name].detach()), name


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
        torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
        torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
    ],
    ids=str,
)  # fmt: skip
def test_every_type_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {"w": values((7, 5), dtype)}
    save_quietly(state, tmp_path)
    target = {"w": torch.zeros((7, 5), dtype=torch.uint8).to(torch.bool) if dtype is torch.bool else empty(dtype)}
    dcp.load(target, storage_reader=TorchDCPReader(tmp_path))
    assert_same(target, state)


def empty(dtype: torch.dtype) -> Tensor:
    return torch.zeros(7 * 5 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(7, 5)


def test_values_and_nesting_come_back(tmp_path: Path) -> None:
    state = {
        "step": 3, "name": "run", "none": None, "rate": 0.25, "flags": (True, 2), "names": ["a", "b"],
        "deep": {"list": [{"x": torch.ones(2), "y": 1}, {"x": torch.zeros(2), "y": 2}]},
        "dtype": torch.bfloat16, "size": torch.Size([2, 3]), "array": np.arange(4.0), "number": np.float32(2.5),
        "ordered": OrderedDict(b=1, a=2), "by_number": {0: torch.ones(1), 1: {"k": torch.zeros(1)}},
        "pair": (torch.ones(2), "with a tensor"), "random": np.random.RandomState(3).get_state(),
    }  # fmt: skip
    save_quietly(state, tmp_path / "a")
    target: dict[str, Any] = {
        **dict.fromkeys(("step", "name", "none", "rate", "flags", "names", "dtype", "size", "array", "number")),
        "pair": None, "random": None, "deep": {"list": [{"x": torch.zeros(2), "y": 0}, {"x": torch.ones(2), "y": 0}]},
        "ordered": OrderedDict(b=0, a=0), "by_number": {0: torch.zeros(1), 1: {"k": torch.ones(1)}},
    }  # fmt: skip
    dcp.load(target, storage_reader=TorchDCPReader(tmp_path / "a"))
    for name in ("step", "name", "none", "rate", "flags", "names", "dtype", "size", "number", "ordered"):
        assert target[name] == state[name], name
        assert type(target[name]) is type(state[name]), name
    assert np.array_equal(target["array"], np.arange(4.0))
    assert np.array_equal(target["random"][1], state["random"][1])  # type: ignore[index]  # a tuple
    assert torch.equal(target["pair"][0], torch.ones(2))
    assert_same({key: target[key] for key in ("deep", "by_number")}, {key: state[key] for key in ("deep", "by_number")})
    convert_torch_dcp_to_dcp(tmp_path / "a", tmp_path / "b", durable=False)
    assert dcp_to_full_state_dict(tmp_path / "b")["deep"]["list"][1]["y"] == 2


class CountingOperations(FileOperations):
    def __init__(self) -> None:
        self.nbytes = 0

    def preadv(self, descriptor: int, buffers: Any, offset: int) -> int:
        moved = super().preadv(descriptor, buffers, offset)
        self.nbytes += moved
        return moved


def _read_rows(rank: TorchRank, path: Path, dim: int) -> int:
    mesh = init_device_mesh("cpu", (4,))
    state = {"w": distribute_tensor(torch.zeros(1024, 1024), mesh, [Shard(dim)])}
    operations = CountingOperations()
    dcp.load(state, storage_reader=TorchDCPReader(storage=LocalStorage(path, operations)))
    expected = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024).chunk(4, dim)[rank.rank]
    assert torch.equal(state["w"].to_local(), expected)
    return operations.nbytes


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_rank_reads_the_rows_that_it_needs(chunks: int, tmp_path: Path) -> None:
    run_gloo(_save_large, chunks, tmp_path)
    part = 1 << 20
    for nbytes in run_gloo(_read_rows, 4, tmp_path, 0):
        assert part <= nbytes <= part * 1.05 + 20_000


def _save_large(rank: TorchRank, path: Path) -> None:
    mesh = init_device_mesh("cpu", (rank.world_size,))
    large = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    save_quietly({"w": distribute_tensor(large, mesh, [Shard(0)])}, path)


def _save_replicated(rank: TorchRank, path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {f"w{n}": distribute_tensor(values((9, 5), seed=n), mesh, [Replicate(), Shard(n)]) for n in range(2)}
    save_quietly({**state, "random": torch.full((3,), rank.rank), "rank": rank.rank}, path)


def test_replicated_shards_and_values_that_differ_between_ranks_load(tmp_path: Path) -> None:
    run_gloo(_save_replicated, 4, tmp_path)
    targets = [
        {"w0": torch.zeros(9, 5), "w1": torch.zeros(9, 5), "random": torch.zeros(3).long(), "rank": -1} for _ in "ab"
    ]
    dcp.load(targets[0], storage_reader=TorchDCPReader(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(targets[1], checkpoint_id=str(tmp_path))  # type: ignore[attr-defined]  # torch lists no exports
    assert_same(targets[0], targets[1])
    assert_same(targets[0]["w1"], values((9, 5), seed=1))


def _save_alone(rank: TorchRank, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save({"w": torch.full((4,), rank.rank + 1)}, checkpoint_id=str(path), use_collectives=False)  # type: ignore[attr-defined]  # torch lists no exports


def _load_alone(rank: TorchRank, path: Path) -> int:
    state = {"w": torch.zeros(4, dtype=torch.int64)}
    dcp.load(state, storage_reader=TorchDCPReader(path))
    return int(state["w"][0])


def test_ranks_that_saved_alone_get_their_own_back(tmp_path: Path) -> None:
    run_gloo(_save_alone, 2, tmp_path)
    assert run_gloo(_load_alone, 2, tmp_path) == [1, 2]


def test_a_load_from_its_own_name_and_from_checkpoint_id(tmp_path: Path) -> None:
    save_quietly({"w": torch.ones(3)}, tmp_path / "a b")
    for reader, options in (
        (TorchDCPReader(tmp_path / "a b"), {}),
        (TorchDCPReader(), {"checkpoint_id": tmp_path / "a b"}),
    ):
        target = {"w": torch.zeros(3)}
        dcp.load(target, storage_reader=reader, **options)  # type: ignore[arg-type]  # a path
        assert torch.equal(target["w"], torch.ones(3))


def test_a_large_tensor_in_another_order_is_read_once_when_it_is_converted(tmp_path: Path) -> None:
    state = {"t": torch.arange(float(6 << 20)).reshape(2048, 3072).t(), "w": torch.ones(1 << 20)}
    save_quietly(state, tmp_path / "a")
    operations = CountingOperations()
    convert_to_dcp(TorchDCPReader(storage=LocalStorage(tmp_path / "a", operations)), tmp_path / "b", durable=False)
    assert operations.nbytes < 1.05 * (28 << 20)
    assert_same(dcp_to_full_state_dict(tmp_path / "b"), state)
