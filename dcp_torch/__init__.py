"""Distributed checkpoints for torch: save a sharded state, load it under any other layout.

>>> import dcp_torch
>>> dcp_torch.save({"model": model}, checkpoint_id="step_1000")    # doctest: +SKIP
>>> dcp_torch.load({"model": model}, checkpoint_id="step_1000")    # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_core import __version__ as __version__
from dcp_core.lazy_names import lazy_names

if TYPE_CHECKING:
    from dcp_core.public import *  # noqa: F403  # that module says what its names are
    from dcp_torch import offline_transform as offline_transform
    from dcp_torch.annotate import annotate_shard as annotate_shard
    from dcp_torch.api import async_save as async_save
    from dcp_torch.api import load as load
    from dcp_torch.api import save as save
    from dcp_torch.flat_buffers import split_flat as split_flat
    from dcp_torch.manager import CheckpointManager as CheckpointManager
    from dcp_torch.manager import latest_checkpoint as latest_checkpoint
    from dcp_torch.manager import survey_checkpoints as survey_checkpoints
    from dcp_torch.parts import describe_parts as describe_parts
    from dcp_torch.torch_dcp import TorchDCPReader as TorchDCPReader

_OWN = {
    "CheckpointManager": "dcp_torch.manager",
    "TorchDCPReader": "dcp_torch.torch_dcp",
    "annotate_shard": "dcp_torch.annotate",
    "async_save": "dcp_torch.api",
    "describe_parts": "dcp_torch.parts",
    "latest_checkpoint": "dcp_torch.manager",
    "load": "dcp_torch.api",
    "offline_transform": "dcp_torch.offline_transform",
    "save": "dcp_torch.api",
    "survey_checkpoints": "dcp_torch.manager",
    "split_flat": "dcp_torch.flat_buffers",
}

__getattr__, __dir__ = lazy_names(__name__, _OWN)
