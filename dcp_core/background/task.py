"""What the trainer hands over, and what comes back: the second half of a save as plain values.

In: what the first half agreed on, and where the bytes lie. Out: the same on the other side of a socket, by
`formats.objects.encode_value`; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_core.adapter import AdapterSet, KeyValueChannel, ProcessGroup
from dcp_core.background.staged import Staged
from dcp_core.formats.block_container import Block
from dcp_core.formats.metadata_file import EncodedBody
from dcp_core.planning.cache import CachedPlan
from dcp_core.planning.local_table import LocalTable
from dcp_core.planning.write_list import decode_answer, encode_write_list
from dcp_core.recipes.job import Job
from dcp_core.recipes.save_front import SaveOptions, Ticket


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """One rank's part of a global plan, as it travels.

    Attributes:
        plan_digest: Of the global plan.
        writes: The write list, encoded.
        body: The metadata columns, on the coordinator.
        file_nbytes: Bytes of tensors in each file of each rank, on the coordinator.
    """

    plan_digest: bytes
    writes: bytes
    body: EncodedBody | None = None
    file_nbytes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, plan: CachedPlan[EncodedBody]) -> PlannedPart:
        """Flatten a plan."""
        return cls(plan.plan_digest, encode_write_list(plan.writes), plan.body, plan.file_nbytes)

    def against(self, table: LocalTable) -> CachedPlan[EncodedBody]:
        """Undo `of`, for the table that the plan's leaves belong to."""
        return CachedPlan(self.plan_digest, decode_answer(self.writes, table), self.body, self.file_nbytes)

    def to_plain(self) -> dict[str, Any]:
        """As plain values."""
        body = self.body
        columns = None
        if body is not None:
            blocks = [(block.name, block.content, block.digest) for block in body.blocks]
            columns = (blocks, body.tensor_files, body.object_files)
        return {
            "plan_digest": self.plan_digest, "writes": self.writes, "body": columns, "file_nbytes": self.file_nbytes,
        }  # fmt: skip

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> PlannedPart:
        """Undo `to_plain`."""
        body = None
        if fields["body"] is not None:
            blocks, tensor_files, object_files = fields["body"]
            body = EncodedBody(tuple([Block(*block) for block in blocks]), tensor_files, object_files)
        return cls(fields["plan_digest"], fields["writes"], body, fields["file_nbytes"])


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank saves, and how.

    Attributes:
        rank: In the group.
        world_size: Ranks of the group.
        global_rank: In the job.
        use_collectives: False: this rank alone.
        framework: Name and version of the trainer's framework.
        timeout_seconds, durable, library, check_replicas: As in `SaveOptions`.
    """

    rank: int
    world_size: int
    global_rank: int
    use_collectives: bool
    framework: tuple[str, str]
    timeout_seconds: float
    durable: bool
    library: str
    check_replicas: bool = False

    @classmethod
    def of(cls, job: Job, options: SaveOptions) -> Seat:
        """Take what is plain of a job and its options."""
        group = job.group
        return cls(
            group.rank, group.world_size, group.global_rank, job.use_collectives, job.framework,
            options.timeout_seconds, options.durable, options.library, options.check_replicas,
        )  # fmt: skip

    def to_plain(self) -> tuple[Any, ...]:
        """As plain values."""
        return tuple(getattr(self, name) for name in Seat.__slots__)

    @property
    def needs_channel(self) -> bool:
        """Whether ranks have to agree."""
        return self.use_collectives and self.world_size > 1

    @property
    def compares(self) -> bool:
        """Whether ranks compare what they hold before they write: all of it is staged then."""
        return self.check_replicas and self.needs_channel

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0 or not self.use_collectives

    def job(self, channel: KeyValueChannel | None, key: str) -> Job:
        """The job as the second half sees it: no adapter, and a channel of its own."""
        group = ProcessGroup(self.rank, self.world_size, self.global_rank, channel, key)
        return Job(AdapterSet(()), group, self.framework, self.use_collectives)

    @property
    def options(self) -> SaveOptions:
        """The options as the second half sees them."""
        return SaveOptions(
            timeout_seconds=self.timeout_seconds, durable=self.durable, library=self.library,
            check_replicas=self.check_replicas,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class PersistTask:
    """The second half of one save.

    Attributes:
        seat: Which rank saves, and how.
        ticket: What was agreed.
        table: What this rank holds, encoded.
        nesting: The containers, encoded.
        staged: Where the bytes lie; None where they could not be staged.
        planned: This rank's part of the plan, where there is one already.
        rules: `remove_redundancy` and `save_to_minimum_rank` of the standard planner, for a plan still to make.
        error: Why there is nothing to write, as `errors.encode_error` bytes; empty where there is.
        meeting: Name of the group and number of the call, where the ranks have no channel yet: they find each other,
            and run the first exchange, in the background. The id of the ticket is a stand-in then, of this rank alone.
        agreement: What this rank hands into that exchange.
        arguments: What must be the same on all ranks then, in words.
    """

    seat: Seat
    ticket: Ticket
    table: bytes = b""
    nesting: bytes = b""
    staged: Staged | None = None
    planned: PlannedPart | None = None
    rules: tuple[bool, bool] = (True, False)
    error: bytes = b""
    meeting: tuple[str, int] | None = None
    agreement: bytes = b""
    arguments: Mapping[str, str] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "seat": self.seat.to_plain(),
            "ticket": self.ticket.to_bytes(),
            "table": self.table,
            "nesting": self.nesting,
            "staged": None if self.staged is None else self.staged.to_plain(),
            "planned": None if self.planned is None else self.planned.to_plain(),
            "rules": self.rules,
            "error": self.error,
            "meeting": self.meeting,
            "agreement": self.agreement,
            "arguments": dict(self.arguments),
        }

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> PersistTask:
        """Undo `to_plain`."""
        staged, planned = fields["staged"], fields["planned"]
        return cls(
            Seat(*fields["seat"]),
            Ticket.from_bytes(fields["ticket"]),
            fields["table"],
            fields["nesting"],
            None if staged is None else Staged.from_plain(staged),
            None if planned is None else PlannedPart.from_plain(planned),
            fields["rules"],
            fields["error"],
            fields["meeting"],
            fields["agreement"],
            fields["arguments"],
        )


@dataclass(frozen=True, slots=True)
class PersistResult:
    """What became of a save that is committed.

    Attributes:
        save_id: Its id.
        planned: This rank's part of the plan that was made for it; None where it had one already.
        seconds: How long the second half took.
    """

    save_id: str
    planned: PlannedPart | None
    seconds: float

    def to_plain(self) -> dict[str, Any]:
        """As plain values."""
        planned = None if self.planned is None else self.planned.to_plain()
        return {"save_id": self.save_id, "planned": planned, "seconds": self.seconds}

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> PersistResult:
        """Undo `to_plain`."""
        planned = fields["planned"]
        return cls(
            fields["save_id"], None if planned is None else PlannedPart.from_plain(planned), fields["seconds"]
        )  # fmt: skip
