"""Models that `transformers` saved load straight from their directories, whole and sharded, and say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcp_torch
from dcp_core.testing import ranks
from dcp_torch import HuggingFaceReader
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.huggingface_models import KINDS, cuts_of, logits_of, make_model
from tests.torch.states import bits_of, poison

ranks.preload("transformers.models.llama.modeling_llama", "transformers.models.qwen3_moe.modeling_qwen3_moe")

pytestmark = pytest.mark.timeout(120)

MODELS = [(kind, tied) for kind in KINDS for tied in (True, False)]


@pytest.mark.parametrize("size", ["5GB", "20KB", "1KB"])
@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_what_save_pretrained_wrote_is_loaded_bit_by_bit(tmp_path: Path, kind: str, tied: bool, size: str) -> None:
    model = make_model(kind, tied, seed=1)
    model.save_pretrained(tmp_path, max_shard_size=size)
    fresh = make_model(kind, tied, seed=2)
    poison(fresh.state_dict())
    dcp_torch.load(fresh.state_dict(), storage_reader=HuggingFaceReader(tmp_path, cuts=cuts_of(fresh)))
    saved, loaded = model.state_dict(), fresh.state_dict()
    assert [key for key in saved if bits_of(saved[key]) != bits_of(loaded[key])] == []
    assert torch.equal(logits_of(model), logits_of(fresh))
    assert (fresh.lm_head.weight is fresh.model.embed_tokens.weight) == tied


def test_a_module_inside_a_state_is_filled_under_a_prefix(tmp_path: Path) -> None:
    model = make_model("llama", tied=True, seed=1)
    model.save_pretrained(tmp_path)
    run = {"net": make_model("llama", tied=True, seed=2)}
    dcp_torch.load(run, storage_reader=HuggingFaceReader(tmp_path, key_map="net."))
    assert torch.equal(logits_of(model), logits_of(run["net"]))


def test_a_head_that_is_alone_in_its_stage_is_filled_by_the_embedding_that_it_is_tied_to(tmp_path: Path) -> None:
    model = make_model("llama", tied=True, seed=1)
    model.save_pretrained(tmp_path)
    head = {"lm_head.weight": torch.zeros(96, 32)}
    with pytest.raises(dcp_torch.MissingKeysError, match=r"lm_head\.weight"):
        dcp_torch.load(head, storage_reader=HuggingFaceReader(tmp_path))
    reader = HuggingFaceReader(tmp_path, cuts={"lm_head.weight": "model.embed_tokens.weight"})
    dcp_torch.load(head, storage_reader=reader)
    assert torch.equal(head["lm_head.weight"], model.lm_head.weight)


def _load_sharded(rank: TorchRank, directory: str, kind: str, tied: bool, layout: str) -> list[str]:
    model = make_model(kind, tied, seed=2)
    mesh = init_device_mesh("cpu", (rank.world_size,))
    if layout == "tp":
        for layer in model.model.layers:
            plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
            parallelize_module(layer, mesh, {**plan, "self_attn.o_proj": RowwiseParallel()})
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    state = model.state_dict()
    poison(state)
    dcp_torch.load(state, storage_reader=HuggingFaceReader(directory, cuts=cuts_of(model)), timeout_seconds=30)
    wrong = []
    for key, expected in make_model(kind, tied, seed=1).state_dict().items():
        found = model.state_dict()[key]
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        if bits_of(whole) != bits_of(expected):
            wrong.append(key)
    return wrong


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_a_sharded_model_takes_its_parts(tmp_path: Path, kind: str, tied: bool, layout: str) -> None:
    make_model(kind, tied, seed=1).save_pretrained(tmp_path, max_shard_size="20KB")
    assert run_gloo(_load_sharded, 4, str(tmp_path), kind, tied, layout) == [[]] * 4
