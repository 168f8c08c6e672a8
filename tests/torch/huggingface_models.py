"""Real models of `transformers`, small: as Llama and as Qwen3-MoE are built, tied and untied; and their cuts."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from dcp_torch import Joined, Stacked

_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = 4
KINDS = ("llama", "moe")


def make_model(kind: str, tied: bool, seed: int) -> Any:
    """A model with weights of its own."""
    transformers = import_module("transformers")  # has no types to check against

    torch.manual_seed(seed)
    if kind == "llama":
        config = transformers.LlamaConfig(**_SIZES, tie_word_embeddings=tied)
        return transformers.LlamaForCausalLM(config).eval()
    config = transformers.Qwen3MoeConfig(
        **_SIZES, moe_intermediate_size=16, num_experts=EXPERTS, num_experts_per_tok=2, tie_word_embeddings=tied
    )
    return transformers.Qwen3MoeForCausalLM(config).eval()


def cuts_of(model: nn.Module) -> dict[str, Stacked]:
    """How the experts in memory, one tensor for all, are made of those in files, three tensors for each."""
    cuts = {}
    for name, _ in model.named_parameters():
        owner, _, last = name.rpartition(".")
        if last == "down_proj":
            cuts[name] = Stacked([f"{owner}.{expert}.down_proj.weight" for expert in range(EXPERTS)])
        elif last == "gate_up_proj":
            pairs = [
                Joined([f"{owner}.{expert}.{part}_proj.weight" for part in ("gate", "up")]) for expert in range(EXPERTS)
            ]
            cuts[name] = Stacked(pairs)
    return cuts


def logits_of(model: Any) -> Tensor:
    """What a model says to a few tokens."""
    with torch.no_grad():
        logits: Tensor = model(torch.arange(24).reshape(2, 12)).logits
    return logits
