"""The offline functions of dcp_torch: full states in and out, Hugging Face files, what torch.save wrote."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_torch as dcp
from dcp_core.cli.main import main
from dcp_core.convert.huggingface_files import INDEX_NAME, SINGLE_NAME
from dcp_core.errors import ArgumentError, CorruptError, DcpError, IncompleteError, NotFoundError, UntrustedObjectError
from dcp_torch.offline_transform import (
    convert_dcp_to_huggingface,
    convert_full_checkpoint_to_dcp,
    dcp_to_full_state_dict,
    full_state_dict_to_dcp_format,
    parse_checkpoint_from_huggingface,
    save_state_dict_as_huggingface_format,
)
from tests.core.guarded_store import OPTIONS, SCHEME
from tests.core.peak_memory import need_peak_counter, peak_rise
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.states import assert_same, raised, values

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]


ROWS_AND_COLUMNS = {"rows": torch.arange(63.0).reshape(9, 7) / 7, "columns": -torch.arange(63.0).reshape(9, 7)}


def full_state() -> dict[Any, Any]:
    shared = values((6, 4), seed=9)
    return {
        "model": {f"w.{n}": values((n + 2, 5), dtype, seed=n) for n, dtype in enumerate(DTYPES)},
        "tied": [shared, shared],
        "optimizer": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"exp_avg": torch.ones(3), "step": torch.tensor(5.0)}],
        "empty": {},
        "none": torch.empty(0, 3),
        "step": 7,
        3: "three",
        "ordered": OrderedDict(a=1),
    }


def test_a_full_state_comes_back_nested_as_it_was(tmp_path: Path) -> None:
    state = full_state()
    full_state_dict_to_dcp_format(state, tmp_path, durable=False)
    found = dcp_to_full_state_dict(tmp_path)
    assert_same(found, state)
    assert found.keys() == state.keys()
    assert type(found["ordered"]) is OrderedDict
    assert (found["empty"], found["optimizer"][0]["betas"]) == ({}, (0.9, 0.99))
    assert found["tied"][0] is found["tied"][1]


def _save_sharded(rank: TorchRank, path: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = ROWS_AND_COLUMNS
    placements = {"rows": [Shard(0)], "columns": [Shard(1)]}
    state = {name: distribute_tensor(tensor, mesh, placements[name]) for name, tensor in whole.items()}
    dcp.save({"model": state, "mine": dcp.PerRank(rank.rank), "step": 3}, checkpoint_id=path)


def test_what_ranks_have_saved_is_put_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_gloo(_save_sharded, 4, tmp_path)
    found = dcp_to_full_state_dict(tmp_path)
    assert_same(found["model"], ROWS_AND_COLUMNS)
    assert (found["step"], found["mine"]) == (3, 0)
    assert "lowest rank" in caplog.text
    convert_dcp_to_huggingface(tmp_path, tmp_path / "hf", prefix="model", dtype=torch.bfloat16)
    assert_same(
        load_file(tmp_path / "hf" / SINGLE_NAME), {name: tensor.bfloat16() for name, tensor in found["model"].items()}
    )


def _convert_in_a_job(rank: TorchRank, path: Path) -> tuple[str, str]:
    if rank.rank:
        return raised(lambda: full_state_dict_to_dcp_format(_sharded(), path / "sharded"))
    full_state_dict_to_dcp_format({"w": torch.ones(3)}, path / "dcp")
    state = dcp_to_full_state_dict(path / "dcp")
    save_state_dict_as_huggingface_format(path / "hf", state)
    return "", ""


def _sharded() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    return {"w": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)}


def test_one_rank_of_a_job_converts_while_others_do_not(tmp_path: Path) -> None:
    outcomes = run_gloo(_convert_in_a_job, 2, tmp_path)
    assert outcomes[0] == ("", "")
    assert outcomes[1][0] == "CoverageError"
    assert "'w'" in outcomes[1][1]
    assert (tmp_path / "dcp" / ".metadata").exists()
    assert not (tmp_path / "sharded" / ".metadata").exists()


def _write_sharded(rank: TorchRank, path: Path) -> tuple[str, str]:
    return raised(lambda: save_state_dict_as_huggingface_format(path, _sharded()))


def test_a_sharded_state_is_no_full_one(tmp_path: Path) -> None:
    for kind, text in run_gloo(_write_sharded, 2, tmp_path / "hf"):
        assert kind == "ArgumentError"
        assert "'w' is sharded" in text
        assert "convert_dcp_to_huggingface" in text


@pytest.mark.parametrize("limit", [1, 200, "5GB"])
def test_states_become_directories_and_states_again(limit: int | str, tmp_path: Path) -> None:
    state = {f"w.{n}": values((n + 2, 5), dtype, seed=n) for n, dtype in enumerate(DTYPES)}
    state |= {
        "strided": values((6, 8), seed=20)[::2, ::3],
        "transposed": values((3, 4), seed=21).t(),
        "scalar": torch.tensor(5),
    }
    report = save_state_dict_as_huggingface_format(tmp_path, state, limit, durable=False)
    assert sorted(report.files) == sorted(os.listdir(tmp_path))
    assert_same(parse_checkpoint_from_huggingface(tmp_path), state)
    by_others: dict[str, Tensor] = {}
    for name in report.files:
        by_others |= load_file(tmp_path / name) if name != INDEX_NAME else {}
    assert_same(by_others, state)
    if limit == "5GB":
        contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(contiguous, tmp_path / "theirs.safetensors", {"format": "pt"})
        assert (tmp_path / "theirs.safetensors").read_bytes() == (tmp_path / SINGLE_NAME).read_bytes()


def test_tied_parameters_nested_modules_and_values(tmp_path: Path) -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    state = {
        "head": head.state_dict(),
        "embed": embedding.state_dict(),
        "half": embedding.weight.detach()[:2],
        "step": 3,
    }
    report = save_state_dict_as_huggingface_format(tmp_path, state)
    found = parse_checkpoint_from_huggingface(tmp_path)
    assert found.keys() == {"embed.weight", "half"}
    assert torch.equal(found["half"], embedding.weight[:2])
    assert {entry.name for entry in report.skipped} == {"head.weight", "step"}


def test_functions_of_whole_states_hold_them_once(tmp_path: Path) -> None:
    need_peak_counter()
    state = {f"w{number}": torch.rand(32 << 18) for number in range(4)}  # 128 MiB
    few, once = 48.0, 128 + 48.0
    assert peak_rise(lambda: full_state_dict_to_dcp_format(state, tmp_path / "dcp", durable=False)) < few
    assert peak_rise(lambda: save_state_dict_as_huggingface_format(tmp_path / "hf", state, durable=False)) < few
    assert peak_rise(lambda: dcp_to_full_state_dict(tmp_path / "dcp")) < once
    assert peak_rise(lambda: parse_checkpoint_from_huggingface(tmp_path / "hf")) < once
    torch.save(state, tmp_path / "full.pt")
    assert peak_rise(lambda: convert_full_checkpoint_to_dcp(tmp_path / "full.pt", tmp_path / "b", "torch")) < once


@pytest.mark.parametrize("limit", [0, "0GB", "much", -5])
def test_sizes_that_are_none_leave_the_directory_alone(limit: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_size"):
        save_state_dict_as_huggingface_format(tmp_path / "hf", {"w": torch.ones(1)}, limit)
    assert not (tmp_path / "hf").exists()


def test_only_what_the_index_names_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "unnamed": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    save_file({"stray": torch.zeros(2)}, tmp_path / "three.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    assert parse_checkpoint_from_huggingface(tmp_path).keys() == {"a", "b"}
    assert parse_checkpoint_from_huggingface(tmp_path / "one.safetensors").keys() == {"a", "unnamed"}
    convert_full_checkpoint_to_dcp(tmp_path, tmp_path / "dcp", key_map="model.")
    target = {"model": {"a": torch.zeros(2), "b": torch.ones(2)}}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    assert_same(target, {"model": {"a": torch.ones(2), "b": torch.zeros(2)}})


# -- what torch.save wrote --------------------------------------------------------------------------------------------


def test_files_of_torch_save_become_checkpoints(tmp_path: Path) -> None:
    state = {key: value for key, value in full_state().items() if key != "ordered"}
    torch.save(state, tmp_path / "full.pt")
    old = {"w": torch.ones(3), "b": values((4, 5), torch.bfloat16), "step": 3}
    torch.save(old, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    for name, expected in (("full.pt", state), ("legacy.pt", old)):
        convert_full_checkpoint_to_dcp(tmp_path / name, tmp_path / f"{name}-dcp", "torch", durable=False)
        assert_same(dcp_to_full_state_dict(tmp_path / f"{name}-dcp"), expected)
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")
    convert_full_checkpoint_to_dcp(tmp_path / "w.safetensors", tmp_path / "w-dcp", "torch")
    assert_same(dcp_to_full_state_dict(tmp_path / "w-dcp"), {"w": torch.ones(3)})
    assert main(["convert", str(tmp_path / "full.pt"), str(tmp_path / "by-cli"), "--to", "dcp"]) == 0
    assert_same(dcp_to_full_state_dict(tmp_path / "by-cli"), state)


def test_a_directory_of_bin_files(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "one.bin")
    torch.save({"b": torch.zeros(2), "a": torch.zeros(2)}, tmp_path / "two.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.bin", "b": "two.bin"}}))
    convert_full_checkpoint_to_dcp(tmp_path, tmp_path / "dcp", "torch")
    assert_same(dcp_to_full_state_dict(tmp_path / "dcp"), {"a": torch.ones(2), "b": torch.zeros(2)})
    for text, error in (
        ('{"weight_map": {"a": "../one.bin"}}', CorruptError),
        ("{", CorruptError),
        ("[]", CorruptError),
        ('{"weight_map": {"a": "one.bin", "c": "two.bin"}}', IncompleteError),
        ('{"weight_map": {"a": "none.bin"}}', NotFoundError),
    ):
        index.write_text(text)
        with pytest.raises(error):
            convert_full_checkpoint_to_dcp(tmp_path, tmp_path / "dcp2", "torch")
    assert not (tmp_path / "dcp2").exists()


class _Harm:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_no_code_of_a_pickle_runs(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "x": _Harm(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(UntrustedObjectError, match="mkdir"):
        convert_full_checkpoint_to_dcp(tmp_path / "evil.pt", tmp_path / "dcp", "torch")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "dcp").exists()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04" + b"\0" * 40])
def test_files_that_are_none_of_torchs_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CorruptError, match=r"x\.pt"):
        convert_full_checkpoint_to_dcp(tmp_path / "x.pt", tmp_path / "dcp", "torch")


def test_bad_arguments_are_explained(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "list.pt")
    wrong: list[tuple[Any, ...]] = [
        (tmp_path / "nothing.pt", "torch", NotFoundError),
        (tmp_path / "list.pt", "torch", CorruptError),
        (tmp_path / "list.pt", "jax", ArgumentError),
        (tmp_path / "nothing", "huggingface", NotFoundError),
    ]
    for source, platform, error in wrong:
        with pytest.raises(error):
            convert_full_checkpoint_to_dcp(source, tmp_path / "dcp", platform)
    with pytest.raises(ArgumentError, match="key_map"):
        convert_full_checkpoint_to_dcp(tmp_path / "list.pt", tmp_path / "dcp", "torch", key_map="x")
    with pytest.raises(DcpError):
        dcp_to_full_state_dict(tmp_path / "nothing")
    with pytest.raises(ArgumentError, match="mapping"):
        save_state_dict_as_huggingface_format(tmp_path / "hf", [1])  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin"])
def test_a_file_of_torch_that_is_taken_for_safetensors_is_told_by_its_name(tmp_path: Path, name: str) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(ArgumentError, match="pass src_platform='torch'"):
        convert_full_checkpoint_to_dcp(tmp_path / name, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_every_function_takes_storage_options(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": {"w": torch.arange(6.0)}, "step": 3}
    weights = {"w": torch.arange(6.0)}

    def calls(a: str, b: str, c: str, d: str) -> list[Callable[..., Any]]:
        return [
            partial(full_state_dict_to_dcp_format, state, a),
            partial(dcp_to_full_state_dict, a),
            partial(convert_dcp_to_huggingface, a, b),
            partial(parse_checkpoint_from_huggingface, b),
            partial(save_state_dict_as_huggingface_format, c, weights),
            partial(convert_full_checkpoint_to_dcp, c, d),
        ]

    urls = [f"{SCHEME}://torch/{name}" for name in "abcd"]
    for call in calls(*urls):
        with pytest.raises(ArgumentError, match="the token is wrong"):
            call(progress=False)
        call(storage_options=OPTIONS, progress=False)
    assert list(dcp_to_full_state_dict(urls[3], storage_options=OPTIONS)) == list(weights)
    for call in calls(*(str(tmp_path / name) for name in "abcd")):
        with pytest.raises(ArgumentError, match=r"storage_options \(token\) are for URLs"):
            call(storage_options=OPTIONS, progress=False)
    assert list(tmp_path.iterdir()) == []
