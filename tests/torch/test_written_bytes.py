"""What lies on disk after a save: every element once, evenly spread, in files that safetensors opens."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import dcp_torch
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.states import assert_same, bits_of, poison, shard, tensors, values

Shapes = dict[str, tuple[tuple[int, ...], int | None, torch.dtype]]
"""Name to global shape, the dimension that tensor parallelism cuts, and type."""


def transformer(width: int, layers: int, vocabulary: int) -> Shapes:
    shapes: Shapes = {"embed": ((vocabulary, width), 0, torch.bfloat16), "norm": ((width,), None, torch.float32)}
    for layer in range(layers):
        for name in ("q", "k", "v", "up"):
            rows = 4 * width if name == "up" else width
            shapes[f"{layer}.{name}.weight"] = ((rows, width), 0, torch.float32)
            shapes[f"{layer}.{name}.bias"] = ((rows,), 0, torch.float32)
        for name in ("o", "down"):
            columns = 4 * width if name == "down" else width
            shapes[f"{layer}.{name}.weight"] = ((width, columns), 1, torch.float32)
            shapes[f"{layer}.{name}.bias"] = ((width,), None, torch.float32)
        shapes[f"{layer}.norm.weight"] = ((width,), None, torch.float32)
    return shapes


_BALANCED = transformer(width=192, layers=3, vocabulary=1000)
_EMBEDDING_HEAVY = {
    **transformer(width=64, layers=2, vocabulary=50_000),
    "head": ((50_000, 64), None, torch.float32),
}


def total_nbytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, _, dtype in shapes.values())


def sharded(rank: TorchRank, shapes: Shapes, ways: int) -> dict[str, DTensor]:
    """Data parallel over all others, tensor parallel `ways`."""
    mesh = init_device_mesh(rank.device.type, (rank.world_size // ways, ways))
    state = {}
    for at, (name, (shape, dim, dtype)) in enumerate(shapes.items()):
        placement: Placement = Replicate() if dim is None else Shard(dim)
        state[name] = shard(values(shape, dtype, at), mesh, [Replicate(), placement])
    return state


def save_sharded(rank: TorchRank, directory: Path, shapes: Shapes) -> None:
    dcp_torch.save(sharded(rank, shapes, 2), checkpoint_id=directory)


def load_sharded(rank: TorchRank, directory: Path, shapes: Shapes) -> None:
    state = sharded(rank, shapes, rank.world_size)
    poison(state)
    dcp_torch.load(state, checkpoint_id=directory)
    assert_same(state, sharded(rank, shapes, rank.world_size))


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("_rank*.safetensors"))


def header_of(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file starts, and its header."""
    with file.open("rb") as opened:
        nbytes = int.from_bytes(opened.read(8), "little")
        return nbytes + 8, json.loads(opened.read(nbytes))


def data_nbytes(file: Path) -> int:
    return file.stat().st_size - header_of(file)[0]


@pytest.mark.parametrize("shapes", [_BALANCED, _EMBEDDING_HEAVY], ids=["transformer", "embedding-heavy"])
def test_data_and_tensor_parallel_ranks_write_every_byte_once_and_evenly(shapes: Shapes, shared_path: Path) -> None:
    run_gloo(save_sharded, 8, shared_path, shapes)
    files = data_files(shared_path)
    assert len(files) == 8
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) <= 1.05 * sum(sizes) / len(sizes)
    assert sum(data_nbytes(file) for file in files) == total_nbytes(shapes)
    chunks = sum(len(header_of(file)[1]) - 1 for file in files)
    headers = sum(header_of(file)[0] for file in files)
    checksums = 8 * (total_nbytes(shapes) / 2**20 + 2 * chunks) * 4 / 3  # of blocks, and of chunks, in base64
    assert headers <= 150 * chunks + checksums + 8 * 300
    others = {file.name for file in shared_path.iterdir()} - {file.name for file in files}
    assert others == {".metadata"}
    assert (shared_path / ".metadata").stat().st_size <= 400 * len(shapes)
    run_gloo(load_sharded, 2, shared_path, shapes)


