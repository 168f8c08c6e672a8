"""What a newcomer stumbles over: nothing is lost without a word, and every message says what to do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core.api import load, read, save
from dcp_core.box import Box
from dcp_core.errors import ArgumentError, MissingKeysError, PlanningError, RankFailedError
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.ranks import RankContext, run_ranks


def _differ(context: RankContext, directory: str, size: int) -> None:
    own = np.full((size, 25), float(context.rank))
    same = np.arange(size * 25.0)
    state = {"own": own, "transposed": own.T, "same": same}
    for _ in range(2):
        save(state, checkpoint_id=directory, adapter=NumpyRankAdapter(), timeout_seconds=30)
    target = {key: np.full_like(value, -1) for key, value in state.items()}
    load(target, checkpoint_id=directory, adapter=NumpyRankAdapter(), timeout_seconds=30)
    for key, value in state.items():
        assert np.array_equal(target[key], value), key


@pytest.mark.parametrize("size", [10, 400, 40_000])
def test_plain_arrays_of_any_size_that_differ_between_ranks_are_kept_for_each_rank(tmp_path: Path, size: int) -> None:
    run_ranks(_differ, 3, str(tmp_path), size)
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert written < size * 25 * 8 * (3 + 3 + 1) + 30_000  # the one that is the same is stored once


class Renaming(StandardSavePlanner):
    """Gives all values one name."""

    def build_local_plan(self) -> SavePlan:
        plan = super().build_local_plan()
        return plan.with_items([replace(item, index=replace(item.index, fqn="one")) for item in plan.items])


@pytest.mark.parametrize("values", [(np.ones(2), np.zeros(2)), (1, 2), (np.ones(2), 3)])
def test_a_planner_that_gives_two_values_one_name_is_refused(tmp_path: Path, values: Sequence[Any]) -> None:
    with pytest.raises(PlanningError, match="two values of this rank would be stored under 'one'"):
        save({"a": values[0], "b": values[1]}, checkpoint_id=tmp_path, planner=Renaming())
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".safetensors", ".metadata")]


def test_a_key_and_its_number_may_hold_a_value_and_an_empty_dict(tmp_path: Path) -> None:
    save({"a": {"0": 1, 0: {}}}, checkpoint_id=tmp_path)
    target: dict[str, Any] = {"a": {"0": 0, 0: {}}}
    load(target, checkpoint_id=tmp_path)
    assert target == {"a": {"0": 1, 0: {}}}


@pytest.mark.parametrize(
    ("stored", "wanted", "near"),
    [
        ("m._orig_mod.weight", "m.weight", "m._orig_mod.weight"),
        ("m.module.weight", "m.weight", "m.module.weight"),
        ("m.weight", "m.module.weight", "m.weight"),
        ("layers.0.weight", "layer.0.weight", "layers.0.weight"),
        ("a.b", "a", "a.b"),
    ],
)
def test_a_missing_key_is_told_with_the_stored_one_that_may_be_meant(
    tmp_path: Path, stored: str, wanted: str, near: str
) -> None:
    save({stored: np.ones(2), "z": 1}, checkpoint_id=tmp_path)
    with pytest.raises(MissingKeysError) as caught:
        load({wanted: np.zeros(2)}, checkpoint_id=tmp_path)
    assert f"{wanted!r} (it has {near!r})" in str(caught.value)


class Counter:
    """A Stateful whose state grows, and that can fail."""

    def __init__(self, seen: dict[str, int], failing: str = "") -> None:
        self.seen, self.failing = seen, failing

    def state_dict(self) -> dict[str, Any]:
        if self.failing == "state_dict":
            raise RuntimeError("boo")
        return {"seen": dict(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.failing == "load_state_dict":
            raise RuntimeError("boo")
        self.seen = state["seen"]


def test_keys_that_a_stateful_has_no_place_for_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save({"c": Counter({"a": 1, "b": 2})}, checkpoint_id=tmp_path)
    target = Counter({"a": 0})
    with caplog.at_level(logging.WARNING, logger="dcp"):
        load({"c": target}, checkpoint_id=tmp_path)
    assert target.seen == {"a": 1}
    assert "'c' has no place for 1 keys of the checkpoint, which are not loaded: ['c.seen.b']" in caplog.text


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_what_a_stateful_raises_is_told_with_its_key_and_class(tmp_path: Path, method: str) -> None:
    save({"c": Counter({"a": 1})}, checkpoint_id=tmp_path)
    with pytest.raises(RankFailedError, match=rf"{method}\(\) of 'c' \(.*\.Counter\) raised RuntimeError: boo"):
        load({"c": Counter({"a": 0}, method)}, checkpoint_id=tmp_path)


def test_values_that_need_permission_at_load_are_named_at_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="dcp"):
        save({"pickled here": Counter, "plain": 1}, checkpoint_id=tmp_path)
    assert "'pickled here' have no exact encoding and are pickled" in caplog.text


def test_read_says_what_it_wants(tmp_path: Path) -> None:
    save({"a": np.arange(4)}, checkpoint_id=tmp_path)
    with pytest.raises(ArgumentError, match=r"box must be a Box\(offsets, sizes\)"):
        read(tmp_path, "a", ((0,), (1,)))  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ArgumentError, match="key must be the name of a tensor"):
        read(tmp_path, 5)  # type: ignore[arg-type]  # on purpose
    assert read(tmp_path, "a", Box((1,), (2,))).tolist() == [1, 2]
