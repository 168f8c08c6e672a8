"""Who carries out the second half of a save: the background process, or a thread of the trainer.

In: a `PersistTask`. Out: a function that waits for its `PersistResult`. Both run the same `persist.persist`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from typing import Protocol

from dcp_core.adapter import ChannelSpec
from dcp_core.background.arena import Arena
from dcp_core.background.cancellation import Cancellation
from dcp_core.background.peers import abandon, begin, channel_to_peers
from dcp_core.background.persist import persist
from dcp_core.background.process import BackgroundProcess
from dcp_core.background.service import BackgroundService
from dcp_core.background.steps import GRACE_SECONDS, Steps, Watch, answered, mute
from dcp_core.background.task import PersistResult, PersistTask, Seat
from dcp_core.background.writer_spec import WriterSpec
from dcp_core.errors import CoordinationError, CoordinationTimeoutError, DcpError, RankFailedError
from dcp_core.execution.interfaces import StorageWriter
from dcp_core.storage.operations import present_umask
from dcp_core.type_names import type_name

LIGHT = "light"
"""The process that runs the core alone."""

_OURS = "dcp_core."
_SEE_REBUILDING = "; see StorageWriter.rebuild_arguments"
_CANCEL_SECONDS = 10.0
_END_SECONDS = 5.0
_logger = logging.getLogger("dcp.background")
_warned_of: set[str] = set()


class Carrier(Protocol):
    """Carries out the second half of one save."""

    def begin(self, save_id: str, rank: int | None, *, with_mailbox: bool) -> str:
        """Announce the save, as `StorageWriter.begin_checkpoint` does, and make its mailbox."""
        ...

    def expect(self, save_id: str, seat: Seat) -> None:
        """Say that the save is agreed on: should this process end before it hands over, the other ranks are told."""
        ...

    def abandon(self, save_id: str) -> None:
        """Take back what `begin` and `expect` did, for a save that comes to nothing."""
        ...

    def hand_over(self, task: PersistTask) -> Callable[[], PersistResult]:
        """Hand over; what is given waits for the outcome."""
        ...

    def cancel(self, save_id: str) -> bool:
        """Cancel the save; whether it was in time."""
        ...

    @property
    def has_died(self) -> bool:
        """Whether nobody carries on."""
        ...

    @property
    def may_still_act(self) -> bool:
        """Whether one operation of who died may still take effect; asked once `has_died`."""
        ...


class ProcessCarrier:
    """The background process.

    Args:
        process: It.
        arena: Where the trainer stages.
        spec: Makes the writer there.
        channel: How it reaches its peers; None: by a mailbox, or not at all.
        seat: Which rank saves, and how.
    """

    def __init__(
        self,
        process: BackgroundProcess,
        arena: Arena,
        spec: WriterSpec,
        channel: ChannelSpec | None,
        seat: Seat,
    ) -> None:
        self._process = process
        self._arena = arena
        self._spec = spec
        self._seat = seat
        self._channel = None if channel is None else channel.to_plain()

    def begin(self, save_id: str, rank: int | None, *, with_mailbox: bool) -> str:
        """Announce the save; its intent record belongs to the background process, which outlives the trainer."""
        message = {
            "do": "begin", "writer": self._spec.to_plain(), "save_id": save_id, "rank": rank,
            "with_mailbox": with_mailbox, "umask": present_umask(),
        }  # fmt: skip
        suffix: str = answered(self._process, message, f"began save {save_id}", self._seat)["suffix"]
        return suffix

    def expect(self, save_id: str, seat: Seat) -> None:
        """Say that the save is agreed on."""
        self._process.request({
            "do": "expect", "save_id": save_id, "seat": seat.to_plain(), "writer": self._spec.to_plain(),
            "channel": self._channel,
        })  # fmt: skip

    def abandon(self, save_id: str) -> None:
        """Take back what `begin` and `expect` did."""
        answer = self._process.request({"do": "abandon", "save_id": save_id})
        with suppress(DcpError):
            if wait([answer], _CANCEL_SECONDS).done:
                answer.result()

    def hand_over(self, task: PersistTask) -> Callable[[], PersistResult]:
        """Hand over."""
        shared = self._process.share(self._arena)
        message = {
            "do": "persist", "task": task.to_plain(), "writer": self._spec.to_plain(), "channel": self._channel,
            "trainer": os.getpid(), "umask": present_umask(),
        }  # fmt: skip
        answer = self._process.request(message)
        watch = Watch(self._process, task.seat.rank, task.seat.timeout_seconds + GRACE_SECONDS)

        def outcome() -> PersistResult:
            watch.wait(shared)
            return PersistResult.from_plain(watch.wait(answer))

        return outcome

    def cancel(self, save_id: str) -> bool:
        """Cancel the save."""
        try:
            answer = self._process.request({"do": "cancel", "save_id": save_id})
            if not wait([answer], _CANCEL_SECONDS).done:
                raise mute(self._process.pid, f"was asked to cancel save {save_id}", self._seat.rank, _CANCEL_SECONDS)
            return bool(answer.result()["cancelled"])
        except RankFailedError:  # it died: the outcome says so
            return False

    @property
    def has_died(self) -> bool:
        """Whether the process has ended, or was given up."""
        return not self._process.is_alive

    @property
    def may_still_act(self) -> bool:
        """Whether the kernel still holds the process in an operation."""
        return not self._process.has_ended_within(_END_SECONDS)


class ThreadCarrier:
    """The thread of the trainer that waits for the outcome.

    Args:
        writer: Where to.
        arena: Where the trainer stages.
        channel: How it reaches its peers; None: by a mailbox, or not at all.
    """

    def __init__(self, writer: StorageWriter, arena: Arena, channel: ChannelSpec | None) -> None:
        self._writer = writer
        self._arena = arena
        self._channel = None if channel is None else channel.open()
        self._cancellation = Cancellation()

    def begin(self, save_id: str, rank: int | None, *, with_mailbox: bool) -> str:
        """Announce the save."""
        return begin(self._writer, save_id, rank, with_mailbox=with_mailbox)

    def expect(self, save_id: str, seat: Seat) -> None:
        """Nobody is left to tell the others where this process ends: they wait for their deadlines."""

    def abandon(self, save_id: str) -> None:
        """Take back what `begin` did."""
        abandon(self._writer, save_id)

    def hand_over(self, task: PersistTask) -> Callable[[], PersistResult]:
        """Hand over."""
        return lambda: self._carry_out(task)

    def _carry_out(self, task: PersistTask) -> PersistResult:
        cancellation, steps = self._cancellation, Steps()  # nobody asks for them: a thread cannot be ended
        with channel_to_peers(self._channel, self._writer, task, cancellation, steps) as mailbox:
            return persist(task, self._writer, self._arena, mailbox, cancellation, steps)

    def cancel(self, save_id: str) -> bool:
        """Cancel the save."""
        return self._cancellation.cancel()

    @property
    def has_died(self) -> bool:
        """Whether the thread has ended: not while anybody asks."""
        return False

    @property
    def may_still_act(self) -> bool:
        """It never dies."""
        return True


def choose_carrier(
    service: BackgroundService, writer: StorageWriter, channel: ChannelSpec | None, seat: Seat
) -> Carrier:
    """Find who carries out a save.

    Args:
        service: What this process has.
        writer: Where to; initialized.
        channel: How peers reach each other where that is not a mailbox; opened before this returns.
        seat: Which rank saves, and how.

    Raises:
        CoordinationError: The channel cannot be opened.
    """
    spec = WriterSpec.of(writer)
    if spec is None:
        return _on_a_thread(service, writer, channel, f"it gives no rebuild_arguments(){_SEE_REBUILDING}")
    kind = LIGHT if channel is None else channel.module
    try:
        process = service.process(kind)
        if not spec.module.startswith(_OURS):
            answered(process, {"do": "writer", "writer": spec.to_plain()}, "makes the writer", seat)
    except CoordinationTimeoutError:
        raise
    except CoordinationError as error:
        service.dismiss(kind)
        remedy = "" if spec.module.startswith(_OURS) else _SEE_REBUILDING
        return _on_a_thread(service, writer, channel, f"{error}{remedy}")
    if channel is not None:
        answered(process, {"do": "join", "channel": channel.to_plain()}, "joins the other ranks", seat)
    return ProcessCarrier(process, service.arena, spec, channel, seat)


def _on_a_thread(
    service: BackgroundService, writer: StorageWriter, channel: ChannelSpec | None, reason: str
) -> ThreadCarrier:
    name = type_name(writer)
    if name not in _warned_of:
        _warned_of.add(name)
        _logger.warning(
            "there is no background process for %s (%s): asynchronous saves with it are written by a thread of this "
            "process, which slows training down",
            name, reason,
        )  # fmt: skip
    return ThreadCarrier(writer, service.arena, channel)