def test_files_open_in_safetensors_and_hold_the_values_of_their_chunks(shared_path: Path) -> None:
    run_gloo(save_sharded, 4, shared_path, _BALANCED)
    wholes = {name: values(shape, dtype, at) for at, (name, (shape, _, dtype)) in enumerate(_BALANCED.items())}
    held = {name: torch.zeros(whole.shape, dtype=torch.int32) for name, whole in wholes.items()}
    source = dcp_torch.FileSystemReader(shared_path).load_metadata().source
    rank_of = source.files.rank
    for file in data_files(shared_path):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                name, _, at = key.partition("@")
                (stored,) = source.tensors(name)
                places = [
                    offsets[: len(stored.shape)]
                    for offsets, row in zip(stored.chunks.offsets.tolist(), stored.chunks.file.tolist(), strict=True)
                    if file.name == f"_rank{rank_of[row]}_.safetensors"
                ]
                start = [int(number) for number in at.split(",")] if at else places[0]
                assert start in places
                assert bool(at) == (len(places) > 1), key
                found = opened.get_tensor(key)
                box = tuple(slice(a, a + size) for a, size in zip(start, found.shape, strict=True))
                assert bits_of(found) == bits_of(wholes[name][box]), key
                held[name][box] += 1
    assert all((count == 1).all() for count in held.values())


# -- replicas ------------------------------------------------------------------------------------------------------


def replicated() -> dict[str, Any]:
    """What every rank of a data-parallel job holds: plain tensors, large and tiny, and values."""
    state: dict[str, Any] = {f"w{at}": values((300, 400 + at), seed=at) for at in range(7)}
    return {**state, "bias": values((10,), seed=9), "count": torch.tensor(5), "step": 7}


def save_replicated(rank: TorchRank, directory: Path, planner: Callable[[], Any]) -> None:
    dcp_torch.save(replicated(), checkpoint_id=directory, planner=planner())


def lowest_rank_planner() -> dcp_torch.StandardSavePlanner:
    return dcp_torch.StandardSavePlanner(save_to_minimum_rank=True)


def redundant_planner() -> dcp_torch.StandardSavePlanner:
    return dcp_torch.StandardSavePlanner(remove_redundancy=False)


def replicated_nbytes() -> int:
    return sum(tensor.nbytes for tensor in tensors(replicated()))


@pytest.mark.parametrize(
    ("planner", "shares"),
    [
        (dcp_torch.StandardSavePlanner, None),
        (lowest_rank_planner, [1, 0, 0, 0]),
        (redundant_planner, [1, 1, 1, 1]),
    ],
    ids=["balanced", "lowest rank", "redundant"],
)
def test_replicated_tensors_are_written_once_unless_asked_otherwise(
    planner: Callable[[], Any], shares: list[int] | None, shared_path: Path
) -> None:
    run_gloo(save_replicated, 4, shared_path, planner)
    written = {file.name: data_nbytes(file) for file in data_files(shared_path)}
    of_rank = [written.get(f"_rank{rank}_.safetensors", 0) for rank in range(4)]
    if shares is None:
        assert sum(of_rank) == replicated_nbytes()
        assert max(of_rank) <= 1.05 * sum(of_rank) / 4
    else:
        assert of_rank == [share * replicated_nbytes() for share in shares]
    state = replicated()
    state["step"] = 0
    poison(state)
    dcp_torch.load(state, checkpoint_id=shared_path)
    assert_same(state, replicated())


# -- tied parameters -----------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Input and output share their weights, unless told otherwise."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


