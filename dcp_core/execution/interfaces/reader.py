"""A storage reader, and what it is handed: a plan, whom to ask where bytes belong, which load it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dcp_core.errors import StorageError
from dcp_core.execution.interfaces.arguments import CheckpointId, Plan, Verify
from dcp_core.metadata import Metadata, StoredObject
from dcp_core.planning.items import ReadItem
from dcp_core.planning.leaves import TensorAccess
from dcp_core.planning.span_columns import PlannedRegion


@dataclass(frozen=True, slots=True)
class ReadContext:
    """Which load a reader serves.

    Attributes:
        rank: This process in the group.
        world_size: Ranks of the group.
        verify: True: blocks that are read whole are checked; "full": every block that is touched is read whole and
            checked; False: nothing is checked.
    """

    rank: int
    world_size: int
    verify: Verify = True


class PlannedRead(Protocol):
    """What execution needs of a `LoadPlan`."""

    def spans(self) -> Sequence[PlannedRegion]:
        """The regions to read, in the order of reading: file after file, each by byte offset."""
        ...


class ReadTarget(Protocol):
    """What execution needs of a `LoadPlanner`. Called on the thread that loads, in the order of the regions.

    One that has `acquire_batch` and `apply_batch`, as a `LoadPlanner` does, is asked for many regions at once.
    """

    def acquire_tensor(self, item: ReadItem) -> Any:
        """The view that the region goes to, of shape `item.lengths`."""
        ...

    def access(self, item: ReadItem) -> TensorAccess:
        """How to reach the elements of that view."""
        ...

    def apply_tensor(self, item: ReadItem, view: Any, /) -> None:
        """Told that the view has been filled."""
        ...


class StorageReader(ABC):
    """Gets a checkpoint out of storage. One instance serves many loads, one at a time.

    Attributes:
        shares_reads: Whether `execute_read` heeds `LoadPlan.sharing`. Where it is False every rank reads all that it
            wants.
    """

    shares_reads: bool = False

    @abstractmethod
    def initialize_reader(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Point the reader at a checkpoint; None keeps the one that it was made with.

        Raises:
            ArgumentError: There is none, or it cannot be understood.
        """

    @abstractmethod
    def load_metadata(self, rank: int | None = None, header_digest: bytes | None = None) -> Metadata:
        """Open the checkpoint's description, read as far as it is asked.

        Args:
            rank: None for the description of a save of a whole group, else whose own.
            header_digest: What the description's header must have, where the coordinator found it so: xxh3-128 of
                what `encode_metadata` gave, if that gave something.

        Raises:
            NotFoundError: There is no such description.
            CorruptError: It is damaged.
        """

    def options(self) -> str:
        """What must agree between ranks, besides the class of the reader and the checkpoint's id."""
        return ""

    def encode_metadata(self, metadata: Metadata) -> bytes | None:
        """Turn a description that `load_metadata` gave into bytes for the other ranks. Called on the coordinator.

        Returns:
            Bytes that `decode_metadata` understands. None for a description that a `.metadata` file can hold: that is
            what travels then.
        """
        return None

    def decode_metadata(self, raw: bytes) -> Metadata:
        """Undo `encode_metadata`, on the other ranks."""
        raise StorageError(f"{type(self).__name__} has no way to read a description that another rank opened")

    @abstractmethod
    def configure_reader(self, metadata: Metadata, context: ReadContext) -> None:
        """Learn which load comes next."""

    def optimize_local_plan(self, plan: Plan) -> Plan:
        """Adapt this rank's plan to the storage."""
        return plan

    def optimize_global_plan(self, plans: Sequence[Plan]) -> Sequence[Plan]:
        """Adapt all ranks' plans to the storage; called on the coordinator."""
        return plans

    def probe_rate(self, plan: PlannedRead, fraction: float) -> float:
        """Read a little of what a plan reads, to see how fast storage gives it; after `configure_reader`.

        Args:
            plan: What this rank wants.
            fraction: Where: this part of the plan's bytes lies before it, 0 up to 1.

        Returns:
            Bytes a second; 0.0 where that is not known, as it is for a reader that does not override this.
        """
        return 0.0

    def check_files(self, plan: PlannedRead) -> None:
        """See that the files of a plan are there and have their sizes; called before any rank touches a target.

        Raises:
            IncompleteError: A file is missing, or of another size.
        """
        return

    @abstractmethod
    def read_object(self, stored: StoredObject) -> bytes:
        """Read one object's bytes, checked.

        Raises:
            IncompleteError: Its file is missing or short.
            CorruptError: Its bytes contradict their digest.
        """

    @abstractmethod
    def execute_read(
        self,
        plan: PlannedRead,
        planner: ReadTarget,
        broadcast_groups: Mapping[Any, Any] | None = None,
        broadcast_batch_bytes: int = 0,
    ) -> None:
        """Read what the plan says to where the planner says.

        Args:
            plan: All that this rank wants; its `sharing` says what other ranks read of it.
            planner: Says where regions go.
            broadcast_groups: The open groups that shared buffers travel in, by `planning.rank_groups.GroupKey`.
            broadcast_batch_bytes: Buffers below this are sent together.

        Raises:
            IncompleteError: A file is missing or of another size; then no target has been touched.
            CorruptError: Bytes contradict their checksum; targets are undefined from then on.
        """
