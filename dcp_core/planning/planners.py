"""What plans a save or a load: the base classes that users extend.

Order of calls for a save: `configure_planner`, `build_local_plan`, on the coordinator `build_global_plan`,
`finalize_plan`, then `get_data` for each item. For a load: the same four, then `acquire_tensor` and `apply_tensor`
for each region, and `apply_bytes` for each object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from dcp_core.metadata import Metadata
from dcp_core.planning.items import ReadItem, WriteItem
from dcp_core.planning.leaves import DeviceBits, LocalTensor, Place, TensorAccess
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.write_columns import PlannedChunk

if TYPE_CHECKING:
    from dcp_core.planning.load_plan import LoadPlan
    from dcp_core.planning.read_spans import ReadSpan


class ValueCodec(Protocol):
    """Objects to bytes and back."""

    def encode(self, value: Any, path: str) -> bytes:
        """Encode a value exactly."""
        ...

    def decode(self, blob: bytes, name: str) -> Any:
        """Undo `encode`."""
        ...

    def digest(self, value: Any) -> int:
        """Equal for equal values, whatever the order of their dict and set entries; 128 bits."""
        ...

    def needs_pickle(self, value: Any) -> bool:
        """Whether the value has no exact encoding."""
        ...


@dataclass(frozen=True, slots=True)
class PlannerContext:
    """What a planner is told before it plans.

    Attributes:
        describe: Describes a tensor leaf; None for any other value.
        codec: Objects to bytes and back.
        rank: This process in the group.
        world_size: Ranks of the group.
        is_coordinator: True where the global plan is made.
        use_collectives: False where there is no global view: dedup and plan caching are off.
        metadata: The checkpoint's description (load only).
        place: What is known of tensors by their names: takes the names, values and descriptions of all leaves, gives
            the descriptions that count. None: nothing.
    """

    describe: Callable[[Any], LocalTensor | None]
    codec: ValueCodec
    rank: int = 0
    world_size: int = 1
    is_coordinator: bool = True
    use_collectives: bool = True
    metadata: Metadata | None = None
    place: Place | None = None


class SavePlanner(ABC):
    """Decides what each rank writes."""

    @abstractmethod
    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        """Learn the state to save; Stateful objects in it have been replaced by their state."""

    @abstractmethod
    def build_local_plan(self) -> SavePlan:
        """Plan what this rank holds."""

    @abstractmethod
    def build_global_plan(self, all_plans: Sequence[SavePlan]) -> Sequence[SavePlan]:
        """Decide who writes what. Called on the coordinator.

        Args:
            all_plans: The local plan of every rank.

        Returns:
            One plan a rank. What they write makes up the checkpoint.
        """

    @abstractmethod
    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        """Look at this rank's final plan; it must keep its items."""

    @abstractmethod
    def get_data(self, item: WriteItem) -> npt.NDArray[Any] | DeviceBits | bytes:
        """The bits of a region as an array of shape `item.sizes`, or still on a device; or the bytes of an object."""

    def get_batch(self, spans: Sequence[PlannedChunk]) -> Sequence[npt.NDArray[Any] | DeviceBits]:
        """What `get_data` gives for each of some regions; storages ask for a few hundred at a time."""
        return [self.get_data(span.item) for span in spans]  # type: ignore[misc]  # no objects among regions

    def options(self) -> str:
        """What must agree between ranks, and what a cached plan depends on."""
        return ""

    @property
    def enable_plan_caching(self) -> bool:
        """Whether a plan may be reused for the next state of the same structure."""
        return False


class LoadPlanner(ABC):
    """Decides which stored regions go where."""

    @abstractmethod
    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        """Learn the state to fill and, from `context.metadata`, what is stored."""

    @abstractmethod
    def build_local_plan(self) -> LoadPlan:
        """Plan what this rank wants."""

    @abstractmethod
    def build_global_plan(self, all_plans: Sequence[LoadPlan]) -> Sequence[LoadPlan]:
        """Look at all ranks' plans. Called on the coordinator, if a subclass overrides it; one plan a rank."""

    @abstractmethod
    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        """Look at this rank's final plan."""

    @abstractmethod
    def acquire_tensor(self, item: ReadItem) -> Any:
        """The view that a region goes to, of shape `item.lengths`.

        Called on the thread that loads, in the order of reading. Many regions are acquired before the first of them is
        applied: give each memory of its own.
        """

    @abstractmethod
    def access(self, item: ReadItem) -> TensorAccess:
        """How to reach the elements of that view."""

    @abstractmethod
    def apply_tensor(self, item: ReadItem, tensor: Any) -> None:
        """Told that the view has been filled; in the order in which regions were acquired."""

    def acquire_batch(self, spans: Sequence[ReadSpan]) -> Sequence[tuple[Any, TensorAccess]]:
        """For each of many regions its view, and how to reach the elements: `acquire_tensor` and `access`."""
        return [(self.acquire_tensor(span.item), self.access(span.item)) for span in spans]

    def apply_batch(self, spans: Sequence[ReadSpan], views: Sequence[Any]) -> None:
        """Told that the views of many regions have been filled: `apply_tensor`."""
        for span, view in zip(spans, views, strict=True):
            self.apply_tensor(span.item, view)

    @abstractmethod
    def apply_bytes(self, item: ReadItem, value: bytes) -> None:
        """Put an object in its place."""

    def options(self) -> str:
        """What must agree between ranks."""
        return ""
