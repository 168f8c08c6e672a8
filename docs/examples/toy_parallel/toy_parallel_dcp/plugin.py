"""What DCP finds by the entry point. It only registers: torch and the describer are imported when they are needed."""

from __future__ import annotations

from dcp_core.hookspecs import DescriberEntry, hookimpl


@hookimpl
def dcp_describers() -> list[DescriberEntry]:
    """One describer, for one type."""
    return [
        DescriberEntry(
            "toy_parallel.sharded.ShardedTensor",
            framework="torch",
            factory="toy_parallel_dcp.describer:ShardedTensorDescriber",
        )
    ]
