"""Open weights go straight into sharded models: real ranks, the bytes that each of them reads, torch's own shards."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

import dcp_torch
from dcp_core.storage.local import LocalStorage
from dcp_torch import HuggingFaceReader, Joined, Stacked
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.shared_reads import CountedOperations
from tests.torch.states import assert_same_leaf, bits_of, local_of, poison, shard, values

pytestmark = pytest.mark.timeout(120)

SECONDS = 30.0
INDEX = "model.safetensors.index.json"


def write_directory(directory: Path, tensors: Mapping[str, Tensor], files: int = 3) -> None:
    """Write tensors in turn into several files, with an index, by safetensors' own writer."""
    names = [f"model-{row + 1:05}-of-{files:05}.safetensors" for row in range(files)]
    weight_map = {key: names[number % files] for number, key in enumerate(tensors)}
    for name in names:
        save_file({key: tensors[key] for key, own in weight_map.items() if own == name}, directory / name)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(state: Any, directory: str | Path | None, **options: Any) -> None:
    ours = {key: options.pop(key) for key in ("key_map", "cuts", "storage") if key in options}
    reader = HuggingFaceReader(directory, **ours)
    dcp_torch.load(state, storage_reader=reader, timeout_seconds=SECONDS, **options)


# -- element types -------------------------------------------------------------------------------------------------


_FILE_TYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0", torch.float4_e2m1fn_x2: "F4",
}  # fmt: skip


@pytest.mark.parametrize("dtype", list(_FILE_TYPES), ids=str)
def test_every_type_that_safetensors_has_for_torch_comes_in_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = {"w": values((6, 10), dtype, 1), "line": values((7,), dtype, 2), "one": values((1, 1), dtype, 3)}
    if dtype is not torch.float4_e2m1fn_x2:
        stored["scalar"] = values((), dtype, 4)
    save_file(stored, tmp_path / "model.safetensors")
    raw = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert {entry["dtype"] for key, entry in header.items() if key != "__metadata__"} == {_FILE_TYPES[dtype]}
    target = {key: values(tensor.shape, dtype, 99) for key, tensor in stored.items()}
    load(target, tmp_path)
    assert {key: bits_of(tensor) for key, tensor in target.items()} == {k: bits_of(t) for k, t in stored.items()}


# -- parts of tensors on ranks -------------------------------------------------------------------------------------


def random_weights() -> dict[str, Tensor]:
    shapes = {"embed": (515, 64), "up": (256, 64), "down": (64, 256), "norm": (64,), "bias": (3,), "scalar": ()}
    weights = {f"{key}.{row}": values(shape, torch.bfloat16, row) for row in range(3) for key, shape in shapes.items()}
    return weights | {"wide": values((5, 3, 7), torch.float32, 77), "none": torch.zeros(0, 4)}


def _load_any_layout(rank: TorchRank, directory: str, placements: str) -> list[str]:
    line = init_device_mesh(rank.device.type, (rank.world_size,))
    square = init_device_mesh(rank.device.type, (rank.world_size // 2, 2), mesh_dim_names=("a", "b"))
    chosen: dict[str, tuple[Any, list[Placement]]] = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(-1)]),
        "whole": (line, [Replicate()]),
        "rows and columns": (square, [Shard(0), Shard(-1)]),
        "two copies": (square, [Replicate(), Shard(0)]),
    }
    mesh, own = chosen[placements]
    weights = random_weights()
    cut = {key: tensor for key, tensor in weights.items() if tensor.ndim}
    state: dict[str, Any] = {key: shard(tensor, mesh, own) for key, tensor in cut.items()}
    state["scalar.1"] = weights["scalar.1"].clone()
    poison(state)
    load(state, directory)
    right: dict[str, Any] = {key: shard(tensor, mesh, own) for key, tensor in cut.items()}
    right["scalar.1"] = weights["scalar.1"]
    return [key for key in right if bits_of(state[key]) != bits_of(right[key])]


@pytest.mark.parametrize("placements", ["rows", "columns", "whole", "rows and columns", "two copies"])
def test_a_target_of_any_layout_is_filled(tmp_path: Path, placements: str) -> None:
    write_directory(tmp_path, random_weights())
    assert run_gloo(_load_any_layout, 4, str(tmp_path), placements) == [[]] * 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)


