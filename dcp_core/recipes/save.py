"""Save, stage by stage.

state -> leaves -> boxes and buffers -> agree (1) -> [miss: plan tables in, write lists out (2)] -> write -> results
in, commit (3). A stage that fails on one rank hands its error into the next exchange, so that all ranks raise it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from dcp_core.coordination.frames import pack, unpack
from dcp_core.errors import ArgumentError, DcpError, InDoubtError, PlanningError
from dcp_core.execution.interfaces import CheckpointId, MetadataDraft, StorageWriter, WriteContext, WriteResult
from dcp_core.formats.metadata_file import EncodedBody, MetadataColumns, encode_body
from dcp_core.formats.objects import decode_value, encode_value
from dcp_core.log import stage
from dcp_core.metadata import Metadata, Nesting, SaveRecord, UInt64, WriterRecord
from dcp_core.planning.cache import CachedPlan, PlanCache
from dcp_core.planning.divergence import agreement_number, coefficients, path_keys
from dcp_core.planning.global_plan import GlobalPlan, describe_objects, describe_tensors, number_files
from dcp_core.planning.local_plan import compared_values
from dcp_core.planning.local_table import PICKLED, RAGGED, EncodedTable, LocalTable, encode_table
from dcp_core.planning.planners import SavePlanner
from dcp_core.planning.plans import Narrowing, SavePlan
from dcp_core.planning.standard_save import ReceivedPlans, StandardSavePlanner, settle_plans
from dcp_core.planning.write_list import WriteList, decode_answer
from dcp_core.recipes.agreement import Agreement, Offer, argument_digests, check_arguments, common_plan
from dcp_core.recipes.job import Descriptions, Job, attempt, logger, state_of
from dcp_core.recipes.write_results import check_results, file_nbytes, log_slowest
from dcp_core.state_tree import expand_stateful

PLAN_CACHE: PlanCache[EncodedBody] = PlanCache()
"""The plans of this process."""

_KEYS_SHOWN = 100
_named_keys: set[str] = set()


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to save.

    Attributes:
        checkpoint_id: Where to; None: where the writer points.
        timeout_seconds: How long to wait for the slowest rank in each exchange.
        durable: Whether data reaches the disk before the save is complete.
        library: Name and version of this library, for the record.
    """

    checkpoint_id: CheckpointId | None = None
    timeout_seconds: float = 1800.0
    durable: bool = True
    library: str = "hyper-dcp"


