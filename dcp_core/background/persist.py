"""The second half of an asynchronous save, where no tensor is: in the background process, or on a thread.

In: a `PersistTask`, the memory that it speaks of, and a way to the other ranks. Out: a committed checkpoint and a
`PersistResult`, or the error that all ranks raise. `Persister` serves the requests of the trainer in its background
process.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from dcp_core.adapter import AdapterSet, ChannelSpec, KeyValueChannel, drain
from dcp_core.background.arena import Buffers
from dcp_core.background.joining import Meeting, join_without_channel
from dcp_core.background.mailbox import Mailbox
from dcp_core.background.staged import StagedSource
from dcp_core.background.task import PersistResult, PersistTask, PlannedPart
from dcp_core.background.writer_spec import WriterSpec
from dcp_core.coordination.exchange import Exchange, forget
from dcp_core.errors import ArgumentError, CoordinationError, SaveCancelledError, decode_error
from dcp_core.execution.interfaces import MailboxFolder, StorageWriter
from dcp_core.formats.metadata_file import EncodedBody
from dcp_core.log import set_rank
from dcp_core.planning.cache import CachedPlan
from dcp_core.planning.local_table import LocalTable, decode_table
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.recipes.committed import committed_metadata
from dcp_core.recipes.job import Descriptions, Job, logger
from dcp_core.recipes.save_back import SaveBack, abort_quietly
from dcp_core.recipes.save_front import Decision, Ticket

_FINISHED_KEPT = 64
_DRAIN_SECONDS = 2.0


class Cancellation:
    """Whether a save is cancelled: possible until it may be committed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._is_too_late = False

    def cancel(self) -> bool:
        """Cancel; whether it was in time."""
        with self._lock:
            self._is_cancelled = not self._is_too_late
            return self._is_cancelled

    def check(self) -> None:
        """Raise if the save is cancelled."""
        if self._is_cancelled:
            raise SaveCancelledError("the save was cancelled; nothing of it is committed")

    def close(self) -> None:
        """From now on it is too late to cancel. Raises if the save is cancelled already."""
        with self._lock:
            self.check()
            self._is_too_late = True


def persist(
    task: PersistTask,
    writer: StorageWriter,
    buffers: Buffers,
    channel: Mailbox | None,
    cancellation: Cancellation,
    handed_in: Callable[[], None] = lambda: None,
) -> PersistResult:
    """Carry out the second half of a save.

    Args:
        task: What to do.
        writer: Where to; initialized, and on the coordinator begun, where the save is agreed.
        buffers: The memory of what was staged.
        channel: How ranks talk, for this save; None for one that is alone.
        cancellation: Stops the save.
        handed_in: Called when the save may be committed from then on, whatever becomes of this process.

    Raises:
        DcpError: The same on all ranks.
    """
    started = time.perf_counter()
    seat = task.seat
    key = task.ticket.save_id if channel is None else channel.key
    job = seat.job(channel, key)
    exchange = job.exchange(seat.timeout_seconds)
    try:
        ticket = task.ticket if task.meeting is None else _agree(task, exchange, writer, key)
        back = SaveBack(job, exchange, writer, seat.options, ticket, _standard_rules(job, task.rules))
        try:
            plan = _carry_out(task, back, buffers, cancellation, handed_in)
        except BaseException as error:
            back.abort(error)
            raise
    finally:
        forget(key, seat.rank)
    seconds = time.perf_counter() - started
    logger.info("save %s is committed, %.3f s after it was handed over", ticket.save_id, seconds)
    return PersistResult(ticket.save_id, None if task.planned is not None else PlannedPart.of(plan), seconds)


def _agree(task: PersistTask, exchange: Exchange, writer: StorageWriter, save_id: str) -> Ticket:
    """Exchange 1, where the trainers could not run it."""
    arguments = {name: _Words(text) for name, text in task.arguments.items()}
    decision = Decision(arguments, writer.begin_checkpoint, None, save_id)
    error = decode_error(task.error) if task.error else None
    return Ticket.from_bytes(exchange.run("save/agree", task.agreement, error=error, compute=decision))


