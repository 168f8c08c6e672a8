"""`async_save`, stage by stage: agree, stage, hand over, return.

In: a state, on the thread that trains. Out: a save that is agreed among all ranks, staged, and in the hands of the
background process; then, on a thread that waits for it, the outcome.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dcp_core.adapter import ChannelSpec
from dcp_core.background.carriers import Carrier, choose_carrier
from dcp_core.background.completion import Completion
from dcp_core.background.data_copier import StagingEncoding
from dcp_core.background.peers import mailbox_folder
from dcp_core.background.response import AsyncSaveResponse, SaveFuture
from dcp_core.background.service import BackgroundService, InFlight, OnPending, service
from dcp_core.background.staging import stage
from dcp_core.background.task import PersistResult, PersistTask, PlannedPart, Seat
from dcp_core.background.writer_spec import WriterSpec
from dcp_core.coordination.verdict import safe_cause
from dcp_core.errors import ArgumentError, DcpError, RankFailedError, encode_error
from dcp_core.execution.interfaces import StorageWriter
from dcp_core.formats.metadata_file import EncodedBody
from dcp_core.planning.cache import CachedPlan
from dcp_core.planning.local_table import encode_table
from dcp_core.planning.planners import SavePlanner
from dcp_core.planning.plans import everything_held
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.planning.write_list import encode_write_list
from dcp_core.recipes.job import Job, attempt, logger
from dcp_core.recipes.save_back import SaveBack
from dcp_core.recipes.save_front import SaveFront, SaveOptions, Ticket

_log = logging.getLogger("dcp.background")


@dataclass(frozen=True, slots=True)
class AsyncOptions:
    """What an asynchronous save has besides `SaveOptions`.

    Attributes:
        use_gloo: Whether the background processes talk through the adapter's channel.
        callback: Called once in this process when the checkpoint is committed.
        on_pending: What to do while another save is in flight.
    """

    use_gloo: bool = False
    callback: Callable[[], object] | None = None
    on_pending: OnPending = "wait"


class AsyncSaveRecipe:
    """One asynchronous save, on one rank.

    Args:
        job: Who saves.
        writer: Where to.
        planner: How.
        options: The rest.
        how: What is asynchronous about it.
    """

    def __init__(
        self, job: Job, writer: StorageWriter, planner: SavePlanner, options: SaveOptions, how: AsyncOptions
    ) -> None:
        self.job = job
        self.writer = writer
        self.planner = planner
        self.options = options
        self.how = how
        self._seat = Seat.of(job, options)
        self._service: BackgroundService = service()
        self._meeting: tuple[str, int] | None = None
        if self._seat.needs_channel and job.group.channel is None:
            self._meeting = job.group.key, self._service.count_call(job.group.key)
        else:
            self.exchange = job.exchange(options.timeout_seconds)
        self._front = SaveFront(
            job, writer, planner, options, begin=self._begin, codec=StagingEncoding(),
            offers_plans=self._meeting is None,
        )  # fmt: skip
        self._carrier: Carrier | None = None
        self._begun = ""  # the save that the carrier knows of

    def run(self, state: Mapping[Any, Any], *, failed: BaseException | None = None) -> AsyncSaveResponse:
        """Agree, stage, hand over.

        Args:
            state: The state to save.
            failed: What went wrong on this rank before; handed to the other ranks.

        Returns:
            The save that goes on.

        Raises:
            DcpError: The same on all ranks; nothing was begun.
        """
        refused = self._service.take_turn(self.how.on_pending)
        with self._service.lock:
            refused = refused or self._service.take_turn(self.how.on_pending)
            return self._start(state, failed or refused)

    def _start(self, state: Mapping[Any, Any], failed: BaseException | None) -> AsyncSaveResponse:
        front = self._front
        if self._meeting is not None:
            return self._start_without_channel(state, failed, self._meeting)
        try:
            front.agree(self.exchange, lambda: self._prepare(state), failed)
            self._expected()
            known = self._plan_on_this_thread()
        except BaseException:
            if self._begun and self._carrier is not None:
                self._carrier.abandon(self._begun)
            raise
        return self._handed_over(*self._staged(known), known)

    def _handed_over(
        self, task: PersistTask, error: BaseException | None, known: CachedPlan[EncodedBody] | None
    ) -> AsyncSaveResponse:
        response = self._hand_over(task, known)
        if error is not None and not isinstance(error, Exception):
            flight = self._service.latest
            if flight is not None:
                flight.future.mark_seen()
            raise error
        return response

    def _start_without_channel(
        self, state: Mapping[Any, Any], failed: BaseException | None, meeting: tuple[str, int]
    ) -> AsyncSaveResponse:
        """Stage everything, and let the background processes find each other and agree."""
        front = self._front
        self.writer.initialize_writer(self.options.checkpoint_id)
        mailbox_folder(self.writer, "0" * 32)
        self._carrier = choose_carrier(self._service, self.writer, None, self._seat)
        front.ticket = Ticket(secrets.token_hex(16), "")
        payload, error = (None, failed) if failed is not None else attempt(lambda: self._prepare_alone(state))
        if error is None:
            task, error = self._staged(None)
        else:
            task = PersistTask(self._seat, front.ticket, error=encode_error(_as_ours(error)))
        words = {name: repr(value) for name, value in front.arguments.items()}
        task = replace(task, meeting=meeting, agreement=payload or b"", arguments=words)
        return self._handed_over(task, error, None)

    def _prepare_alone(self, state: Mapping[Any, Any]) -> bytes:
        if self.how.use_gloo or not (self._front.plans_by_rule and self._finalizes_by_rule):
            raise ArgumentError(
                "the ranks of this group have no channel on the thread that saves: use_gloo=True, and planners that "
                "override build_global_plan or finalize_plan, need one; initialize the framework's process group"
            )
        return self._front.prepare(state)

    # -- before anything is agreed --------------------------------------------------------------------------------

    def _prepare(self, state: Mapping[Any, Any]) -> bytes:
        payload = self._front.prepare(state)
        if self._needs_mailbox:
            mailbox_folder(self.writer, "0" * 32)
        self._carrier = choose_carrier(self._service, self.writer, self._channel(), self._seat)
        return payload

    @property
    def _needs_mailbox(self) -> bool:
        return self._seat.needs_channel and not self.how.use_gloo

    def _channel(self) -> ChannelSpec | None:
        if not self.how.use_gloo or not self._seat.needs_channel:
            return None
        remote = self.job.group.remote
        if remote is None:
            raise ArgumentError(
                f"use_gloo=True: the adapter of {self.job.framework[0]} has no channel that a background process can "
                "join; save with use_gloo=False, which talks through files in the checkpoint's directory"
            )
        return remote

    def _begin(self, save_id: str, rank: int | None) -> str:
        carrier = self._carrier
        assert carrier is not None, "chosen before ranks agree"
        self._begun = save_id
        return carrier.begin(save_id, rank, with_mailbox=self._needs_mailbox)

    def _expected(self) -> None:
        carrier, self._begun = self._carrier, self._front.ticket.save_id
        assert carrier is not None, "chosen before ranks agree"
        carrier.expect(self._begun, self._seat)

    # -- what will be written -------------------------------------------------------------------------------------

    def _plan_on_this_thread(self) -> CachedPlan[EncodedBody] | None:
        """The plan, where it is known, or where only the planner of this process can make it (exchange 2)."""
        front = self._front
        if front.known is not None:
            logger.info("Hit final plan and metadata cache.")
            return front.known
        if front.plans_by_rule and self._finalizes_by_rule:
            return None
        ticket = Ticket(front.ticket.save_id, front.ticket.suffix)
        back = SaveBack(
            self.job, self.exchange, self.writer, self.options, ticket, self.planner.build_global_plan
        )  # fmt: skip
        return back.received(back.plan(front.encoded.payload, front.nesting), front.table)

    @property
    def _finalizes_by_rule(self) -> bool:
        return type(self.planner).finalize_plan is StandardSavePlanner.finalize_plan

    def _staged(self, known: CachedPlan[EncodedBody] | None) -> tuple[PersistTask, BaseException | None]:
        """What to hand over; where staging fails, that, for the other ranks to hear."""
        seat, front = self._seat, self._front
        try:
            return self._stage_all() if known is None else self._stage_own(known), None
        except BaseException as error:
            part = None if known is None else PlannedPart(known.plan_digest, b"", known.body, known.file_nbytes)
            cause = encode_error(_as_ours(error))
            task = PersistTask(
                seat, front.ticket, front.encoded.payload, front.nesting, planned=part, error=cause
            )  # fmt: skip
            return task, error

    def _stage_all(self) -> PersistTask:
        front, planner = self._front, self.planner
        plan, writes = everything_held(front.plan, front.table, front.narrowing)
        staged = stage(plan, writes, planner, self._service.arena, rank=self._seat.rank)
        rules = planner.rules if isinstance(planner, StandardSavePlanner) else (True, False)
        return PersistTask(
            self._seat, front.ticket, front.encoded.payload, front.nesting, staged=staged, rules=rules
        )  # fmt: skip

    def _stage_own(self, known: CachedPlan[EncodedBody]) -> PersistTask:
        front = self._front
        final = self.planner.finalize_plan(front.in_planner_terms(known.writes)).laid_out()
        whole = front.held() if self._seat.compares else final
        staged = stage(whole, whole.writes, self.planner, self._service.arena, rank=self._seat.rank)
        table = front.encoded if final.table is front.table else encode_table(final.table)
        part = PlannedPart(known.plan_digest, encode_write_list(final.writes), known.body, known.file_nbytes)
        return PersistTask(
            self._seat, front.ticket, table.payload, front.nesting, staged=staged, planned=part
        )  # fmt: skip

    # -- from here on in the background ---------------------------------------------------------------------------

    def _put_in_flight(self, carrier: Carrier, task: PersistTask, flight: InFlight) -> Callable[[], PersistResult]:
        """Hand a save over. What the background process says of it at once must find it in flight already."""
        before, self._service.latest = self._service.latest, flight
        try:
            return carrier.hand_over(task)
        except BaseException as error:
            self._service.latest = before
            flight.future.set_exception(error)  # for a thread that waits for all saves
            raise

    def _hand_over(self, task: PersistTask, known: CachedPlan[EncodedBody] | None) -> AsyncSaveResponse:
        carrier = self._carrier
        assert carrier is not None, "chosen before ranks agree"
        save_id = task.ticket.save_id
        flight = InFlight(SaveFuture(save_id))
        table = getattr(self._front, "table", None)  # where preparing failed there is none, nor a plan to keep
        keep = self._front.keeper() if table is not None else _forget
        waiting = Completion(
            flight, carrier, task.seat, WriterSpec.of(self.writer), self.writer, self.how.callback, known,
            table, keep, self._channel(), self.job.group, self._put_in_flight(carrier, task, flight),
        )  # fmt: skip
        flight.thread = threading.Thread(target=waiting.run, name=f"dcp-save-{save_id[:8]}")
        flight.future.thread = flight.thread
        flight.thread.start()
        return AsyncSaveResponse(flight.future, lambda: carrier.cancel(save_id))


def _forget(plan: CachedPlan[EncodedBody]) -> None:
    """Keep no plan."""


def _as_ours(error: BaseException) -> DcpError:
    if isinstance(error, DcpError):
        return error
    told = safe_cause(error, 0)
    return RankFailedError(f"{told.kind}: {told.message}")
