"""Foreign checkpoints go straight into MindSpore states: published safetensors, and what torch DCP wrote."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.parallel import Layout
from safetensors.numpy import save_file

import dcp_mindspore as dcp
from dcp_core.box import Box, slices
from dcp_core.dtype import BY_NAME
from dcp_core.errors import CorruptError, MissingKeysError, ShapeMismatchError
from dcp_core.storage.local import LocalStorage
from dcp_mindspore.elements import memory_of, read_bits, tensor_of_bits
from tests.core.rank_jobs import error_of
from tests.core.test_shared_reads_numpy import CountedOperations
from tests.mindspore.ms_ranks import MindSporeRank, run_mindspore
from tests.torch.gloo_ranks import TorchRank, run_gloo

pytestmark = pytest.mark.timeout(120)

SECONDS = 30.0
Array = npt.NDArray[Any]

# -- published weights ------------------------------------------------------------------------------------------------

SHAPES = {"embed": (512, 64), "up": (256, 64), "down": (64, 256), "norm": (64,), "bias": (3,), "scalar": ()}


def weights() -> dict[str, Array]:
    found = {}
    for row in range(3):
        for key, shape in SHAPES.items():
            found[f"{key}.{row}"] = np.random.default_rng([row, len(key)]).standard_normal(shape).astype(np.float32)
    return found | {"empty": np.zeros((0, 4), np.float32), "count": np.arange(24, dtype=np.int16).reshape(4, 6)}


def write_directory(directory: Path, arrays: Mapping[str, Array], files: int = 3) -> None:
    """Several files and an index, by safetensors' own writer."""
    names = [f"model-{row + 1:05}-of-{files:05}.safetensors" for row in range(files)]
    weight_map = {key: names[number % files] for number, key in enumerate(arrays)}
    for name in names:
        save_file({key: arrays[key] for key, own in weight_map.items() if own == name}, str(directory / name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def box_of(shape: tuple[int, ...], cut: str, rank: int, ranks: int) -> Box:
    dim = {"rows": 0, "columns": len(shape) - 1, "whole": -1}[cut]
    if not shape or dim < 0 or shape[dim] % ranks:
        return Box.whole(shape)
    part = shape[dim] // ranks
    offsets = tuple(rank * part if at == dim else 0 for at in range(len(shape)))
    return Box(offsets, tuple(part if at == dim else size for at, size in enumerate(shape)))


def load_published(rank: MindSporeRank, directory: str, cut: str) -> tuple[int, int]:
    """Bytes that were read, and those that this rank wants."""
    target, boxes = {}, {}
    for key, whole in weights().items():
        box = boxes[key] = box_of(whole.shape, cut, rank.rank, rank.world_size)
        local = Parameter(Tensor.from_numpy(np.full_like(whole[slices(box)], 99)), name=key)
        target[key] = dcp.annotate_shard(local, offsets=box.offsets, global_shape=whole.shape)
    operations = CountedOperations()
    reader = dcp.HuggingFaceReader(storage=LocalStorage(directory, operations))
    dcp.load(target, storage_reader=reader, timeout_seconds=SECONDS)
    for key, whole in weights().items():
        assert target[key].asnumpy().tobytes() == whole[slices(boxes[key])].tobytes(), key
    return operations.nbytes, sum(parameter.nbytes for parameter in target.values())


@pytest.mark.parametrize("cut", ["rows", "columns", "whole"])
def test_published_weights_fill_a_target_of_any_layout(tmp_path: Path, cut: str) -> None:
    write_directory(tmp_path, weights())
    found = run_mindspore(load_published, 4, str(tmp_path), cut)
    read, wanted = (sum(column) for column in zip(*found, strict=True))
    total = sum(array.nbytes for array in weights().values())
    if cut != "columns":  # their short runs are read with what lies between them
        assert total <= read <= 1.05 * total, "each byte is read by one rank"
    assert wanted > total


class Attention(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.qkv = nn.Dense(8, 24 // parts, has_bias=False)
        self.out = nn.Dense(8 // parts, 8, has_bias=False)


def load_fused(rank: MindSporeRank, directory: str) -> None:
    net = Attention(rank.world_size)
    layout = Layout((rank.world_size,), ("tp",))
    layouts = {"qkv.weight": layout("tp", "None"), "out.weight": layout("None", "tp")}
    fused = dcp.Joined([f"model.layer.{name}_proj.weight" for name in "qkv"])
    reader = dcp.HuggingFaceReader(
        directory, key_map={r"model\.layer\.o_proj": "net.out"}, cuts={"net.qkv.weight": fused}
    )
    address = net.qkv.weight.data_ptr()
    dcp.load({"net": net}, storage_reader=reader, layouts=layouts, timeout_seconds=SECONDS)
    joined = np.concatenate([projection(name) for name in "qkv"])
    part = 24 // rank.world_size
    assert net.qkv.weight.data_ptr() == address
    assert (net.qkv.weight.asnumpy() == joined[rank.rank * part : rank.rank * part + part]).all()
    assert (net.out.weight.asnumpy() == np.split(projection("o"), rank.world_size, axis=1)[rank.rank]).all()


def projection(name: str) -> Array:
    return np.random.default_rng(ord(name)).standard_normal((8, 8)).astype(np.float32)


def test_weights_that_are_named_and_cut_otherwise_fill_a_sharded_cell(tmp_path: Path) -> None:
    write_directory(tmp_path, {f"model.layer.{name}_proj.weight": projection(name) for name in "qkvo"}, files=2)
    for ranks in (1, 2, 4):
        run_mindspore(load_fused, ranks, str(tmp_path))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "uint16", "int8", "float64"])
def test_published_elements_come_in_bit_by_bit(tmp_path: Path, name: str) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    raw = np.random.default_rng(0).integers(0, 2 if name == "bool" else 256, 48 * BY_NAME[name].itemsize, np.uint8)
    stored = torch.from_numpy(raw).view(getattr(torch, name)).reshape(6, 8)
    save_torch({"w": stored}, tmp_path / "model.safetensors")
    target = {"w": tensor_of_bits(np.zeros((6, 8), BY_NAME[name].bits), BY_NAME[name])}
    dcp.load(target, storage_reader=dcp.HuggingFaceReader(tmp_path))
    assert read_bits(target["w"]).tobytes() == raw.tobytes()


def test_published_float32_becomes_bfloat16_where_the_network_has_it(tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32).reshape(8, 8) / 3
    save_file({"weight": values}, str(tmp_path / "model.safetensors"))
    net = nn.Dense(8, 8, has_bias=False, dtype=mindspore.bfloat16)
    dcp.load({"weight": net.weight}, storage_reader=dcp.HuggingFaceReader(tmp_path))
    expected = Tensor(values).bfloat16()
    assert read_bits(net.weight).tobytes() == read_bits(expected).tobytes()


def load_what_does_not_fit(rank: MindSporeRank, directory: str, damage: str) -> tuple[str, str]:
    shape = (4, 6) if damage != "shape" or rank.rank == 0 else (6, 4)
    state = {"count": Tensor.from_numpy(np.full(shape, 7, np.int16))}
    if damage == "missing" and rank.rank:
        state["lost"] = Tensor([1.0])
    reader = dcp.HuggingFaceReader(directory)
    kind, text = error_of(dcp.load, state, storage_reader=reader, timeout_seconds=SECONDS)
    assert (state["count"].asnumpy() == 7).all()
    return kind.__name__, text


@pytest.mark.parametrize(
    ("damage", "error"), [("missing", MissingKeysError), ("shape", ShapeMismatchError), ("index", CorruptError)]
)
def test_what_does_not_fit_is_one_error_on_all_ranks(tmp_path: Path, damage: str, error: type[Exception]) -> None:
    write_directory(tmp_path, weights())
    if damage == "index":
        (tmp_path / "model.safetensors.index.json").write_text("{")
    first, second = run_mindspore(load_what_does_not_fit, 2, str(tmp_path), damage)
    assert first == second and first[0] == error.__name__


# -- checkpoints of torch DCP -----------------------------------------------------------------------------------------

ROWS = np.arange(96, dtype=np.float32).reshape(8, 12)


def save_by_torch_dcp(rank: TorchRank, path: str) -> None:
    import torch
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (rank.world_size,))
    rows = distribute_tensor(torch.from_numpy(ROWS.copy()), mesh, [Shard(0)], src_data_rank=None)
    state = {"model": {"rows": rows, "half": rows.bfloat16()}, "whole": torch.arange(5), "step": 7, "names": ["a"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        torch_dcp.save(state, checkpoint_id=path)  # type: ignore[attr-defined]  # torch lists no exports


def load_from_torch_dcp(rank: MindSporeRank, path: str) -> None:
    from dcp_torch import TorchDCPReader

    layout = Layout((rank.world_size,), ("tp",))("None", "tp")
    columns = 12 // rank.world_size
    own = ROWS[:, rank.rank * columns : (rank.rank + 1) * columns]
    half = Parameter(Tensor(np.zeros_like(own), mindspore.bfloat16), name="half")
    state: dict[str, Any] = {
        "model": {"rows": Parameter(Tensor(np.zeros_like(own)), name="rows"), "half": half},
        "whole": Tensor(np.zeros(5, np.int64)), "step": 0, "names": [""],
    }  # fmt: skip
    layouts = {"rows": layout, "half": layout}
    dcp.load(state, storage_reader=TorchDCPReader(path), layouts=layouts, timeout_seconds=SECONDS)
    assert (state["model"]["rows"].asnumpy() == own).all()
    assert memory_of(half).view.tobytes() == memory_of(Tensor(own).bfloat16()).view.tobytes()
    assert (state["whole"].asnumpy() == np.arange(5)).all() and (state["step"], state["names"]) == (7, ["a"])


def test_ranks_of_mindspore_load_what_torch_dcp_wrote(tmp_path: Path) -> None:
    run_gloo(save_by_torch_dcp, 4, str(tmp_path / "torch"))
    run_mindspore(load_from_torch_dcp, 2, str(tmp_path / "torch"))
