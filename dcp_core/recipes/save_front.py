"""The first half of a save, on the thread that called: from the state to what all ranks agree on.

In: the state. Out: this rank's local plan, the save's id, and a known plan where one serves. Nothing is copied or
written here. The second half is `save_back`: a synchronous save goes on with it at once, an asynchronous one hands it
to another process.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from dcp_core.coordination.exchange import Exchange
from dcp_core.coordination.frames import pack, unpack
from dcp_core.errors import ArgumentError, PlanningError
from dcp_core.execution.interfaces import CheckpointId, StorageWriter
from dcp_core.formats.metadata_file import EncodedBody
from dcp_core.formats.objects import encode_value
from dcp_core.log import stage
from dcp_core.metadata import UInt64
from dcp_core.planning.cache import CachedPlan, PlanCache
from dcp_core.planning.divergence import agreement_number, coefficients, path_keys
from dcp_core.planning.local_plan import compared_values
from dcp_core.planning.local_table import RAGGED, EncodedTable, LocalTable, encode_table
from dcp_core.planning.planners import SavePlanner, ValueCodec
from dcp_core.planning.plans import Narrowing, SavePlan, everything_held
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.planning.write_list import WriteList
from dcp_core.recipes.agreement import Agreement, Offer, argument_digests, check_arguments, common_plan
from dcp_core.recipes.job import Descriptions, Job, ObjectEncoding, attempt
from dcp_core.state_tree import expand_stateful
from dcp_core.storage.urls import redacted

PLAN_CACHE: PlanCache[EncodedBody] = PlanCache()
"""The plans of this process."""

Begin = Callable[[str, int | None], str]
"""Announces a save, as `StorageWriter.begin_checkpoint` does."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to save.

    Attributes:
        checkpoint_id: Where to; None: where the writer points.
        timeout_seconds: How long to wait for the slowest rank in each exchange.
        durable: Whether data reaches the disk before the save is complete.
        library: Name and version of this library, for the record.
        check_replicas: Whether what counts as copies is compared before it is written.
        mode: How the save is carried out; the same on all ranks, as are the arguments beside it.
    """

    checkpoint_id: CheckpointId | None = None
    timeout_seconds: float = 1800.0
    durable: bool = True
    library: str = "hyper-dcp"
    check_replicas: bool = False
    mode: Mapping[str, object] = field(default_factory=lambda: {"call": "save"})


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the coordinator decided in the first exchange.

    Attributes:
        save_id: 32 hex digits.
        suffix: What data files carry between rank and ending.
        plan_digest: Of the known plan that serves; empty where there is none.
    """

    save_id: str
    suffix: str
    plan_digest: bytes = b""

    def to_bytes(self) -> bytes:
        """Flatten."""
        return pack(self.save_id.encode(), self.suffix.encode(), self.plan_digest)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Ticket:
        """Undo `to_bytes`."""
        save_id, suffix, plan_digest = unpack(raw)
        return cls(save_id.decode(), suffix.decode(), plan_digest)


@dataclass(frozen=True, slots=True)
class Decision:
    """The coordinator's part of the first exchange: compare arguments, look for a common plan, open the save.

    Attributes:
        arguments: The coordinator's own arguments, by name.
        begin: Announces the save.
        rank: The rank that saves alone; None for a save of all.
        save_id: Of the save, where it has one already.
    """

    arguments: Mapping[str, object]
    begin: Begin
    rank: int | None = None
    save_id: str = ""

    def __call__(self, payloads: Sequence[bytes]) -> bytes:
        """Decide.

        Args:
            payloads: `Agreement`s of all ranks.
        """
        agreements = [Agreement.from_bytes(payload) for payload in payloads]
        check_arguments(agreements, self.arguments)
        plan_digest = common_plan(agreements)
        save_id = self.save_id or secrets.token_hex(16)
        return Ticket(save_id, self.begin(save_id, self.rank), plan_digest).to_bytes()


