"""The second half of a save: from what was agreed to a committed checkpoint.

[miss: plan tables in, write lists out (2)] -> write -> results in, commit (3). In: plain values, a writer, and
whoever gives the bytes. Out: `.metadata`, and a plan that may serve again. It runs in the process that called, in
another one, or on a thread: nothing here knows a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import xxhash

from dcp_core.coordination.exchange import Exchange
from dcp_core.coordination.frames import pack, unpack
from dcp_core.errors import DcpError, InDoubtError, doubt_about
from dcp_core.execution.interfaces import MetadataDraft, StorageWriter, WriteContext, WriteResult, WriteSource
from dcp_core.formats.metadata_file import EncodedBody, MetadataColumns, encode_body
from dcp_core.formats.objects import decode_value, encode_value
from dcp_core.log import stage
from dcp_core.metadata import Metadata, Nesting, SaveRecord, WriterRecord
from dcp_core.planning.cache import CachedPlan
from dcp_core.planning.global_plan import GlobalPlan, describe_objects, describe_tensors, number_files
from dcp_core.planning.local_table import LocalTable
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.standard_save import ReceivedPlans, settle_plans
from dcp_core.planning.write_list import decode_answer
from dcp_core.recipes.divergence_warnings import warn_of_divergence
from dcp_core.recipes.job import Job, attempt, logger
from dcp_core.recipes.replica_check import FIRST_STAGE, ReplicaCheck
from dcp_core.recipes.save_front import SaveOptions, Ticket
from dcp_core.recipes.write_results import check_results, file_nbytes, log_slowest

BuildGlobalPlan = Callable[[Sequence[SavePlan]], Sequence[SavePlan]]
"""Decides who writes what, as `SavePlanner.build_global_plan` does."""

FinalPlan = Callable[[CachedPlan[EncodedBody]], SavePlan]
"""This rank's own plan, from its part of the global plan."""


