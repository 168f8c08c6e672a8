"""The standard load planner: match, check, intersect, put in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from typing import cast as as_type

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box
from dcp_core.errors import ArgumentError, PlanningError
from dcp_core.file_names import TENSOR_FILE
from dcp_core.metadata import ChunkColumns
from dcp_core.planning.items import ReadItem
from dcp_core.planning.leaves import LocalTensor, TensorAccess
from dcp_core.planning.load_plan import LoadPlan
from dcp_core.planning.matching import MatchRules, match_state, warn_once
from dcp_core.planning.planner_state import PlannerState
from dcp_core.planning.planners import LoadPlanner, PlannerContext
from dcp_core.planning.regions import intersect_chunks
from dcp_core.state_path import PerRank
from dcp_core.state_tree import set_value

CASTS = ("auto", "exact", "any")


class StandardLoadPlanner(PlannerState, LoadPlanner):
    """Fills the target in place from whatever layout was saved.

    Args:
        allow_partial_load: Leave targets alone whose key the checkpoint lacks, instead of raising.
        cast: What dtype changes are converted. "auto": those that lose nothing, and lossy ones among floating types,
            which are reported once. "exact": none. "any": all that the framework can do.
    """

    def __init__(self, allow_partial_load: bool = False, cast: str = "auto") -> None:
        if not isinstance(allow_partial_load, bool):
            raise ArgumentError(f"allow_partial_load must be True or False, found {allow_partial_load!r}")
        if cast not in CASTS:
            raise ArgumentError(f"cast must be one of {', '.join(map(repr, CASTS))}, found {cast!r}")
        super().__init__()
        self.rules = MatchRules(allow_partial_load, cast)
        self._target: Mapping[Any, Any] = {}
        self._plan: LoadPlan | None = None

    def options(self) -> str:
        """What must agree between ranks."""
        return f"partial={self.rules.allow_partial_load} cast={self.rules.cast}"

    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        """Read the target: leaves, boxes, memory."""
        super().configure_planner(state_dict, context)
        self._target = state_dict

    def build_local_plan(self) -> LoadPlan:
        """Match the target with the checkpoint and find the regions that fill it.

        Raises:
            MissingKeysError, ShapeMismatchError, DTypeMismatchError, CoverageError: What does not fit.
        """
        context = self.context
        metadata = context.metadata
        if metadata is None:
            raise PlanningError("the planner was given no metadata; configure it with a context that has it")
        found = match_state(self.state, metadata, context.rank, context.world_size, self.rules)
        warn_once("converted with loss of precision", found.lossy)
        borrowed = "values that differ between ranks, taken from the lowest, as this rank saved none in such a world"
        warn_once(borrowed, found.borrowed)
        files = metadata.source.files
        own_files = (files.rank == context.rank) & (files.kind == TENSOR_FILE)

        def own_file(chunks: ChunkColumns) -> npt.NDArray[np.bool_]:
            return as_type("npt.NDArray[np.bool_]", own_files[chunks.file])

        plan = LoadPlan(found.wanted, found.objects, intersect_chunks(found.wanted, own_file))
        self._plan = plan
        return plan

    def build_global_plan(self, all_plans: Sequence[LoadPlan]) -> Sequence[LoadPlan]:
        """Return the plans as they are."""
        return all_plans

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        """Remember the plan that is carried out."""
        self._plan = plan
        return plan

    def acquire_tensor(self, item: ReadItem) -> Any:
        """The part of the target's memory that a region goes to."""
        tensor, ordinal = self._target_of(item)
        view, box = tensor.views[ordinal], tensor.boxes[ordinal]
        if item.lengths == box.sizes:
            return view
        return tensor.access.narrow(view, Box(item.dest_offsets, item.lengths))

    def access(self, item: ReadItem) -> TensorAccess:
        """How to reach the elements of that part."""
        return self._target_of(item)[0].access

    def apply_tensor(self, item: ReadItem, tensor: Any) -> None:
        """Nothing is left to do: the elements are in the target already."""

    def apply_bytes(self, item: ReadItem, value: bytes) -> None:
        """Decode an object and put it in its place in the target."""
        wanted = self._current_plan().objects_by_name[item.dest_index.fqn]
        leaf = self.state.leaves[wanted.leaf]
        decoded = self.context.codec.decode(value, leaf.name)
        set_value(self._target, leaf.path, PerRank(decoded) if isinstance(leaf.value, PerRank) else decoded)

    def _target_of(self, item: ReadItem) -> tuple[LocalTensor, int]:
        wanted = self._current_plan().wanted_by_index[item.dest_index.fqn, item.dest_index.index or 0]
        tensor = self.state.leaves[wanted.leaf].tensor
        if tensor is None:
            raise PlanningError(f"{wanted.name!r} is no tensor")
        return tensor, wanted.ordinal

    def _current_plan(self) -> LoadPlan:
        if self._plan is None:
            raise PlanningError("there is no plan yet; call build_local_plan first")
        return self._plan
