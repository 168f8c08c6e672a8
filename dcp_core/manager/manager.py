"""`CheckpointManager`: saves of a training run into one directory, how many of them stay, and where to go on.

In: steps and states. Out: a directory `step_<number>` for each save, a link `latest`, and old checkpoints gone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from dcp_core import api
from dcp_core.adapter import Adapter
from dcp_core.api import DEADLINE_SECONDS
from dcp_core.arrays import NumpyAdapter
from dcp_core.background.response import AsyncSaveResponse
from dcp_core.errors import ArgumentError, CorruptError, DcpError, IncompleteError, NotFoundError
from dcp_core.execution.filesystem import FileSystemWriter
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.manager.latest import place_of, shown_root, survey_on_ranks
from dcp_core.manager.retention import Retention, after_commit
from dcp_core.manager.survey import step_of
from dcp_core.metadata import Metadata
from dcp_core.plugins import open_storage
from dcp_core.recipes.places import storage_at
from dcp_core.storage.base import Storage

_Manager = TypeVar("_Manager", bound="CheckpointManager")

_PREFIX = "step_"
_OURS = re.compile(rf"{_PREFIX}[0-9]{{1,18}}")
_LARGEST_STEP = 10**18 - 1
_LOG = logging.getLogger("dcp.manager")


@dataclass(frozen=True, slots=True)
class Calls:
    """The functions of a framework's package that a manager calls."""

    save: Callable[..., Metadata]
    async_save: Callable[..., AsyncSaveResponse]
    load: Callable[..., None]


