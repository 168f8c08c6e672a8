"""Save and load for torch: the core's functions over the torch adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_core import api
from dcp_core.execution.interfaces import CheckpointId, StorageReader, StorageWriter, Verify
from dcp_core.metadata import Metadata
from dcp_core.planning.planners import LoadPlanner, SavePlanner
from dcp_core.plugins import adapter_named


def save(
    state_dict: Mapping[Any, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    process_group: Any = None,
    timeout_seconds: float = api.DEADLINE_SECONDS,
    durable: bool = True,
) -> Metadata:
    """Save a state; every rank of the group calls, with its own shards.

    Args:
        state_dict: Nested mappings, lists and tuples of torch tensors (plain, DTensor, ShardedTensor, annotated),
            numpy arrays, plain values, modules, optimizers and other Stateful objects.
        checkpoint_id: The directory, as a path or `file://` URL.
        storage_writer: Where to write instead; with both, the writer is pointed at `checkpoint_id`.
        planner: How to plan; a `StandardSavePlanner` by default.
        no_dist: This process alone, under its rank in the job; as `use_collectives=False`.
        use_collectives: False: every rank saves alone, into `{rank}.metadata`.
        process_group: The torch process group (or 1-d DeviceMesh) whose ranks call; the default group by default.
        timeout_seconds: How long to wait for the slowest rank, in each exchange.
        durable: Whether data reaches the disk before this returns.

    Returns:
        The checkpoint's description, read as far as it is asked; every rank's data is committed. Without
        collectives: this rank's description and data.

    Raises:
        DcpError: The same on every rank. What was there before is still there.
    """
    return api.save(
        state_dict, checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner, no_dist=no_dist,
        use_collectives=use_collectives, process_group=process_group, timeout_seconds=timeout_seconds,
        durable=durable, adapter=adapter_named("torch"),
    )  # fmt: skip


def load(
    state_dict: Mapping[Any, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    broadcast_replicated_tensors: bool | str = True,
    broadcast_groups: Mapping[tuple[int, ...], Any] | None = None,
    broadcast_batch_bytes: int = api.BATCH_BYTES,
    process_group: Any = None,
    timeout_seconds: float = api.DEADLINE_SECONDS,
    verify: Verify = True,
) -> None:
    """Load into a state, in place, whatever layout it was saved under; every rank of the group calls.

    Args:
        state_dict: The target: its tensors are filled, its plain values replaced, its Stateful objects given their
            state. Keys that only the checkpoint has are ignored.
        checkpoint_id: The directory, as a path or `file://` URL.
        storage_reader: Where to read from instead; with both, the reader is pointed at `checkpoint_id`.
        planner: How to plan; a `StandardLoadPlanner` by default.
        no_dist: This process alone, under its rank in the job; as `use_collectives=False`.
        use_collectives: False: every rank loads alone.
        broadcast_replicated_tensors: Whether shards that several ranks want are read once and broadcast: True, False,
            or "auto".
        broadcast_groups: Groups for that, by the tuple of their ranks.
        broadcast_batch_bytes: Buffers below this are sent together.
        process_group: The torch process group (or 1-d DeviceMesh) whose ranks call; the default group by default.
        timeout_seconds: How long to wait for the slowest rank, in each exchange.
        verify: True: blocks that are read whole are checked. "full": every block that is touched is read whole and
            checked. False: nothing is.

    Raises:
        DcpError: The same on every rank. An error that is found before reading leaves the targets as they were; a
            `CorruptError` or `StorageError` after that leaves them undefined, and says so.
    """
    api.load(
        state_dict, checkpoint_id=checkpoint_id, storage_reader=storage_reader, planner=planner, no_dist=no_dist,
        use_collectives=use_collectives, broadcast_replicated_tensors=broadcast_replicated_tensors,
        broadcast_groups=broadcast_groups, broadcast_batch_bytes=broadcast_batch_bytes, process_group=process_group,
        timeout_seconds=timeout_seconds, verify=verify, adapter=adapter_named("torch"),
    )  # fmt: skip
