"""Open up the Stateful objects of a nested state: each is replaced by what its `state_dict` returns.

In: the user's state. Out: a copy of its containers, and what was called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from dcp_core.errors import UnsupportedValueError
from dcp_core.state_nest import shown_path, tuple_like
from dcp_core.state_path import PathKey, StatePath, decode_path, encode_path, plain_name
from dcp_core.state_walk import ATOMS, IsLeaf, Walker, checked_root, component, pairs
from dcp_core.type_names import type_name

StatefulCall: TypeAlias = Callable[[StatePath, Any], object]


class OpenedStateful(NamedTuple):
    """A Stateful object whose `state_dict` was called.

    Attributes:
        path: Where it lies in the state.
        value: The object.
        state_dict: What it returned, with containers copied and inner Stateful objects replaced by their own state:
            the very container that lies at `path` in the expanded state.
    """

    path: StatePath
    value: Any
    state_dict: Any


def collect_stateful(state: Mapping[Any, object], is_leaf: IsLeaf = lambda value: False) -> list[tuple[StatePath, Any]]:
    """Find the Stateful objects of a state, in the order in which they are called on every rank.

    Returns:
        Path and object, sorted by printed name, then by encoded path. Objects that only appear in what another one's
        `state_dict` returns are not seen.
    """
    search = _Search(is_leaf)
    search.look_into(checked_root(state), b"", 0)
    return [(found.path, found.value) for found in search.in_calling_order()]


def expand_stateful(
    state: Mapping[Any, object],
    is_leaf: IsLeaf,
    call: StatefulCall = lambda path, value: value.state_dict(),
) -> tuple[Any, list[OpenedStateful]]:
    """Replace every Stateful object by its state dict, also inside the state dicts that they return.

    Objects are called in the order of `collect_stateful`; those found in a result are called right after it. The copy
    is made after the calls: a value that a `state_dict()` puts into the user's containers is taken as it is then.

    Args:
        state: The user's state; not changed, nor is what `state_dict` returns.
        is_leaf: True for tensors and arrays.
        call: Asks an object for its state; what it raises is passed on.

    Returns:
        A copy of all containers with the objects replaced, and what was called: inner objects before the one whose
        state holds them, otherwise in the order of the calls.

    Raises:
        UnsupportedValueError: A `state_dict()` that is no mapping, or objects that hold each other; and as `flatten`.
    """
    expansion = _Expansion(is_leaf, call)
    return expansion.expand(checked_root(state), (), ()), expansion.opened


class _Found:
    """A Stateful object, and its state once it was called."""

    __slots__ = ("path", "state", "value")

    def __init__(self, path: StatePath, value: Any) -> None:
        self.path = path
        self.value = value
        self.state: Any = None


_Inner: TypeAlias = dict[Any, "_Found | _Inner"]
"""What of a container is no leaf, by key or position: Stateful objects, and containers by what they hold themselves.

Keys that are no strings stand here as `PathKey`, which tells 1 from True.
"""


class _Search:
    """Finds the Stateful objects, and the containers that a copy must copy."""

    def __init__(self, is_leaf: IsLeaf) -> None:
        self._walker = Walker(is_leaf, opens_stateful=True)
        self._found: list[_Found] = []

    def look_into(self, container: Any, path: bytes, depth: int) -> _Inner:
        """Walk through a container."""
        self._walker.enter(container, path, depth)
        is_leaf = self._walker.is_leaf
        is_mapping = isinstance(container, Mapping)
        inner: _Inner = {}
        for key, child in pairs(container):
            place = key
            if is_mapping and type(key) is not str:
                component(key, container, path)
                place = PathKey("key", key)
            if not (type(child) in ATOMS or is_leaf(child)):
                found = self._look_at(child, path + component(key, container, path), depth + 1)
                if found is not None:
                    inner[place] = found
        self._walker.leave(container)
        return inner

    def _look_at(self, value: Any, path: bytes, depth: int) -> _Found | _Inner | None:
        role = self._walker.role(value, path, depth)
        if role == "container":
            return self.look_into(value, path, depth)
        if role == "leaf":
            return None
        found = _Found(decode_path(path), value)
        self._found.append(found)
        return found

    def in_calling_order(self) -> list[_Found]:
        """The Stateful objects, sorted as every rank sorts them."""
        return sorted(self._found, key=lambda found: (plain_name(found.path), encode_path(found.path)))


class _Expansion:
    """Calls Stateful objects and puts their states in their places."""

    def __init__(self, is_leaf: IsLeaf, call: StatefulCall) -> None:
        self._is_leaf = is_leaf
        self._call = call
        self.opened: list[OpenedStateful] = []

    def expand(self, root: object, path: StatePath, within: tuple[object, ...]) -> Any:
        """Copy a container with everything Stateful in it replaced; `within` are the objects being opened."""
        search = _Search(self._is_leaf)
        inner = search.look_into(root, encode_path(path), len(path))
        for found in search.in_calling_order():
            found.state = self._open(found.value, found.path, within)
        return _copied(root, inner)

    def _open(self, value: Any, path: StatePath, within: tuple[object, ...]) -> Any:
        if any(value is outer for outer in within):
            raise UnsupportedValueError(f"{shown_path(path)}: the state of a {type_name(value)} holds itself")
        state = self._call(path, value)
        if not isinstance(state, Mapping):
            raise UnsupportedValueError(
                f"{shown_path(path)}: {type_name(value)}.state_dict() returned a {type_name(state)}, expected a mapping"
            )
        expanded = self.expand(state, path, (*within, value))
        self.opened.append(OpenedStateful(path, value, expanded))
        return expanded


def _copied(container: Any, inner: _Inner) -> Any:
    """Copy a container and those in it, with the states in their places."""
    if isinstance(container, Mapping):
        entries = dict(container.items())
        for place, found in inner.items():
            key = place.value if isinstance(place, PathKey) else place
            if key in entries:
                entries[key] = _replaced(entries[key], found)
        return _like_mapping(container, entries)
    items = list(container)
    for index, found in inner.items():
        if index < len(items):
            items[index] = _replaced(items[index], found)
    return items if isinstance(container, list) else tuple_like(container, items)


def _replaced(value: Any, found: _Found | _Inner) -> Any:
    """What stands in a copy for a value; one that is no container any more stands for itself."""
    if isinstance(found, _Found):
        return found.state
    return _copied(value, found) if isinstance(value, (Mapping, list, tuple)) else value


def _like_mapping(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A mapping of the type of `value`, if that is a dict, with these entries."""
    if type(value) is dict or not isinstance(value, dict):
        return entries
    # A dict subclass keeps its attributes: module states carry their versions in one.
    copied = copy.copy(value)
    for key, child in entries.items():
        copied[key] = child
    return copied
