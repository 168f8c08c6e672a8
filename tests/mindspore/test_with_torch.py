"""One checkpoint, two frameworks: what one writes, the other loads, bit for bit, in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
import pytest

import dcp_mindspore
from dcp_core.box import Box, slices
from dcp_core.dtype import BY_NAME
from dcp_mindspore.elements import memory_of, tensor_of_bits
from tests.mindspore.ms_ranks import MindSporeRank, run_mindspore
from tests.torch.gloo_ranks import TorchRank, run_gloo

pytestmark = pytest.mark.timeout(120)

SHAPE = (8, 12)
NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)


def whole_bits(name: str) -> npt.NDArray[Any]:
    dtype = BY_NAME[name]
    raw = np.random.default_rng(len(name)).integers(0, 256, int(np.prod(SHAPE)) * dtype.itemsize, np.uint8)
    return (raw % 2 if name == "bool" else raw).view(dtype.bits).reshape(SHAPE)


def columns(rank: int, of: int) -> Box:
    return Box((0, SHAPE[1] * rank // of), (SHAPE[0], SHAPE[1] // of))


def rows(rank: int, of: int) -> Box:
    return Box((SHAPE[0] * rank // of, 0), (SHAPE[0] // of, SHAPE[1]))


def plain_values(rank: int) -> dict[str, Any]:
    return {"step": 7, "names": ["a", b"b", None], "nested": {"rate": 1e-3, 3: (True, 2.5)}, "array": np.arange(5)}


def mindspore_state(box: Box, *, empty: bool) -> dict[str, Any]:
    state = {}
    for name in NAMES:
        bits = np.ascontiguousarray(whole_bits(name)[slices(box)])
        tensor = tensor_of_bits(np.zeros_like(bits) if empty else bits, BY_NAME[name])
        state[name] = dcp_mindspore.annotate_shard(tensor, offsets=box.offsets, global_shape=SHAPE)
    return state


def torch_state(box: Box, *, empty: bool) -> dict[str, Any]:
    import dcp_torch
    from dcp_torch.elements import tensor_of_bits as torch_tensor_of_bits

    state = {}
    for name in NAMES:
        bits = np.ascontiguousarray(whole_bits(name)[slices(box)])
        tensor = torch_tensor_of_bits(np.zeros_like(bits) if empty else bits, BY_NAME[name])
        state[name] = dcp_torch.annotate_shard(tensor, offsets=box.offsets, global_shape=SHAPE)
    return state


def check_values(loaded: dict[str, Any]) -> None:
    expected = plain_values(0)
    assert loaded["array"].tolist() == expected["array"].tolist()
    assert {key: loaded[key] for key in ("step", "names", "nested")} == {
        key: expected[key] for key in ("step", "names", "nested")
    }


def blank_values() -> dict[str, Any]:
    return {"step": 0, "names": ["", b"", 1], "nested": {"rate": 0.0, 3: (False, 0.0)}, "array": np.zeros(5, np.int64)}


def save_by_mindspore(rank: MindSporeRank, path: str) -> None:
    state = {"tensors": mindspore_state(columns(rank.rank, rank.world_size), empty=False)}
    dcp_mindspore.save(state | plain_values(rank.rank), checkpoint_id=path)


def load_by_mindspore(rank: MindSporeRank, path: str) -> None:
    box = columns(rank.rank, rank.world_size)
    state: dict[str, Any] = {"tensors": mindspore_state(box, empty=True)} | blank_values()
    dcp_mindspore.load(state, checkpoint_id=path)
    for name in NAMES:
        assert memory_of(state["tensors"][name]).view.tobytes() == whole_bits(name)[slices(box)].tobytes(), name
    check_values(state)


def save_by_torch(rank: TorchRank, path: str) -> None:
    import dcp_torch

    state = {"tensors": torch_state(rows(rank.rank, rank.world_size), empty=False)}
    dcp_torch.save(state | plain_values(rank.rank), checkpoint_id=path)


def load_by_torch(rank: TorchRank, path: str) -> None:
    import dcp_torch
    from dcp_torch.elements import read_bits

    box = rows(rank.rank, rank.world_size)
    state: dict[str, Any] = {"tensors": torch_state(box, empty=True)} | blank_values()
    dcp_torch.load(state, checkpoint_id=path)
    for name in NAMES:
        assert read_bits(state["tensors"][name]).tobytes() == whole_bits(name)[slices(box)].tobytes(), name
    check_values(state)


def test_two_ranks_of_torch_load_what_four_of_mindspore_wrote(tmp_path: Path) -> None:
    run_mindspore(save_by_mindspore, 4, str(tmp_path / "c"))
    run_gloo(load_by_torch, 2, str(tmp_path / "c"))


def test_four_ranks_of_mindspore_load_what_two_of_torch_wrote(tmp_path: Path) -> None:
    run_gloo(save_by_torch, 2, str(tmp_path / "c"))
    run_mindspore(load_by_mindspore, 4, str(tmp_path / "c"))


def save_model_by_mindspore(rank: MindSporeRank, path: str) -> list[float]:
    from mindspore import nn

    model = nn.SequentialCell(nn.Dense(4, 8), nn.Dense(8, 2))
    dcp_mindspore.save({"model": model}, checkpoint_id=path)
    assert rank.rank == 0
    return [float(value) for value in model(mindspore.Tensor(np.ones((1, 4), np.float32))).asnumpy().ravel()]


def test_a_model_of_mindspore_is_a_model_of_torch(tmp_path: Path) -> None:
    import torch

    import dcp_torch

    (expected,) = run_mindspore(save_model_by_mindspore, 1, str(tmp_path / "c"), start="alone")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    dcp_torch.load({"model": model}, checkpoint_id=tmp_path / "c")
    found = model(torch.ones(1, 4)).detach().numpy().ravel()
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-5)
