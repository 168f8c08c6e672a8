"""Which states are saved and loaded: names, shapes and types of tensors, as plain values.

`--mib` gives the size of a state; shapes stay as they are as long as they fit, and the number of tensors follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MIB = 1024 * 1024
ITEM_NBYTES = {"bfloat16": 2, "float32": 4}

COMMON = ("ours", "torch-dcp", "torch-hf", "safetensors", "plain", "torchsnapshot", "orbax", "torch_checkpointing")
OPEN = ("ours-open", "torch-open")
ON_AND_OFF = ("ours", "ours-unverified", "ours-full", "torch-dcp", "plain", "plain-hashed")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One global tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Workload:
    """A state, on how many ranks, and what is measured with it.

    Attributes:
        name: What selects it.
        about: One line for the table.
        mib: Its size by default.
        tensors: Its tensors, by size in MiB.
        world_sizes: On how many ranks. One rank holds plain tensors; several hold DTensors cut along dimension 0.
        measures: What is measured: save, load, cold (load), memory.
        contestants: Who takes part.
        load_cut: The dimension along which the targets of a load are cut.
    """

    name: str
    about: str
    mib: int
    tensors: Callable[[int], tuple[TensorSpec, ...]]
    world_sizes: tuple[int, ...]
    measures: tuple[str, ...]
    contestants: tuple[str, ...] = COMMON
    load_cut: int = 0


def total_nbytes(tensors: tuple[TensorSpec, ...]) -> int:
    """Bytes of all tensors, on all ranks together."""
    return sum(spec.nbytes for spec in tensors)


def transformer(mib: int) -> tuple[TensorSpec, ...]:
    """Weights in bfloat16 and two moments of the optimizer in float32, named as torch names them."""
    hidden = 1024 if mib >= 256 else 128
    layers = max(1, round((mib * MIB - 60 * hidden**2) / (120 * hidden**2)))
    weights: dict[str, tuple[int, ...]] = {"embedding.weight": (6 * hidden, hidden)}
    for layer in range(layers):
        weights |= {f"layers.{layer}.{part}": shape for part, shape in _layer(hidden).items()}
    weights |= {"norm.weight": (hidden,), "norm.bias": (hidden,)}
    model = [TensorSpec(f"model.{name}", shape, "bfloat16") for name, shape in weights.items()]
    moments = [
        TensorSpec(f"optimizer.state.{name}.{moment}", shape, "float32")
        for name, shape in weights.items()
        for moment in ("exp_avg", "exp_avg_sq")
    ]
    return tuple(model + moments)


def _layer(hidden: int) -> dict[str, tuple[int, ...]]:
    cuts = {"attention.qkv": (3, 1), "attention.out": (1, 1), "mlp.up": (4, 1), "mlp.down": (1, 4)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in cuts.items():
        shapes[f"{name}.weight"] = (rows * hidden, columns * hidden)
        shapes[f"{name}.bias"] = (rows * hidden,)
    for norm in ("norm1", "norm2"):
        shapes |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
    return shapes


def open_weights(mib: int) -> tuple[TensorSpec, ...]:
    """Weights in bfloat16, shaped and named as those of a Llama."""
    hidden = 2048 if mib >= 256 else 128
    layer = {
        "self_attn.q_proj": (1, 1), "self_attn.k_proj": (0.25, 1), "self_attn.v_proj": (0.25, 1),
        "self_attn.o_proj": (1, 1), "mlp.gate_proj": (2.75, 1), "mlp.up_proj": (2.75, 1), "mlp.down_proj": (1, 2.75),
    }  # fmt: skip
    layers = max(1, round((mib * MIB // 2 - 32 * hidden**2) / (10.75 * hidden**2)))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (16 * hidden, hidden)}
    for number in range(layers):
        for part, (rows, columns) in layer.items():
            shapes[f"model.layers.{number}.{part}.weight"] = (int(rows * hidden), int(columns * hidden))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{number}.{norm}.weight"] = (hidden,)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (16 * hidden, hidden)}
    return tuple(TensorSpec(name, shape, "bfloat16") for name, shape in shapes.items())


def small(mib: int) -> tuple[TensorSpec, ...]:
    """Tensors of 64 KiB: what a call costs for each tensor."""
    return tuple(TensorSpec(f"blocks.{n // 100}.experts.{n % 100}.w", (128, 128), "float32") for n in range(mib * 16))


def huge(mib: int) -> tuple[TensorSpec, ...]:
    """One tensor: what a call costs for each byte."""
    return (TensorSpec("embedding.weight", (mib * 64, 4096), "float32"),)


def wide(mib: int) -> tuple[TensorSpec, ...]:
    """Rows of 128 KiB: half a row is a run of 64 KiB."""
    return _tables(mib, columns=32768, rows_each=1024)


def narrow(mib: int) -> tuple[TensorSpec, ...]:
    """Rows of 8 KiB: half a row is a run of 4 KiB."""
    return _tables(mib, columns=2048, rows_each=4096)


def layers(mib: int) -> tuple[TensorSpec, ...]:
    """Matrices of 16 MiB."""
    return _tables(mib, columns=2048, rows_each=2048)


def _tables(mib: int, columns: int, rows_each: int) -> tuple[TensorSpec, ...]:
    rows = mib * MIB // (columns * ITEM_NBYTES["float32"])
    count = max(1, rows // rows_each)
    shape = (min(rows, rows_each), columns)
    return tuple(TensorSpec(f"tables.{number}.weight", shape, "float32") for number in range(count))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "transformer", "bfloat16 weights, float32 moments", 1024, transformer, (1, 2),
            ("save", "load", "cold", "memory"),
        ),
        Workload(
            "small", "tensors of 64 KiB", 1250, small, (1,), ("save", "load", "memory"),
            (*COMMON, "ours-replan"),
        ),
        Workload("huge", "one tensor", 1024, huge, (1,), ("save", "load", "memory")),
        Workload(
            "reshard", "saved by rows, loaded by columns, runs of 64 KiB", 1024, wide, (2,),
            ("load", "cold", "memory"), load_cut=1,
        ),
        Workload(
            "reshard_short", "saved by rows, loaded by columns, runs of 4 KiB", 1024, narrow, (2,), ("load",),
            load_cut=1,
        ),
        Workload(
            "checksums", "checksums on and off, the state of `transformer`", 1024, transformer, (1,), ("save", "load"),
            ON_AND_OFF,
        ),
        Workload(
            "open_weights", "whole tensors of a Hugging Face directory, loaded into shards of rows", 1024, open_weights,
            (4,), ("load", "cold"), OPEN,
        ),
    )
}  # fmt: skip
