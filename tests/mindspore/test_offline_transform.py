"""The offline functions of dcp_mindspore: full states in and out, Hugging Face files, what torch.save wrote."""

from __future__ import annotations

import inspect
import json
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
import pytest
from mindspore import Parameter, Tensor, nn
from safetensors.numpy import load_file, save_file

import dcp_mindspore as dcp
import dcp_torch.offline_transform
from dcp_core.convert.huggingface_files import INDEX_NAME, SINGLE_NAME
from dcp_core.dtype import BY_NAME
from dcp_core.errors import ArgumentError, CorruptError, NotFoundError, UntrustedObjectError
from dcp_mindspore import offline_transform
from dcp_mindspore.elements import dtype_of, read_bits, tensor_of_bits
from dcp_mindspore.offline_transform import (
    convert_dcp_to_huggingface,
    convert_full_checkpoint_to_dcp,
    dcp_to_full_state_dict,
    full_state_dict_to_dcp_format,
    parse_checkpoint_from_huggingface,
    save_state_dict_as_huggingface_format,
)
from tests.core.guarded_store import OPTIONS, SCHEME
from tests.mindspore.ms_ranks import MindSporeRank, run_mindspore

pytestmark = pytest.mark.timeout(120)

IN_SAFETENSORS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint16", "int64", "bool")
NAMES = (*IN_SAFETENSORS, "complex64", "float64", "complex128")
WHOLE = np.arange(63, dtype=np.float32).reshape(9, 7) / 7


def bits(name: str, shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[Any]:
    dtype = BY_NAME[name]
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng([seed, *name.encode()]).integers(0, 256, nbytes, np.uint8)
    return (raw % 2 if name == "bool" else raw).view(dtype.bits).reshape(shape)


def tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    return tensor_of_bits(bits(name, shape, seed), BY_NAME[name])


def is_same(found: Any, expected: Any) -> bool:
    """Equal values of equal types; tensors by dtype, shape and bits."""
    if isinstance(expected, Tensor):
        alike = isinstance(found, Tensor) and found.dtype == expected.dtype and found.shape == expected.shape
        return alike and read_bits(found).tobytes() == read_bits(expected).tobytes()
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(is_same(found[key], value) for key, value in expected.items())
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    return type(found) is type(expected) and bool(found == expected)


def full_state() -> dict[Any, Any]:
    shared = tensor("float32", (6, 4), 9)
    return {
        "model": {f"w.{name}": tensor(name, (3, 5)) for name in NAMES},
        "tied": [shared, shared],
        "optimizer": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"moment": tensor("bfloat16", (3,)), "step": Tensor(5.0)}],
        "empty": {},
        "none": Tensor.from_numpy(np.empty((0, 3), np.float32)),
        "step": 7,
        3: "three",
        "ordered": OrderedDict(b=1, a=Tensor([True])),
    }


def test_the_functions_are_those_of_dcp_torch() -> None:
    own = set(dcp_torch.offline_transform.__all__) - {"convert_torch_dcp_to_dcp"}
    assert set(offline_transform.__all__) == own
    for name in own - {"ConversionReport"}:
        here, there = (
            inspect.signature(getattr(module, name)).parameters
            for module in (offline_transform, dcp_torch.offline_transform)
        )
        assert [(key, value.default, value.kind) for key, value in here.items()] == [
            (key, value.default, value.kind) for key, value in there.items()
        ]


def test_a_full_state_comes_back_nested_as_it_was(tmp_path: Path) -> None:
    state = full_state()
    full_state_dict_to_dcp_format(state, tmp_path, durable=False)
    found = dcp_to_full_state_dict(tmp_path)
    assert is_same(found, state)
    assert type(found["ordered"]) is OrderedDict and found["tied"][0] is found["tied"][1]
    found["model"]["w.float32"].asnumpy()[...] = 0  # memory of its own, that may be written


def test_a_cell_and_its_optimizer_are_a_full_state(tmp_path: Path) -> None:
    net = nn.SequentialCell(nn.Dense(4, 3), nn.BatchNorm1d(3))
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    optimizer.moments[0].asnumpy()[...] = 5
    full_state_dict_to_dcp_format({"model": net, "optimizer": optimizer}, tmp_path)
    found = dcp_to_full_state_dict(tmp_path)
    assert is_same(found["model"], {name: Tensor(value) for name, value in net.state_dict().items()})
    assert found["optimizer"]["0.weight"] is found["model"]["0.weight"], "what an optimizer repeats is one tensor"
    assert (found["optimizer"]["moments.0.weight"].asnumpy() == 5).all()