class SaveFront:
    """What one rank brings to a save.

    Args:
        job: Who saves.
        writer: Where to.
        planner: How.
        options: The rest.
        begin: Announces the save; the writer's own way by default.
        codec: What planners are given to encode objects with.
        offers_plans: Whether known plans may serve.

    Attributes:
        plan: This rank's local plan, in the planner's terms.
        table: What of it travels to the coordinator.
        narrowing: How that table maps to the plan's own; None where it is the same.
        encoded: That table as bytes.
        nesting: The state's containers as bytes.
        ticket: What was decided.
    """

    plan: SavePlan
    table: LocalTable
    encoded: EncodedTable
    nesting: bytes
    ticket: Ticket

    def __init__(
        self,
        job: Job,
        writer: StorageWriter,
        planner: SavePlanner,
        options: SaveOptions,
        *,
        begin: Begin | None = None,
        codec: ValueCodec | None = None,
        offers_plans: bool = True,
    ) -> None:
        self.job = job
        self.planner = planner
        self._writer = writer
        self._options = options
        self._begin = writer.begin_checkpoint if begin is None else begin
        self._codec = ObjectEncoding() if codec is None else codec
        self._offers_plans = offers_plans
        self.narrowing: Narrowing | None = None
        self._structure = b""
        self._offered: tuple[CachedPlan[EncodedBody], ...] = ()

    def agree(self, exchange: Exchange, prepare: Callable[[], bytes], failed: BaseException | None = None) -> None:
        """Exchange 1: the arguments, the save's id, and whether a known plan serves.

        Args:
            exchange: Among the ranks that save.
            prepare: Calls the method of that name, and what else may fail on one rank before anything is agreed.
            failed: What went wrong on this rank before; handed to the other ranks.

        Raises:
            DcpError: The same on all ranks.
        """
        payload, error = (None, failed) if failed is not None else attempt(prepare)
        with stage("all_gather_object"):
            answer = exchange.run("save/agree", payload or b"", error=error, compute=self._decide)
        self.ticket = Ticket.from_bytes(answer)

    def _decide(self, payloads: Sequence[bytes]) -> bytes:
        alone = None if self.job.use_collectives else self.job.group.rank
        return Decision(self.arguments, self._begin, alone)(payloads)

    def prepare(self, state: Mapping[Any, Any]) -> bytes:
        """Read the state and make this rank's local plan; gives what it hands into the first exchange."""
        if not isinstance(state, Mapping):
            raise ArgumentError(f"state_dict must be a mapping, found {type(state).__name__}")
        self._writer.initialize_writer(self._options.checkpoint_id)
        descriptions = Descriptions(self.job.adapters)
        opened, _ = expand_stateful(state, descriptions.is_tensor, self.job.state_of)
        self.planner.configure_planner(opened, self.job.planner_context(descriptions, self._codec))
        with stage("build_local_plan"):
            plan = self.planner.build_local_plan()
            if not isinstance(plan, SavePlan):
                raise PlanningError(f"build_local_plan returned {type(plan).__name__}; return a SavePlan")
            plan = self._writer.optimize_local_plan(plan)
        self.plan = plan
        self.table, self.narrowing = plan.held()
        self.encoded = encode_table(self.table)
        self.nesting = encode_value(plan.containers)
        self._structure = self._structure_digest()
        self._offered = PLAN_CACHE.offers(self._structure) if self.may_cache else ()
        offers = tuple(Offer(cached.plan_digest, self._number(cached.writes)) for cached in self._offered)
        return Agreement(argument_digests(self.arguments), offers).to_bytes()

    @cached_property
    def arguments(self) -> dict[str, object]:
        """What must be the same on all ranks."""
        options = self._options
        return {
            "checkpoint_id": None if options.checkpoint_id is None else redacted(str(options.checkpoint_id)),
            "planner": (type(self.planner).__qualname__, self.planner.options()),
            "storage_writer": type(self._writer).__qualname__,
            "timeout_seconds": options.timeout_seconds,
            "durable": options.durable,
            "check_replicas": options.check_replicas,
            **options.mode,
        }

    def _structure_digest(self) -> bytes:
        text = f"{self.arguments['planner']} {self.job.group.rank} of {self.job.world_size} in {self.job.group.key}"
        return xxhash.xxh3_128_digest(self.encoded.structure + self.nesting + text.encode())

    @cached_property
    def plans_by_rule(self) -> bool:
        """Whether the global plan is made by the standard planner's rules, wherever it is made."""
        return type(self.planner).build_global_plan is StandardSavePlanner.build_global_plan

    @cached_property
    def may_cache(self) -> bool:
        """Whether the plan may serve again."""
        return (
            self._offers_plans
            and self.planner.enable_plan_caching
            and self.plans_by_rule
            and self.job.use_collectives
            and type(self._writer).optimize_global_plan is StorageWriter.optimize_global_plan
            and not bool((self.table.flags & RAGGED).any())
        )

    def _number(self, writes: WriteList) -> int:
        """This rank's share in the check that replicated values agree."""
        if not self.table.values.any():
            return 0  # nothing is compared, as on a rank that saves alone
        leaves, values = compared_values(self.table, writes.divergent.tolist())
        factors = coefficients(self._path_keys[leaves], self.job.group.rank)
        factors[np.searchsorted(leaves, writes.lowest)] = writes.lowest_factor
        return agreement_number(values, factors)

    @cached_property
    def _path_keys(self) -> UInt64:
        """A key for each leaf that is compared, 0 for others; the same for all plans that are offered. Shape (L,)."""
        rows, _ = compared_values(self.table, ())
        keys = np.zeros(len(self.table.paths), dtype=np.uint64)
        keys[rows] = path_keys(tuple([self.table.paths[row] for row in rows]))
        return keys

    @cached_property
    def known(self) -> CachedPlan[EncodedBody] | None:
        """The known plan that serves, as agreed; None if there is none."""
        digest = self.ticket.plan_digest
        return next(cached for cached in self._offered if cached.plan_digest == digest) if digest else None

    def held(self) -> SavePlan:
        """Give all that the local plan writes, in the planner's own terms: it gives the bits of each region."""
        return everything_held(self.plan, self.table, self.narrowing)[0]

    def in_planner_terms(self, writes: WriteList) -> SavePlan:
        """The plan of this rank that writes a list; that is in the terms of `table`, the plan in the planner's own."""
        translated = self.narrowing.translate(writes) if self.narrowing is not None else writes
        return self.plan.with_writes(translated)

    def keep(self, plan: CachedPlan[EncodedBody]) -> None:
        """Remember a plan whose checkpoint is committed, where that is allowed."""
        if self.may_cache:
            PLAN_CACHE.keep(self._structure, plan)

    def keeper(self) -> Callable[[CachedPlan[EncodedBody]], None]:
        """What `keep` does, without a reference to the state."""
        structure = self._structure if self.may_cache else None

        def keep(plan: CachedPlan[EncodedBody]) -> None:
            if structure is not None:
                PLAN_CACHE.keep(structure, plan)

        return keep
