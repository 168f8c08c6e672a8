"""The newest checkpoint of a directory, and a manager of many: the core's over the MindSpore adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_core.api import DEADLINE_SECONDS
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.manager import latest, manager
from dcp_core.manager.survey import RootSurvey
from dcp_core.plugins import adapter_named
from dcp_mindspore import api


def latest_checkpoint(
    root: CheckpointId,
    *,
    verify: bool = False,
    no_dist: bool = False,
    process_group: Any = None,
    timeout_seconds: float = DEADLINE_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """Find the newest complete checkpoint in a directory of checkpoints; every rank of the group calls.

    The newest is the one whose name ends with the highest number (``step_100`` comes after ``step_20``). Directories
    that hold no complete checkpoint, or that this user may not read, are passed over, each with a warning that says
    why; `survey_checkpoints` gives the reasons as values. Links are not followed.

    Args:
        root: The directory whose directories are checkpoints, as a path or URL.
        verify: Whether to read all files and compare them with their checksums. Without, their sizes are compared.
        no_dist: This process alone looks.
        process_group: The ranks that call, as for `save`.
        timeout_seconds: How long to wait for the slowest rank.
        storage_options: What fsspec gets beside a URL.

    Returns:
        What `load` takes as `checkpoint_id`; None where there is no complete checkpoint. The same on all ranks.

    Raises:
        NewerVersionError: The newest one was written by a newer version of this library.
        DcpError: The same on every rank.
    """
    return survey_checkpoints(
        root, verify=verify, no_dist=no_dist, process_group=process_group, timeout_seconds=timeout_seconds,
        storage_options=storage_options,
    ).path  # fmt: skip


def survey_checkpoints(
    root: CheckpointId,
    *,
    verify: bool = False,
    no_dist: bool = False,
    process_group: Any = None,
    timeout_seconds: float = DEADLINE_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
) -> RootSurvey:
    """Find the newest complete checkpoint as `latest_checkpoint` does, and tell what was passed over.

    Args:
        root: The directory whose directories are checkpoints, as a path or URL.
        verify: Whether to read all files and compare them with their checksums.
        no_dist: This process alone looks.
        process_group: The ranks that call.
        timeout_seconds: How long to wait for the slowest rank.
        storage_options: What fsspec gets beside a URL.

    Returns:
        The checkpoint, and the directories that came before it, with reasons. The same on all ranks.
    """
    return latest.survey_checkpoints(
        root, verify=verify, no_dist=no_dist, process_group=process_group, timeout_seconds=timeout_seconds,
        storage_options=storage_options, adapter=adapter_named("mindspore"),
    )  # fmt: skip


class CheckpointManager(manager.CheckpointManager):
    """The checkpoints of a training run in one directory; every rank makes one, and makes the same calls.

    A save of step 100 goes to ``step_100``. Once it is committed, the link ``latest`` leads to it, and only then older
    checkpoints go. Rank 0 does both; what it cannot do is a warning. It removes nothing but the files of complete
    checkpoints in directories of such names, what killed saves and removals left there, and such directories where
    nothing is left in them.

    As a context manager it waits at the end for the save that is in flight.

    Args:
        root: The directory, as a path or URL; made by the first save.
        keep: How many of the newest checkpoints stay; None: all.
        every: What `should_save` goes by, in steps.
        keep_every: Checkpoints whose step is a multiple of this stay besides.
        check_replicas: As for `save`.
        durable: As for `save`.
        process_group: The ranks that save, as for `save`.
        timeout_seconds: How long to wait for the slowest rank, in each exchange.
        storage_options: What fsspec gets beside a URL.

    Raises:
        ArgumentError: An argument makes no sense.
    """

    def __init__(
        self,
        root: CheckpointId,
        *,
        keep: int | None = None,
        every: int = 1,
        keep_every: int | None = None,
        check_replicas: bool = False,
        durable: bool = True,
        process_group: Any = None,
        timeout_seconds: float = DEADLINE_SECONDS,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            root, keep=keep, every=every, keep_every=keep_every, check_replicas=check_replicas, durable=durable,
            process_group=process_group, timeout_seconds=timeout_seconds, storage_options=storage_options,
            adapter=adapter_named("mindspore"), calls=manager.Calls(api.save, api.async_save, api.load),
        )  # fmt: skip
