"""Walk a nested state: leaves by typed path.

In: the user's state, any nesting of mappings, lists and tuples. Out: its leaves, as columns. Stateful objects are
opened up before, by `stateful`; putting values back is `state_nest`'s part. Both are offered here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dcp_core.key_codec import encode_key
from dcp_core.state_nest import check_settable, rebuild, set_value
from dcp_core.state_path import StatePath, decode_path, plain_key
from dcp_core.state_walk import ATOMS, IsLeaf, Walker, checked_root, component, container_kind, is_stateful, pairs
from dcp_core.stateful import OpenedStateful, StatefulCall, collect_stateful, expand_stateful

__all__ = [
    "FlatState",
    "IsLeaf",
    "OpenedStateful",
    "StatefulCall",
    "check_settable",
    "collect_stateful",
    "expand_stateful",
    "flatten",
    "is_stateful",
    "rebuild",
    "set_value",
]


@dataclass(frozen=True, eq=False)
class FlatState:
    """A state taken apart, as columns; a leaf is a row, in the order of the state.

    Attributes:
        paths: Encoded path of each leaf.
        plain_names: Plain name of each leaf.
        values: Value of each leaf.
        kinds: "dict", "OrderedDict", "list", "tuple" or "namedtuple" for every container that was entered, by encoded
            path, the root and empty ones included.
        hollow: Encoded paths of containers, and of lists and tuples that are leaves, that hold nothing.
    """

    paths: tuple[bytes, ...]
    plain_names: tuple[str, ...]
    values: tuple[Any, ...]
    kinds: Mapping[bytes, str]
    hollow: frozenset[bytes]

    @cached_property
    def leaves(self) -> dict[StatePath, object]:
        """Value of each leaf by path, in the order of the state."""
        return dict(zip(map(decode_path, self.paths), self.values, strict=True))

    @cached_property
    def containers(self) -> dict[StatePath, str]:
        """Kind of every container by path."""
        return {decode_path(path): kind for path, kind in self.kinds.items()}

    @cached_property
    def empty(self) -> frozenset[StatePath]:
        """Paths of what holds nothing."""
        return frozenset(map(decode_path, self.hollow))


def flatten(state: Mapping[Any, object], is_leaf: IsLeaf) -> FlatState:
    """Take a state apart into leaves.

    Mappings are always entered. A list or tuple is entered when it holds, through lists and tuples, a tensor, a
    mapping, a Stateful or a `PerRank`; otherwise the whole list or tuple is one leaf, an empty one too. A Stateful
    that is no mapping is a leaf: see `expand_stateful`.

    Args:
        state: The state; its root must be a mapping.
        is_leaf: True for tensors and arrays.

    Raises:
        UnsupportedValueError: A root that is no mapping, a key that no path can hold, a cycle, or nesting deeper
            than `MAX_DEPTH`.
    """
    walk = _Flattening(is_leaf)
    walk.take_apart(checked_root(state), b"", "", 0)
    return walk.result()


class _Flattening:
    """Writes leaves down while it walks."""

    def __init__(self, is_leaf: IsLeaf) -> None:
        self._walker = Walker(is_leaf)
        self._paths: list[bytes] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        self._kinds: dict[bytes, str] = {}
        self._hollow: list[bytes] = []

    def take_apart(self, container: Any, path: bytes, prefix: str, depth: int) -> None:
        """Write down a container and all in it; `prefix` is what the plain names in it begin with."""
        self._walker.enter(container, path, depth)
        self._kinds[path] = container_kind(container)
        if not container:
            self._hollow.append(path)
        is_leaf = self._walker.is_leaf
        add_path, add_name, add_value = self._paths.append, self._names.append, self._values.append
        for key, child in pairs(container):
            if type(key) is str:
                place, name = path + encode_key(key), prefix + key
            else:
                place, name = path + component(key, container, path), prefix + plain_key(key)
            if type(child) in ATOMS or is_leaf(child) or not self._is_taken_apart(child, place, name, depth + 1):
                add_path(place)
                add_name(name)
                add_value(child)
        self._walker.leave(container)

    def _is_taken_apart(self, value: Any, path: bytes, name: str, depth: int) -> bool:
        """Write down what a value holds, if it is a container."""
        if self._walker.role(value, path, depth) == "container":
            self.take_apart(value, path, f"{name}.", depth)
            return True
        if type(value) in (list, tuple) and not value:
            self._hollow.append(path)
        return False

    def result(self) -> FlatState:
        """What was found."""
        paths, names, values = self._paths, self._names, self._values
        if len(set(names)) < len(names):  # a foreign mapping may tell one key twice: its last value counts
            rows = {path: (name, value) for path, name, value in zip(paths, names, values, strict=True)}
            paths, names, values = list(rows), [row[0] for row in rows.values()], [row[1] for row in rows.values()]
        return FlatState(tuple(paths), tuple(names), tuple(values), self._kinds, frozenset(self._hollow))
