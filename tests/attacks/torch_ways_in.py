"""The ways in for checkpoints of torch DCP; only where torch is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import dcp_torch as dcp
from dcp_torch.offline_transform import convert_torch_dcp_to_dcp
from dcp_torch.torch_dcp import TorchDCPReader
from tests.attacks.ways_in import Way, command, common_ways


def torch_target() -> dict[str, Any]:
    """A state that holds what nobody saved."""
    return {"w": np.full((3, 4), 7, "f4"), "step": -1}


def torch_load(directory: Path, target: Mapping[str, Any]) -> None:
    """Load a checkpoint of torch DCP."""
    dcp.load(target, storage_reader=TorchDCPReader(directory))


def torch_ways(good: Path) -> dict[str, Way]:
    """All of them."""

    def convert(directory: Path) -> None:
        convert_torch_dcp_to_dcp(directory, directory.parent / "converted", durable=False, progress=False)

    def load_plainly(directory: Path) -> None:
        dcp.load({"w": np.zeros((3, 4), "f4")}, checkpoint_id=directory)

    return {
        "import": convert,
        "load as ours": load_plainly,
        "inspect a tensor": lambda directory: command("inspect", directory, "--tensor", "w"),
        **common_ways(good),
    }
