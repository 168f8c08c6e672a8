"""What happens in the trainer when its save is over: on a thread that waits for that.

In: a save that was handed over. Out: the plan kept, the callback called, the future resolved, in this order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dcp_core.adapter import ChannelSpec, ProcessGroup
from dcp_core.background.carriers import Carrier
from dcp_core.background.service import InFlight
from dcp_core.background.settle import outcome_after_death
from dcp_core.background.task import PersistResult, Seat
from dcp_core.background.writer_spec import WriterSpec
from dcp_core.errors import DcpError, SaveCancelledError
from dcp_core.execution.interfaces import StorageWriter
from dcp_core.formats.metadata_file import EncodedBody
from dcp_core.metadata import Metadata
from dcp_core.planning.cache import CachedPlan
from dcp_core.planning.local_table import LocalTable
from dcp_core.recipes.committed import committed_metadata

_log = logging.getLogger("dcp.background")


@dataclass(slots=True)
class Completion:
    """Waits for the outcome of a save, on a thread of its own: a script that ends waits for it.

    Holds nothing of the state.
    """

    flight: InFlight
    carrier: Carrier
    seat: Seat
    spec: WriterSpec | None
    writer: StorageWriter
    callback: Callable[[], object] | None
    known: CachedPlan[EncodedBody] | None
    table: LocalTable | None
    keep: Callable[[CachedPlan[EncodedBody]], None]
    channel: ChannelSpec | None
    group: ProcessGroup  # held until the end: a store that this process hosts serves the others for as long
    outcome: Callable[[], PersistResult]

    def run(self) -> None:
        """Wait, keep the plan, tell whoever waits."""
        future = self.flight.future
        try:
            metadata = self._conclude()
        except BaseException as error:
            level = logging.INFO if isinstance(error, SaveCancelledError) else logging.ERROR
            _log.log(level, "save %s failed: %s", future.save_id, error)
            future.set_exception(error)
            return
        try:
            if self.callback is not None:
                self.callback()
        except BaseException as error:
            _log.exception("the callback of save %s failed; its checkpoint is committed", future.save_id)
            future.set_exception(error)
        else:
            future.set_result(metadata)

    def _conclude(self) -> Metadata:
        writer = self.writer if self.spec is None else self.spec.make()
        if self.spec is not None:
            writer.initialize_writer(None)
        plan = self.known
        try:
            result = self.outcome()
        except DcpError as error:
            if not self.carrier.has_died:
                raise
            flight = self.flight
            outcome_after_death(
                error, self.seat, flight.save_id, writer, self.channel, may_be_committed=flight.may_be_committed,
                may_still_act=self.carrier.may_still_act,
            )  # fmt: skip
        else:
            self.flight.agreed_id = result.save_id
            if result.planned is not None and self.table is not None:
                plan = result.planned.against(self.table)
        if plan is not None:
            self.keep(plan)
        return committed_metadata(writer, self.flight.save_id, None if self.seat.use_collectives else self.seat.rank)