def save_parts(rank: MindSporeRank, path: str) -> tuple[str, str]:
    rows = np.array_split(WHOLE, 4)[rank.rank]
    first = sum(len(part) for part in np.array_split(WHOLE, 4)[: rank.rank])
    shard = dcp.annotate_shard(Parameter(Tensor(rows), name="w"), offsets=(first, 0), global_shape=WHOLE.shape)
    dcp.save({"model": {"w": shard, "b": Tensor([1.0])}, "step": 3}, checkpoint_id=path)
    try:
        save_state_dict_as_huggingface_format(f"{path}-never", {"w": shard})
    except ArgumentError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_what_ranks_have_saved_is_put_together_and_exported(tmp_path: Path) -> None:
    for kind, text in run_mindspore(save_parts, 4, str(tmp_path / "dcp")):
        assert kind == "ArgumentError" and "'w' is sharded" in text and "convert_dcp_to_huggingface" in text
    found = dcp_to_full_state_dict(tmp_path / "dcp")
    assert is_same(found, {"model": {"w": Tensor(WHOLE), "b": Tensor([1.0])}, "step": 3})
    for dtype in (mindspore.bfloat16, "bfloat16"):
        report = convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf", prefix="model", dtype=dtype)
        assert [entry.name for entry in report.skipped] == ["step"]
        half = parse_checkpoint_from_huggingface(tmp_path / "hf")
        assert is_same(half, {"w": Tensor(WHOLE).bfloat16(), "b": Tensor([1.0]).bfloat16()})


@pytest.mark.parametrize("limit", [1, 60, "5GB"])
def test_states_become_directories_and_states_again(tmp_path: Path, limit: int | str) -> None:
    import torch

    state = {f"w.{name}": tensor(name, (3, 5)) for name in IN_SAFETENSORS}
    state |= {"transposed": tensor("float32", (3, 4)).T, "scalar": Tensor(5), "wide": tensor("int16", (4, 6))[:, 1:4]}
    expected = {name: Tensor(value) if name in ("transposed", "wide") else value for name, value in state.items()}
    report = save_state_dict_as_huggingface_format(tmp_path, state, limit, durable=False)
    assert sorted(report.files) == sorted(file.name for file in tmp_path.iterdir())
    assert is_same(parse_checkpoint_from_huggingface(tmp_path), expected)
    by_torch = dcp_torch.offline_transform.parse_checkpoint_from_huggingface(tmp_path)
    for name, value in expected.items():
        found = by_torch[name].contiguous()
        assert found.reshape(-1).view(torch.uint8).numpy().tobytes() == read_bits(value).tobytes(), name


def test_tied_parameters_cells_and_values(tmp_path: Path) -> None:
    net = nn.CellDict({"embed": nn.Embedding(5, 4), "head": nn.Dense(4, 5, has_bias=False)})
    net["head"].weight = net["embed"].embedding_table
    for model in (net, net.state_dict()):
        report = save_state_dict_as_huggingface_format(tmp_path, {"model": model, "step": 3})
    found = parse_checkpoint_from_huggingface(tmp_path)
    assert len(found) == 1 and is_same([*found.values()], [Tensor(net["head"].weight)])
    assert len(report.skipped) == 2 and {entry.name for entry in report.skipped} > {"step"}


@pytest.mark.parametrize("limit", [0, "much", -5])
def test_sizes_that_are_none_leave_the_directory_alone(tmp_path: Path, limit: Any) -> None:
    with pytest.raises(ValueError, match="max_shard_size"):
        save_state_dict_as_huggingface_format(tmp_path / "hf", {"w": Tensor([1.0])}, limit)
    assert not (tmp_path / "hf").exists()