_TP = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _read_tensor_parallel(rank: TorchRank, directory: str, dim: int) -> tuple[int, int, int, list[str]]:
    """Bytes that were read, that this rank's shards have, and that all have alike; and what is wrong."""
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    weights = tensor_parallel_weights(dim)
    state: dict[str, Any] = {}
    for key, tensor in weights.items():
        state[key] = shard(tensor, mesh, [Shard(dim) if tensor.ndim == 2 else Replicate()])
    poison(state)
    operations = CountedOperations()
    load(state, None, storage=LocalStorage(directory, operations))
    wrong = [
        key
        for key, tensor in weights.items()
        if bits_of(state[key]) != bits_of(shard(tensor, mesh, [Shard(dim) if tensor.ndim == 2 else Replicate()]))
    ]
    cut = sum(local_of(state[key]).nbytes for key, tensor in weights.items() if tensor.ndim == 2)
    shared = sum(tensor.nbytes for tensor in weights.values() if tensor.ndim == 1)
    return operations.nbytes, cut, shared, wrong


def tensor_parallel_weights(dim: int = 0) -> dict[str, Tensor]:
    """Where columns are cut, a quarter of a row is 64 KiB: shorter runs are read with what lies between them."""
    shape = (16, 1 << 17) if dim else (512, 1024)
    weights = {f"w{row}": values(shape, torch.bfloat16, row) for row in range(6)}
    return weights | {f"norm{row}": values((1 << 17,), torch.bfloat16, 90 + row) for row in range(6)}


@pytest.mark.parametrize(("dim", "most"), [(0, 1.05), (1, 1.1)])
def test_tensor_parallel_ranks_read_what_they_need_and_shared_tensors_once(
    tmp_path: Path, dim: int, most: float
) -> None:
    write_directory(tmp_path, tensor_parallel_weights(dim))
    found = run_gloo(_read_tensor_parallel, 4, str(tmp_path), dim)
    assert [wrong for *_, wrong in found] == [[]] * 4
    total, shared = sum(nbytes for nbytes, *_ in found), found[0][2]
    needed = sum(cut for _, cut, *_ in found) + shared
    assert needed <= total <= most * needed
    for nbytes, cut, _, _ in found:
        assert nbytes <= most * (cut + shared)


def _read_with_cuts(rank: TorchRank, directory: str) -> tuple[int, int, list[str]]:
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    experts = expert_weights()
    fused = fused_experts(experts)
    state = {"experts.gate_up": shard(fused, mesh, [Shard(0)]), "experts.rows": shard(fused, mesh, [Shard(1)])}
    poison(state)
    operations = CountedOperations()
    cut = Stacked([Joined([f"experts.{e}.gate", f"experts.{e}.up"]) for e in range(8)])
    cuts = {"experts.gate_up": cut, "experts.rows": cut}
    load(state, None, storage=LocalStorage(directory, operations), cuts=cuts)
    right = {"experts.gate_up": shard(fused, mesh, [Shard(0)]), "experts.rows": shard(fused, mesh, [Shard(1)])}
    wrong = [key for key in right if bits_of(state[key]) != bits_of(right[key])]
    return operations.nbytes, sum(local_of(tensor).nbytes for tensor in state.values()), wrong


def expert_weights() -> dict[str, Tensor]:
    return {
        f"experts.{e}.{name}": values((96, 256), torch.bfloat16, 10 * e + part)
        for e in range(8)
        for part, name in enumerate(("gate", "up"))
    }


def fused_experts(experts: Mapping[str, Tensor]) -> Tensor:
    pairs = [torch.cat([experts[f"experts.{e}.gate"], experts[f"experts.{e}.up"]]) for e in range(8)]
    return torch.stack(pairs)


def test_experts_are_stacked_into_shards_and_only_theirs_are_read(tmp_path: Path) -> None:
    write_directory(tmp_path, expert_weights())
    for nbytes, needed, wrong in run_gloo(_read_with_cuts, 4, str(tmp_path)):
        assert wrong == []
        assert nbytes == needed


# -- shards that torch's writer wrote ----------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(37, 24)
        self.block = Block(24)
        self.head = nn.Linear(24, 7)
        self.register_buffer("scale", torch.rand(3, 2))


def _write_with_torch(rank: TorchRank, directory: str, layout: str) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    model = Small()
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (rank.world_size,)))
    elif layout == "tp":
        mesh = init_device_mesh("cpu", (rank.world_size,))
        parallelize_module(model, mesh, {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()})
    save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(directory, save_distributed=True))


