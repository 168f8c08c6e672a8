"""What a walk through a nested state takes apart: which values are leaves, which are containers.

Walks know where they are by the *encoded* path (see `state_path`): a component costs a few bytes, and typed paths are
made only for what is reported or called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from dcp_core.errors import UnsupportedValueError
from dcp_core.key_codec import encode_key
from dcp_core.state_nest import shown_path
from dcp_core.state_path import MAX_DEPTH, PerRank, decode_path, position
from dcp_core.type_names import type_name

IsLeaf: TypeAlias = Callable[[object], bool]
Role: TypeAlias = Literal["leaf", "container", "stateful"]

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
"""Types whose values are leaves, whatever they are."""

_SHOWN_COMPONENTS = 8


def is_stateful(value: object) -> bool:
    """Tell whether a value is an object with `state_dict` and `load_state_dict` methods (a class is not)."""
    if type(value) in ATOMS or isinstance(value, type):
        return False
    try:
        return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    except Exception:  # a foreign __getattr__ may raise anything
        return False


class Walker:
    """Tells leaves from containers, and refuses cycles and nesting without end. Serves one walk.

    Args:
        is_leaf: True for tensors and arrays.
        opens_stateful: Whether Stateful objects have a role of their own.
    """

    def __init__(self, is_leaf: IsLeaf, *, opens_stateful: bool = False) -> None:
        self.is_leaf = is_leaf
        self._opens_stateful = opens_stateful
        # By id, None while looking; the sequence is kept beside the answer so that no other object gets its id.
        self._holding: dict[int, tuple[object, bool | None]] = {}
        self._active: set[int] = set()

    def role(self, value: object, path: bytes, depth: int) -> Role:
        """What to do with a value that is no atom and no tensor.

        Args:
            value: The value.
            path: Where it lies, encoded.
            depth: Components of the path.

        Raises:
            UnsupportedValueError: A `PerRank` holds an object that has a state of its own.
        """
        if type(value) is dict:
            return "container"
        if isinstance(value, PerRank):
            _check_own_value(value.value, path)
            return "leaf"
        if self._opens_stateful and is_stateful(value):
            return "stateful"
        if isinstance(value, (list, tuple)):
            if not value and hasattr(value, "_fields"):
                return "container"
            return "container" if self._holds_reason(value, path, depth) else "leaf"
        return "container" if isinstance(value, Mapping) else "leaf"

    def enter(self, value: object, path: bytes, depth: int) -> None:
        """Begin with what a container holds.

        Raises:
            UnsupportedValueError: It is being walked already, or lies too deep.
        """
        if id(value) in self._active:
            raise UnsupportedValueError(f"{shown(path)}: a container that holds itself; break the cycle")
        if depth >= MAX_DEPTH:
            raise _too_deep(path)
        self._active.add(id(value))

    def leave(self, value: object) -> None:
        """End with what a container holds."""
        self._active.discard(id(value))

    def _holds_reason(self, values: list[object] | tuple[object, ...], path: bytes, depth: int) -> bool:
        """Whether a list or tuple must be entered, looking through lists and tuples in it."""
        known = self._holding.get(id(values), (None, False))
        if known[1] is None:
            raise UnsupportedValueError(f"{shown(path)}: a list or tuple that holds itself; break the cycle")
        if known[0] is not None:
            return known[1]
        if depth >= MAX_DEPTH:
            raise _too_deep(path)
        self._holding[id(values)] = (values, None)
        found = any(type(value) not in ATOMS and self._is_reason(value, path, depth) for value in values)
        self._holding[id(values)] = (values, found)
        return found

    def _is_reason(self, value: object, path: bytes, depth: int) -> bool:
        if isinstance(value, (Mapping, PerRank)) or self.is_leaf(value):
            return True
        if isinstance(value, (list, tuple)) and self._holds_reason(value, path, depth + 1):
            return True
        return is_stateful(value)


def _check_own_value(value: object, path: bytes) -> None:
    if is_stateful(value):
        name = type_name(value)
        raise UnsupportedValueError(
            f"{shown(path)}: a PerRank that holds a {name}, whose state is in its state_dict(): pass "
            f"PerRank(value.state_dict()), and hand what a load puts there to value.load_state_dict()"
        )


def checked_root(state: Any) -> Mapping[Any, object]:
    """Check that a state is a mapping.

    Raises:
        UnsupportedValueError: It is not.
    """
    if not isinstance(state, Mapping):
        raise UnsupportedValueError(f"the state must be a mapping, found {type_name(state)}; pass a dict")
    return state


def pairs(container: Any) -> Iterable[tuple[Any, Any]]:
    """Keys or positions of a container, and what lies there."""
    return container.items() if isinstance(container, Mapping) else enumerate(container)


def component(key: Any, container: object, path: bytes) -> bytes:
    """The component of a key or position of a container, encoded.

    Args:
        key: What `pairs` tells.
        container: The container.
        path: Where it lies, encoded.

    Raises:
        UnsupportedValueError: A key that no path can hold.
    """
    if not isinstance(container, Mapping):
        return position("list" if isinstance(container, list) else "tuple", key).encoded
    try:
        return encode_key(key)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{shown(path)}: {error.message}") from None


def container_kind(value: object) -> str:
    """What a container is called in a checkpoint."""
    if isinstance(value, Mapping):
        return "OrderedDict" if isinstance(value, OrderedDict) else "dict"
    if isinstance(value, list):
        return "list"
    return "namedtuple" if hasattr(value, "_fields") else "tuple"


def shown(path: bytes) -> str:
    """How a message names a place."""
    return shown_path(decode_path(path))


def _too_deep(path: bytes) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"{shown_path(decode_path(path)[:_SHOWN_COMPONENTS])}...: containers nest more than {MAX_DEPTH} deep; make the "
        "state flatter"
    )
