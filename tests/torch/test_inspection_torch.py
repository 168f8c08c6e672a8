"""The tools on checkpoints that torch's ranks wrote, on those of torch DCP, and across formats."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_torch as dcp
from dcp_core.cli.main import main
from tests.torch.gloo_ranks import TorchRank, run_gloo

WORLD = 4


def _train_and_save(rank: TorchRank, directory: Path, mesh_shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 6))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1)
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
    dcp.save({"model": model, "optimizer": optimizer, "step": 1}, checkpoint_id=directory, durable=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspection")
    run_gloo(_train_and_save, WORLD, path / "fsdp", (4,), ("dp",))
    run_gloo(_train_and_save, WORLD, path / "hsdp", (2, 2), ("replicate", "shard"))
    return path


def test_a_trained_state_is_whole_and_inspected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = dcp.verify(root / "fsdp")
    assert isinstance(report, dcp.VerifyReport)
    assert report.is_whole and report.tensors >= 12 and report.objects > 0
    assert main(["inspect", str(root / "fsdp"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["framework"] == "torch"
    assert {tensor["name"]: tensor["cut"] for tensor in found["tensors"]}["model.0.weight"] == [4, 1]
    assert not [entry for entry in found["objects"] if entry["summary"].startswith("unreadable")]
    assert main(["inspect", str(root / "fsdp"), "--tensor", "model.2.weight"]) == 0
    assert "rank 2: 1 box" in capsys.readouterr().out


def test_two_layouts_of_one_training_do_not_differ(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["diff", str(root / "fsdp"), str(root / "hsdp"), "--keys", "model.*"])
    assert (code, "nothing differs" in capsys.readouterr().out) == (0, True)


def test_a_checkpoint_of_torch_dcp_is_inspected_and_compared_with_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = torch.ones(3, dtype=torch.bfloat16)
    state: dict[str, Any] = {"w": torch.arange(24.0).reshape(4, 6), "h": half, "step": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        torch_dcp.save(dict(state), checkpoint_id=tmp_path / "torch")  # type: ignore[attr-defined]  # torch lists no exports
    dcp.save(state, checkpoint_id=tmp_path / "ours", durable=False)
    assert main(["inspect", str(tmp_path / "torch")]) == 0
    out = capsys.readouterr().out
    assert "bfloat16" in out and "torch-dcp" in out
    assert main(["diff", str(tmp_path / "torch"), str(tmp_path / "ours")]) == 0
    state["w"][2, 3] += 1
    dcp.save(state, checkpoint_id=tmp_path / "changed", durable=False)
    assert main(["diff", str(tmp_path / "torch"), str(tmp_path / "changed")]) == 1
    assert "1 of 24 elements, by at most 1, first at [2, 3]" in capsys.readouterr().out


def test_a_checkpoint_of_torch_dcp_is_verified_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        torch_dcp.save({"w": torch.ones(40, 6), "step": 3}, checkpoint_id=tmp_path / "c")  # type: ignore[attr-defined]
    (data,) = (tmp_path / "c").glob("*.distcp")
    whole, described = data.read_bytes(), (tmp_path / "c" / ".metadata").read_bytes()

    def verified() -> tuple[int, list[str]]:
        code = main(["verify", "--json", str(tmp_path / "c")])
        found = json.loads(capsys.readouterr().out)
        assert (found["format"], found["checked_nbytes"]) == ("torch-dcp", 0)
        return code, [problem["kind"] for problem in found["problems"]]

    assert verified() == (0, [])
    data.write_bytes(whole[:-200])
    assert verified() == (1, ["wrong size"])
    data.unlink()
    assert verified() == (1, ["missing file"])
    data.write_bytes(whole)
    (tmp_path / "c" / ".metadata").write_bytes(described[:-9])
    assert verified() == (1, ["damaged description"])


def test_a_conversion_is_compared_with_what_it_was_made_of(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, made = str(root / "fsdp"), str(tmp_path / "model")
    assert main(["convert", source, made, "--to", "hf", "--prefix", "model", "--dtype", "bfloat16"]) == 0
    for more, code in ([], 1), (["--no-types"], 1), (["--rtol", "0.01"], 1), (["--no-types", "--rtol", "0.01"], 0):
        assert main(["diff", source, made, "--prefix", "model", *more]) == code, more
    capsys.readouterr()
    assert main(["diff", source, made, "--rename", r"^model\.", "", "--common", "--no-types", "--rtol", "0.01"]) == 0
    assert "only in one of them were left out" in capsys.readouterr().out
