"""Load, stage by stage.

`.metadata` by way of the coordinator (1) -> match, intersect -> objects read once, errors of all plans (2) -> read in
place -> errors (3) -> `load_state_dict` of Stateful objects, errors (4). Until exchange 2 has gone well on all ranks,
no target is touched.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_core.coordination.frames import pack, unpack
from dcp_core.errors import ArgumentError, DcpError, PlanningError
from dcp_core.execution.interfaces import CheckpointId, ReadContext, StorageReader, Verify
from dcp_core.log import stage
from dcp_core.metadata import EVERY_RANK, Metadata
from dcp_core.planning.load_plan import LoadPlan, PeerPlan
from dcp_core.planning.planners import LoadPlanner
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.recipes.agreement import Agreement, argument_digests, check_arguments
from dcp_core.recipes.job import Descriptions, Job, attempt, logger
from dcp_core.recipes.loaded_objects import LoadedObjects, shared_request
from dcp_core.recipes.metadata_handout import MetadataHandout
from dcp_core.recipes.plan_items import decode_items, encode_items
from dcp_core.recipes.shared_reads import SharedReads
from dcp_core.state_path import StatePath, plain_name
from dcp_core.state_tree import OpenedStateful, check_settable, expand_stateful, set_value
from dcp_core.storage.urls import redacted

_UNDEFINED = "reading had begun: the targets are undefined now on all ranks; load again, or another checkpoint"
_HALF_SET = "all had been read: what load_state_dict had to set is undefined now; load again, or another checkpoint"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load.

    Attributes:
        checkpoint_id: Where from; None: where the reader points.
        timeout_seconds: How long to wait for the slowest rank in each exchange.
        verify: True: blocks read whole are checked; "full": every block touched; False: none.
        broadcast_replicated_tensors: Whether shards that several ranks want are read once.
        broadcast_groups: Groups to do that in, by their ranks.
        broadcast_batch_bytes: Buffers below this are sent together.
    """

    checkpoint_id: CheckpointId | None = None
    timeout_seconds: float = 1800.0
    verify: Verify = True
    broadcast_replicated_tensors: bool | str = True
    broadcast_groups: Mapping[tuple[int, ...], Any] | None = None
    broadcast_batch_bytes: int = 6 * 1024 * 1024


