"""`CheckpointManager`: saves of a training run into one directory, how many of them stay, and where to go on.

In: steps and states. Out: a directory `step_<number>` for each save, a link `latest`, and old checkpoints gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from dcp_core import api
from dcp_core.adapter import Adapter
from dcp_core.api import DEADLINE_SECONDS
from dcp_core.arguments import check_adapter, check_flags, check_timeout, checked_kind
from dcp_core.arrays import NumpyAdapter
from dcp_core.background.response import AsyncSaveResponse
from dcp_core.errors import ArgumentError, CorruptError, DcpError, IncompleteError, NotFoundError
from dcp_core.execution.checkpoint_place import is_other_url
from dcp_core.execution.filesystem import FileSystemReader, FileSystemWriter
from dcp_core.execution.interfaces import CheckpointId
from dcp_core.manager.latest import check_options, place_of, shown_root, survey_on_ranks
from dcp_core.manager.retention import Retention, after_commit, warn_of_higher_steps
from dcp_core.manager.steps import NoPlace, is_step_name, name_of, step_number
from dcp_core.manager.survey import RootSurvey, step_of
from dcp_core.manager.whole_numbers import whole_number
from dcp_core.metadata import Metadata
from dcp_core.plugins import open_storage
from dcp_core.recipes.places import storage_at
from dcp_core.storage.base import Storage
from dcp_core.storage.urls import redacted

_Manager = TypeVar("_Manager", bound="CheckpointManager")

_OWN_ARGUMENTS = frozenset(("checkpoint_id", "storage_writer", "no_dist", "use_collectives"))
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
        storage_options: What fsspec gets beside a URL.
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
        storage_options: Mapping[str, Any] | None = None,
        adapter: Adapter | None = None,
        calls: Calls | None = None,
    ) -> None:
        check_flags(check_replicas=check_replicas, durable=durable)
        check_timeout(timeout_seconds)
        check_options(root, storage_options)
        check_adapter(adapter)
        checked_kind(calls, Calls, "calls")
        self.root = shown_root(root)
        if is_other_url(self.root):
            storage_at(self.root, storage_options)  # says now what a save would say after many steps
        self._storage_options = storage_options
        self._retention = Retention(keep, keep_every)
        self._every = whole_number("every", every, "1 or more", least=1)
        self._durable = durable
        self._told_of: set[str] = set()
        self._check_replicas = check_replicas
        self._common = {"process_group": process_group, "timeout_seconds": timeout_seconds}
        self._adapter: Adapter = NumpyAdapter() if adapter is None else adapter
        self._calls = calls or Calls(
            partial(api.save, adapter=self._adapter),
            partial(api.async_save, adapter=self._adapter),
            partial(api.load, adapter=self._adapter),
        )

    def should_save(self, step: int) -> bool:
        """Whether a step is a multiple of `every`; step 0 is not.

        Raises:
            ArgumentError: It is no number of a step.
        """
        number = step_number(step)
        return number > 0 and number % self._every == 0

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
        arguments = self._arguments(step, options)
        decides = self._decides()
        metadata = self._calls.save(state_dict, **arguments)
        if decides:
            self._after_commit(name_of(step))
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
        arguments = self._arguments(step, options)
        decides = self._decides()

        def committed() -> None:
            if decides:
                self._after_commit(name_of(step))
            if callback is not None:
                callback()

        is_good = callback is None or callable(callback)
        told: Any = committed if is_good else callback  # a bad one is refused by the save, on all ranks
        return self._calls.async_save(state_dict, callback=told, **arguments)

    def resume(
        self, state_dict: Mapping[Any, Any], *, step: int | None = None, verify: bool = False, **options: Any
    ) -> int | None:
        """Load the newest checkpoint that is whole into a state, or that of a step.

        A newest one that proves to be damaged while it is loaded is passed over, with a warning, and the one before is
        loaded: so on every rank.

        Args:
            state_dict: As for `load`.
            step: Whose checkpoint is loaded, and no other; None: the newest.
            verify: Whether to read all files of a checkpoint and compare checksums before any target is touched.
                A load compares those of what it reads in any case.
            options: What else `load` takes but `verify`.

        Returns:
            The step whose state it is; None where there is no checkpoint, and the state is as it was.

        Raises:
            NotFoundError: There is no whole checkpoint of the step that was asked for.
            DcpError: The same on every rank. Where all checkpoints are damaged, what the newest one's load raised.
        """
        self.wait()
        passed_over: set[str] = set()
        first: DcpError | None = None
        while True:
            found = self._survey(options, step=step, verify=verify, passed_over=passed_over)
            if found.newest is None:
                if step is not None:
                    raise _no_such_step(step, self.root, found)
                if first is not None:
                    raise first
                return None
            name = found.newest.name
            try:
                self._calls.load(state_dict, **self._place_to_load(name) | self._common | options)
            except (CorruptError, IncompleteError, NotFoundError) as error:
                if step is not None:
                    raise
                level = logging.WARNING if self._decides() else logging.INFO
                _LOG.log(
                    level,
                    "%r in %s cannot be loaded, and the checkpoint before it is tried: %s",
                    name,
                    self.root,
                    error,
                )
                passed_over.add(name)
                first = first or error
                continue
            return found.newest.step

    def latest(self) -> str | None:
        """Find the newest complete checkpoint of this manager; every rank calls. What `load` takes, or None."""
        return self._survey({}).path

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
            _LOG.warning("a save into %s failed: %s", redacted(self.root), failure)

    # -- where, and what happens there ----------------------------------------------------------------------------

    def _open_root(self) -> Storage:
        return storage_at(self.root, self._storage_options)

    def _place(self, name: str) -> dict[str, Any]:
        """What tells `save` where a checkpoint goes: into no link, which nobody would look into afterwards."""
        writer = FileSystemWriter(
            open_url=open_storage, storage_options=self._storage_options or None, follows_link=False
        )
        return {"checkpoint_id": place_of(self.root, name), "storage_writer": writer}

    def _place_to_load(self, name: str) -> dict[str, Any]:
        """What tells `load` where a checkpoint is."""
        place: dict[str, Any] = {"checkpoint_id": place_of(self.root, name)}
        if self._storage_options:
            place["storage_reader"] = FileSystemReader(open_url=open_storage, storage_options=self._storage_options)
        return place

    def _arguments(self, step: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """What a save gets. What is wrong here goes to the save, which tells the other ranks."""
        own = {"durable": self._durable, "check_replicas": self._check_replicas}
        try:
            _refuse("save", options, *_OWN_ARGUMENTS)
            place = self._place(name_of(step))
        except ArgumentError as error:
            place = {"checkpoint_id": NoPlace(error)}
            options = {name: value for name, value in options.items() if name not in _OWN_ARGUMENTS}
        return {**place, **self._common, **own, **options}

    def _survey(
        self,
        options: Mapping[str, Any],
        *,
        step: int | None = None,
        verify: bool = False,
        passed_over: Collection[str] = (),
    ) -> RootSurvey:
        """Look for the newest checkpoint, or for that of a step."""

        def check() -> None:
            _refuse("load", options, "checkpoint_id", "no_dist", "use_collectives")
            if step is not None:
                step_number(step)

        kept = self._retention
        alike = {"keep": kept.keep, "every": self._every, "keep_every": kept.keep_every, "step": step}
        return survey_on_ranks(
            self._adapter, self._common["process_group"], self._common["timeout_seconds"], self.root,
            self._open_root, verify=verify, passed_over=passed_over, alike=alike, check=check,
            is_wanted=lambda name: is_step_name(name) and (step is None or step_of(name) == step),
        )  # fmt: skip

    def _decides(self) -> bool:
        """Whether this rank moves the link and removes checkpoints."""
        return self._adapter.process_group(self._common["process_group"], with_channel=False).rank == 0

    def _after_commit(self, name: str) -> None:
        try:
            root = self._open_root()
            after_commit(root, name, self._retention, is_ours=is_step_name, durable=self._durable)
            warn_of_higher_steps(root, name, is_ours=is_step_name, told=self._told_of)
        except Exception:  # a storage of somebody else's; the checkpoint is committed, and training goes on
            _LOG.warning("the checkpoint %r is committed, but what comes after failed", name, exc_info=True)


def _refuse(what: str, options: Mapping[str, Any], *names: str) -> None:
    refused = sorted(set(names) & set(options))
    if refused:
        raise ArgumentError(f"{', '.join(refused)}: a CheckpointManager says itself where and how ranks {what}")


def _no_such_step(step: int, root: str, found: RootSurvey) -> NotFoundError:
    reasons = "".join(f" ({each.reason})" for each in found.skipped)
    return NotFoundError(f"there is no whole checkpoint of step {step} in {redacted(root)!r}{reasons}")
