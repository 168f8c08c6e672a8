"""A storage writer, and what it is handed: a plan, whom to ask for bytes, which save it is, what to commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from dcp_core.errors import StorageError
from dcp_core.execution.interfaces.arguments import CheckpointId, Plan
from dcp_core.execution.interfaces.mailbox_folder import MailboxFolder
from dcp_core.execution.interfaces.write_result import WriteResult
from dcp_core.metadata import Metadata, SaveRecord, WriterRecord
from dcp_core.planning.items import WriteItem
from dcp_core.planning.leaves import DeviceBits
from dcp_core.planning.write_columns import PlannedChunk

if TYPE_CHECKING:
    from dcp_core.formats.metadata_file import EncodedBody


def _go_on() -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class WriteContext:
    """Which save a writer serves.

    Attributes:
        rank: This process in the group; without collectives, the rank whose own checkpoint this is.
        world_size: Ranks of the group.
        is_coordinator: True where the checkpoint is committed from.
        save_id: 32 hex digits.
        suffix: What data files carry between rank and ending: "" or ".<id>".
        use_collectives: False for a checkpoint of this rank alone.
        durable: Whether files reach the disk before the save is complete.
        step: Called by a writer before each of its writes: who waits for a save in the background sees that it goes on.
    """

    rank: int
    world_size: int
    is_coordinator: bool
    save_id: str
    suffix: str
    use_collectives: bool = True
    durable: bool = True
    step: Callable[[], None] = field(default=_go_on, compare=False)


@dataclass(frozen=True, slots=True)
class MetadataDraft:
    """A checkpoint's description, complete but for its files.

    Attributes:
        body: The columns that depend on the plan alone, encoded.
        writer: Who writes.
        save: Which save it is.
    """

    body: EncodedBody
    writer: WriterRecord
    save: SaveRecord


class PlannedWrite(Protocol):
    """What execution needs of a `SavePlan`."""

    def spans(self) -> Sequence[PlannedChunk]:
        """The chunks of this rank's tensor files, part after part from 0 on, each in the order of its bytes."""
        ...

    def objects(self) -> Sequence[WriteItem]:
        """The values of this rank's `.bytes` file, in the order of its index."""
        ...


class WriteSource(Protocol):
    """What execution needs of a `SavePlanner`."""

    def get_data(self, item: WriteItem) -> npt.NDArray[Any] | DeviceBits | bytes:
        """The raw bits of a region (dtype `DType.bits`, shape `item.sizes`, any strides), or an object's bytes.

        Called on the thread that called `execute_write`, and on no other. An array must stay as it is until that
        returns. A source may also have `get_batch(spans)`, which gives the bits of many regions at once.
        """
        ...


class StorageWriter(ABC):
    """Puts a checkpoint into storage. One instance serves many saves, one at a time.

    Order of calls: `initialize_writer`; `begin_checkpoint` on the coordinator; then on all ranks `configure_writer`,
    the two `optimize` methods and `execute_write`; then `finalize_checkpoint` on the coordinator, or
    `abort_checkpoint` on every rank.
    """

    @abstractmethod
    def initialize_writer(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Point the writer at a checkpoint; None keeps the one that it was made with.

        Raises:
            ArgumentError: There is none, or it cannot be understood.
        """

    def begin_checkpoint(self, save_id: str, rank: int | None) -> str:
        """Announce a save, before anything is written. Called on the coordinator, or on a rank that saves alone.

        Args:
            save_id: 32 hex digits.
            rank: None for a save of the whole group, else the rank that saves alone.

        Returns:
            What data files carry between rank and ending.
        """
        return ""

    @abstractmethod
    def configure_writer(self, context: WriteContext) -> None:
        """Learn which save comes next."""

    def optimize_local_plan(self, plan: Plan) -> Plan:
        """Adapt this rank's plan to the storage."""
        return plan

    def optimize_global_plan(self, plans: Sequence[Plan]) -> Sequence[Plan]:
        """Adapt all ranks' plans to the storage; called on the coordinator."""
        return plans

    @abstractmethod
    def execute_write(self, plan: PlannedWrite, planner: WriteSource) -> WriteResult:
        """Write what the plan says; nothing is visible as a checkpoint yet."""

    @abstractmethod
    def finalize_checkpoint(self, metadata: MetadataDraft, results: Sequence[WriteResult]) -> Metadata:
        """Make the checkpoint complete. Called on the coordinator, once every rank has written.

        Args:
            metadata: The description, but for the files.
            results: What the ranks wrote.

        Raises:
            IncompleteError: A file is missing or short.
        """

    def committed_metadata(self, save_id: str, rank: int | None = None) -> Metadata:
        """The description of the save that was just committed, on a rank that did not commit it.

        Args:
            save_id: Which save it was.
            rank: Of a rank that saved alone, its number.

        Raises:
            StorageError: This storage cannot be read from here, or another save has replaced that one.
        """
        raise StorageError(f"{type(self).__name__} cannot read back the metadata of save {save_id}")

    def rebuild_arguments(self) -> Mapping[str, Any] | None:
        """What makes an equal writer in another process, which `async_save` writes from.

        A class that gives some is imported there by its name, and called with them. Its module must import no
        framework. Where there are none, an asynchronous save is written by a thread of the process that called.

        Returns:
            Keyword arguments for the class, plain values, so that the new writer points at the same checkpoint; None
            for a writer that exists in its own process only.
        """
        return None

    def open_mailbox(self, save_id: str) -> MailboxFolder | None:
        """Where the background processes of `async_save` meet to agree on a save; makes nothing yet.

        Args:
            save_id: 32 hex digits, or "join" for the folder where ranks that share nothing else find each other.

        Returns:
            The folder: of the checkpoint that the writer points at, and of this name, the same on all ranks. None for
            a storage that has none; its ranks need another way to talk.
        """
        return None

    def abort_checkpoint(self) -> None:
        """Remove what this rank wrote, as far as that is possible. Never raises."""
        return
