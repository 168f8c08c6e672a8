"""What tests of staging share: planners of a state, and all that was staged, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.adapter import AdapterSet
from dcp_core.background.arena import Arena, Buffers
from dcp_core.background.data_copier import StagingEncoding
from dcp_core.background.staging import Staged, StagedSource, stage
from dcp_core.formats.objects import decode_value, encode_value
from dcp_core.planning.local_table import LocalTable, decode_table, encode_table
from dcp_core.planning.planners import PlannerContext, SavePlanner
from dcp_core.planning.plans import SavePlan, everything_held
from dcp_core.planning.standard_save import ReceivedPlans, StandardSavePlanner, settle_plans
from dcp_core.planning.write_list import WriteList, decode_answer
from dcp_core.recipes.job import Descriptions
from dcp_core.testing.device_ranks import DeviceRankAdapter
from tests.core.io_samples import same_bits

Array = npt.NDArray[Any]


def configured(
    state: Mapping[Any, Any], planner: SavePlanner | None = None, adapter: Any = None, rank: int = 0, world: int = 1
) -> SavePlanner:
    """A planner that has read a state."""
    planner = StandardSavePlanner() if planner is None else planner
    describe = Descriptions(AdapterSet([DeviceRankAdapter() if adapter is None else adapter])).describe
    planner.configure_planner(state, PlannerContext(describe, StagingEncoding(), rank, world, rank == 0))
    return planner


@dataclass(frozen=True)
class Rank:
    """A rank between its local plan and the end of staging.

    Attributes:
        planner: Configured.
        plan: Its local plan, in the planner's terms.
        table: What travels.
    """

    planner: SavePlanner
    plan: SavePlan
    table: LocalTable

    @classmethod
    def of(cls, state: Mapping[Any, Any], planner: SavePlanner | None = None, **options: Any) -> Rank:
        made = configured(state, planner, **options)
        plan = made.build_local_plan()
        return cls(made, plan, plan.held()[0])

    @property
    def payload(self) -> bytes:
        return encode_table(self.table).payload

    def stage_all(self, arena: Arena) -> Staged:
        """Stage as on a miss."""
        plan, writes = everything_held(self.plan, *self.plan.held())
        return stage(plan, writes, self.planner, arena, rank=3)

    def stage_own(self, writes: WriteList, arena: Arena) -> Staged:
        """Stage as on a hit."""
        return stage(self.in_planner_terms(writes), writes, self.planner, arena, rank=3)

    def in_planner_terms(self, writes: WriteList) -> SavePlan:
        narrowing = self.plan.held()[1]
        return self.plan.with_writes(writes if narrowing is None else narrowing.translate(writes))

    def source(self, staged: Staged, buffers: Buffers, **options: Any) -> StagedSource:
        """What another process makes of it."""
        travelled = Staged.from_plain(decode_value(encode_value(staged.to_plain())))  # type: ignore[arg-type]
        return StagedSource(travelled, decode_table(self.payload), buffers, **options)


def plan_together(*ranks: Rank) -> list[WriteList]:
    """The write list of each rank, in terms of the tables that travel."""
    received = ReceivedPlans([rank.payload for rank in ranks])
    _, answers = settle_plans(ranks[0].planner.build_global_plan(received), received)
    return [decode_answer(answer, rank.table) for answer, rank in zip(answers, ranks, strict=True)]


def everything(source: StagedSource, table: LocalTable) -> dict[str, Array | bytes]:
    """All that is held, by name; one box each."""
    plan = SavePlan.of_everything(table)
    spans = plan.spans()
    batch = source.get_batch(spans)
    found: dict[str, Array | bytes] = {}
    for span, array in zip(spans, batch, strict=True):
        assert span.item.index.fqn not in found
        again = source.get_data(span.item)
        assert isinstance(again, np.ndarray)
        assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())
        found[span.item.index.fqn] = array
    return found | {item.index.fqn: source.get_data(item) for item in plan.objects()}


def differing(found: Mapping[str, Array | bytes], expected: Mapping[str, Array]) -> list[str]:
    """Names whose bits are not those expected, or that were not found."""
    return [name for name, array in expected.items() if not _is_same(found.get(name), array)]


def _is_same(found: object, expected: Array) -> bool:
    return isinstance(found, np.ndarray) and same_bits(found, expected)


def staged_values(state: Mapping[Any, Any], arena: Arena, **options: Any) -> dict[str, Array | bytes]:
    """Stage all of a state, and look at it."""
    rank = Rank.of(state, **options)
    return everything(rank.source(rank.stage_all(arena), arena), rank.table)
