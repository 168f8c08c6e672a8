"""Save, stage by stage.

state -> leaves -> boxes and buffers -> agree (1) -> [miss: plan tables in, write lists out (2)] -> write -> results
in, commit (3). A stage that fails on one rank hands its error into the next exchange, so that all ranks raise it.
The two halves are `save_front` and `save_back`; here they run one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_core.execution.interfaces import StorageWriter
from dcp_core.formats.metadata_file import EncodedBody
from dcp_core.metadata import Metadata
from dcp_core.planning.cache import CachedPlan
from dcp_core.planning.planners import SavePlanner
from dcp_core.recipes.job import Job, logger
from dcp_core.recipes.save_back import SaveBack, abort_quietly
from dcp_core.recipes.save_front import PLAN_CACHE, SaveFront, SaveOptions

__all__ = ["PLAN_CACHE", "SaveOptions", "SaveRecipe"]


class SaveRecipe:
    """One save, on one rank.

    Args:
        job: Who saves.
        writer: Where to.
        planner: How.
        options: The rest.
    """

    def __init__(self, job: Job, writer: StorageWriter, planner: SavePlanner, options: SaveOptions) -> None:
        self.job = job
        self.writer = writer
        self.planner = planner
        self.options = options
        self.exchange = job.exchange(options.timeout_seconds)
        self._front = SaveFront(job, writer, planner, options)

    @property
    def save_id(self) -> str:
        """The id of the save, once it is agreed."""
        return self._front.ticket.save_id

    def run(self, state: Mapping[Any, Any], *, failed: BaseException | None = None) -> Metadata | None:
        """Save.

        Args:
            state: The state to save.
            failed: What went wrong on this rank before; handed to the other ranks.

        Returns:
            The metadata on the coordinator; None elsewhere.

        Raises:
            DcpError: The same on all ranks; what was written for this save is gone.
        """
        front = self._front
        try:
            front.agree(self.exchange, lambda: front.prepare(state), failed)
        except BaseException:
            abort_quietly(self.writer)
            raise
        back = SaveBack(
            self.job, self.exchange, self.writer, self.options, front.ticket, self.planner.build_global_plan
        )
        try:
            current = self._write_and_commit(back)
        except BaseException as error:
            back.abort(error)
            raise
        front.keep(current)
        return back.committed

    def _write_and_commit(self, back: SaveBack) -> CachedPlan[EncodedBody]:
        front = self._front
        answer = b""
        if front.ticket.plan_digest:
            logger.info("Hit final plan and metadata cache.")
        else:
            answer = back.plan(front.encoded.payload, front.nesting)

        def current() -> CachedPlan[EncodedBody]:
            known = front.known
            return back.received(answer, front.table) if known is None else known

        return back.write_and_commit(
            current,
            lambda plan: self.planner.finalize_plan(front.in_planner_terms(plan.writes)),
            self.planner,
            front.held,
        )
