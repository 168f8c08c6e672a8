"""A toy parallel framework over torch: tensors that are cut over ranks, and a network made of them."""

from __future__ import annotations

from toy_parallel.mlp import Average, Mlp
from toy_parallel.sharded import Columns, Cut, Experts, Part, Ragged, Rows, ShardedTensor

__all__ = ["Average", "Columns", "Cut", "Experts", "Mlp", "Part", "Ragged", "Rows", "ShardedTensor"]
