"""Walk a nested state: leaves by typed path, Stateful objects opened up.

In: the user's state, any nesting of mappings, lists and tuples. Out: leaves, or a copy of the containers. Nothing of
the user's is changed here; putting values back is `state_nest`'s part, offered here too.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from dcp_core.errors import UnsupportedValueError
from dcp_core.state_nest import check_settable, rebuild, set_value, shown_path, tuple_like, type_name
from dcp_core.state_path import MAX_DEPTH, PathKey, PerRank, StatePath, encode_path, plain_name, position

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

IsLeaf: TypeAlias = Callable[[object], bool]
StatefulCall: TypeAlias = Callable[[StatePath, Any], object]
_Role: TypeAlias = Literal["leaf", "container", "stateful"]

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state taken apart.

    Attributes:
        leaves: Value of each leaf by path, in the order of the state.
        containers: "dict", "OrderedDict", "list", "tuple" or "namedtuple" for every container that was entered,
            the root and empty ones included.
        empty: Paths of containers, and of lists and tuples that are leaves, that hold nothing.
    """

    leaves: dict[StatePath, object]
    containers: dict[StatePath, str]
    empty: frozenset[StatePath]


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


def is_stateful(value: object) -> bool:
    """Tell whether a value is an object with `state_dict` and `load_state_dict` methods (a class is not)."""
    if type(value) in _ATOMS or isinstance(value, type):
        return False
    try:
        return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    except Exception:  # a foreign __getattr__ may raise anything
        return False


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
    leaves: dict[StatePath, object] = {}
    containers: dict[StatePath, str] = {}
    empty: list[StatePath] = []
    for path, value, role in _Walker(is_leaf).walk(_checked_root(state), ()):
        if role == "container":
            containers[path] = _container_kind(value)
            if not value:
                empty.append(path)
        else:
            leaves[path] = value
            if type(value) in (list, tuple) and not value:
                empty.append(path)
    return FlatState(leaves, containers, frozenset(empty))


def collect_stateful(state: Mapping[Any, object], is_leaf: IsLeaf = lambda value: False) -> list[tuple[StatePath, Any]]:
    """Find the Stateful objects of a state, in the order in which they are called on every rank.

    Returns:
        Path and object, sorted by printed name, then by encoded path. Objects that only appear in what another one's
        `state_dict` returns are not seen.
    """
    return _in_calling_order(_Walker(is_leaf, opens_stateful=True).walk(_checked_root(state), ()))


