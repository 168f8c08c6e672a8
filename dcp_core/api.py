"""Save, load and read: what users call, for any adapter.

`dcp_torch` and `dcp_mindspore` wrap these functions with their own adapter; numpy ranks use them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from dcp_core import __version__
from dcp_core.adapter import Adapter, AdapterSet, ProcessGroup, StateRules, rendezvous_address
from dcp_core.arguments import (
    check_adapter,
    check_async,
    check_broadcast,
    check_comparable,
    check_flags,
    check_place,
    check_timeout,
    check_verify,
    checked_kind,
    is_flag,
    usable_timeout,
)
from dcp_core.arrays import NumpyAdapter
from dcp_core.background.async_save import AsyncOptions, AsyncSaveRecipe
from dcp_core.background.data_copier import DataCopier
from dcp_core.background.response import AsyncSaveResponse
from dcp_core.background.service import OnPending, take_turn, wait_all
from dcp_core.box import Box
from dcp_core.errors import ArgumentError
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.execution.interfaces import CheckpointId, StorageReader, StorageWriter, Verify
from dcp_core.formats.objects import allow_pickled
from dcp_core.inspection.verify import verify
from dcp_core.log import set_rank, stage
from dcp_core.metadata import Metadata
from dcp_core.planning.planners import LoadPlanner, SavePlanner
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.plugins import activate_codecs, active_adapters, open_storage
from dcp_core.recipes.committed import committed_metadata
from dcp_core.recipes.job import Job, paused_collection
from dcp_core.recipes.load import LoadOptions, LoadRecipe
from dcp_core.recipes.read import read_tensor
from dcp_core.recipes.save import PLAN_CACHE, SaveOptions, SaveRecipe

__all__ = [
    "AsyncSaveResponse",
    "DataCopier",
    "allow_pickled",
    "async_save",
    "clear_plan_cache",
    "load",
    "read",
    "save",
    "verify",
    "wait_all",
]

BATCH_BYTES = 6 * 1024 * 1024
DEADLINE_SECONDS = 1800.0


@paused_collection()
def save(
    state_dict: Mapping[Any, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    process_group: Any = None,
    timeout_seconds: float = DEADLINE_SECONDS,
    durable: bool = True,
    check_replicas: bool = False,
    adapter: Adapter | None = None,
    rules: StateRules | None = None,
) -> Metadata:
    """Save a state; every rank of the group calls, with its own shards.

    Waits first for an asynchronous save that is in flight.

    Args:
        state_dict: Nested mappings, lists and tuples of tensors, plain values, and Stateful objects.
        checkpoint_id: The directory, as a path or URL.
        storage_writer: Where to write instead; with both, the writer is pointed at `checkpoint_id`.
        planner: How to plan; a `StandardSavePlanner` by default.
        no_dist: This process alone, under its rank in the job; as `use_collectives=False`.
        use_collectives: False: every rank saves alone, into `{rank}.metadata`.
        process_group: The ranks that call; the job's by default.
        timeout_seconds: How long to wait for the slowest rank, in each exchange.
        durable: Whether data reaches the disk before this returns.
        check_replicas: Compare first what ranks hold of what counts as copies, and save only if it is equal bit for
            bit.
        adapter: Which framework's process group to use; plain numpy, a group of one, by default.
        rules: What is known of the state beyond its values; nothing by default.

    Returns:
        The checkpoint's description, read as far as it is asked; every rank's data is committed. Without
        collectives: this rank's description and data.

    Raises:
        DcpError: The same on every rank. What was there before is still there.
    """
    with stage("save"):
        order = _SaveOrder.checked(
            adapter, process_group, checkpoint_id, storage_writer, planner, no_dist, use_collectives,
            timeout_seconds, durable, check_replicas, rules,
        )  # fmt: skip
        failed = order.failed or take_turn()
        recipe = SaveRecipe(order.job, order.writer, order.planner, order.options)
        with stage("_save_impl"):
            metadata = recipe.run(state_dict, failed=failed)
        return metadata if metadata is not None else committed_metadata(order.writer, recipe.save_id)


@paused_collection()
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
    timeout_seconds: float = DEADLINE_SECONDS,
    durable: bool = True,
    on_pending: OnPending = "wait",
    check_replicas: bool = False,
    adapter: Adapter | None = None,
    rules: StateRules | None = None,
) -> AsyncSaveResponse:
    """Save a state in the background: returns once it is in host memory, and may be changed again.

    All ranks agree, each copies what it will write into memory that it keeps for this, and a separate process of each
    rank writes and commits. A script that ends waits for its checkpoint.

    Args:
        state_dict: Nested mappings, lists and tuples of tensors, plain values, and Stateful objects.
        checkpoint_id: The directory, as a path or URL.
        storage_writer: Where to write instead; with both, the writer is pointed at `checkpoint_id`. One that gives no
            `rebuild_arguments` is used by a thread of this process.
        planner: How to plan; a `StandardSavePlanner` by default.
        no_dist: This process alone, under its rank in the job; as `use_collectives=False`.
        use_collectives: False: every rank saves alone, into `{rank}.metadata`.
        use_gloo: How the background processes agree: False: through files in the checkpoint's directory. True: through
            a channel of the framework, which they load for that; needs `MASTER_ADDR` and `MASTER_PORT`.
        callback: Called without an argument, once in this process, when the checkpoint is committed, before
            `persist_completion` resolves; not if the save fails. What it raises goes to `persist_completion`.
        process_group: The ranks that call; the job's by default.
        timeout_seconds: How long to wait for the slowest rank, in each exchange.
        durable: Whether data reaches the disk before the save is complete.
        on_pending: What to do while an earlier save is in flight on any rank: "wait" for it, or "raise".
        check_replicas: Compare first what ranks hold of what counts as copies, and save only if it is equal bit for
            bit. Each rank stages all that it holds then; a difference reaches `persist_completion`.
        adapter: Which framework's process group to use; plain numpy, a group of one, by default.
        rules: What is known of the state beyond its values; nothing by default.

    Returns:
        The save that goes on.

    Raises:
        DcpError: The same on every rank: nothing was begun; or an earlier asynchronous save had failed, and nobody had
            awaited it. What goes wrong later reaches `persist_completion`.
    """
    with stage("async_save"):
        order = _SaveOrder.checked(
            adapter, process_group, checkpoint_id, storage_writer, planner, no_dist, use_collectives,
            timeout_seconds, durable, check_replicas, rules,
        )  # fmt: skip
        failed, how = order.failed, AsyncOptions()
        try:
            check_async(use_gloo, callback, on_pending)
            how = AsyncOptions(bool(use_gloo) and order.job.use_collectives, callback, on_pending)
            if how.use_gloo:
                rendezvous_address()
        except ArgumentError as error:
            failed = failed or error
        mode = {"call": "async_save", "use_gloo": bool(how.use_gloo), "on_pending": how.on_pending}
        recipe = AsyncSaveRecipe(order.job, order.writer, order.planner, replace(order.options, mode=mode), how)
        return recipe.run(state_dict, failed=failed)


@paused_collection()
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
    broadcast_batch_bytes: int = BATCH_BYTES,
    process_group: Any = None,
    timeout_seconds: float = DEADLINE_SECONDS,
    verify: Verify = True,
    adapter: Adapter | None = None,
    rules: StateRules | None = None,
) -> None:
    """Load into a state, in place, whatever layout it was saved under; every rank of the group calls.

    Args:
        state_dict: The target: its tensors are filled, its plain values replaced. Keys that only the checkpoint has
            are ignored.
        checkpoint_id: The directory, as a path or URL.
        storage_reader: Where to read from instead; with both, the reader is pointed at `checkpoint_id`.
        planner: How to plan; a `StandardLoadPlanner` by default.
        no_dist: This process alone, under its rank in the job; as `use_collectives=False`.
        use_collectives: False: every rank loads alone.
        broadcast_replicated_tensors: Whether shards that several ranks want are read once and broadcast: True, False,
            or "auto".
        broadcast_groups: Groups for that, by the tuple of their ranks.
        broadcast_batch_bytes: Buffers below this are sent together.
        process_group: The ranks that call; the job's by default.
        timeout_seconds: How long to wait for the slowest rank, in each exchange.
        verify: True: blocks that are read whole are checked. "full": every block that is touched is read whole and
            checked. False: nothing is.
        adapter: Which framework's process group to use; plain numpy, a group of one, by default.
        rules: What is known of the state beyond its values; nothing by default.

    Raises:
        DcpError: The same on every rank. An error that is found before reading leaves the targets as they were; a
            `CorruptError` or `StorageError` after that leaves them undefined, and says so.
    """
    with stage("load"):
        job, failed = _job(adapter, process_group, no_dist, use_collectives, rules)
        try:
            reader = checked_kind(storage_reader, StorageReader, "storage_reader") or _reader()
            chosen = checked_kind(planner, LoadPlanner, "planner") or StandardLoadPlanner()
            check_place(checkpoint_id, storage_reader)
            check_timeout(timeout_seconds)
            check_flags(no_dist=no_dist, use_collectives=use_collectives)
            check_broadcast(broadcast_replicated_tensors, broadcast_groups, broadcast_batch_bytes)
            check_verify(verify)
        except ArgumentError as error:
            failed = failed or error
            reader, chosen, timeout_seconds = (
                FileSystemReader(),
                StandardLoadPlanner(),
                usable_timeout(timeout_seconds, DEADLINE_SECONDS),
            )
            broadcast_batch_bytes = BATCH_BYTES
        options = LoadOptions(
            checkpoint_id, float(timeout_seconds), verify, broadcast_replicated_tensors, broadcast_groups,
            int(broadcast_batch_bytes),
        )  # fmt: skip
        LoadRecipe(job, reader, chosen, options).run(state_dict, failed=failed)


def read(
    checkpoint_id: CheckpointId,
    key: str,
    box: Box | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> npt.NDArray[Any]:
    """Read one tensor, or a region of it, as a numpy array; needs no framework and no group.

    Args:
        checkpoint_id: The checkpoint's directory.
        key: Name of the tensor.
        box: The region, in elements of the global tensor; the whole tensor by default.
        storage_options: What fsspec gets beside a URL.

    Returns:
        A fresh array of the region's shape. Types that numpy lacks come as raw bits (bfloat16 as uint16, float8 as
        uint8).

    Raises:
        NotFoundError: There is no complete checkpoint.
        MissingKeysError: It has no such tensor.
        CorruptError, IncompleteError: It is damaged.
    """
    return read_tensor(checkpoint_id, key, box, storage_options)


def clear_plan_cache() -> None:
    """Forget the plans of this process; the next save of every structure plans anew."""
    PLAN_CACHE.clear()


@dataclass(frozen=True, slots=True)
class _SaveOrder:
    """The arguments of a save, checked; stand-ins for bad ones, of which the other ranks are told."""

    job: Job
    writer: StorageWriter
    planner: SavePlanner
    options: SaveOptions
    failed: BaseException | None

    @classmethod
    def checked(
        cls,
        adapter: Adapter | None,
        process_group: Any,
        checkpoint_id: CheckpointId | None,
        storage_writer: Any,
        planner: Any,
        no_dist: bool,
        use_collectives: bool,
        timeout_seconds: float,
        durable: bool,
        check_replicas: bool,
        rules: StateRules | None,
    ) -> _SaveOrder:
        """Check what both kinds of save take."""
        job, failed = _job(adapter, process_group, no_dist, use_collectives, rules)
        try:
            writer = checked_kind(storage_writer, StorageWriter, "storage_writer") or _writer()
            chosen = checked_kind(planner, SavePlanner, "planner") or StandardSavePlanner()
            check_place(checkpoint_id, storage_writer)
            check_timeout(timeout_seconds)
            check_flags(
                no_dist=no_dist, use_collectives=use_collectives, durable=durable, check_replicas=check_replicas
            )
            check_comparable(check_replicas, alone=no_dist or not use_collectives)
        except ArgumentError as error:
            failed = failed or error
            writer, chosen, timeout_seconds = (
                FileSystemWriter(),
                StandardSavePlanner(),
                usable_timeout(timeout_seconds, DEADLINE_SECONDS),
            )
            durable, check_replicas = True, False
        options = SaveOptions(
            checkpoint_id, float(timeout_seconds), bool(durable), f"hyper-dcp {__version__}", bool(check_replicas)
        )
        return cls(job, writer, chosen, options, failed)


def _writer() -> StorageWriter:
    """The writer of directories, and of the storages that plugins know by their scheme."""
    return FileSystemWriter(open_url=open_storage)


def _reader() -> StorageReader:
    return FileSystemReader(open_url=open_storage)


def _job(
    adapter: Adapter | None, group: Any, no_dist: bool, use_collectives: bool, rules: StateRules | None
) -> tuple[Job, BaseException | None]:
    """Find the group; what goes wrong with it on this rank alone cannot be told to others, and is raised."""
    check_adapter(adapter)
    chosen: Adapter = NumpyAdapter() if adapter is None else adapter
    no_dist, use_collectives = is_flag(no_dist, True), not is_flag(use_collectives, False)
    collectives = use_collectives and not no_dist
    found = chosen.process_group(group, with_channel=collectives)
    if no_dist:
        found = ProcessGroup(found.global_rank, 1, found.global_rank, None, f"no_dist-{found.global_rank}")
    set_rank(found.global_rank)
    adapters, failed = _adapters()
    if chosen.name not in {other.name for other in adapters.adapters}:
        adapters = AdapterSet((chosen, *adapters.adapters), adapters.describers, adapters.declined)
    framework = (chosen.name, chosen.version)
    if rules is not None and not isinstance(rules, StateRules):
        failed = failed or ArgumentError(f"rules must be StateRules, found {rules!r}")
        rules = None
    return Job(adapters, found, framework, collectives, rules or StateRules()), failed


def _adapters() -> tuple[AdapterSet, BaseException | None]:
    """Look for plugins; what this rank has installed may be broken, which the others are told."""
    try:
        activate_codecs()
        return active_adapters(), None
    except Exception as error:
        return AdapterSet(()), error