class _Words:
    """A value of which only its `repr` is known."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _carry_out(
    task: PersistTask,
    back: SaveBack,
    buffers: Buffers,
    cancellation: Cancellation,
    handed_in: Callable[[], None],
) -> CachedPlan[EncodedBody]:
    error = decode_error(task.error) if task.error else None
    answer = b""
    if task.planned is None:
        answer = back.plan(task.table, task.nesting, error)
    elif error is not None:
        back.fail(error)
    table = decode_table(task.table)
    staged = task.staged
    if staged is None:
        raise CoordinationError("nothing was staged")
    source = StagedSource(staged, table, buffers, cancellation.check)

    def current() -> CachedPlan[EncodedBody]:
        cancellation.check()
        return back.received(answer, table) if task.planned is None else task.planned.against(table)

    def before_commit() -> None:
        cancellation.close()
        handed_in()

    return back.write_and_commit(current, lambda plan: _plan_of(table, plan), source, before_commit)


def _plan_of(table: LocalTable, plan: CachedPlan[EncodedBody]) -> SavePlan:
    return SavePlan(table, plan.writes)


def _standard_rules(job: Job, rules: tuple[bool, bool]) -> Any:
    """How the standard planner makes the global plan."""
    planner = StandardSavePlanner(True, *rules)
    planner.configure_planner({}, job.planner_context(Descriptions(AdapterSet(()))))
    return planner.build_global_plan


NO_MAILBOX = (
    "the background processes of the ranks agree through files in the checkpoint's directory, and {writer} has none; "
    "pass a checkpoint_id that is a path, or use_gloo=True, or use_collectives=False"
)


def mailbox_folder(writer: StorageWriter, save_id: str) -> MailboxFolder:
    """The folder of a save's mailbox; not made yet.

    Raises:
        ArgumentError: The storage has no place for one.
    """
    folder = writer.open_mailbox(save_id)
    if folder is None:
        raise ArgumentError(NO_MAILBOX.format(writer=type(writer).__name__))
    return folder


@contextmanager
def channel_to_peers(
    board: KeyValueChannel | None,
    writer: StorageWriter,
    task: PersistTask,
    cancellation: Cancellation,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Iterator[Mailbox | None]:
    """The way to the other ranks for one save.

    Args:
        board: What carries the messages; None: files next to the checkpoint's.
        writer: Where the checkpoint is.
        task: The save.
        cancellation: Ends the waits of the coordinator. The others hand an error in instead.
        is_wanted: Whether the trainer still lives: without it a save that is not agreed on has no point.
    """
    seat, save_id = task.seat, task.ticket.save_id
    if not seat.needs_channel:
        yield None
        return
    check = cancellation.check if seat.is_coordinator else None
    if task.meeting is not None:
        mailbox = join_without_channel(
            writer.open_mailbox,
            Meeting(seat.rank, seat.world_size, *task.meeting, is_wanted=is_wanted),
            is_committed=lambda found: is_committed(writer, found),
            timeout_seconds=seat.timeout_seconds,
            check=check,
        )
    else:
        mailbox = Mailbox(
            mailbox_folder(writer, save_id) if board is None else board,
            seat.rank,
            seat.world_size,
            key=save_id,
            is_committed=lambda: is_committed(writer, save_id),
            check=check,
        )
    committed = False
    try:
        yield mailbox
        committed = True
    finally:
        mailbox.close(committed=committed)
        if board is not None:
            drain(board, _DRAIN_SECONDS)


def is_committed(writer: StorageWriter, save_id: str, rank: int | None = None) -> bool:
    """Whether the checkpoint that lies there is that of a save; of a rank that saved alone, whether its own is."""
    try:
        return committed_metadata(writer, save_id, rank).save_id == save_id
    except Exception:
        return False


def begin(writer: StorageWriter, save_id: str, rank: int | None, *, with_mailbox: bool) -> str:
    """Announce a save, and make its mailbox before anybody else knows the save's id; gives the suffix of its files."""
    suffix = writer.begin_checkpoint(save_id, rank)
    if with_mailbox:
        try:
            mailbox_folder(writer, save_id).prepare()
        except BaseException:
            abandon(writer, save_id)
            raise
    return suffix


def abandon(writer: StorageWriter, save_id: str) -> None:
    """Take back what `begin` did."""
    abort_quietly(writer)
    folder = writer.open_mailbox(save_id)
    if folder is not None:
        folder.remove()


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
        self._channels: dict[str, KeyValueChannel] = {}
        self._cancellations: dict[str, Cancellation] = {}
        self._finished: deque[str] = deque(maxlen=_FINISHED_KEPT)
        self._lock = threading.Lock()
        self._trainer = os.getppid()

    def handle(self, what: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Serve one request, on the worker thread.

        Raises:
            DcpError: What went wrong.
        """
        serve = {
            "writer": self._check_writer, "join": self._join, "begin": self._begin, "abandon": self._abandon,
            "persist": self._persist,
        }.get(what)  # fmt: skip
        if serve is None:
            raise CoordinationError(f"the background process does not know the request {what!r}")
        return serve(message)

    def cancel(self, save_id: str) -> bool:
        """Cancel a save, on another thread; whether it was in time."""
        with self._lock:
            if save_id in self._finished:
                return False
            return self._cancellations.setdefault(save_id, Cancellation()).cancel()

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
        writer = _writer_of(message)
        save_id = message["save_id"]
        suffix = begin(writer, save_id, message["rank"], with_mailbox=message["with_mailbox"])
        self._begun[save_id] = writer
        return {"suffix": suffix}

    def _abandon(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        writer = self._begun.pop(message["save_id"], None)
        if writer is not None:
            abandon(writer, message["save_id"])
        return {}

    def _persist(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        task = PersistTask.from_plain(message["task"])
        set_rank(task.seat.global_rank)
        save_id = task.ticket.save_id
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
        with channel_to_peers(board, writer, task, cancellation, self._has_trainer) as mailbox:
            if task.meeting is not None and mailbox is not None:
                self._tell({"named": task.ticket.save_id, "save_id": mailbox.key})
            return persist(task, writer, self._segments, mailbox, cancellation, handed_in)

    def _tell(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the trainer is gone, and its save goes on
            self._notify(message)

    def _has_trainer(self) -> bool:
        return os.getppid() == self._trainer


def _writer_of(message: Mapping[str, Any]) -> StorageWriter:
    writer = WriterSpec.from_plain(message["writer"]).make()
    writer.initialize_writer(None)
    return writer
