"""From open weights to a trained, published model: files of `transformers`, four ranks, and files again."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_torch
from dcp_core.formats.cuts import Cut, Narrowed, Selected
from dcp_core.testing import ranks
from dcp_torch.offline_transform import (
    convert_dcp_to_huggingface,
    convert_full_checkpoint_to_dcp,
    dcp_to_full_state_dict,
    save_state_dict_as_huggingface_format,
)
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.huggingface_models import EXPERTS, KINDS, cuts_of, logits_of, make_model
from tests.torch.states import poison, whole

ranks.preload("transformers.models.llama.modeling_llama", "transformers.models.qwen3_moe.modeling_qwen3_moe")

pytestmark = pytest.mark.timeout(120)

MODELS = [(kind, tied) for kind in KINDS for tied in (True, False)]
INDEX = "model.safetensors.index.json"


def cuts_back(model: nn.Module) -> dict[str, Cut]:
    """How the experts in files, three tensors for each, are cut out of those in memory: `cuts_of`, the other way."""
    cuts: dict[str, Cut] = {}
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        if last not in ("down_proj", "gate_up_proj"):
            continue
        for expert in range(EXPERTS):
            one = Selected(name, expert)
            if last == "down_proj":
                cuts[f"{owner}.{expert}.down_proj.weight"] = one
                continue
            gate, up = Narrowed.split(one, [parameter.shape[1] // 2] * 2)
            cuts[f"{owner}.{expert}.gate_proj.weight"], cuts[f"{owner}.{expert}.up_proj.weight"] = gate, up
    return cuts


def _train(rank: TorchRank, source: Path, target: Path, kind: str, tied: bool) -> dict[str, Tensor]:
    """Load sharded, train a step, save; give the trained weights."""
    model = make_model(kind, tied, seed=2)
    poison(model.state_dict())
    mesh = init_device_mesh("cpu", (rank.world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model_state, _ = get_state_dict(model, optimizer)
    dcp_torch.load(model_state, checkpoint_id=source)
    tokens = torch.arange(24).reshape(2, 12) + rank.rank
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp_torch.save({"model": model_state, "optimizer": optimizer_state, "step": 1}, checkpoint_id=target)
    return whole(model_state)


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_open_weights_are_converted_trained_on_four_ranks_and_published(
    tmp_path: Path, kind: str, tied: bool, size: str
) -> None:
    transformers = import_module("transformers")  # has no types to check against
    model = make_model(kind, tied, seed=1)
    model.save_pretrained(tmp_path / "open", max_shard_size=size)
    cuts: dict[str, Cut] = {**cuts_of(model), **({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})}
    parts = set(cuts_back(model))
    convert_full_checkpoint_to_dcp(
        tmp_path / "open",
        tmp_path / "start",
        key_map=lambda name: None if name in parts else name,
        cuts=cuts,
        durable=False,
    )
    trained = run_gloo(_train, 4, tmp_path / "start", tmp_path / "trained", kind, tied)[0]

    report = convert_dcp_to_huggingface(
        tmp_path / "trained", tmp_path / "published", size, "model", cuts=cuts_back(model), durable=False
    )
    assert {entry.name for entry in report.skipped if entry.name.startswith("model.")} == (
        {"model.lm_head.weight"} if tied else set()
    )
    model.config.save_pretrained(tmp_path / "published")
    published = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published").eval()
    expected = make_model(kind, tied, seed=3)
    expected.load_state_dict(trained)
    assert torch.equal(logits_of(published), logits_of(expected))
    assert not torch.equal(logits_of(published), logits_of(model))

    expected.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    if size == "5GB":
        assert _files(tmp_path / "published") == _files(tmp_path / "theirs")
    ours, theirs = (_index(tmp_path / name) for name in ("published", "theirs"))
    assert ours.keys() == theirs.keys()
    if ours:
        assert ours["metadata"].keys() == theirs["metadata"].keys()
        assert ours["metadata"] == theirs["metadata"]
        assert ours["weight_map"].keys() == theirs["weight_map"].keys()


def _index(path: Path) -> dict[str, Any]:
    if not (path / INDEX).exists():
        return {}
    found: dict[str, Any] = json.loads((path / INDEX).read_text())
    return found


def _files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if ".safetensors" in file.name}


@pytest.mark.parametrize("size", ["5GB", "20KB", "5KB", "1KB"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_files_are_byte_for_byte_those_of_save_pretrained(tmp_path: Path, tied: bool, size: str) -> None:
    model = make_model("llama", tied, seed=7)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    save_state_dict_as_huggingface_format(tmp_path / "ours", model.state_dict(), size, durable=False)
    assert _files(tmp_path / "ours") == _files(tmp_path / "theirs")


@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_a_full_state_is_published_and_loaded_by_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    transformers = import_module("transformers")  # has no types to check against
    model = make_model(kind, tied, seed=5)
    save_state_dict_as_huggingface_format(tmp_path / "hf", model.state_dict(), "20KB", durable=False)
    model.config.save_pretrained(tmp_path / "hf")
    published = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert torch.equal(logits_of(published), logits_of(model))
    convert_full_checkpoint_to_dcp(tmp_path / "hf", tmp_path / "dcp", durable=False)
    fresh = make_model(kind, tied, seed=6)
    fresh.load_state_dict(dcp_to_full_state_dict(tmp_path / "dcp"), strict=not tied)
    assert torch.equal(logits_of(fresh), logits_of(model))
