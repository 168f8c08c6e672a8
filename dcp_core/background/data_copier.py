"""How values that have no exact encoding are copied to the host before an asynchronous save returns.

In: what users and plugins registered for their types. Out: `StagingEncoding`, the codec that planners are given then.
A value is encoded at once, so nothing of it is shared with the state afterwards; a copier says what to encode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from dcp_core.errors import ArgumentError, DcpError, RankFailedError, UntrustedObjectError
from dcp_core.formats.objects import decode_value, encode_value
from dcp_core.plugins import staging_copier
from dcp_core.recipes.job import ObjectEncoding
from dcp_core.type_names import name_of_type, type_name

_LOGGER = logging.getLogger("dcp.background")

_Copier = TypeVar("_Copier", bound=Callable[[Any], Any])

_COPIERS: dict[type, Callable[[Any], Any]] = {}
_named: set[type] = set()
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})


class DataCopier:
    """Registers how values of a type are copied to the host for `async_save`."""

    @staticmethod
    def register(kind: type) -> Callable[[_Copier], _Copier]:
        """Decorate the function that copies values of a type, and of its subclasses that have no function of their own.

        The function gets a value and returns a copy that lives in host memory, of any type; it may hold tensors. A type
        without one, and without a plugin's, is pickled as it is, which copies all of it, with one warning.

        Args:
            kind: The type. A function that was registered for it before is replaced.

        Raises:
            ArgumentError: It is no type.

        Examples:
            >>> class Sampler:
            ...     def __init__(self, seen):
            ...         self.seen = seen
            >>> @DataCopier.register(Sampler)
            ... def copy_sampler(sampler):
            ...     return {"seen": list(sampler.seen)}
        """
        if not isinstance(kind, type):
            raise ArgumentError(f"DataCopier.register takes a type, found {kind!r}; write @DataCopier.register(MyType)")

        def add(copier: _Copier) -> _Copier:
            _COPIERS[kind] = copier
            return copier

        return add


class StagingEncoding(ObjectEncoding):
    """The objects codec of one asynchronous save. What has a copier counts as what that makes of it."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[object, object]] = {}  # with the values, so that no other object has their ids

    def digest(self, value: Any) -> int:
        """Equal for equal values, or copies."""
        return super().digest(self._stand_in(value))

    def needs_pickle(self, value: Any) -> bool:
        """Whether the value, or its copy, has no exact encoding."""
        return super().needs_pickle(self._stand_in(value))

    def _stand_in(self, value: Any) -> Any:
        """What a value counts as. A copier that raises is left to `encode`, which knows the key."""
        try:
            return self._copy(value)
        except DcpError:
            return value

    def _copy(self, value: Any, path: str = "") -> Any:
        """What stands for a value that would be pickled but for copiers, made once; other values as they are."""
        found = self._copies.get(id(value))
        if found is None:
            has_copier = _copier_of(type(value)) is not None
            if not (has_copier or (_COPIERS and type(value) in _CONTAINERS)) or not super().needs_pickle(value):
                return value
            copies = _Copies(path)
            copied = copies.replace(value) if has_copier else value
            if not has_copier or super().needs_pickle(copied):
                copied = _with_copies_inside(copied, path, copies)
            found = self._copies[id(value)] = value, copied
        return found[1]

    def encode(self, value: Any, path: str) -> bytes:
        """Encode a value exactly; what would be pickled is copied by its type's copier, where it has one."""
        copies = _Copies(path)
        copied = self._copy(value, path)
        if copied is not value:
            copies.keep(copied)
        return encode_value(copied, path=path, replace=copies.replace)


class _Copies:
    """The copies that were made while one value is encoded."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._made: dict[int, object] = {}  # alive, so that no other object has its id

    def keep(self, copied: object) -> None:
        """Take note of a copy that was made before."""
        self._made[id(copied)] = copied

    def replace(self, value: object) -> object:
        """The copy of a value; the value itself if it is such a copy, or if there is no copier."""
        if id(value) in self._made:
            return value
        copier = _copier_of(type(value))
        if copier is None:
            _warn_once(type(value), self._path)
            return value
        try:
            copied = copier(value)
        except DcpError:
            raise
        except Exception as error:
            raise RankFailedError(
                f"the copier of {type_name(value)} for {self._path!r} raised {type(error).__name__}: {error}"
            ) from error
        self._made[id(copied)] = copied
        return copied


def _with_copies_inside(value: Any, path: str, copies: _Copies) -> Any:
    """A container with copies in the place of what has copiers; itself where something else in it needs pickle."""
    try:
        return decode_value(encode_value(value, path=path, replace=copies.replace), name=path)
    except UntrustedObjectError:
        return value


def _copier_of(kind: type) -> Callable[[Any], Any] | None:
    """What users registered for a type or its most derived base; else what plugins did."""
    for base in kind.__mro__:
        if base in _COPIERS:
            return _COPIERS[base]
    return staging_copier(kind)


def _warn_once(kind: type, path: str) -> None:
    if kind in _named:
        return
    _named.add(kind)
    _LOGGER.warning(
        "%r: no copier is registered for %s, so it is copied by pickling it while training waits; register one with "
        "@DataCopier.register(%s), or store plain values",
        path, name_of_type(kind), kind.__qualname__,
    )  # fmt: skip
