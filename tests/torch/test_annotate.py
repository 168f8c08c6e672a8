"""Arguments of `annotate_shard` that make no sense are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dcp_torch
from dcp_core.errors import ArgumentError


def test_only_a_tensor_can_be_annotated() -> None:
    nothing: Any = 5
    with pytest.raises(ArgumentError, match=r"on a torch\.Tensor; got 5, a int"):
        dcp_torch.annotate_shard(nothing, offsets=(0,), global_shape=(4,))


@pytest.mark.parametrize("name", ["offsets", "global_shape", "replica_ranks"])
@pytest.mark.parametrize("value", [3, 1.5, (0.5,), ("1",), (None,)])
def test_what_is_no_sequence_of_whole_numbers_is_named(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"offsets": (0,), "global_shape": (4,), name: value}
    with pytest.raises(ArgumentError, match=f"{name} must be a sequence of whole numbers"):
        dcp_torch.annotate_shard(torch.zeros(2), **arguments)


def test_sizes_and_numbers_of_torch_are_whole_numbers() -> None:
    offsets: Any = [torch.tensor(2)]
    tensor = dcp_torch.annotate_shard(torch.zeros(2), offsets=offsets, global_shape=torch.zeros(4).shape)
    assert tensor.shape == (2,)
