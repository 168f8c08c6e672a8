"""Empty lists, tuples and dicts: saved, and as targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core.api import load, save
from dcp_core.errors import MissingKeysError, PlanningError
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.ranks import RankContext, run_ranks


@pytest.mark.parametrize("target", [[], (), [1], None, "anything"])
@pytest.mark.parametrize("stored", [[], (), [1.0, 2.0], (3,)])
def test_a_plain_list_replaces_whatever_plain_value_the_target_has(tmp_path: Path, stored: Any, target: Any) -> None:
    save({"losses": stored}, checkpoint_id=tmp_path)
    state = {"losses": target}
    load(state, checkpoint_id=tmp_path)
    assert state["losses"] == stored
    assert type(state["losses"]) is type(stored)


@pytest.mark.parametrize("target", [[], (), {}])
def test_an_empty_target_is_told_to_warm_up_where_the_checkpoint_has_entries(tmp_path: Path, target: Any) -> None:
    save({"optimizer": {"state": [np.ones(3), {"step": 1}]}}, checkpoint_id=tmp_path)
    with pytest.raises(MissingKeysError, match=r"'optimizer\.state' is empty in the target.*warm the target up"):
        load({"optimizer": {"state": target}}, checkpoint_id=tmp_path)


def test_an_empty_dict_does_not_take_the_place_of_a_value(tmp_path: Path) -> None:
    save({"x": [1, 2]}, checkpoint_id=tmp_path)
    with pytest.raises(PlanningError, match="'x' is an empty dict in the target and a value in the checkpoint"):
        load({"x": {}}, checkpoint_id=tmp_path)


def test_an_empty_dict_is_fine_where_an_empty_dict_was_saved(tmp_path: Path) -> None:
    save({"x": {}, "y": 1}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"x": {}, "y": 0}
    load(state, checkpoint_id=tmp_path)
    assert state == {"x": {}, "y": 1}


def _a_stage_without_parameters(context: RankContext, directory: str) -> None:
    entries = {} if context.rank else {0: {"momentum": np.arange(3.0)}}
    save({"optimizer": {"state": entries}}, checkpoint_id=directory, adapter=NumpyRankAdapter())
    target: dict[str, Any] = {"optimizer": {"state": {} if context.rank else {0: {"momentum": np.zeros(3)}}}}
    load(target, checkpoint_id=directory, adapter=NumpyRankAdapter())
    if context.rank == 0:
        assert target["optimizer"]["state"][0]["momentum"].tolist() == [0, 1, 2]


def test_a_rank_that_saved_an_empty_dict_loads_it_again(tmp_path: Path) -> None:
    run_ranks(_a_stage_without_parameters, 2, str(tmp_path))
    cold: dict[str, Any] = {"optimizer": {"state": {}}}
    with pytest.raises(MissingKeysError, match="warm the target up"):
        load(cold, checkpoint_id=tmp_path)  # in another world nobody can tell which rank this is


def test_an_empty_root_loads_nothing(tmp_path: Path) -> None:
    save({"y": 1}, checkpoint_id=tmp_path)
    load({}, checkpoint_id=tmp_path)