def expand_stateful(
    state: Mapping[Any, object],
    is_leaf: IsLeaf,
    call: StatefulCall = lambda path, value: value.state_dict(),
) -> tuple[Any, list[OpenedStateful]]:
    """Replace every Stateful object by its state dict, also inside the state dicts that they return.

    Objects are called in the order of `collect_stateful`; those found in a result are called right after it.

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
    return expansion.expand(_checked_root(state), (), ()), expansion.opened


class _Walker:
    """Decides what is taken apart, and walks it. Serves one walk."""

    def __init__(self, is_leaf: IsLeaf, opens_stateful: bool = False) -> None:
        self._is_leaf = is_leaf
        self._opens_stateful = opens_stateful
        # By id, None while looking; the sequence is kept beside the answer so that no other object gets its id.
        self._holding: dict[int, tuple[object, bool | None]] = {}
        self._active: set[int] = set()

    def walk(self, root: object, path: StatePath) -> Iterator[tuple[StatePath, Any, _Role]]:
        """Yield the root and everything in it, containers before what they hold, in the order of the state."""
        yield path, root, "container"
        stack = [(self._entered(root, path), root)]
        while stack:
            found = next(stack[-1][0], None)
            if found is None:
                self._active.discard(id(stack.pop()[1]))
                continue
            path, value = found
            role = self._role(value, path)
            yield path, value, role
            if role == "container":
                stack.append((self._entered(value, path), value))

    def _role(self, value: object, path: StatePath) -> _Role:
        if type(value) in _ATOMS or self._is_leaf(value) or isinstance(value, PerRank):
            return "leaf"
        if self._opens_stateful and is_stateful(value):
            return "stateful"
        if isinstance(value, (list, tuple)):
            if not value and hasattr(value, "_fields"):
                return "container"
            return "container" if self._holds_reason(value, path, len(path)) else "leaf"
        return "container" if isinstance(value, Mapping) else "leaf"

    def _entered(self, value: Any, path: StatePath) -> Iterator[tuple[StatePath, object]]:
        if id(value) in self._active:
            raise UnsupportedValueError(f"{shown_path(path)}: a container that holds itself; break the cycle")
        if len(path) >= MAX_DEPTH:
            raise _too_deep(path)
        self._active.add(id(value))
        return _children(value, path)

    def _holds_reason(self, values: list[object] | tuple[object, ...], path: StatePath, depth: int) -> bool:
        """Whether a list or tuple must be entered, looking through lists and tuples in it."""
        known = self._holding.get(id(values), (None, False))
        if known[1] is None:
            raise UnsupportedValueError(f"{shown_path(path)}: a list or tuple that holds itself; break the cycle")
        if known[0] is not None:
            return known[1]
        if depth >= MAX_DEPTH:
            raise _too_deep(path)
        self._holding[id(values)] = (values, None)
        found = any(type(value) not in _ATOMS and self._is_reason(value, path, depth) for value in values)
        self._holding[id(values)] = (values, found)
        return found

    def _is_reason(self, value: object, path: StatePath, depth: int) -> bool:
        if isinstance(value, (Mapping, PerRank)) or self._is_leaf(value):
            return True
        if isinstance(value, (list, tuple)) and self._holds_reason(value, path, depth + 1):
            return True
        return is_stateful(value)


class _Expansion:
    """Calls Stateful objects and puts their states in their places."""

    def __init__(self, is_leaf: IsLeaf, call: StatefulCall) -> None:
        self._is_leaf = is_leaf
        self._call = call
        self.opened: list[OpenedStateful] = []

    def expand(self, root: object, path: StatePath, within: tuple[object, ...]) -> Any:
        """Copy a container with everything Stateful in it replaced; `within` are the objects being opened."""
        visited = list(_Walker(self._is_leaf, opens_stateful=True).walk(root, path))
        states = {place: self._open(value, place, within) for place, value in _in_calling_order(visited)}
        entered = {place for place, _, role in visited if role == "container"}

        def copied(value: Any, place: StatePath) -> Any:
            if place in entered:
                return _copy_container(value, [(key[-1], copied(child, key)) for key, child in _children(value, place)])
            return states.get(place, value)

        return copied(root, path)

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


def _in_calling_order(visited: Any) -> list[tuple[StatePath, Any]]:
    found = [(path, value) for path, value, role in visited if role == "stateful"]
    return sorted(found, key=lambda entry: (plain_name(entry[0]), encode_path(entry[0])))


def _checked_root(state: Any) -> Mapping[Any, object]:
    if not isinstance(state, Mapping):
        raise UnsupportedValueError(f"the state must be a mapping, found {type_name(state)}; pass a dict")
    return state


def _children(value: Any, path: StatePath) -> Iterator[tuple[StatePath, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield (*path, _mapping_key(key, path)), child
        return
    kind: Literal["list", "tuple"] = "list" if isinstance(value, list) else "tuple"
    for index, child in enumerate(value):
        yield (*path, position(kind, index)), child


def _mapping_key(key: Any, path: StatePath) -> PathKey:
    try:
        return PathKey("key", key)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{shown_path(path)}: {error.message}") from None


def _container_kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "OrderedDict" if isinstance(value, OrderedDict) else "dict"
    if isinstance(value, list):
        return "list"
    return "namedtuple" if hasattr(value, "_fields") else "tuple"


def _copy_container(value: Any, entries: list[tuple[PathKey, Any]]) -> Any:
    if isinstance(value, Mapping):
        return _copy_mapping(value, {key.value: child for key, child in entries})
    items = [child for _, child in entries]
    return items if isinstance(value, list) else tuple_like(value, items)


def _copy_mapping(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if type(value) is dict or not isinstance(value, dict):
        return entries
    # A dict subclass keeps its attributes: module states carry their versions in one.
    copied = copy.copy(value)
    for key, child in entries.items():
        copied[key] = child
    return copied


def _too_deep(path: StatePath) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"{shown_path(path[:8])}...: containers nest more than {MAX_DEPTH} deep; make the state flatter"
    )
