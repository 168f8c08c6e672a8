"""What writers and readers are both given: which checkpoint it is, how it is checked, the plans of ranks."""

from __future__ import annotations

import os
from typing import Literal, TypeVar

CheckpointId = str | os.PathLike[str]
Verify = bool | Literal["full"]
Plan = TypeVar("Plan")