def test_published_files_become_a_checkpoint_and_that_a_sharded_network(tmp_path: Path) -> None:
    save_file({"w": WHOLE, "unnamed": np.zeros(2)}, str(tmp_path / "one.safetensors"))
    save_file({"b": np.arange(9, dtype=np.int32)}, str(tmp_path / "two.safetensors"))
    weight_map = {"w": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert parse_checkpoint_from_huggingface(tmp_path).keys() == {"w", "b"}
    convert_full_checkpoint_to_dcp(tmp_path, tmp_path / "dcp", key_map="model.")
    run_mindspore(load_columns, 2, str(tmp_path / "dcp"))
    convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf", prefix="model")
    assert (load_file(tmp_path / "hf" / SINGLE_NAME)["w"] == WHOLE).all()


def load_columns(rank: MindSporeRank, path: str) -> None:
    own = slice(4 * rank.rank, 4 + 3 * rank.rank)
    target = Parameter(Tensor(np.zeros_like(WHOLE[:, own])), name="w")
    dcp.annotate_shard(target, offsets=(0, own.start), global_shape=WHOLE.shape)
    state = {"model": {"w": target, "b": Tensor(np.zeros(9, np.int32))}}
    dcp.load(state, checkpoint_id=path)
    assert (target.asnumpy() == WHOLE[:, own]).all() and (state["model"]["b"].asnumpy() == np.arange(9)).all()


# -- what torch.save wrote --------------------------------------------------------------------------------------------


def test_files_of_torch_save_become_checkpoints_with_tensors_of_mindspore(tmp_path: Path) -> None:
    import torch

    half = torch.arange(6).to(torch.bfloat16).reshape(2, 3)
    state = {"model": {"w": half, "f": torch.arange(4.0)}, "step": 3, "array": np.arange(3), "tied": half}
    torch.save(state, tmp_path / "full.pt")
    (tmp_path / "bins").mkdir()
    torch.save({"w": torch.ones(2, dtype=torch.int16)}, tmp_path / "bins" / "pytorch_model.bin")
    convert_full_checkpoint_to_dcp(tmp_path / "full.pt", tmp_path / "dcp", "torch")
    found = dcp_to_full_state_dict(tmp_path / "dcp")
    expected = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)).bfloat16()
    assert is_same(found["model"], {"w": expected, "f": Tensor(np.arange(4, dtype=np.float32))})
    assert found["step"] == 3 and found["tied"] is found["model"]["w"]
    assert dtype_of(found["array"].dtype).name == "int64" and (found["array"].asnumpy() == np.arange(3)).all()
    convert_full_checkpoint_to_dcp(tmp_path / "bins", tmp_path / "dcp2", "torch")
    assert is_same(dcp_to_full_state_dict(tmp_path / "dcp2"), {"w": Tensor([1, 1], mindspore.int16)})


class _Harm:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (str(self.marker),)


def test_what_cannot_be_converted_says_why_and_runs_nothing(tmp_path: Path) -> None:
    import torch

    torch.save({"x": _Harm(tmp_path / "ran")}, tmp_path / "evil.pt")
    (tmp_path / "broken.pt").write_bytes(b"nonsense")
    torch.save([1], tmp_path / "list.pt")
    wrong: list[tuple[str, str, type[Exception], str]] = [
        ("evil.pt", "torch", UntrustedObjectError, "mkdir"),
        ("broken.pt", "torch", CorruptError, "broken"),
        ("list.pt", "torch", CorruptError, "not a state"),
        ("none.pt", "torch", NotFoundError, "none"),
        ("none", "huggingface", NotFoundError, "none"),
        ("list.pt", "jax", ArgumentError, "src_platform"),
    ]
    for name, platform, error, message in wrong:
        with pytest.raises(error, match=message):
            convert_full_checkpoint_to_dcp(tmp_path / name, tmp_path / "dcp", platform)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "dcp").exists()
    full_state_dict_to_dcp_format({"w": tensor("float32", (2,))}, tmp_path / "whole")
    with pytest.raises(ArgumentError, match="begins with"):
        convert_dcp_to_huggingface(tmp_path / "whole", tmp_path / "hf", prefix="nothing")
    with pytest.raises(ArgumentError, match="nonsense"):
        convert_dcp_to_huggingface(tmp_path / "whole", tmp_path / "hf", dtype="nonsense")


def test_a_type_that_mindspore_lacks_is_named(tmp_path: Path) -> None:
    import torch

    save = dcp_torch.offline_transform.save_state_dict_as_huggingface_format
    save(tmp_path, {"odd": torch.zeros(4, dtype=torch.uint8).view(torch.float8_e5m2fnuz)})
    with pytest.raises(ValueError, match="no dtype float8_e5m2fnuz"):
        parse_checkpoint_from_huggingface(tmp_path)


def test_every_function_takes_storage_options(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": {"w": Tensor(np.arange(6, dtype=np.float32))}, "step": 3}
    weights = {"w": Tensor(np.arange(6, dtype=np.float32))}

    def calls(a: str, b: str, c: str, d: str) -> list[Callable[..., Any]]:
        return [
            partial(full_state_dict_to_dcp_format, state, a),
            partial(dcp_to_full_state_dict, a),
            partial(convert_dcp_to_huggingface, a, b),
            partial(parse_checkpoint_from_huggingface, b),
            partial(save_state_dict_as_huggingface_format, c, weights),
            partial(convert_full_checkpoint_to_dcp, c, d),
        ]

    urls = [f"{SCHEME}://mindspore/{name}" for name in "abcd"]
    for call in calls(*urls):
        with pytest.raises(ArgumentError, match="the token is wrong"):
            call(progress=False)
        call(storage_options=OPTIONS, progress=False)
    assert list(dcp_to_full_state_dict(urls[3], storage_options=OPTIONS)) == list(weights)
    for call in calls(*(str(tmp_path / name) for name in "abcd")):
        with pytest.raises(ArgumentError, match=r"storage_options \(token\) are for URLs"):
            call(storage_options=OPTIONS, progress=False)
    assert list(tmp_path.iterdir()) == []
