"""Serves the requests of the trainer in its background process."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from dcp_core.adapter import ChannelSpec, KeyValueChannel
from dcp_core.background.arena import Buffers
from dcp_core.background.cancellation import Cancellation
from dcp_core.background.peers import abandon, begin, channel_to_peers, mailbox_of
from dcp_core.background.persist import persist
from dcp_core.background.steps import Steps
from dcp_core.background.task import PersistResult, PersistTask, Seat
from dcp_core.background.writer_spec import WriterSpec
from dcp_core.errors import CoordinationError, RankFailedError
from dcp_core.execution.interfaces import StorageWriter
from dcp_core.log import set_rank
from dcp_core.recipes.save_back import abort_quietly

_FINISHED_KEPT = 64


class Persister:
    """Serves the requests of one trainer, in its background process.

    Args:
        segments: The memory that the trainer shares.
        notify: Sends the trainer a message that answers no request.
    """

    def __init__(self, segments: Buffers, notify: Callable[[Mapping[str, Any]], None]) -> None:
        self._segments = segments
        self._notify = notify
        self._begun: dict[str, StorageWriter] = {}
        self._expected: dict[str, Mapping[str, Any]] = {}
        self._channels: dict[str, KeyValueChannel] = {}
        self._cancellations: dict[str, Cancellation] = {}
        self._finished: deque[str] = deque(maxlen=_FINISHED_KEPT)
        self._lock = threading.Lock()
        self._trainer = 0
        self._steps = Steps()

    def handle(self, what: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Serve one request, on the worker thread.

        Raises:
            DcpError: What went wrong.
        """
        serve = {
            "writer": self._check_writer, "join": self._join, "begin": self._begin, "expect": self._expect,
            "abandon": self._abandon, "persist": self._persist,
        }.get(what)  # fmt: skip
        if serve is None:
            raise CoordinationError(f"the background process does not know the request {what!r}")
        umask = message.get("umask")
        if umask is not None:
            os.umask(umask)  # files get the rights that the trainer would give them now, not when this process began
        return serve(message)

    def cancel(self, save_id: str) -> bool:
        """Cancel a save, on another thread; whether it was in time."""
        with self._lock:
            if save_id in self._finished:
                return False
            return self._cancellations.setdefault(save_id, Cancellation()).cancel()

    def progress(self) -> Mapping[str, Any]:
        """How far the present save is, on another thread."""
        return {"count": self._steps.count, "phase": self._steps.phase}

    def leave(self) -> None:
        """The trainer is gone: tell the other ranks of saves that it had agreed on and never handed over."""
        for save_id, message in self._expected.items():
            with suppress(Exception):
                begun, seat = self._begun.get(save_id), Seat(*message["seat"])
                if seat.needs_channel:
                    board = None if message["channel"] is None else self._channel(message["channel"])
                    text = f"the process of rank {seat.rank} ended before it had handed over what it saves"
                    mailbox = mailbox_of(board, begun or _writer_of(message), seat, save_id)
                    mailbox.post_abort(seat.rank, RankFailedError(text))
                    mailbox.close(committed=False)
                if begun is not None and not (seat.needs_channel and mailbox.is_open):
                    abort_quietly(begun)  # else its record stays, by which the next save finds the mailbox

    def _expect(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take note of a save that is agreed on, until it is handed over."""
        self._expected[message["save_id"]] = message
        return {}

    def _check_writer(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        WriterSpec.from_plain(message["writer"]).make()
        return {}

    def _join(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        self._channel(message["channel"])
        return {}

    def _channel(self, fields: Mapping[str, Any]) -> KeyValueChannel:
        name = repr(sorted(fields.items()))
        found = self._channels.get(name)
        if found is None:
            found = self._channels[name] = ChannelSpec(**fields).open()
        return found

    def _begin(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        self._steps.enter("announcing the save")
        writer = _writer_of(message)
        save_id = message["save_id"]
        suffix = begin(writer, save_id, message["rank"], with_mailbox=message["with_mailbox"])
        self._begun[save_id] = writer
        return {"suffix": suffix}

    def _abandon(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        self._expected.pop(message["save_id"], None)
        writer = self._begun.pop(message["save_id"], None)
        if writer is not None:
            abandon(writer, message["save_id"])
        return {}

    def _persist(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        task = PersistTask.from_plain(message["task"])
        self._trainer = message["trainer"]  # it may have gone before this process could see it
        set_rank(task.seat.global_rank)
        save_id = task.ticket.save_id
        self._expected.pop(save_id, None)
        writer = self._begun.pop(save_id, None) or _writer_of(message)
        with self._lock:
            cancellation = self._cancellations.setdefault(save_id, Cancellation())
        try:
            result = self._run(task, writer, message["channel"], cancellation)
        finally:
            with self._lock:
                self._cancellations.pop(save_id, None)
                self._finished.append(save_id)
        return result.to_plain()

    def _run(
        self, task: PersistTask, writer: StorageWriter, channel: Mapping[str, Any] | None, cancellation: Cancellation
    ) -> PersistResult:
        def handed_in() -> None:
            self._tell({"handed_in": task.ticket.save_id})

        board = None if channel is None else self._channel(channel)
        with channel_to_peers(board, writer, task, cancellation, self._steps, self._has_trainer) as mailbox:
            if task.meeting is not None and mailbox is not None:
                self._tell({"named": task.ticket.save_id, "save_id": mailbox.key})
            return persist(task, writer, self._segments, mailbox, cancellation, self._steps, handed_in)

    def _tell(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the trainer is gone, and its save goes on
            self._notify(message)

    def _has_trainer(self) -> bool:
        return os.getppid() == self._trainer


def _writer_of(message: Mapping[str, Any]) -> StorageWriter:
    writer = WriterSpec.from_plain(message["writer"]).make()
    writer.initialize_writer(None)
    return writer
