"""Explicit values per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcp_core.api import load, save
from dcp_core.errors import PlanningError
from dcp_core.state_path import PerRank
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.ranks import RankContext, run_ranks


def _save_on_rank_0_only(context: RankContext, directory: str) -> None:
    state: dict[str, Any] = {"seed": PerRank(7)} if context.rank == 0 else {}
    save(state, checkpoint_id=directory, adapter=NumpyRankAdapter(), timeout_seconds=30)
    target: dict[str, Any] = {"seed": PerRank(None)} if context.rank == 0 else {}
    load(target, checkpoint_id=directory, adapter=NumpyRankAdapter(), timeout_seconds=30)
    assert target == state
    target = {"seed": PerRank("mine")}
    with pytest.raises(PlanningError, match=r"'seed' holds one value per rank, and rank 1 saved none \(ranks 0 did\)"):
        load(target, checkpoint_id=directory, adapter=NumpyRankAdapter(), timeout_seconds=30)
    assert target == {"seed": PerRank("mine")}


def test_a_rank_that_saved_no_value_of_its_own_is_not_given_another_ones(tmp_path: Path) -> None:
    run_ranks(_save_on_rank_0_only, 2, str(tmp_path))
