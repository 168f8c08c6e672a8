"""The second half of an asynchronous save, where no tensor is: in the background process, or on a thread.

In: a `PersistTask`, the memory that it speaks of, and a way to the other ranks. Out: a committed checkpoint and a
`PersistResult`, or the error that all ranks raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from dcp_core.adapter import AdapterSet
from dcp_core.background.arena import Buffers
from dcp_core.background.cancellation import Cancellation
from dcp_core.background.mailbox import Mailbox
from dcp_core.background.staged import Staged, StagedSource
from dcp_core.background.steps import Steps
from dcp_core.background.task import PersistResult, PersistTask, PlannedPart
from dcp_core.coordination.exchange import Exchange, forget
from dcp_core.errors import CoordinationError, decode_error
from dcp_core.execution.interfaces import StorageWriter
from dcp_core.formats.metadata_file import EncodedBody
from dcp_core.planning.cache import CachedPlan
from dcp_core.planning.local_table import LocalTable, decode_table
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.planning.write_list import WriteList
from dcp_core.recipes.job import Descriptions, Job, logger
from dcp_core.recipes.save_back import SaveBack
from dcp_core.recipes.save_front import Decision, Ticket


def persist(
    task: PersistTask,
    writer: StorageWriter,
    buffers: Buffers,
    channel: Mailbox | None,
    cancellation: Cancellation,
    steps: Steps,
    handed_in: Callable[[], None] = lambda: None,
) -> PersistResult:
    """Carry out the second half of a save.

    Args:
        task: What to do.
        writer: Where to; initialized, and on the coordinator begun, where the save is agreed.
        buffers: The memory of what was staged.
        channel: How ranks talk, for this save; None for one that is alone.
        cancellation: Stops the save.
        steps: Told of everything that is done.
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
        steps.enter("agreeing")
        ticket = task.ticket if task.meeting is None else _agree(task, exchange, writer, key)
        back = SaveBack(job, exchange, writer, seat.options, ticket, _standard_rules(job, task.rules), steps.step)
        try:
            plan = _carry_out(task, back, buffers, cancellation, steps, handed_in)
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
    steps: Steps,
    handed_in: Callable[[], None],
) -> CachedPlan[EncodedBody]:
    error = decode_error(task.error) if task.error else None
    answer = b""
    steps.enter("planning")
    if task.planned is None:
        answer = back.plan(task.table, task.nesting, error)
    elif error is not None:
        back.fail(error)
    table = decode_table(task.table)
    staged = task.staged
    if staged is None:
        raise CoordinationError("nothing was staged")

    def go_on() -> None:
        steps.step()
        cancellation.check()

    source = StagedSource(staged, table, buffers, go_on)

    def current() -> CachedPlan[EncodedBody]:
        steps.enter("writing")
        cancellation.check()
        return back.received(answer, table) if task.planned is None else task.planned.against(table)

    def before_commit() -> None:
        cancellation.close()
        steps.enter("committing")
        handed_in()

    held = partial(_all_staged, table, staged)
    return back.write_and_commit(current, lambda plan: _plan_of(table, plan), source, held, before_commit)


def _all_staged(table: LocalTable, staged: Staged) -> SavePlan:
    return SavePlan(table, WriteList(staged.leaf, staged.ordinal, staged.start, staged.sizes, staged.object_leaf))


def _plan_of(table: LocalTable, plan: CachedPlan[EncodedBody]) -> SavePlan:
    return SavePlan(table, plan.writes)


def _standard_rules(job: Job, rules: tuple[bool, bool]) -> Any:
    """How the standard planner makes the global plan."""
    planner = StandardSavePlanner(True, *rules)
    planner.configure_planner({}, job.planner_context(Descriptions(AdapterSet(()))))
    return planner.build_global_plan
