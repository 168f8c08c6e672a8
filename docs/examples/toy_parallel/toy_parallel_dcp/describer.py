"""What a rank holds of a `ShardedTensor`, told to DCP. Imported when the first such value turns up in a state."""

from __future__ import annotations

from typing import Any

from toy_parallel.sharded import ShardedTensor

from dcp_core.planning.leaves import LocalTensor
from dcp_torch import describe_parts


class ShardedTensorDescriber:
    """`dcp_core.adapter.Describer` for `toy_parallel.ShardedTensor`."""

    def describe(self, value: Any) -> LocalTensor | None:
        """The parts as they lie; for a ragged tensor a part's start is one number, in the flattened tensor."""
        if not isinstance(value, ShardedTensor):
            return None
        parts = [(local, part.start) for local, part in zip(value.local, value.parts, strict=True)]
        return describe_parts(parts, global_shape=value.shape, dtype=value.dtype)