def fill(module: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for at, parameter in enumerate(module.parameters()):
            parameter.copy_(values(parameter.shape, seed=seed + at))


def save_tied(rank: TorchRank, directory: Path) -> None:
    """Tied, untied, tied again: each time what it is now, whatever plan is known from before."""
    tied, apart = Tied(), Tied(is_tied=False)
    fill(tied, 1)
    fill(apart, 2)
    for name, module in {"1": tied, "2": apart, "3": tied, "4": apart}.items():
        dcp_torch.save({"m": module.state_dict()}, checkpoint_id=directory / name)


def test_tied_parameters_are_stored_once_and_load_by_either_name(shared_path: Path) -> None:
    run_gloo(save_tied, 2, shared_path)
    weight = 11 * 6 * 4
    stored = [sum(data_nbytes(file) for file in data_files(shared_path / name)) for name in "1234"]
    assert stored == [weight, 2 * weight, weight, 2 * weight]
    for name, seeds in {"1": (1, 1), "2": (2, 3), "3": (1, 1), "4": (2, 3)}.items():
        apart = {"embed.weight": torch.zeros(11, 6), "head.weight": torch.zeros(11, 6)}
        dcp_torch.load({"m": apart}, checkpoint_id=shared_path / name)
        assert_same(apart, {key: values((11, 6), seed=s) for key, s in zip(apart, seeds, strict=True)})
        for key, seed in zip(apart, seeds, strict=True):
            alone = {"m": {key: torch.zeros(11, 6)}}
            dcp_torch.load(alone, checkpoint_id=shared_path / name)
            assert_same(alone, {"m": {key: values((11, 6), seed=seed)}})
    keys = [key for file in data_files(shared_path / "1") for key in header_of(file)[1] if key != "__metadata__"]
    assert keys == ["m.embed.weight"]
    module = Tied()
    dcp_torch.load({"m": module.state_dict()}, checkpoint_id=shared_path / "3")
    assert module.head.weight is module.embed.weight
    assert bits_of(module.head.weight) == bits_of(values((11, 6), seed=1))


def tied_shards(rank: TorchRank, *, is_tied: bool) -> dict[str, Tensor]:
    mesh = DeviceMesh(rank.device.type, list(range(rank.world_size)))
    first = shard(values((9, 4)), mesh, [Shard(0)])
    return {"a": first, "b": first if is_tied else shard(values((9, 4)), mesh, [Shard(0)]), "view": first.detach()}


def save_tied_shards(rank: TorchRank, directory: Path) -> None:
    dcp_torch.save(tied_shards(rank, is_tied=True), checkpoint_id=directory)
    state = tied_shards(rank, is_tied=False)
    poison({"a": state["a"], "b": state["b"]})
    dcp_torch.load(state, checkpoint_id=directory)
    assert_same(state, tied_shards(rank, is_tied=False))


def test_tied_shards_are_stored_once(shared_path: Path) -> None:
    run_gloo(save_tied_shards, 3, shared_path)
    assert sum(data_nbytes(file) for file in data_files(shared_path)) == 9 * 4 * 4


# -- sizes beyond 2 GiB --------------------------------------------------------------------------------------------

_LARGE_ROWS, _LARGE_COLUMNS = (1 << 16) + 64, 1 << 15
_LARGE_NBYTES = _LARGE_ROWS * _LARGE_COLUMNS


def _has_room(directory: Path) -> bool:
    free = shutil.disk_usage(directory).free
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free > 2 * _LARGE_NBYTES and memory > 4 * _LARGE_NBYTES


@pytest.mark.slow
def test_a_tensor_of_more_than_two_gibibytes_is_written_and_read_whole_and_in_part(shared_path: Path) -> None:
    if not _has_room(shared_path):
        pytest.skip("needs 10 GiB of memory and 5 GiB of disk")
    large = torch.zeros(_LARGE_ROWS, _LARGE_COLUMNS, dtype=torch.uint8)
    large[:, 7] = torch.arange(_LARGE_ROWS).remainder(251).to(torch.uint8)
    large[-1] = values((_LARGE_COLUMNS,), torch.uint8)
    dcp_torch.save({"large": large, "small": values((3,))}, checkpoint_id=shared_path, durable=False)
    state = {"large": torch.full_like(large, 9), "small": torch.zeros(3)}
    dcp_torch.load(state, checkpoint_id=shared_path)
    assert torch.equal(state["large"], large)
    assert bits_of(state["small"]) == bits_of(values((3,)))
    part = dcp_torch.annotate_shard(
        torch.zeros(_LARGE_ROWS, 2, dtype=torch.uint8), offsets=(0, 6), global_shape=large.shape
    )
    dcp_torch.load({"large": part}, checkpoint_id=shared_path)
    assert torch.equal(part, large[:, 6:8])
    shutil.rmtree(shared_path)
