"""What a rank holds of a `ShardedTensor`, told to DCP."""

from __future__ import annotations

from typing import Any

from dcp_core.planning.leaves import LocalTensor
from dcp_torch import describe_parts


class ShardedTensorDescriber:
    """`dcp_core.adapter.Describer` for `toy_parallel.ShardedTensor`."""

    def describe(self, value: Any) -> LocalTensor | None:
        """The parts as they lie; for a ragged tensor their start is one number, in the flattened tensor."""
        starts = [part.start for part in value.parts]
        return describe_parts(list(zip(value.local, starts, strict=True)), global_shape=value.shape, dtype=value.dtype)
