"""The standard save planner: dedup with balance, validation, plan caching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, overload

import numpy.typing as npt

from dcp_core.box import Box
from dcp_core.errors import ArgumentError, PlanningError
from dcp_core.planning.global_plan import GlobalPlan, PlanOptions, plan_globally
from dcp_core.planning.global_table import merge_tables
from dcp_core.planning.items import ItemType, WriteItem
from dcp_core.planning.leaves import DeviceBits, LocalTensor
from dcp_core.planning.local_plan import special_containers, tabulate
from dcp_core.planning.local_table import decode_table, encode_table
from dcp_core.planning.planner_state import PlannerState
from dcp_core.planning.planners import SavePlanner
from dcp_core.planning.plans import Narrowing, SavePlan
from dcp_core.planning.write_columns import PlannedChunk
from dcp_core.planning.write_items import WrittenRegions
from dcp_core.planning.write_list import decode_answer, encode_answers, encode_write_list
from dcp_core.planning.write_spans import WriteSpans
from dcp_core.state_path import PerRank


class ReceivedPlans(Sequence[SavePlan]):
    """The local plans as they arrived; one is decoded when somebody looks at it."""

    def __init__(self, payloads: Sequence[bytes], ranks: Sequence[int] | None = None) -> None:
        self.payloads = tuple(payloads)
        self.ranks = tuple(range(len(payloads))) if ranks is None else tuple(ranks)

    def __len__(self) -> int:
        return len(self.payloads)

    @overload
    def __getitem__(self, index: int) -> SavePlan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SavePlan]: ...
    def __getitem__(self, index: int | slice) -> SavePlan | Sequence[SavePlan]:
        if isinstance(index, slice):
            return [SavePlan.of_everything(decode_table(payload)) for payload in self.payloads[index]]
        return SavePlan.of_everything(decode_table(self.payloads[index]))


class GloballyPlanned(Sequence[SavePlan]):
    """The final plans, as the standard planner makes them: columns; one is made when somebody looks at it.

    Attributes:
        plan: The global plan.
        answers: The write list of each rank, as it travels.
    """

    def __init__(self, received: ReceivedPlans, plan: GlobalPlan) -> None:
        self._received = received
        self.plan = plan
        self.answers = encode_answers(plan)

    def __len__(self) -> int:
        return len(self.answers)

    @overload
    def __getitem__(self, index: int) -> SavePlan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SavePlan]: ...
    def __getitem__(self, index: int | slice) -> SavePlan | Sequence[SavePlan]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        table = decode_table(self._received.payloads[index])
        return SavePlan(table, decode_answer(self.answers[index], table))


def settle_plans(
    plans: Sequence[SavePlan], received: ReceivedPlans, *, check_coverage: bool = True
) -> tuple[GlobalPlan, list[bytes]]:
    """Turn what `build_global_plan` returned into a global plan and the ranks' write lists.

    Plans that a custom planner changed are taken at their word: what they write is checked for coverage and laid out.

    Raises:
        PlanningError: The number of plans is not the number of ranks.
    """
    if not isinstance(plans, Sequence) or not all(isinstance(plan, SavePlan) for plan in _listed(plans)):
        raise PlanningError("build_global_plan must return a sequence of SavePlan, one a rank")
    if len(plans) != len(received):
        raise PlanningError(
            f"build_global_plan returned {len(plans)} plans for {len(received)} ranks; return one plan a rank, in order"
        )
    if isinstance(plans, GloballyPlanned):
        return plans.plan, plans.answers
    held = [plan.held() for plan in plans]
    narrowed = [encode_table(table).payload for table, _ in held]
    options = PlanOptions(remove_redundancy=False, check_coverage=check_coverage, check_tied=False)
    plan = plan_globally(merge_tables(narrowed, received.ranks), options)
    answers = []
    for (table, narrowing), answer in zip(held, encode_answers(plan), strict=True):
        answers.append(_in_original_terms(answer, table, narrowing))
    return plan, answers


def _listed(plans: Sequence[SavePlan]) -> Sequence[SavePlan]:
    """The plans that a custom planner made; ours need no look at each."""
    return () if isinstance(plans, GloballyPlanned) else plans


def _in_original_terms(answer: bytes, table: Any, narrowing: Narrowing | None) -> bytes:
    if narrowing is None:
        return answer
    return encode_write_list(narrowing.translate(decode_answer(answer, table)))


class StandardSavePlanner(PlannerState, SavePlanner):
    """Writes every shard once, spread evenly over its holders.

    Args:
        enable_plan_caching: Reuse the plan of a state with the same structure.
        remove_redundancy: Write each replica set once; False: every holder writes its own copy.
        save_to_minimum_rank: Let the lowest holder write, instead of balancing.
    """

    def __init__(
        self, enable_plan_caching: bool = True, remove_redundancy: bool = True, save_to_minimum_rank: bool = False
    ) -> None:
        super().__init__()
        self._caching = _checked_flag("enable_plan_caching", enable_plan_caching)
        self._remove_redundancy = _checked_flag("remove_redundancy", remove_redundancy)
        self._to_minimum_rank = _checked_flag("save_to_minimum_rank", save_to_minimum_rank)

    @property
    def enable_plan_caching(self) -> bool:
        """Whether a plan may be reused for the next state of the same structure."""
        return self._caching

    @property
    def rules(self) -> tuple[bool, bool]:
        """`remove_redundancy` and `save_to_minimum_rank`: all that `build_global_plan` depends on."""
        return self._remove_redundancy, self._to_minimum_rank

    def options(self) -> str:
        """What must agree between ranks, and what a cached plan depends on."""
        return f"caching={self._caching} dedup={self._remove_redundancy} minimum_rank={self._to_minimum_rank}"

    def build_local_plan(self) -> SavePlan:
        """Plan all that this rank holds."""
        context = self.context
        compare = context.use_collectives and context.world_size > 1
        table = tabulate(self.state, context.codec.digest, context.codec.needs_pickle, compare=compare)
        return SavePlan.of_everything(table, special_containers(self.state), plain_names=self.state.plain_names)

    def build_global_plan(self, all_plans: Sequence[SavePlan]) -> Sequence[SavePlan]:
        """Share the replica sets out, check coverage, lay the files out."""
        context = self.context
        if not isinstance(all_plans, ReceivedPlans):
            all_plans = ReceivedPlans([encode_table(plan.held()[0]).payload for plan in all_plans])
        options = PlanOptions(
            remove_redundancy=self._remove_redundancy or not context.use_collectives,
            save_to_minimum_rank=self._to_minimum_rank,
            check_coverage=context.use_collectives,
        )
        return GloballyPlanned(all_plans, plan_globally(merge_tables(all_plans.payloads, all_plans.ranks), options))

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def get_data(self, item: WriteItem) -> npt.NDArray[Any] | DeviceBits | bytes:
        """The bits of a region, sharing the tensor's memory where that is on the host; or an object's bytes."""
        tensor = self.state.tensors[item.leaf]
        if item.type is ItemType.BYTES or tensor is None:
            value = self.state.values[item.leaf]
            value = value.value if isinstance(value, PerRank) else value
            return self.context.codec.encode(value, self.state.names[item.leaf])
        view, box = tensor.views[item.box], tensor.boxes[item.box]
        if item.sizes != box.sizes:
            view = tensor.access.narrow(view, Box(item.start, item.sizes))
        return _bits_of(tensor, view, item.sizes)

    def get_batch(self, spans: Sequence[PlannedChunk]) -> Sequence[npt.NDArray[Any] | DeviceBits]:
        """The bits of some regions, as `get_data` gives them."""
        is_own = getattr(self.get_data, "__func__", None) is StandardSavePlanner.get_data
        if not is_own or not isinstance(spans, WriteSpans):
            return super().get_batch(spans)
        return [
            _bits_of(tensor, view, sizes)
            for tensor, view, sizes in self._views(spans.every.regions, spans.rows)
        ]  # fmt: skip

    def _views(self, regions: WrittenRegions, rows: slice) -> Iterator[tuple[LocalTensor, Any, tuple[int, ...]]]:
        """The view of each region, with its tensor and its sizes."""
        tensors, writes = self.state.tensors, regions.writes
        columns = writes.leaf[rows].tolist(), writes.ordinal[rows].tolist(), regions.is_whole[rows]
        for row, leaf, ordinal, is_whole in zip(count(rows.start), *columns, strict=False):
            tensor = tensors[leaf]
            assert tensor is not None, "regions are parts of tensors"
            view, sizes = tensor.views[ordinal], tensor.boxes[ordinal].sizes
            if not is_whole:
                start, sizes = (tuple(column[row, : len(sizes)].tolist()) for column in (writes.start, writes.sizes))
                view = tensor.access.narrow(view, Box(start, sizes))
            yield tensor, view, sizes


def _bits_of(tensor: LocalTensor, view: Any, sizes: tuple[int, ...]) -> npt.NDArray[Any] | DeviceBits:
    """The bits of a view: in their own memory on the host, else to be copied later, block by block."""
    access = tensor.access
    bits = access.host_array(view) if tensor.device == "cpu" else None
    return DeviceBits(view, access, sizes, tensor.dtype.bits) if bits is None else bits


def _checked_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, found {value!r}")
    return value
