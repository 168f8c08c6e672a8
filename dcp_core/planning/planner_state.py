"""What the standard planners remember between their calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_core.errors import PlanningError
from dcp_core.planning.local_plan import LocalState, read_state
from dcp_core.planning.planners import PlannerContext


class PlannerState:
    """The context and the leaves of the state that is planned."""

    def __init__(self) -> None:
        self._context: PlannerContext | None = None
        self._state: LocalState | None = None

    @property
    def state(self) -> LocalState:
        """The leaves that are planned, in plan order."""
        if self._state is None:
            raise _unconfigured()
        return self._state

    @property
    def context(self) -> PlannerContext:
        """What the planner was told."""
        if self._context is None:
            raise _unconfigured()
        return self._context

    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        """Read the state: leaves, boxes, memory."""
        self._context = context
        self._state = read_state(state_dict, context.describe, context.place)


def _unconfigured() -> PlanningError:
    return PlanningError("the planner has not been configured; call configure_planner first")
