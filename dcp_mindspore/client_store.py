"""A client of a MindSpore job's store, for a process beside the job."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from mindspore.mint.distributed import TCPStore

from dcp_core.coordination import client_store
from dcp_core.coordination.store import PrefixedStore
from dcp_mindspore.store_channel import MindSporeStore

_REMEDY = (
    "Let the process of rank 0, or whichever hosts the job's TCPStore, outlive the save; or save with use_gloo=False, "
    "which talks through files in the checkpoint's directory"
)


class ClientStore(client_store.ClientStore):
    """`dcp_core.coordination.client_store.ClientStore` of MindSpore's TCPStore.

    Args:
        host: Where the store is, an IPv4 address.
        port: Where the store is.
        prefix: Goes before every name, with a slash.
        timeout_seconds: How long the store may take to accept the connection, and then for each call.

    Raises:
        CoordinationError: There is no store, or it does not answer; also from every call.
    """

    def __init__(self, host: str, port: int, prefix: str, timeout_seconds: float) -> None:
        def connect() -> Any:
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
            return PrefixedStore(prefix, MindSporeStore(store))

        super().__init__(
            host, port, connect, timeout_seconds,
            lost_by=RuntimeError, host_process="rank 0's or the one that made the TCPStore", remedy=_REMEDY,
        )  # fmt: skip
