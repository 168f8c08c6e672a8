"""What a call knows of its state beyond the values: shards in the place of arrays, states opened in another way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.adapter import StateRules
from dcp_core.errors import DcpError, UnsupportedValueError
from dcp_core.planning.leaves import LocalTensor
from dcp_core.planning.placed_shards import place_by_layout
from dcp_core.planning.strategy_layouts import known_layout

INTERLEAVED = {"device_matrix": (1, 2), "tensor_map": ((0, 1), -1), "interleaved_parallel": True, "rank_list": [0]}
SWAPPED = {"device_matrix": (2,), "tensor_map": (0, -1), "interleaved_parallel": True, "rank_list": [0]}


class Placing(StateRules):
    """Places the tensors that it has layouts for, and notes what it was asked."""

    def __init__(self, **layouts: Any) -> None:
        self.layouts = layouts
        self.asked: list[tuple[str, ...]] = []

    def place(
        self, names: Sequence[str], values: Sequence[Any], tensors: Sequence[LocalTensor | None]
    ) -> Sequence[LocalTensor | None]:
        self.asked.append(tuple(names))
        return [
            tensor
            if tensor is None or name not in self.layouts
            else place_by_layout(tensor, known_layout(self.layouts[name], 0), 0, self.layouts[name].get("shape"))
            for name, tensor in zip(names, tensors, strict=True)
        ]


def test_arrays_are_saved_and_loaded_as_the_shards_that_the_rules_make_of_them(tmp_path: Path) -> None:
    rows = np.arange(32.0).reshape(8, 4)
    rules = Placing(**{"model.w": INTERLEAVED})
    api.save({"model": {"w": rows, "b": rows[0].copy()}, "step": 3}, checkpoint_id=str(tmp_path / "s"), rules=rules)
    assert rules.asked == [("model.w", "model.b", "step")]
    assert np.array_equal(api.read(str(tmp_path / "s"), "model.w"), rows)
    target = {"model": {"w": np.zeros((8, 4)), "b": np.zeros(4)}, "step": 0}
    api.load(target, checkpoint_id=str(tmp_path / "s"), rules=Placing(**{"model.w": SWAPPED}))
    assert np.array_equal(target["model"]["w"], rows) and target["step"] == 3  # type: ignore[index]


def test_async_saves_follow_the_rules_too(tmp_path: Path) -> None:
    rules = Placing(w={"device_matrix": (1,), "tensor_map": (0, -1), "rank_list": [0], "shape": (8, 4)})
    api.async_save({"w": np.arange(32.0).reshape(8, 4)}, checkpoint_id=str(tmp_path / "s"), rules=rules).get_result(60)
    assert len(rules.asked) == 1
    assert api.read(str(tmp_path / "s"), "w").shape == (8, 4)


def test_what_the_rules_refuse_is_the_error_of_the_call_and_nothing_is_written(tmp_path: Path) -> None:
    rules = Placing(w={"device_matrix": (2,), "tensor_map": (0,), "rank_list": [0, 1]})
    with pytest.raises(UnsupportedValueError, match="another number of dimensions"):
        api.save({"w": np.zeros((8, 4))}, checkpoint_id=str(tmp_path / "s"), rules=rules)
    assert not (tmp_path / "s" / ".metadata").exists()


class Counter:
    """A Stateful object whose own methods must not be called here."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.array = np.full(3, float(count))

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("the rules know better")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("the rules know better")


class Opening(StateRules):
    """Opens counters in its own way."""

    def state_of(self, value: Any) -> object:
        return {"count": value.count, "array": value.array} if isinstance(value, Counter) else super().state_of(value)

    def hand_state(self, value: Any, state: Any) -> None:
        assert state["array"] is value.array
        value.count = state["count"]


def test_stateful_objects_are_opened_and_filled_as_the_rules_say(tmp_path: Path) -> None:
    api.save({"deep": [{"counter": Counter(5)}]}, checkpoint_id=str(tmp_path / "s"), rules=Opening())
    found = Counter(0)
    api.load({"deep": [{"counter": found}]}, checkpoint_id=str(tmp_path / "s"), rules=Opening())
    assert found.count == 5 and (found.array == 5).all()
    with pytest.raises(DcpError, match=r"state_dict\(\) of 'counter'.*the rules know better"):
        api.save({"counter": Counter(5)}, checkpoint_id=str(tmp_path / "t"))
