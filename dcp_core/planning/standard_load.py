"""The standard load planner: match, check, intersect, put in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any
from typing import cast as as_type

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box
from dcp_core.errors import ArgumentError, PlanningError
from dcp_core.file_names import TENSOR_FILE
from dcp_core.metadata import ChunkColumns
from dcp_core.planning.items import ReadItem
from dcp_core.planning.leaves import TensorAccess
from dcp_core.planning.load_plan import LoadPlan
from dcp_core.planning.matching import MatchRules, match_state, warn_once
from dcp_core.planning.planner_state import PlannerState
from dcp_core.planning.planners import LoadPlanner, PlannerContext
from dcp_core.planning.read_spans import ReadSpan, ReadSpans
from dcp_core.planning.regions import intersect_chunks
from dcp_core.planning.target_overlaps import Neighbourhood, Targets, check_apart
from dcp_core.planning.wanted import WantedBoxes
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
        self._targets: list[tuple[Any, TensorAccess]] = []
        self._rows: dict[tuple[str, int], int] = {}
        self._neighbourhood = Neighbourhood()

    def options(self) -> str:
        """What must agree between ranks."""
        return f"partial={self.rules.allow_partial_load} cast={self.rules.cast}"

    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        """Read the target: leaves, boxes, memory."""
        super().configure_planner(state_dict, context)
        self._target, self._plan = state_dict, None

    def build_local_plan(self) -> LoadPlan:
        """Match the target with the checkpoint and find the regions that fill it.

        Raises:
            MissingKeysError, ShapeMismatchError, DTypeMismatchError, CoverageError: What does not fit.
            UnsupportedValueError: A target that cannot be filled, or two that overlap in memory.
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

        reads = intersect_chunks(found.wanted, own_file)
        self._rows, self._targets = {}, self._targets_of(found.wanted)
        self._neighbourhood = self._checked_neighbourhood(found.wanted)
        self._announce_changes()
        share_memory = self._neighbourhood.other_looks or self._share_memory(found.wanted)
        self._plan = LoadPlan(found.wanted, found.objects, reads, share_memory=share_memory)
        return self._plan

    def build_global_plan(self, all_plans: Sequence[LoadPlan]) -> Sequence[LoadPlan]:
        """Return the plans as they are."""
        return all_plans

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        """Remember the plan that is carried out."""
        self._take(plan)
        return plan

    def acquire_tensor(self, item: ReadItem) -> Any:
        """The part of the target's memory that a region goes to."""
        row = self._box_of(item)
        (view, access), box = self._targets[row], self._current_plan().wanted.boxes[row]
        if item.lengths == box.sizes:
            return view
        return access.narrow(view, Box(item.dest_offsets, item.lengths))

    def access(self, item: ReadItem) -> TensorAccess:
        """How to reach the elements of that part."""
        return self._targets[self._box_of(item)][1]

    def target_of(self, row: int) -> tuple[Any, TensorAccess]:
        """The view of a wanted box of the plan, and how to reach its elements."""
        return self._targets[row]

    @property
    def targets_meet(self) -> bool:
        """Whether the ranges of memory of some targets of the plan meet, or cannot be told."""
        return self._neighbourhood.meet

    def devices(self) -> list[str]:
        """The type of device that each wanted box of the plan lies on."""
        device = ["cpu" if tensor is None else tensor.device for tensor in self.state.tensors]
        return [device[leaf] for leaf in self._current_plan().wanted.leaves]

    @property
    def can_share(self) -> bool:
        """Whether others may fill the targets of this plan: not where a subclass looks at regions or global plans."""
        kind = type(self)
        return not self._is_extended() and all(
            getattr(kind, name) is getattr(StandardLoadPlanner, name)
            for name in ("acquire_batch", "apply_batch", "build_global_plan", "finalize_plan")
        )

    @property
    def fills_in_place(self) -> bool:
        """Whether what is acquired is the target's own memory, which is there anyway."""
        return not self._is_extended() and type(self).acquire_batch is StandardLoadPlanner.acquire_batch

    def acquire_batch(self, spans: Sequence[ReadSpan]) -> Sequence[tuple[Any, TensorAccess]]:
        """The parts of the targets' memory that regions go to, and how to reach their elements."""
        if not isinstance(spans, ReadSpans) or spans.boxes is not self._current_plan().wanted or self._is_extended():
            return super().acquire_batch(spans)
        found = [self._targets[row] for row in spans.wanted.tolist()]
        for row in np.flatnonzero(~spans.fills_box).tolist():
            (view, access), item = found[row], spans[row].item
            found[row] = access.narrow(view, Box(item.dest_offsets, item.lengths)), access
        return found

    def apply_tensor(self, item: ReadItem, tensor: Any) -> None:
        """Nothing is left to do: the elements are in the target already."""

    def apply_batch(self, spans: Sequence[ReadSpan], views: Sequence[Any]) -> None:
        """Told that views have been filled."""
        if self._is_extended():
            super().apply_batch(spans, views)

    def apply_bytes(self, item: ReadItem, value: bytes) -> None:
        """Decode an object and put it in its place in the target."""
        wanted = self._current_plan().objects_by_name[item.dest_index.fqn]
        decoded = self.context.codec.decode(value, wanted.name)
        is_own = isinstance(self.state.values[wanted.leaf], PerRank)
        set_value(self._target, wanted.path, PerRank(decoded) if is_own else decoded)

    def _take(self, plan: LoadPlan) -> None:
        if self._plan is None or plan.wanted is not self._plan.wanted:
            self._rows, self._targets = {}, self._targets_of(plan.wanted)
        self._plan = plan

    def _targets_of(self, boxes: WantedBoxes) -> list[tuple[Any, TensorAccess]]:
        """For each wanted box the target's view, and how to reach its elements."""
        tensors = self.state.tensors
        found = []
        for name, leaf, ordinal in zip(boxes.names, boxes.leaves, boxes.ordinals, strict=True):
            tensor = tensors[leaf]
            if tensor is None:
                raise PlanningError(f"{name!r} is no tensor")
            found.append((tensor.views[ordinal], tensor.access))
        return found

    def _box_of(self, item: ReadItem) -> int:
        """Index of the wanted box that an item fills."""
        if not self._rows:
            boxes = self._current_plan().wanted
            self._rows = {key: row for row, key in enumerate(zip(boxes.names, boxes.ordinals, strict=True))}
        return self._rows[item.dest_index.fqn, item.dest_index.index or 0]

    def _checked_neighbourhood(self, boxes: WantedBoxes) -> Neighbourhood:
        """See that no targets overlap in memory; a subclass that acquires memory of its own knows what lies where."""
        acquires = ("acquire_tensor", "acquire_batch")
        if any(getattr(getattr(self, m), "__func__", None) is not getattr(StandardLoadPlanner, m) for m in acquires):
            return Neighbourhood()
        tensors = self.state.tensors
        storages = [None if (tensor := tensors[leaf]) is None else tensor.storage for leaf in boxes.leaves]
        views, accesses = [view for view, _ in self._targets], [access for _, access in self._targets]
        return check_apart(Targets(boxes.names, boxes.leaves, views, accesses, storages))

    def _announce_changes(self) -> None:
        """Tell frameworks that want to know which views this load will fill."""
        by_access: dict[int, tuple[TensorAccess, list[Any]]] = {}
        for view, access in self._targets:
            by_access.setdefault(id(access), (access, []))[1].append(view)
        for access, views in by_access.values():
            tell: Callable[[Sequence[Any]], None] | None = getattr(access, "will_change", None)
            if tell is not None:
                tell(views)

    def _share_memory(self, boxes: WantedBoxes) -> bool:
        """Whether two leaves that are the same memory are filled from different chunks."""
        tensors = self.state.tensors
        leaves = list(dict.fromkeys(boxes.leaves))
        keys = [None if (tensor := tensors[leaf]) is None else tensor.storage for leaf in leaves]
        if len(set(keys) - {None}) == len(keys) - keys.count(None):
            return False
        filled_from: dict[Hashable, tuple[bytes, bytes, bytes, tuple[Box, ...]]] = {}
        for row, leaf in enumerate(boxes.leaves):
            tensor = tensors[leaf]
            if tensor is not None and tensor.storage is not None and boxes.ordinals[row] == 0:
                chunks = boxes.stored(row).chunks
                inside = b"" if chunks.arrays is None else chunks.arrays.offsets.tobytes() + chunks.offsets.tobytes()
                source = chunks.file.tobytes(), chunks.byte_offset.tobytes(), inside, tensor.boxes
                if filled_from.setdefault(tensor.storage, source) != source:
                    return True
        return False

    def _is_extended(self) -> bool:
        """Whether a subclass wants to be asked about each region."""
        methods = ("acquire_tensor", "access", "apply_tensor")
        return any(getattr(getattr(self, m), "__func__", None) is not getattr(StandardLoadPlanner, m) for m in methods)

    def _current_plan(self) -> LoadPlan:
        if self._plan is None:
            raise PlanningError("there is no plan yet; call build_local_plan first")
        return self._plan