class LoadRecipe:
    """One load, on one rank.

    Args:
        job: Who loads.
        reader: Where from.
        planner: How.
        options: The rest.
    """

    def __init__(self, job: Job, reader: StorageReader, planner: LoadPlanner, options: LoadOptions) -> None:
        self.job = job
        self.reader = reader
        self.planner = planner
        self.options = options
        self.exchange = job.exchange(options.timeout_seconds)
        self._arguments: dict[str, object]
        self._descriptions = Descriptions(job.adapters)
        self._state: Any = None
        self._opened: Any = None
        self._stateful: Sequence[OpenedStateful] = ()
        self._stateful_paths: frozenset[StatePath] = frozenset()
        self._any_stateful = False
        self._is_shared = False
        self._metadata: Metadata
        self._plan: LoadPlan
        self._handout = MetadataHandout(reader, job.group.rank)
        self._objects = LoadedObjects(reader)
        self._shared: SharedReads

    def run(self, state: Mapping[Any, Any], *, failed: BaseException | None = None) -> None:
        """Load into the state, in place.

        Args:
            state: The target.
            failed: What went wrong on this rank before; handed to the other ranks.

        Raises:
            DcpError: The same on all ranks.
        """
        self._state = state
        metadata_answer = self._find_metadata(failed)
        self._read_all(self._plan_reads(metadata_answer))
        self._hand_to_stateful()

    def _find_metadata(self, failed: BaseException | None) -> bytes:
        """Exchange 1: the arguments; the description, or which one."""
        payload, error = (None, failed) if failed is not None else attempt(self._prepare)
        with stage("all_gather_object"):
            return self.exchange.run("load/metadata", payload or b"", error=error, compute=self._describe_checkpoint)

    def _prepare(self) -> bytes:
        """Open the target up: Stateful objects by their state."""
        if not isinstance(self._state, Mapping):
            raise ArgumentError(f"state_dict must be a mapping, found {type(self._state).__name__}")
        self._arguments = self._common_arguments()
        options = self.options
        self._shared = SharedReads(
            self.job, options.broadcast_groups, options.broadcast_batch_bytes, options.broadcast_replicated_tensors,
            options.timeout_seconds,
        )  # fmt: skip
        self.reader.initialize_reader(self.options.checkpoint_id)
        self._opened, self._stateful = expand_stateful(self._state, self._descriptions.is_tensor, self.job.state_of)
        self._stateful_paths = frozenset(opened.path for opened in self._stateful)
        return Agreement(argument_digests(self._arguments), flag=bool(self._stateful)).to_bytes()

    def _common_arguments(self) -> dict[str, object]:
        """What must be the same on all ranks."""
        options = self.options
        return {
            "checkpoint_id": None if options.checkpoint_id is None else redacted(str(options.checkpoint_id)),
            "planner": (type(self.planner).__qualname__, self.planner.options()),
            "storage_reader": (type(self.reader).__qualname__, self.reader.options()),
            "timeout_seconds": options.timeout_seconds,
            "verify": options.verify,
            "broadcast_replicated_tensors": options.broadcast_replicated_tensors,
            "broadcast_batch_bytes": options.broadcast_batch_bytes,
        }

    def _describe_checkpoint(self, payloads: Sequence[bytes]) -> bytes:
        """On the coordinator: open the description and decide how the others get it."""
        agreements = [Agreement.from_bytes(payload) for payload in payloads]
        check_arguments(agreements, self._arguments)
        return bytes([any(part.flag for part in agreements)]) + self._handout.find(len(payloads))

    def _plan_reads(self, metadata_answer: bytes) -> bytes:
        """Exchange 2: all plans are sound; shared objects, read once."""
        payload, error = attempt(lambda: self._plan_locally(metadata_answer))
        with stage("all_gather_object"):
            return self.exchange.run("load/plan", payload or b"", error=error, compute=self._plan_globally)

    def _plan_locally(self, metadata_answer: bytes) -> bytes:
        self._any_stateful = bool(metadata_answer[0])
        self._metadata = self._handout.receive(metadata_answer[1:])
        context = dataclasses.replace(self.job.planner_context(self._descriptions), metadata=self._metadata)
        self.planner.configure_planner(self._opened, context)
        self.reader.configure_reader(
            self._metadata, ReadContext(self.job.group.rank, self.job.world_size, self.options.verify)
        )
        with stage("build_local_plan"):
            plan = self.planner.build_local_plan()
            if not isinstance(plan, LoadPlan):
                raise PlanningError(f"build_local_plan returned {type(plan).__name__}; return a LoadPlan")
            self._plan = self.reader.optimize_local_plan(plan)
        self.reader.check_files(self._plan)
        self._name_what_stays_behind()
        for want in self._plan.objects:
            if not self._is_in_stateful(want.path):
                check_settable(self._state, want.path)
        objects, alone = self._plan.objects, self._is_alone()
        shared = [want for want in objects if want.stored.rank == EVERY_RANK and not alone]
        self._objects.read([want for want in objects if want.stored.rank != EVERY_RANK or alone])
        items = encode_items(self._plan.items) if self._plans_globally() else b""
        shares = not alone and self.options.broadcast_replicated_tensors is not False
        offer = self._shared.offer(self._plan, self.planner, self.reader) if shares else b""
        return pack(shared_request(shared), items, offer)

    def _name_what_stays_behind(self) -> None:
        """Log keys of a Stateful that only the checkpoint has: a target that is not as warm as the saved state was.

        Where there are other ranks, they may well be theirs, so that is no warning.
        """
        level = logging.WARNING if self.job.group.world_size == 1 else logging.INFO
        if not self._stateful or not logger.isEnabledFor(level):
            return
        wanted = {*self._plan.wanted.stored_names, *(want.stored.name for want in self._plan.objects)}
        names = self._metadata.source.names()
        for opened in self._stateful:
            owner = plain_name(opened.path)
            inside = names[bisect.bisect_left(names, f"{owner}.") : bisect.bisect_left(names, f"{owner}/")]
            behind = [name for name in inside if name not in wanted]
            if behind:
                text = "%r has no place for %d keys of the checkpoint, which are not loaded: %s"
                logger.log(level, text, owner, len(behind), behind[:20])

    def _is_alone(self) -> bool:
        return self.job.world_size == 1 or self._metadata.source.save.rank is not None

    def _plans_globally(self) -> bool:
        """Whether somebody wants to see all ranks' plans."""
        planner, reader = type(self.planner), type(self.reader)
        return (
            planner.build_global_plan is not StandardLoadPlanner.build_global_plan
            or reader.optimize_global_plan is not StorageReader.optimize_global_plan
        )

    def _plan_globally(self, payloads: Sequence[bytes]) -> Sequence[bytes] | bytes:
        """On the coordinator: read the shared objects once, look at all plans if somebody wants to."""
        parts = [unpack(payload) for payload in payloads]
        shared = self._objects.read_shared({request for request, _, _ in parts}, self._metadata)
        if not self._plans_globally():
            offers = [offer for _, _, offer in parts]
            if not all(offers):
                return pack(shared, b"", b"", b"")
            with stage("build_global_plan"):
                sources, token = self._shared.answers(offers)
            if not token:  # nobody shares: one answer for all
                return pack(shared, b"", b"", b"")
            return [pack(shared, b"", source, token) for source in sources]
        plans: list[LoadPlan] = [PeerPlan(decode_items(items)) for _, items, _ in parts]
        with stage("build_global_plan"):
            final = self.reader.optimize_global_plan(self.planner.build_global_plan(plans))
        if len(final) != len(parts):
            raise PlanningError(f"build_global_plan returned {len(final)} plans for {len(parts)} ranks")
        return [pack(shared, encode_items(plan.items), b"", b"") for plan in final]

    def _read_all(self, answer: bytes) -> None:
        """Read regions and place objects; exchange 3: errors."""
        _, error = attempt(lambda: self._fill_targets(answer))
        # The coordinator may wait for a broadcast until that is out of time, and then says who did not send.
        delay = self.exchange.timeout_seconds if error is None and self._is_shared else 0.0
        try:
            self.exchange.run("load/done", error=error, is_last=not self._any_stateful, delay_seconds=delay)
        except DcpError as failure:
            if "undefined" in failure.message:
                raise
            raise type(failure)(f"{failure.message}\n{_UNDEFINED}", failure.causes) from failure.__cause__

    def _fill_targets(self, answer: bytes) -> None:
        shared, own, sources, token = unpack(answer)
        self._is_shared = bool(token)
        self._objects.take(shared)
        if own:
            self._plan = self._plan.with_items(decode_items(own))
        if sources:
            self._plan = self._shared.shared_plan(self._plan, sources)
        with self._shared.taking_part(self._plan, self.planner, token.decode()) as open_groups:
            self._objects.read([want for want in self._plan.objects if want.stored.name not in self._objects])
            plan = self.planner.finalize_plan(self._plan)
            with stage("execute_read"):
                self.reader.execute_read(plan, self.planner, open_groups(), self.options.broadcast_batch_bytes)
        for position, want in enumerate(plan.objects):
            self.planner.apply_bytes(plan.object_item(position), self._objects[want.stored.name])
        for want in plan.objects:
            if not self._is_in_stateful(want.path):
                set_value(self._state, want.path, _value_at(self._opened, want.path))

    def _hand_to_stateful(self) -> None:
        """Exchange 4, if any rank has Stateful objects: what their `load_state_dict` raised."""
        if not self._any_stateful:
            return
        _, error = attempt(self._load_stateful)
        try:
            self.exchange.run("load/stateful", error=error, is_last=True)
        except DcpError as failure:
            if "load_state_dict()" in failure.message:
                raise
            raise type(failure)(f"{failure.message}\n{_HALF_SET}", failure.causes) from failure.__cause__

    def _load_stateful(self) -> None:
        for opened in self._stateful:
            if not any(opened.path[:depth] in self._stateful_paths for depth in range(len(opened.path))):
                self.job.hand_state(opened.path, opened.value, opened.state_dict)

    def _is_in_stateful(self, path: StatePath) -> bool:
        paths = self._stateful_paths
        return bool(paths) and any(path[:depth] in paths for depth in range(len(path) + 1))


def _value_at(state: Any, path: StatePath) -> Any:
    for key in path:
        state = state[key.value]
    return state
