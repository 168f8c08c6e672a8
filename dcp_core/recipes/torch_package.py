"""What reads torch's own formats, for those that have no torch: it lies in torch's package, imported when needed."""

from __future__ import annotations

import importlib
from typing import Any

from dcp_core.errors import ArgumentError


def torch_package_module(name: str) -> Any:
    """Import a module of `dcp_torch`.

    Args:
        name: Which one: "offline_transform", "torch_dcp".

    Raises:
        ArgumentError: torch is not installed.
    """
    try:
        return importlib.import_module(f"dcp_torch.{name}")
    except ImportError as error:
        raise ArgumentError(f"{error}: what torch wrote is read with torch; pip install 'hyper-dcp[torch]'") from error
