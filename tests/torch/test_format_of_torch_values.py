"""What docs/reference/format.md says of torch's codecs, read by the second reader that knows only that page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_torch
from dcp_core.state_path import PerRank
from tests.core.format_data_reader import Checkpoint
from tests.core.format_value_reader import Coded

WEIGHT = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
SHARED: tuple[Any, ...] = ("bfloat16", [1, 2], WEIGHT.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (WEIGHT, Coded("torch.Tensor", (*SHARED, False))),
        (torch.nn.Parameter(WEIGHT.clone()), Coded("torch.Parameter", (*SHARED, True))),
        (torch.Size([2, 3]), Coded("torch.Size", [2, 3])),
        (torch.float32, Coded("torch.dtype", "float32")),
        (torch.device("cuda", 1), Coded("torch.device", "cuda:1")),
    ],
    ids=lambda value: value.codec if isinstance(value, Coded) else "",
)
def test_torch_values_inside_objects_are_stored_as_the_page_says(value: Any, expected: Coded, tmp_path: Path) -> None:
    dcp_torch.save({"own": PerRank({"value": value})}, checkpoint_id=tmp_path / "step")
    checkpoint = Checkpoint.read(tmp_path / "step")
    (stored,) = checkpoint.description.objects
    assert checkpoint.value(stored) == {"value": expected}
