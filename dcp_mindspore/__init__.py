"""Distributed checkpoints for MindSpore: save a sharded state, load it under any other layout.

>>> import dcp_mindspore
>>> dcp_mindspore.save({"model": net}, checkpoint_id="step_1000")    # doctest: +SKIP
>>> dcp_mindspore.load({"model": net}, checkpoint_id="step_1000")    # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_core import __version__ as __version__
from dcp_core.lazy_names import lazy_names

if TYPE_CHECKING:
    from dcp_core.public import *  # noqa: F403  # that module says what its names are
    from dcp_mindspore import offline_transform as offline_transform
    from dcp_mindspore.annotate import annotate_shard as annotate_shard
    from dcp_mindspore.api import async_save as async_save
    from dcp_mindspore.api import load as load
    from dcp_mindspore.api import save as save
    from dcp_mindspore.channel import StoreGroup as StoreGroup
    from dcp_mindspore.channel import use_store as use_store
    from dcp_mindspore.manager import CheckpointManager as CheckpointManager
    from dcp_mindspore.manager import latest_checkpoint as latest_checkpoint
    from dcp_mindspore.manager import survey_checkpoints as survey_checkpoints
    from dcp_mindspore.strategy_files import read_strategy as read_strategy
    from dcp_mindspore.strategy_import import import_checkpoint as import_checkpoint

_OWN = {
    "CheckpointManager": "dcp_mindspore.manager",
    "StoreGroup": "dcp_mindspore.channel",
    "annotate_shard": "dcp_mindspore.annotate",
    "async_save": "dcp_mindspore.api",
    "import_checkpoint": "dcp_mindspore.strategy_import",
    "latest_checkpoint": "dcp_mindspore.manager",
    "load": "dcp_mindspore.api",
    "offline_transform": "dcp_mindspore.offline_transform",
    "read_strategy": "dcp_mindspore.strategy_files",
    "save": "dcp_mindspore.api",
    "survey_checkpoints": "dcp_mindspore.manager",
    "use_store": "dcp_mindspore.channel",
}

__getattr__, __dir__ = lazy_names(__name__, _OWN)
