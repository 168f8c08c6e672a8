"""Put values into nested states: one value in place, or all leaves of a checkpoint into new containers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any

from dcp_core.errors import CorruptError, UnsupportedValueError
from dcp_core.state_path import MAX_DEPTH, PathKey, StatePath, plain_name
from dcp_core.type_names import type_name

_MAPPING_KINDS = ("dict", "OrderedDict")
_CONTAINERS: dict[str, type] = {"key": Mapping, "list": list, "tuple": tuple}
_POSITION_KINDS = {"list": "list", "tuple": "tuple", "namedtuple": "tuple"}


def check_settable(state: object, path: StatePath) -> None:
    """Check that `set_value` can put a value at `path`.

    Raises:
        UnsupportedValueError: As `set_value`.
    """
    _changeable_level(_containers_on(state, path), path)


def set_value(state: object, path: StatePath, value: object) -> None:
    """Put a value at a path of a nested state, in place.

    Tuples on the way cannot be changed: they are built anew (a namedtuple stays one) and replaced in the nearest
    container above that can be.

    Raises:
        UnsupportedValueError: The path leads nowhere, or nothing above the value can be changed.
    """
    containers = _containers_on(state, path)
    level = _changeable_level(containers, path)
    for index in range(len(path) - 1, level, -1):
        items = list(containers[index])
        items[_index(path[index])] = value
        value = tuple_like(containers[index], items)
    containers[level][path[level].value] = value


def rebuild(leaves: Mapping[StatePath, object], containers: Mapping[StatePath, str]) -> Any:
    """Nest leaves as they were saved.

    Args:
        leaves: Value by path; mappings come out in this order.
        containers: Kind of the containers that the paths do not tell: empty ones, and kinds other than dict, list
            and tuple. Others may be listed too. A namedtuple comes back as a tuple.

    Returns:
        The root: a dict unless the paths or `containers` say otherwise.

    Raises:
        CorruptError: Paths that contradict each other or leave gaps in a list.
    """
    root = _Node()
    for path, value in leaves.items():
        node = root.descend(path)
        node.is_leaf, node.value = True, value
    for path, kind in containers.items():
        root.descend(path).kind = kind
    if not root.children and root.kind is None and not root.is_leaf:
        root.kind = "dict"
    return root.nest(())


class _Node:
    """A place in the tree that `rebuild` makes."""

    __slots__ = ("children", "is_leaf", "kind", "value")

    def __init__(self) -> None:
        self.children: dict[PathKey, _Node] = {}
        self.kind: str | None = None
        self.is_leaf = False
        self.value: object = None

    def descend(self, path: StatePath) -> _Node:
        """The node at a path, made if need be."""
        if len(path) > MAX_DEPTH:
            raise CorruptError(
                f"a path of {len(path)} components, at most {MAX_DEPTH} can be: {shown_path(path[:8])}..."
            )
        node = self
        for key in path:
            node = node.children.setdefault(key, _Node())
        return node

    def nest(self, path: StatePath) -> Any:
        """Make the value of this node."""
        if self.is_leaf:
            if self.children or self.kind is not None:
                raise CorruptError(f"{shown_path(path)} is both a value and a container in the checkpoint")
            return self.value
        kinds = {key.kind for key in self.children}
        kind = self.kind if self.kind is not None else "dict" if kinds == {"key"} else min(kinds)
        expected = "key" if kind in _MAPPING_KINDS else _POSITION_KINDS.get(kind)
        if expected is None or kinds - {expected}:
            raise CorruptError(f"{shown_path(path)}: a container of kind {kind!r} with {sorted(kinds)} components")
        values = [(key.value, node.nest((*path, key))) for key, node in self.children.items()]
        return self._mapping(values, kind, path) if expected == "key" else self._sequence(values, kind, path)

    def _mapping(self, values: list[tuple[Any, Any]], kind: str, path: StatePath) -> Any:
        nested = OrderedDict(values) if kind == "OrderedDict" else dict(values)
        if len(nested) < len(values):
            raise CorruptError(
                f"{shown_path(path)}: keys that are equal for Python, such as 1 and True, in one mapping"
            )
        return nested

    def _sequence(self, values: list[tuple[Any, Any]], kind: str, path: StatePath) -> Any:
        values.sort(key=lambda entry: int(entry[0]))
        if any(place != index for index, (place, _) in enumerate(values)):
            raise CorruptError(f"{shown_path(path)}: a {kind} with a gap: {len(values)} entries up to {values[-1][0]}")
        items = [value for _, value in values]
        return items if kind == "list" else tuple(items)


def tuple_like(value: Any, items: list[Any]) -> Any:
    """Make a tuple of the type of `value`, which may be a namedtuple, with other items."""
    kind = type(value)
    if kind is tuple:
        return tuple(items)
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def _index(key: PathKey) -> int:
    assert isinstance(key.value, int)
    return key.value


def _containers_on(state: Any, path: StatePath) -> list[Any]:
    """The container that holds each component of a path."""
    containers: list[Any] = []
    for depth, key in enumerate(path):
        is_last = depth == len(path) - 1
        if not isinstance(state, _CONTAINERS[key.kind]) or not _has(state, key, is_last):
            found = f"a {type_name(state)} at {shown_path(path[:depth])}"
            raise UnsupportedValueError(f"{shown_path(path)}: the state has no such place; found {found}")
        containers.append(state)
        state = None if is_last else _child(state, key)
    return containers


def _child(container: Any, key: PathKey) -> Any:
    return container[key.value]


def _has(container: Any, key: PathKey, is_last: bool) -> bool:
    if key.kind == "key":
        return is_last or key.value in container
    return _index(key) < len(container)


def _changeable_level(containers: list[Any], path: StatePath) -> int:
    for level in range(len(path) - 1, -1, -1):
        if isinstance(containers[level], (list, MutableMapping)):
            return level
        if not isinstance(containers[level], tuple):
            break
    raise UnsupportedValueError(
        f"{shown_path(path)}: nothing above this value can be changed in place; pass a dict, not an immutable container"
    )


def shown_path(path: StatePath) -> str:
    """How a message names a place."""
    return repr(plain_name(path)) if path else "the root of the state"
