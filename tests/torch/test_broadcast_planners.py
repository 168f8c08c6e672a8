"""Loads in which not everything is shared: planners and readers with a will of their own, parts of the job, checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.planning.items import ReadItem
from dcp_core.planning.load_plan import LoadPlan
from dcp_torch import StandardLoadPlanner
from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.shared_reads import (
    CountedOperations,
    Layout,
    Part,
    load,
    poisoned,
    reader_on,
    save_whole,
    watched,
    wrong_in,
)
from tests.torch.states import poison

pytestmark = pytest.mark.timeout(90)

NBYTES = 4 * (200 * 40 + 30 * 7)


def both(rank: int = 0) -> Layout:
    return {"w": Part((200, 40)), "v": Part((30, 7))}


# -- planners ---------------------------------------------------------------------------------------------------------


class AcquiringPlanner(StandardLoadPlanner):
    """Is asked for every region, and notes it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def acquire_tensor(self, item: ReadItem) -> Any:
        self.asked.append(item.dest_index.fqn)
        return super().acquire_tensor(item)


class ApplyingPlanner(StandardLoadPlanner):
    """Inverts what was read."""

    def apply_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        poison({"read": tensor})


class FinalPlanner(StandardLoadPlanner):
    """Looks at the final plan."""

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        assert len(plan.items) == 2
        return super().finalize_plan(plan)


class GlobalPlanner(StandardLoadPlanner):
    """Looks at all plans."""

    def build_global_plan(self, all_plans: Sequence[LoadPlan]) -> Sequence[LoadPlan]:
        assert all(len(plan.items) == 2 for plan in all_plans)
        return super().build_global_plan(all_plans)


class QuietPlanner(StandardLoadPlanner):
    """Overrides nothing that matters to sharing."""

    def build_local_plan(self) -> LoadPlan:
        return super().build_local_plan()


class OwnReader(FileSystemReader):
    """Somebody's reader, which says nothing of sharing."""

    shares_reads = False


PLANNERS = (AcquiringPlanner, ApplyingPlanner, FinalPlanner, GlobalPlanner)


def load_with_planners(rank: TorchRank, directory: Path) -> dict[str, tuple[bool, int, int]]:
    """For each whether it is right, how many broadcasts there were and how many bytes were read."""
    found = {}
    layout = both()
    arguments: list[dict[str, Any]] = [{"planner": kind()} for kind in (*PLANNERS, QuietPlanner)]
    for options in arguments:
        operations, state = CountedOperations(), poisoned(layout)
        with watched() as seen:
            load(state, None, storage_reader=reader_on(directory, operations), **options)
        planner = options["planner"]
        if isinstance(planner, ApplyingPlanner):
            poison(state)
        right = wrong_in(state, layout) == []
        if isinstance(planner, AcquiringPlanner):
            right = right and sorted(set(planner.asked)) == ["v", "w"]
        found[type(planner).__name__] = right, len(seen.sizes), operations.nbytes
    state = poisoned(layout)
    with watched() as seen:
        load(state, directory, storage_reader=OwnReader())
    found["OwnReader"] = wrong_in(state, layout) == [], len(seen.sizes), NBYTES
    return found


def test_planners_that_see_regions_or_plans_read_for_themselves(tmp_path: Path) -> None:
    save_whole(tmp_path / "c", both())
    found = run_gloo(load_with_planners, 2, tmp_path / "c")
    for name in (*[kind.__name__ for kind in PLANNERS], "OwnReader"):
        assert [rank[name] for rank in found] == [(True, 0, NBYTES)] * 2, name
    quiet = [rank["QuietPlanner"] for rank in found]
    assert all(right and broadcasts > 0 for right, broadcasts, _ in quiet)
    assert sum(nbytes for _, _, nbytes in quiet) == NBYTES


# -- a part of the job ------------------------------------------------------------------------------------------------


def part_layout(place: int) -> Layout:
    return {"w": Part((40, 9)), "x": Part.even((8, 8), 2, place % 2), "y": Part.even((8, 8), 3, place)}


def load_in_a_part(rank: TorchRank, directory: Path) -> tuple[list[str], set[tuple[int, ...]], list[int]]:
    """Ranks 1, 3 and 4 load as a group, while 0 and 2 load as another."""
    own = (1, 3, 4) if rank.rank in (1, 3, 4) else (0, 2)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((1, 3, 4), (0, 2))}
    layout = part_layout(own.index(rank.rank))
    wrong: list[str] = []
    with watched() as seen:
        for mode in (True, True, "auto"):
            state = poisoned(layout)
            load(state, directory, process_group=groups[own], broadcast_replicated_tensors=mode)
            wrong += wrong_in(state, layout)
        alone = poisoned(layout)
        count = len(seen.sizes)
        if rank.rank == own[0]:
            load(alone, directory, use_collectives=False)
            wrong += wrong_in(alone, layout)
    return wrong, {group.ranks for group in seen.opened}, [count, len(seen.sizes)]


def test_the_ranks_of_a_part_of_the_job_share_among_themselves(tmp_path: Path) -> None:
    save_whole(tmp_path / "c", part_layout(0))
    found = run_gloo(load_in_a_part, 5, tmp_path / "c")
    assert [wrong for wrong, _, _ in found] == [[]] * 5
    assert [groups for _, groups, _ in found] == [
        {(0, 2)},
        {(1, 3, 4), (1, 4)},
        {(0, 2)},
        {(1, 3, 4)},
        {(1, 3, 4), (1, 4)},
    ]
    assert all(before == after for _, _, (before, after) in found)  # without collectives nothing is sent


# -- checks -----------------------------------------------------------------------------------------------------------


def load_checked(rank: TorchRank, directory: Path) -> list[str]:
    """Whatever is checked, and a box that is a part of what was saved."""
    layout: Mapping[str, Part] = {"w": Part((3000, 300)), "v": Part((30, 7), bounds=(3, 20))}
    wrong: list[str] = []
    for verify in (True, "full", False):
        for batch_bytes in (0, 6 << 20):
            state = poisoned(layout)
            with watched() as seen:
                load(state, directory, verify=verify, broadcast_batch_bytes=batch_bytes)
            wrong += [f"{verify} {name}" for name in wrong_in(state, layout)]
            wrong += [] if seen.sizes else [f"{verify}: nothing was shared"]
    return wrong


def test_every_way_of_checking_goes_with_sharing(tmp_path: Path) -> None:
    save_whole(tmp_path / "c", {"w": Part((3000, 300)), "v": Part((30, 7))})
    assert run_gloo(load_checked, 3, tmp_path / "c") == [[]] * 3