def _load_what_torch_wrote(rank: TorchRank, directory: str, layout: str) -> list[str]:
    model = Small()
    right = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (rank.world_size,))
    if layout == "fsdp":
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        parallelize_module(model, mesh, {"block.up": RowwiseParallel(), "block.down": ColwiseParallel()})
    state = model.state_dict()
    poison(state)
    load(state, directory)
    wrong = []
    for key, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if bits_of(whole) != bits_of(right[key]):
            wrong.append(key)
    return wrong


@pytest.mark.parametrize(
    ("written", "ranks", "read", "readers"),
    [("fsdp", 4, "tp", 2), ("fsdp", 3, "one", 1), ("tp", 2, "fsdp", 4), ("one", 1, "fsdp", 3)],
)
def test_what_torch_saved_in_shards_loads_under_another_layout(
    tmp_path: Path, written: str, ranks: int, read: str, readers: int
) -> None:
    run_gloo(_write_with_torch, ranks, str(tmp_path), written)
    assert not (tmp_path / INDEX).exists()
    assert run_gloo(_load_what_torch_wrote, readers, str(tmp_path), read) == [[]] * readers


def test_a_file_of_torch_that_is_missing_is_a_gap(tmp_path: Path) -> None:
    run_gloo(_write_with_torch, 3, str(tmp_path), "fsdp")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(dcp_torch.IncompleteError, match="shard missing"):
        load({"embed.weight": torch.zeros(37, 24)}, tmp_path)


# -- one error for all ---------------------------------------------------------------------------------------------


def _fail_together(rank: TorchRank, directory: str, case: str) -> str:
    options: dict[str, Any] = {}
    if case == "key maps differ":
        options["key_map"] = "a." if rank.rank else "b."
    if case == "cuts differ":
        options["cuts"] = {"w": Joined(["w0", "w1"][: 1 + rank.rank])}
    if case == "a key map fails on one rank":
        options["key_map"] = _fails_on_rank_one
    state = {"w0": torch.full((512, 1024), 3.0, dtype=torch.bfloat16)}
    try:
        load(state, directory, **options)
    except dcp_torch.DcpError as error:
        assert bool((state["w0"] == 3).all())
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _fails_on_rank_one(name: str) -> str:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError(name)
    return name


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("key maps differ", "ArgumentsDifferError"),
        ("cuts differ", "ArgumentsDifferError"),
        ("a key map fails on one rank", "ArgumentError: rank 1: key_map failed for"),
        ("a broken header", "CorruptError"),
    ],
)
def test_an_error_is_the_same_on_all_ranks_and_nothing_is_touched(tmp_path: Path, case: str, words: str) -> None:
    write_directory(tmp_path, tensor_parallel_weights())
    if case == "a broken header":
        with open(tmp_path / "model-00002-of-00003.safetensors", "r+b") as file:
            file.seek(10)
            file.write(b"#")
    found = run_gloo(_fail_together, 2, str(tmp_path), case)
    assert found[0] == found[1]
    assert words in found[0]


# -- how the description travels ---------------------------------------------------------------------------------------


def _load_by_digest(rank: TorchRank, directory: str, is_other: bool) -> str:
    from dcp_core.recipes import metadata_handout

    metadata_handout.HANDED_OUT_BYTES = 0
    weights = random_weights()
    state = {"up.1": torch.zeros_like(weights["up.1"])}
    own = f"{directory}/{rank.rank if is_other else 0}"
    try:
        dcp_torch.load(state, storage_reader=HuggingFaceReader(own), timeout_seconds=SECONDS)
    except dcp_torch.DcpError as error:
        return f"{type(error).__name__}: {error}"
    assert_same_leaf("up.1", state["up.1"], weights["up.1"])
    return ""


@pytest.mark.parametrize("is_other", [False, True])
def test_where_headers_are_too_large_to_hand_out_ranks_read_them_and_compare(tmp_path: Path, is_other: bool) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        write_directory(tmp_path / str(rank), random_weights(), files=2 + rank)
    found = run_gloo(_load_by_digest, 2, str(tmp_path), is_other)
    assert found[0] == found[1]
    assert ("not those that rank 0 sees" in found[0]) == is_other
