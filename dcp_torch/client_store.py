"""A client of a torch job's TCPStore, for a process beside the job."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # no list of exports

from dcp_core.coordination import client_store

_REMEDY = (
    "Start the job with torchrun, or by init_process_group with init_method env://, so that its store is there and "
    "outlives the save; or save with use_gloo=False, which talks through files in the checkpoint's directory"
)


class ClientStore(client_store.ClientStore):
    """`dcp_core.coordination.client_store.ClientStore` of a TCPStore.

    Args:
        host: Where the store is.
        port: Where the store is.
        prefix: Goes before every name, with a slash.
        timeout_seconds: How long the store may take to accept the connection, and then for each call.

    Raises:
        CoordinationError: There is no store, or it does not answer; also from every call.
    """

    def __init__(self, host: str, port: int, prefix: str, timeout_seconds: float) -> None:
        def connect() -> Any:
            timeout = timedelta(seconds=timeout_seconds)
            return PrefixStore(prefix, TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))

        super().__init__(
            host, port, connect, timeout_seconds,
            lost_by=DistNetworkError, host_process="rank 0's or torchrun's", remedy=_REMEDY,
        )  # fmt: skip
