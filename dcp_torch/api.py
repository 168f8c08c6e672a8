"""Save and load for torch: the core's functions over the torch adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dcp_core import api
from dcp_core.background.response import AsyncSaveResponse
from dcp_core.background.service import OnPending
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
    check_replicas: bool = False,
) -> Metadata:
    """Save a state; every rank of the group calls, with its own shards.

    Args:
        state_dict: Nested mappings, lists and tuples of torch tensors (plain, DTensor, ShardedTensor, annotated),
            numpy arrays, plain values, modules, optimizers and other Stateful objects.
        checkpoint_id: The directory, as a path or URL.
        storage_writer: Where to write instead; with both, the writer is pointed at `checkpoint_id`.
        planner: How to plan; a `StandardSavePlanner` by default.
        no_dist: This process alone, under its rank in the job; as `use_collectives=False`.
        use_collectives: False: every rank saves alone, into `{rank}.metadata`.
        process_group: The torch process group (or 1-d DeviceMesh) whose ranks call; the default group by default.
        timeout_seconds: How long to wait for the slowest rank, in each exchange.
        durable: Whether data reaches the disk before this returns.
        check_replicas: Compare first what ranks hold of what counts as copies, and save only if it is equal bit for
            bit.

    Returns:
        The checkpoint's description, read as far as it is asked; every rank's data is committed. Without
        collectives: this rank's description and data.

    Raises:
        DcpError: The same on every rank. What was there before is still there.
    """
    return api.save(
        state_dict, checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner, no_dist=no_dist,
        use_collectives=use_collectives, process_group=process_group, timeout_seconds=timeout_seconds,
        durable=durable, check_replicas=check_replicas, adapter=adapter_named("torch"),
    )  # fmt: skip


def async_save(
    state_dict: Mapping[Any, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    use_gloo: bool = False,
    callback: Callable[[], object] | None = None,
    process_group: Any = None,
    timeout_seconds: float = api.DEADLINE_SECONDS,
    durable: bool = True,
    on_pending: OnPending = "wait",
    check_replicas: bool = False,
) -> AsyncSaveResponse:
    """Save a state in the background: returns once it is in host memory, and may be changed again.

    All ranks agree, each copies what it will write into memory that it keeps for this, and a separate process of each
    rank writes and commits. A script that ends waits for its checkpoint.

    Args:
        state_dict: Nested mappings, lists and tuples of torch tensors (plain, DTensor, ShardedTensor, annotated),
            numpy arrays, plain values, modules, optimizers and other Stateful objects.
        checkpoint_id: The directory, as a path or URL.
        storage_writer: Where to write instead; with both, the writer is pointed at `checkpoint_id`. One that gives no
            `rebuild_arguments` is used by a thread of this process.
        planner: How to plan; a `StandardSavePlanner` by default.
        no_dist: This process alone, under its rank in the job; as `use_collectives=False`.
        use_collectives: False: every rank saves alone, into `{rank}.metadata`.
        use_gloo: How the background processes agree: False: through files in the checkpoint's directory. True: through
            the job's store, for which they load torch; needs `MASTER_ADDR` and `MASTER_PORT`.
        callback: Called without an argument, once in this process, when the checkpoint is committed, before
            `persist_completion` resolves; not if the save fails. What it raises goes to `persist_completion`.
        process_group: The torch process group (or 1-d DeviceMesh) whose ranks call; the default group by default.
        timeout_seconds: How long to wait for the slowest rank, in each exchange.
        durable: Whether data reaches the disk before the save is complete.
        on_pending: What to do while an earlier save is in flight on any rank: "wait" for it, or "raise".
        check_replicas: Compare first what ranks hold of what counts as copies, and save only if it is equal bit for
            bit. Each rank stages all that it holds then; a difference reaches `persist_completion`.

    Returns:
        The save that goes on.

    Raises:
        DcpError: The same on every rank: nothing was begun; or an earlier asynchronous save had failed, and nobody had
            awaited it. What goes wrong later reaches `persist_completion`.
    """
    return api.async_save(
        state_dict, checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner, no_dist=no_dist,
        use_collectives=use_collectives, use_gloo=use_gloo, callback=callback, process_group=process_group,
        timeout_seconds=timeout_seconds, durable=durable, on_pending=on_pending, check_replicas=check_replicas,
        adapter=adapter_named("torch"),
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
        checkpoint_id: The directory, as a path or URL.
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
