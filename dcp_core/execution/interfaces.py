"""What moves bytes: the classes that storages extend, and what they are handed.

Goes in: a plan and a planner. A writer asks the planner for bytes and answers with a `WriteResult`; a reader asks it
where bytes belong. Neither decides anything: what to move, and who moves it, stands in the plan.
"""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy.typing as npt

from dcp_core.adapter import KeyValueChannel
from dcp_core.errors import CoordinationError, StorageError
from dcp_core.metadata import Metadata, SaveRecord, StoredObject, WriterRecord
from dcp_core.planning.items import ReadItem, WriteItem
from dcp_core.planning.leaves import DeviceBits, TensorAccess
from dcp_core.planning.span_columns import PlannedRegion
from dcp_core.planning.write_columns import PlannedChunk

if TYPE_CHECKING:
    from dcp_core.formats.metadata_file import EncodedBody

CheckpointId = str | os.PathLike[str]
Verify = bool | Literal["full"]
Plan = TypeVar("Plan")

_RESULT = struct.Struct("<IdQ")
_FILE = struct.Struct("<HBQQII16s")


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


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A data file that was written.

    Attributes:
        rank: Who wrote it.
        part: 0, or the number of a further part.
        kind: `file_names.TENSOR_FILE` or `file_names.OBJECT_FILE`.
        nbytes: Size of the whole file.
        data_start: Where its data section starts.
        field_start: Where its checksum field (`.bytes`: its index) starts.
        field_nbytes: Length of that.
        digest: xxh3-128 of that.
    """

    rank: int
    part: int
    kind: int
    nbytes: int
    data_start: int
    field_start: int
    field_nbytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What one rank wrote.

    Attributes:
        rank: Who.
        files: Its data files; none for a rank that had nothing to write.
        seconds: How long writing took.
        data_nbytes: Bytes of values in them, headers not counted.
    """

    rank: int
    files: tuple[FileRecord, ...]
    seconds: float
    data_nbytes: int

    def to_bytes(self) -> bytes:
        """Flatten to at most 120 bytes for the two usual files."""
        files = []
        for f in self.files:
            digest = f.digest.to_bytes(16, "big")
            files.append(_FILE.pack(f.part, f.kind, f.nbytes, f.data_start, f.field_start, f.field_nbytes, digest))
        return _RESULT.pack(self.rank, self.seconds, self.data_nbytes) + b"".join(files)

    @classmethod
    def from_bytes(cls, raw: bytes) -> WriteResult:
        """Undo `to_bytes`.

        Raises:
            CoordinationError: The bytes are no result.
        """
        if len(raw) < _RESULT.size or (len(raw) - _RESULT.size) % _FILE.size:
            raise CoordinationError(f"{len(raw)} bytes are no result of a write; do all ranks run one version of DCP?")
        rank, seconds, data_nbytes = _RESULT.unpack_from(raw)
        files = tuple(
            FileRecord(rank, part, kind, nbytes, data_start, field_start, field_nbytes, int.from_bytes(digest, "big"))
            for part, kind, nbytes, data_start, field_start, field_nbytes, digest in _FILE.iter_unpack(
                raw[_RESULT.size :]
            )
        )
        return cls(rank, files, seconds, data_nbytes)


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


@runtime_checkable
class MailboxFolder(KeyValueChannel, Protocol):
    """Where the processes of a job leave messages for each other while they save, next to the checkpoint's files.

    A message is named by letters, digits, "." and "-", and is seen whole or not at all; it may be seen late.
    `put` raises FileNotFoundError where the folder is not there.
    """

    def prepare(self) -> None:
        """Make the folder; it may exist."""
        ...

    def names(self, max_age_seconds: float = 0.0) -> frozenset[str] | None:
        """List the messages, from a listing that is not older than this; None when the folder is not there."""
        ...

    def remove(self, *, only_if_empty: bool = False) -> None:
        """Remove the folder with its messages, or only if there are none; a missing one is fine."""
        ...


@runtime_checkable
class KeyedMailboxFolder(MailboxFolder, Protocol):
    """A folder whose listings may be late or costly: what matters is looked for by its name."""

    def is_there(self, max_age_seconds: float = 0.0) -> bool:
        """Return whether the folder is there, as was seen not longer ago than this."""
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