class SaveBack:
    """The rest of one save, on one rank.

    Args:
        job: Who saves.
        exchange: Among the ranks that save.
        writer: Where to; the coordinator's has begun the checkpoint.
        options: How.
        ticket: What was agreed.
        build_global_plan: Decides who writes what; used on the coordinator, where no known plan serves.
        step: Told to the writer; see `WriteContext`.

    Attributes:
        in_doubt: Whether the save may be committed, whatever happens to this rank. Nothing may be taken back then.
    """

    def __init__(
        self,
        job: Job,
        exchange: Exchange,
        writer: StorageWriter,
        options: SaveOptions,
        ticket: Ticket,
        build_global_plan: BuildGlobalPlan,
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self.in_doubt = False
        self._step = step
        self._job = job
        self._exchange = exchange
        self._writer = writer
        self._options = options
        self._ticket = ticket
        self._build_global_plan = build_global_plan
        self._global: tuple[GlobalPlan, Nesting] | None = None
        self._committed: Metadata | None = None

    def plan(self, table: bytes, nesting: bytes, error: BaseException | None = None) -> bytes:
        """Exchange 2: plan tables in, write lists out.

        Args:
            table: This rank's table, encoded.
            nesting: Its containers, encoded.
            error: What went wrong on this rank since the agreement; handed in instead.

        Returns:
            What `received` reads.
        """
        payload = pack(table, nesting)
        with stage("all_gather_object"):
            return self._exchange.run("save/plan", payload, error=error, compute=self._plan_globally)

    def received(self, answer: bytes, table: LocalTable) -> CachedPlan[EncodedBody]:
        """Read the answer of exchange 2; the coordinator's gets the metadata columns.

        Args:
            answer: From `plan`.
            table: What was handed in.
        """
        own, nesting_digest = unpack(answer)
        writes = decode_answer(own, table)
        digest = xxhash.xxh3_128_digest(writes.plan_digest + nesting_digest)
        current: CachedPlan[EncodedBody] = CachedPlan(digest, writes)
        return current if self._global is None else _with_body(current, *self._global)

    def write_and_commit(
        self,
        current: Callable[[], CachedPlan[EncodedBody]],
        final_plan: FinalPlan,
        source: WriteSource,
        held: Callable[[], SavePlan],
        before_commit: Callable[[], None] = lambda: None,
    ) -> CachedPlan[EncodedBody]:
        """Compare replicas, where that is wanted; write this rank's files; exchange 3: results in, commit.

        Args:
            current: Gives this rank's part of the global plan.
            final_plan: Makes the plan to write of it.
            source: Gives the bytes.
            held: Gives all that this rank holds, in terms that `source` knows.
            before_commit: Called when this rank has written and the save may be committed from then on: on the
                coordinator once all have written. What it raises fails the save on all ranks.

        Returns:
            What `current` gave.
        """
        plans: list[CachedPlan[EncodedBody]] = []
        final: list[SavePlan] = []

        def prepare() -> None:
            plans.append(current())
            final.append(final_plan(plans[0]))

        if self._compares:
            ReplicaCheck(self._exchange, self._job.group.rank, source).run(prepare, held)

        def write() -> bytes:
            if not final:
                prepare()
            result = self._write(final[0], source).to_bytes()
            if not self._job.is_coordinator:
                before_commit()
            return result

        def commit(payloads: Sequence[bytes]) -> bytes:
            before_commit()
            return self._commit(plans[0], payloads)

        payload, error = attempt(write)
        self.in_doubt = error is None  # from here on the coordinator may commit, whatever happens to this rank
        with stage("finalize_checkpoint"), self._settling():
            self._exchange.run(
                "save/commit", payload or b"", error=error,
                compute=commit, commit=True,
                in_doubt=doubt_about(self._ticket.save_id),
            )  # fmt: skip
        return plans[0]

    def fail(self, error: BaseException) -> None:
        """Hand an error into the next exchange, in the place of a result; raises what all ranks raise."""
        name = FIRST_STAGE if self._compares else "save/commit"
        self._exchange.run(name, b"", error=error, commit=not self._compares)

    @property
    def _compares(self) -> bool:
        """Whether replicas are compared before this save writes."""
        return self._options.check_replicas and self._job.world_size > 1

    @property
    def committed(self) -> Metadata | None:
        """The description, on the coordinator, once it is committed."""
        return self._committed

    def abort(self, error: BaseException) -> None:
        """Take the save back, unless it may be committed; the error that stopped it is the one that counts."""
        if self.in_doubt or isinstance(error, InDoubtError):
            return
        abort_quietly(self._writer)

    def _plan_globally(self, payloads: Sequence[bytes]) -> Sequence[bytes]:
        """On the coordinator: decide who writes what."""
        job = self._job
        parts = [unpack(payload) for payload in payloads]
        ranks = range(len(parts)) if job.use_collectives else [job.group.rank]
        received = ReceivedPlans([table for table, _ in parts], list(ranks))
        with stage("build_global_plan"):
            plans = self._writer.optimize_global_plan(self._build_global_plan(received))
            plan, answers = settle_plans(plans, received, check_coverage=job.use_collectives)
        nesting = _join_nesting({nesting for _, nesting in parts})
        self._global = plan, nesting
        warn_of_divergence(plan, tensors=not self._compares)
        nesting_digest = xxhash.xxh3_128_digest(encode_value(nesting.containers))
        return [pack(answer, nesting_digest) for answer in answers]

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """An error that the coordinator announced says that nothing was committed; any other end says nothing."""
        try:
            yield
        except InDoubtError:
            raise
        except DcpError:
            self.in_doubt = False
            raise

    def _write(self, plan: SavePlan, source: WriteSource) -> WriteResult:
        group, ticket = self._job.group, self._ticket
        context = WriteContext(
            group.rank, self._job.world_size, self._job.is_coordinator, ticket.save_id, ticket.suffix,
            self._job.use_collectives, self._options.durable, self._step,
        )  # fmt: skip
        self._writer.configure_writer(context)
        with stage("execute_write"):
            return self._writer.execute_write(plan, source)

    def _commit(self, current: CachedPlan[EncodedBody], payloads: Sequence[bytes]) -> bytes:
        """On the coordinator: check the results and make the checkpoint complete."""
        results = [WriteResult.from_bytes(payload) for payload in payloads]
        body = current.body
        assert body is not None, "the coordinator keeps the metadata of its plans"
        check_results(results, current.file_nbytes)
        log_slowest(results)
        group = self._job.group
        draft = MetadataDraft(
            body,
            WriterRecord(self._options.library, *self._job.framework, group.world_size),
            SaveRecord(
                self._ticket.save_id, self._ticket.suffix, None if self._job.use_collectives else group.rank
            ),
        )  # fmt: skip
        self._committed = self._writer.finalize_checkpoint(draft, results)
        return b""


def abort_quietly(writer: StorageWriter) -> None:
    """Let a writer take back what it wrote; what goes wrong is logged."""
    try:
        writer.abort_checkpoint()
    except Exception:
        logger.warning("%s.abort_checkpoint failed", type(writer).__name__, exc_info=True)


def _with_body(current: CachedPlan[EncodedBody], plan: GlobalPlan, nesting: Nesting) -> CachedPlan[EncodedBody]:
    """On the coordinator: the metadata columns, while the others write."""
    files = number_files(plan)
    tensors, chunks = describe_tensors(plan, files)
    body = encode_body(MetadataColumns(tensors, chunks, describe_objects(plan, files), nesting))
    return CachedPlan(current.plan_digest, current.writes, body, file_nbytes(plan))


def _join_nesting(blobs: set[bytes]) -> Nesting:
    """The containers of all ranks; where kinds differ, the first by name."""
    kinds: dict[bytes, str] = {}
    for blob in sorted(blobs):
        found = decode_value(blob, name="nesting")
        assert isinstance(found, tuple)
        for path, kind in found:
            kinds[path] = min(kind, kinds.get(path, kind))
    return Nesting(tuple(sorted(kinds.items())))