@dataclass(frozen=True, slots=True)
class _Ticket:
    """What the coordinator decided in the first exchange."""

    save_id: str
    suffix: str
    plan_digest: bytes

    def to_bytes(self) -> bytes:
        return pack(self.save_id.encode(), self.suffix.encode(), self.plan_digest)

    @classmethod
    def from_bytes(cls, raw: bytes) -> _Ticket:
        save_id, suffix, plan_digest = unpack(raw)
        return cls(save_id.decode(), suffix.decode(), plan_digest)


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
        self._arguments: dict[str, object]
        self._plan: SavePlan
        self._table: LocalTable
        self._narrowing: Narrowing | None = None
        self._encoded: EncodedTable
        self._nesting = b""
        self._structure = b""
        self._offered: tuple[CachedPlan[EncodedBody], ...] = ()
        self._ticket: _Ticket
        self._global: tuple[GlobalPlan, Nesting] | None = None
        self._current: CachedPlan[EncodedBody]
        self._committed: Metadata | None = None
        self._in_doubt = False

    @property
    def save_id(self) -> str:
        """The id of the save, once it is agreed."""
        return self._ticket.save_id

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
        try:
            self._agree(state, failed)
            self._write_and_commit(self._plan_writes())
        except BaseException as error:
            if not (isinstance(error, InDoubtError) or self._in_doubt):
                self._abort()
            raise
        if self._may_cache():
            PLAN_CACHE.keep(self._structure, self._current)
        return self._committed

    def _abort(self) -> None:
        """Take the save back; the error that stopped it is the one that counts."""
        try:
            self.writer.abort_checkpoint()
        except Exception:
            logger.warning("%s.abort_checkpoint failed", type(self.writer).__name__, exc_info=True)

    def _agree(self, state: Mapping[Any, Any], failed: BaseException | None) -> None:
        """Exchange 1: the arguments, the save's id, and whether a known plan serves."""
        payload, error = (None, failed) if failed is not None else attempt(lambda: self._prepare(state))
        with stage("all_gather_object"):
            answer = self.exchange.run("save/agree", payload or b"", error=error, compute=self._decide)
        self._ticket = _Ticket.from_bytes(answer)

    def _prepare(self, state: Mapping[Any, Any]) -> bytes:
        """Read the state and make this rank's local plan."""
        if not isinstance(state, Mapping):
            raise ArgumentError(f"state_dict must be a mapping, found {type(state).__name__}")
        self._arguments = self._common_arguments()
        self.writer.initialize_writer(self.options.checkpoint_id)
        descriptions = Descriptions(self.job.adapters)
        opened, _ = expand_stateful(state, descriptions.is_tensor, state_of)
        self.planner.configure_planner(opened, self.job.planner_context(descriptions))
        with stage("build_local_plan"):
            plan = self.planner.build_local_plan()
            if not isinstance(plan, SavePlan):
                raise PlanningError(f"build_local_plan returned {type(plan).__name__}; return a SavePlan")
            plan = self.writer.optimize_local_plan(plan)
        self._plan = plan
        self._table, self._narrowing = plan.held()
        self._encoded = encode_table(self._table)
        self._nesting = encode_value(plan.containers)
        self._structure = self._structure_digest()
        self._offered = PLAN_CACHE.offers(self._structure) if self._may_cache() else ()
        offers = tuple(Offer(cached.plan_digest, self._number(cached.writes)) for cached in self._offered)
        return Agreement(argument_digests(self._arguments), offers).to_bytes()

    def _common_arguments(self) -> dict[str, object]:
        """What must be the same on all ranks."""
        options = self.options
        return {
            "checkpoint_id": None if options.checkpoint_id is None else str(options.checkpoint_id),
            "planner": (type(self.planner).__qualname__, self.planner.options()),
            "storage_writer": type(self.writer).__qualname__,
            "timeout_seconds": options.timeout_seconds,
            "durable": options.durable,
        }

    def _structure_digest(self) -> bytes:
        text = f"{self._arguments['planner']} {self.job.group.rank} of {self.job.world_size} in {self.job.group.key}"
        return xxhash.xxh3_128_digest(self._encoded.structure + self._nesting + text.encode())

    def _may_cache(self) -> bool:
        standard = type(self.planner).build_global_plan is StandardSavePlanner.build_global_plan
        return (
            self.planner.enable_plan_caching
            and standard
            and self.job.use_collectives
            and type(self.writer).optimize_global_plan is StorageWriter.optimize_global_plan
            and not bool((self._table.flags & RAGGED).any())
        )

    def _number(self, writes: WriteList) -> int:
        """This rank's share in the check that replicated values agree."""
        if not self._table.values.any():
            return 0  # nothing is compared, as on a rank that saves alone
        leaves, values = compared_values(self._table, writes.divergent.tolist())
        factors = coefficients(self._path_keys[leaves], self.job.group.rank)
        factors[np.searchsorted(leaves, writes.lowest)] = writes.lowest_factor
        return agreement_number(values, factors)

    @cached_property
    def _path_keys(self) -> UInt64:
        """A key for each leaf that is compared, 0 for others; the same for all plans that are offered. Shape (L,)."""
        rows, _ = compared_values(self._table, ())
        keys = np.zeros(len(self._table.paths), dtype=np.uint64)
        keys[rows] = path_keys(tuple([self._table.paths[row] for row in rows]))
        return keys

    def _decide(self, payloads: Sequence[bytes]) -> bytes:
        """On the coordinator: compare arguments, look for a common plan, open the save."""
        agreements = [Agreement.from_bytes(payload) for payload in payloads]
        check_arguments(agreements, self._arguments)
        plan_digest = common_plan(agreements)
        save_id = secrets.token_hex(16)
        rank = None if self.job.use_collectives else self.job.group.rank
        suffix = self.writer.begin_checkpoint(save_id, rank)
        return _Ticket(save_id, suffix, plan_digest).to_bytes()

    def _plan_writes(self) -> bytes:
        """Exchange 2, on a miss: plan tables in, write lists out; nothing on a hit."""
        if self._ticket.plan_digest:
            logger.info("Hit final plan and metadata cache.")
            return b""
        payload = pack(self._encoded.payload, self._nesting)
        with stage("all_gather_object"):
            return self.exchange.run("save/plan", payload, compute=self._plan_globally)

    def _final_plan(self, answer: bytes) -> SavePlan:
        """This rank's part of the known plan, or of the answer."""
        if answer:
            own, nesting_digest = unpack(answer)
            writes = decode_answer(own, self._table)
            self._current = CachedPlan(xxhash.xxh3_128_digest(writes.plan_digest + nesting_digest), writes)
        else:
            digest = self._ticket.plan_digest
            self._current = next(cached for cached in self._offered if cached.plan_digest == digest)
            writes = self._current.writes
        translated = self._narrowing.translate(writes) if self._narrowing is not None else writes
        return self._plan.with_writes(translated)

    def _plan_globally(self, payloads: Sequence[bytes]) -> Sequence[bytes]:
        """On the coordinator: decide who writes what."""
        parts = [unpack(payload) for payload in payloads]
        ranks = range(len(parts)) if self.job.use_collectives else [self.job.group.rank]
        received = ReceivedPlans([table for table, _ in parts], list(ranks))
        with stage("build_global_plan"):
            plans = self.writer.optimize_global_plan(self.planner.build_global_plan(received))
            plan, answers = settle_plans(plans, received, check_coverage=self.job.use_collectives)
        nesting = _join_nesting({nesting for _, nesting in parts})
        self._global = plan, nesting
        _warn_of_divergence(plan)
        nesting_digest = xxhash.xxh3_128_digest(encode_value(nesting.containers))
        return [pack(answer, nesting_digest) for answer in answers]

    def _write_and_commit(self, answer: bytes) -> None:
        """Write this rank's files; exchange 3: results in, commit."""
        payload, error = attempt(lambda: self._write(self._final_plan(answer)).to_bytes())
        self._in_doubt = error is None  # from here on the coordinator may commit, whatever happens to this rank
        with stage("finalize_checkpoint"), self._settling():
            self.exchange.run(
                "save/commit", payload or b"", error=error, compute=self._commit, commit=True,
                in_doubt=f"the checkpoint may be committed, id {self._ticket.save_id}",
            )  # fmt: skip

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """An error that the coordinator announced says that nothing was committed; any other end says nothing."""
        try:
            yield
        except InDoubtError:
            raise
        except DcpError:
            self._in_doubt = False
            raise

    def _write(self, final: SavePlan) -> WriteResult:
        group, ticket = self.job.group, self._ticket
        if self._global is not None:
            self._current = self._with_body(*self._global)
        context = WriteContext(
            group.rank, self.job.world_size, self.job.is_coordinator, ticket.save_id, ticket.suffix,
            self.job.use_collectives, self.options.durable,
        )  # fmt: skip
        self.writer.configure_writer(context)
        plan = self.planner.finalize_plan(final)
        with stage("execute_write"):
            return self.writer.execute_write(plan, self.planner)

    def _with_body(self, plan: GlobalPlan, nesting: Nesting) -> CachedPlan[EncodedBody]:
        """On the coordinator: the metadata columns, while the others write."""
        files = number_files(plan)
        tensors, chunks = describe_tensors(plan, files)
        body = encode_body(MetadataColumns(tensors, chunks, describe_objects(plan, files), nesting))
        return CachedPlan(self._current.plan_digest, self._current.writes, body, file_nbytes(plan))

    def _commit(self, payloads: Sequence[bytes]) -> bytes:
        """On the coordinator: check the results and make the checkpoint complete."""
        results = [WriteResult.from_bytes(payload) for payload in payloads]
        body = self._current.body
        assert body is not None, "the coordinator keeps the metadata of its plans"
        check_results(results, self._current.file_nbytes)
        log_slowest(results)
        rank = None if self.job.use_collectives else self.job.group.rank
        draft = MetadataDraft(
            body,
            WriterRecord(self.options.library, *self.job.framework, self.job.group.world_size),
            SaveRecord(self._ticket.save_id, self._ticket.suffix, rank),
        )
        self._committed = self.writer.finalize_checkpoint(draft, results)
        return b""


