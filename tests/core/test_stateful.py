"""Opening up Stateful objects: what is copied, and what a `state_dict()` that changes the user's state does to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.state_path import PerRank, plain_name
from dcp_core.state_tree import collect_stateful, expand_stateful, flatten


class App:
    """A Stateful object that does something to the outer state when it is asked for its own."""

    def __init__(self, state: Any, act: Callable[[], object] = lambda: None) -> None:
        self.state = state
        self.act = act

    def state_dict(self) -> Any:
        self.act()
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)


def test_what_a_state_dict_adds_replaces_and_removes_in_the_users_mapping_is_taken_as_it_is_then() -> None:
    state: dict[str, Any] = {"a": 1, "gone": {"x": 1}, "b": [np.zeros(2)], "changed": {"x": np.ones(2)}}

    def act() -> None:
        del state["gone"]
        state.update({"a": 2, "new": np.zeros(1), "b": 5, "changed": {"x": np.ones(2), "y": 3}})

    app = App({"w": 1}, act)
    state["app"] = app
    expanded, called = expand_stateful(state, is_array)
    assert list(expanded) == ["a", "b", "changed", "app", "new"]
    assert (expanded["a"], expanded["b"], expanded["app"], expanded["changed"]["y"]) == (2, 5, {"w": 1}, 3)
    assert expanded["new"] is state["new"]
    assert expanded["changed"] is not state["changed"]
    assert state["app"] is app
    assert [opened.value for opened in called] == [app]
    assert "new" in flatten(expanded, is_array).plain_names


def test_what_a_state_dict_does_to_a_list_is_taken_as_it_is_then() -> None:
    items: list[Any] = [np.zeros(1), {"x": 1}]
    state = {"items": items, "app": App({}, lambda: items.append(7)), "z": [App({}, items.clear)]}
    expanded, _ = expand_stateful(state, is_array)
    assert expanded == {"items": [], "app": {}, "z": [{}]}
    assert expanded["items"] is not items


def test_a_state_that_is_the_same_at_every_call_is_copied_each_time() -> None:
    inner = {"w": np.zeros(1)}
    app = App(inner)
    expanded, called = expand_stateful({"one": app, "two": app}, is_array)
    assert [plain_name(opened.path) for opened in called] == ["one", "two"]
    assert expanded["one"] is not expanded["two"]
    assert expanded["one"] is not inner
    assert expanded["one"]["w"] is inner["w"]


class Fresh(Mapping[str, Any]):
    """A mapping that makes its values anew whenever it is asked."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self.make = make

    def __getitem__(self, key: str) -> Any:
        return self.make()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.make())

    def __len__(self) -> int:
        return len(self.make())


def test_containers_that_a_mapping_makes_anew_each_time_are_copied_with_the_states_in_their_places() -> None:
    app = App({"w": 1})
    state = Fresh(lambda: {"a": {"app": app, "n": 1}, "b": [app, {}], "array": np.ones(2)})
    expanded, called = expand_stateful(state, is_array)
    assert expanded == {"a": {"app": {"w": 1}, "n": 1}, "b": [{"w": 1}, {}], "array": pytest.approx(np.ones(2))}
    assert len(called) == 2
    assert flatten(state, is_array).plain_names == ("a.app", "a.n", "b.0", "array")  # an empty mapping is no leaf


keys = st.text(max_size=2) | st.integers(-2, 2) | st.booleans() | st.none() | st.tuples(st.integers(0, 1))
leaves = st.none() | st.integers() | st.text(max_size=3) | st.builds(PerRank, st.integers()) | st.just(np.zeros(2))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.builds(App, st.dictionaries(keys, inner, max_size=3))
    ),
    max_leaves=12,
)


def holds_more_than_plain_values(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(holds_more_than_plain_values, value))
    return isinstance(value, (dict, PerRank, App, np.ndarray))


def expanded_by_hand(value: Any) -> Any:
    if isinstance(value, App):
        return expanded_by_hand(value.state)
    if isinstance(value, dict):
        return type(value)((key, expanded_by_hand(child)) for key, child in value.items())
    if isinstance(value, (list, tuple)) and holds_more_than_plain_values(value):
        return type(value)(expanded_by_hand(child) for child in value)
    return value


def check_same(found: Any, expected: Any) -> None:
    """Check that two states are alike, down to the types, the order of keys, and the identity of arrays."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected]
        for key, child in expected.items():
            check_same(found[key], child)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert found is expected
    else:
        assert found == expected


def containers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from containers_in(child)


@given(st.dictionaries(keys, trees, max_size=4))
def test_an_expanded_state_is_a_copy_of_the_containers_with_the_states_in_their_places(state: dict[Any, Any]) -> None:
    found, called = expand_stateful(state, is_array)
    check_same(found, expanded_by_hand(state))
    entered = {
        id(value) for value in containers_in(state) if isinstance(value, dict) or holds_more_than_plain_values(value)
    }
    assert not entered & {id(value) for value in containers_in(found)}
    assert [value for _, value in collect_stateful(state, is_array)] == _outermost(called)


def _outermost(called: list[Any]) -> list[Any]:
    return [
        opened.value
        for opened in called
        if not any(
            len(other.path) < len(opened.path) and opened.path[: len(other.path)] == other.path for other in called
        )
    ]