class CheckpointManager:
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
        process_group: The ranks that save; the job's by default.
        timeout_seconds: How long to wait for the slowest rank, in each exchange.
        adapter: Which framework's process group to use; plain numpy, a group of one, by default.
        calls: The functions that save and load; those of `adapter` by default.

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
        adapter: Adapter | None = None,
        calls: Calls | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ArgumentError(f"every must be a whole number of steps, 1 or more, found {every!r}")
        self.root = shown_root(root)
        self._retention = Retention(keep, keep_every)
        self._every = every
        self._durable = durable
        self._check_replicas = check_replicas
        self._common = {"process_group": process_group, "timeout_seconds": timeout_seconds}
        self._adapter: Adapter = NumpyAdapter() if adapter is None else adapter
        self._calls = calls or Calls(
            partial(api.save, adapter=self._adapter),
            partial(api.async_save, adapter=self._adapter),
            partial(api.load, adapter=self._adapter),
        )

    def should_save(self, step: int) -> bool:
        """Whether a step is a multiple of `every`; step 0 is not."""
        return step > 0 and step % self._every == 0

    def save(self, step: int, state_dict: Mapping[Any, Any], **options: Any) -> Metadata:
        """Save the state of a step, then remove what is not kept.

        Args:
            step: Number of the step, 0 or more.
            state_dict: As for `save`.
            options: What else `save` takes.

        Returns:
            The checkpoint's description.

        Raises:
            DcpError: The same on every rank: nothing was removed; or an earlier asynchronous save had failed, and
                nobody had awaited it.
        """
        name = _name_of(step)
        decides = self._decides()
        metadata = self._calls.save(state_dict, **self._arguments(name, options))
        if decides:
            self._after_commit(name)
        return metadata

    def async_save(
        self,
        step: int,
        state_dict: Mapping[Any, Any],
        *,
        callback: Callable[[], object] | None = None,
        **options: Any,
    ) -> AsyncSaveResponse:
        """Save the state of a step in the background; what is not kept goes once it is committed.

        Args:
            step: Number of the step, 0 or more.
            state_dict: As for `async_save`.
            callback: As for `async_save`; called after the link has moved and old checkpoints are gone.
            options: What else `async_save` takes.

        Returns:
            The save that goes on. If it fails and nobody looks, the next call of this manager raises that.

        Raises:
            DcpError: The same on every rank: nothing was begun.
        """
        name = _name_of(step)
        decides = self._decides()

        def committed() -> None:
            if decides:
                self._after_commit(name)
            if callback is not None:
                callback()

        if callback is not None and not callable(callback):
            raise ArgumentError(f"callback must be a function without arguments, found {callback!r}")
        return self._calls.async_save(state_dict, callback=committed, **self._arguments(name, options))

    def resume(self, state_dict: Mapping[Any, Any], *, verify: bool = False, **options: Any) -> int | None:
        """Load the newest checkpoint that is whole into a state.

        One that proves to be damaged while it is loaded is passed over, with a warning, and the one before is loaded:
        so on every rank.

        Args:
            state_dict: As for `load`.
            verify: Whether to read all files of a checkpoint and compare checksums before any target is touched.
                A load compares those of what it reads in any case.
            options: What else `load` takes but `verify`.

        Returns:
            The step whose state it is; None where there is no checkpoint, and the state is as it was.

        Raises:
            DcpError: The same on every rank. Where all checkpoints are damaged, what the newest one's load raised.
        """
        self.wait()
        passed_over: set[str] = set()
        first: DcpError | None = None
        while True:
            found = survey_on_ranks(
                self._adapter, self._common["process_group"], self._common["timeout_seconds"], self.root,
                self._open_root, verify=verify, passed_over=passed_over, is_wanted=_is_ours,
            )  # fmt: skip
            if found.newest is None:
                if first is not None:
                    raise first
                return None
            name = found.newest.name
            try:
                self._calls.load(state_dict, **{"checkpoint_id": place_of(self.root, name)} | self._common | options)
            except (CorruptError, IncompleteError, NotFoundError) as error:
                _LOG.warning("%r cannot be loaded, and the checkpoint before it is tried: %s", name, error)
                passed_over.add(name)
                first = first or error
                continue
            return found.newest.step

    def latest(self) -> str | None:
        """Find the newest complete checkpoint of this manager; every rank calls. What `load` takes, or None."""
        return survey_on_ranks(
            self._adapter, self._common["process_group"], self._common["timeout_seconds"], self.root,
            self._open_root, is_wanted=_is_ours,
        ).path  # fmt: skip

    def wait(self) -> None:
        """Wait for the save of this process that is in flight.

        Raises:
            DcpError: It failed, and nobody has seen that yet.
        """
        api.wait_all()

    def close(self) -> None:
        """Wait for the save that is in flight; the same as `wait`."""
        self.wait()

    def __enter__(self: _Manager) -> _Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
            return
        try:
            self.wait()
        except Exception as failure:  # what ended the block comes first
            _LOG.warning("a save into %s failed: %s", self.root, failure)

    # -- where, and what happens there ----------------------------------------------------------------------------

    def _open_root(self) -> Storage:
        return storage_at(self.root)

    def _place(self, name: str) -> dict[str, Any]:
        """What tells `save` where a checkpoint goes: into no link, which nobody would look into afterwards."""
        writer = FileSystemWriter(open_url=open_storage, follows_link=False)
        return {"checkpoint_id": place_of(self.root, name), "storage_writer": writer}

    def _arguments(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        refused = sorted({"checkpoint_id", "storage_writer", "no_dist", "use_collectives"} & set(options))
        if refused:
            raise ArgumentError(f"{', '.join(refused)}: a CheckpointManager says itself where and how ranks save")
        own = {"durable": self._durable, "check_replicas": self._check_replicas}
        return {**self._place(name), **self._common, **own, **options}

    def _decides(self) -> bool:
        """Whether this rank moves the link and removes checkpoints."""
        return self._adapter.process_group(self._common["process_group"], with_channel=False).rank == 0

    def _after_commit(self, name: str) -> None:
        try:
            root = self._open_root()
            after_commit(root, name, self._retention, is_ours=_is_ours, durable=self._durable)
        except Exception:  # a storage of somebody else's; the checkpoint is committed, and training goes on
            _LOG.warning("the checkpoint %r is committed, but what comes after failed", name, exc_info=True)


def _name_of(step: int) -> str:
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= int(step) <= _LARGEST_STEP:
        raise ArgumentError(f"step must be a whole number from 0 to {_LARGEST_STEP}, found {step!r}")
    return f"{_PREFIX}{int(step)}"


def _is_ours(name: str) -> bool:
    return _OURS.fullmatch(name) is not None and step_of(name) is not None
