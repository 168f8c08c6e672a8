"""The newest checkpoint of a directory, the same on all ranks: one rank looks, and tells the others.

In: the directory. Out: a path for `load`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dcp_core.adapter import Adapter, AdapterSet
from dcp_core.api import DEADLINE_SECONDS
from dcp_core.arguments import check_adapter, check_flags, check_timeout, usable_timeout
from dcp_core.arrays import NumpyAdapter
from dcp_core.errors import ArgumentError
from dcp_core.execution.checkpoint_place import checked_options, is_other_url, local_path, opened_url
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.manager.survey import RootSurvey, survey, warn_of_skipped
from dcp_core.recipes.agreement import Agreement, argument_digests, check_arguments
from dcp_core.recipes.job import Job, attempt
from dcp_core.recipes.places import storage_at
from dcp_core.storage.base import Storage
from dcp_core.storage.urls import inside, redacted


def latest_checkpoint(
    root: CheckpointId,
    *,
    verify: bool = False,
    no_dist: bool = False,
    process_group: Any = None,
    timeout_seconds: float = DEADLINE_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
    adapter: Adapter | None = None,
) -> str | None:
    """Find the newest complete checkpoint in a directory of checkpoints; every rank of the group calls.

    The newest is the one whose name ends with the highest number (``step_100`` comes after ``step_20``). Directories
    that hold no complete checkpoint, or that this user may not read, are passed over, each with a warning that says
    why; `survey_checkpoints` gives the reasons as values. Links are not followed.

    Args:
        root: The directory whose directories are checkpoints, as a path or URL.
        verify: Whether to read all files and compare them with their checksums. Without, their sizes are compared.
        no_dist: This process alone looks.
        process_group: The ranks that call; the job's by default.
        timeout_seconds: How long to wait for the slowest rank.
        storage_options: What fsspec gets beside a URL.
        adapter: Which framework's process group to use; plain numpy, a group of one, by default.

    Returns:
        What `load` takes as `checkpoint_id`; None where there is no complete checkpoint. The same on all ranks.

    Raises:
        NewerVersionError: The newest one was written by a newer version of this library.
        DcpError: The same on every rank.
    """
    return survey_checkpoints(
        root, verify=verify, no_dist=no_dist, process_group=process_group, timeout_seconds=timeout_seconds,
        storage_options=storage_options, adapter=adapter,
    ).path  # fmt: skip


def survey_checkpoints(
    root: CheckpointId,
    *,
    verify: bool = False,
    no_dist: bool = False,
    process_group: Any = None,
    timeout_seconds: float = DEADLINE_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
    adapter: Adapter | None = None,
) -> RootSurvey:
    """Find the newest complete checkpoint as `latest_checkpoint` does, and tell what was passed over.

    Args:
        root: The directory whose directories are checkpoints, as a path or URL.
        verify: Whether to read all files and compare them with their checksums.
        no_dist: This process alone looks.
        process_group: The ranks that call.
        timeout_seconds: How long to wait for the slowest rank.
        storage_options: What fsspec gets beside a URL.
        adapter: Which framework's process group to use; plain numpy, a group of one, by default.

    Returns:
        The checkpoint, and the directories that came before it, with reasons. The same on all ranks.
    """
    check_adapter(adapter)
    chosen = NumpyAdapter() if adapter is None else adapter
    return survey_on_ranks(
        chosen, process_group, timeout_seconds, root, lambda: storage_at(root, storage_options), verify=verify,
        no_dist=no_dist, check=lambda: check_options(root, storage_options),
    )  # fmt: skip


def survey_on_ranks(
    adapter: Adapter,
    process_group: Any,
    timeout_seconds: float,
    root: CheckpointId,
    open_storage_of_root: Callable[[], Storage],
    *,
    verify: bool = False,
    no_dist: bool = False,
    passed_over: Collection[str] = (),
    is_wanted: Callable[[str], bool] = lambda name: True,
    alike: Mapping[str, object] | None = None,
    check: Callable[[], None] = lambda: None,
) -> RootSurvey:
    """Look on the coordinator, and tell all ranks. See `survey` and `survey_checkpoints`.

    Args:
        adapter: As there.
        process_group: As there.
        timeout_seconds: As there.
        root: As there.
        open_storage_of_root: Makes the storage of the directory.
        verify: As there.
        no_dist: As there.
        passed_over: As there.
        is_wanted: As there.
        alike: What else must be the same on all ranks, by name.
        check: Raises what else is wrong on this rank; all ranks are told.
    """
    check_flags(no_dist=no_dist)
    group = adapter.process_group(process_group, with_channel=not no_dist)
    job = Job(AdapterSet(()), group, (adapter.name, adapter.version), use_collectives=not no_dist)
    arguments: dict[str, object] = {
        "root": redacted(str(root)), "verify": verify, "timeout_seconds": timeout_seconds,
        "passed_over": sorted(passed_over), **(alike or {}),
    }  # fmt: skip

    def look(payloads: Sequence[bytes]) -> bytes:
        check_arguments([Agreement.from_bytes(payload) for payload in payloads], arguments)
        found, skipped = survey(
            open_storage_of_root(), verify=verify, passed_over=passed_over, is_wanted=is_wanted
        )  # fmt: skip
        path = None if found is None else place_of(root, found.name)
        return RootSurvey(shown_root(root), found, path, skipped).to_bytes()

    def checked() -> bytes:
        check_timeout(timeout_seconds)
        check()
        return _checked(root, verify, arguments)

    payload, error = attempt(checked)
    exchange = job.exchange(usable_timeout(timeout_seconds, DEADLINE_SECONDS))
    answer = exchange.run("latest", payload or b"", error=error, compute=look, is_last=True)
    found = RootSurvey.from_bytes(answer)
    warn_of_skipped(found.skipped, logging.WARNING if job.is_coordinator else logging.INFO)
    return found


def place_of(root: CheckpointId, name: str) -> str:
    """What names a checkpoint in a directory of checkpoints: its path, or its URL."""
    if is_other_url(root):
        return inside(str(root), name)
    return os.path.join(shown_root(root), name)


def shown_root(root: CheckpointId) -> str:
    """A directory of checkpoints as its path, made absolute, or its URL."""
    return str(root) if is_other_url(root) else os.path.abspath(local_path(root))


def check_options(root: CheckpointId, storage_options: object) -> None:
    """Refuse what are no storage options, and those that nobody would look at.

    Raises:
        ArgumentError: They are none, or `root` is no URL.
    """
    options = checked_options(storage_options)
    if not is_other_url(root):
        opened_url(root, None, options)  # refuses them


def _checked(root: CheckpointId, verify: bool, arguments: dict[str, object]) -> bytes:
    if not isinstance(root, (str, os.PathLike)):
        raise ArgumentError(f"root must be a path or a URL, found {type(root).__name__}")
    if not isinstance(verify, bool):
        raise ArgumentError(f"verify must be True or False, found {verify!r}")
    return Agreement(argument_digests(arguments)).to_bytes()