def _join_nesting(blobs: set[bytes]) -> Nesting:
    """The containers of all ranks; where kinds differ, the first by name."""
    kinds: dict[bytes, str] = {}
    for blob in sorted(blobs):
        found = decode_value(blob, name="nesting")
        assert isinstance(found, tuple)
        for path, kind in found:
            kinds[path] = min(kind, kinds.get(path, kind))
    return Nesting(tuple(sorted(kinds.items())))


def _warn_of_divergence(plan: GlobalPlan) -> None:
    """Name the keys whose values differ between ranks, and those that need pickle; each key once in a process."""
    held = plan.table.holdings
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for entry in np.flatnonzero(plan.divergence.entry).tolist():
        ranks = tuple(held.rank[held.entry == entry].tolist())
        by_ranks.setdefault(ranks, []).append(plan.table.names[entry])
    for ranks, names in by_ranks.items():
        shown = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
        text = "the values of %s differ between ranks %s: each rank's own is kept, as with PerRank; "
        _warn_once(names, text + "synchronise them or wrap them in PerRank", shown)
    pickled = np.unique(held.entry[(held.flags & PICKLED) != 0])
    text = "the values of %s have no exact encoding and are pickled%s: a load must allow their classes (allow_pickled)"
    compared = ", and compared between ranks by type only" if len(plan.table.ranks) > 1 else ""
    _warn_once([plan.table.names[entry] for entry in pickled.tolist()], text, compared)


def _warn_once(names: Sequence[str], text: str, more: str) -> None:
    """Warn of keys that no warning of this process has named yet."""
    fresh = [name for name in names if name not in _named_keys]
    if fresh:
        _named_keys.update(fresh)
        rest = f" and {len(fresh) - _KEYS_SHOWN} more" if len(fresh) > _KEYS_SHOWN else ""
        logger.warning(text, ", ".join(map(repr, fresh[:_KEYS_SHOWN])) + rest, more)
