"""The model of the demo: a small transformer, and how a layout cuts it.

Nothing in here knows about checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's own examples call it
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job spreads over ranks: `fsdp` x `tp` of them, each one process."""

    name: str
    fsdp: int
    tp: int

    @property
    def ranks(self) -> int:
        return self.fsdp * self.tp


@dataclass(frozen=True, slots=True)
class ModelSizes:
    vocabulary: int = 4096
    width: int = 256
    layers: int = 4
    heads: int = 8
    context: int = 32


class Attention(nn.Module):
    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, sizes.width, bias=False)
        self.value = nn.Linear(sizes.width, sizes.width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Under tensor parallelism this rank has some of the heads: -1 is however many.
        projections = (self.query, self.key, self.value)
        query, key, value = (part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in projections)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # a module call is Any


class Block(nn.Module):
    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, 4 * sizes.width, bias=False)
        self.down = nn.Linear(4 * sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))  # type: ignore[no-any-return]  # a module call is Any


class Transformer(nn.Module):
    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # a module call is Any


def parallelize(model: Transformer, layout: Layout) -> DeviceMesh | None:
    """Cut a model in place, first by tensor parallelism, then by FSDP2; returns the mesh, None for one process.

    The embeddings and norms are not part of the tensor-parallel plan, so the ranks of one tensor-parallel group hold
    the same rows of them: a checkpoint should hold those once.
    """
    if layout.ranks == 1:
        return None
    mesh = init_device_mesh("cpu", (layout.fsdp, layout.tp), mesh_dim_names=("fsdp", "tp"))
    if layout.tp > 1:
        parallelize_module(model, mesh["tp"], _tensor_parallel_plan(len(model.blocks)))
    if layout.fsdp > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
    return mesh


def _tensor_parallel_plan(layers: int) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for at in range(layers):
        for name in ("attention.query", "attention.key", "attention.value", "up"):
            plan[f"blocks.{at}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "down"):
            plan[f"blocks.{at}.{name}"] = RowwiseParallel()
    return plan
