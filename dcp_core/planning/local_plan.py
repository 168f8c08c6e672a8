"""From a state to the columns of the local plan.

In: the nested state and a way to describe its tensors. Out: `LocalState`, the leaves in plan order with what is known
of each, and its `LocalTable`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np

from dcp_core.errors import AdapterError, DcpError, UnsupportedValueError
from dcp_core.metadata import Int32, Int64, UInt8, UInt64
from dcp_core.planning.leaves import LocalTensor, Place
from dcp_core.planning.local_table import COMPARED, OBJECT, PER_RANK, PICKLED, RAGGED, TENSOR, LocalTable
from dcp_core.planning.value_samples import tensor_digest
from dcp_core.state_path import PerRank, StatePath, decode_path, spell_plain_names
from dcp_core.state_tree import FlatState, flatten
from dcp_core.type_names import type_name

Describe = Callable[[Any], LocalTensor | None]


_Cell = TypeVar("_Cell")

_PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, PerRank, dict, list, tuple, set})
_DERIVED_KINDS = ("dict", "list", "tuple")
_LOW_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of this rank's state.

    Attributes:
        encoded_path: Where it lies, as `encode_path` writes it.
        name: Its name, unique among the leaves of this rank.
        value: What the user has there.
        tensor: What is known of it; None for an object.
    """

    encoded_path: bytes
    name: str
    value: Any
    tensor: LocalTensor | None

    @property
    def path(self) -> StatePath:
        """Where it lies."""
        return decode_path(self.encoded_path)


class _LazyLeaves(Sequence[Leaf]):
    """The rows of a `LocalState`, made on request."""

    def __init__(self, state: LocalState) -> None:
        self._state = state

    def __len__(self) -> int:
        return len(self._state.paths)

    @overload
    def __getitem__(self, index: int) -> Leaf: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Leaf, ...]: ...
    def __getitem__(self, index: int | slice) -> Leaf | tuple[Leaf, ...]:
        state = self._state
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        return Leaf(state.paths[index], state.names[index], state.values[index], state.tensors[index])

    def __iter__(self) -> Iterator[Leaf]:
        state = self._state
        return map(Leaf, state.paths, state.names, state.values, state.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class LocalState:
    """The leaves of a state as columns, and how it was nested.

    Leaves are in plan order, sorted by (UTF-8 plain name, encoded path); each is a row.

    Attributes:
        paths: Where each leaf lies, encoded.
        plain_names: Its plain name.
        names: Its name, unique among the leaves of this rank.
        values: What the user has there.
        tensors: What is known of it; None for an object.
        flat: The state as it was walked.
    """

    paths: tuple[bytes, ...]
    plain_names: tuple[str, ...]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    tensors: tuple[LocalTensor | None, ...]
    flat: FlatState

    @property
    def leaves(self) -> Sequence[Leaf]:
        """The rows, made on request."""
        return _LazyLeaves(self)


def read_state(state: Mapping[Any, Any], describe: Describe, place: Place | None = None) -> LocalState:
    """Walk a state and describe its tensors, each once.

    Args:
        state: The state.
        describe: Describes a tensor; None for any other value.
        place: Corrects the descriptions of tensors by their names.

    Raises:
        UnsupportedValueError: A value that cannot be stored, named by its key.
    """
    known: dict[int, LocalTensor | DcpError] = {}
    alive: list[Any] = []  # so that no other value gets the id of a described one
    failed: list[Any] = []

    def look(value: Any) -> bool:
        found: LocalTensor | DcpError | None
        if id(value) in known:
            return True
        if type(value) in _PLAIN_TYPES:
            return False
        try:
            found = describe(value)
        except Exception as error:
            found = _named_later(error, value)
            failed.append(value)
        if found is None:
            return False
        known[id(value)] = found
        alive.append(value)
        return True

    flat = flatten(state, look)
    names = spell_plain_names(flat.plain_names, lambda row: decode_path(flat.paths[row]))
    found = [known.get(id(value)) for value in flat.values]
    for name, error in zip(names, found, strict=True) if failed else ():
        if isinstance(error, DcpError):
            raise type(error)(f"{name!r}: {error}") from error
    described: Sequence[Any] = found if place is None else place(names, flat.values, _without_errors(found))
    rows = _plan_order(flat)
    tensors: list[Any] = [described[row] for row in rows]
    return LocalState(
        _picked(flat.paths, rows), _picked(flat.plain_names, rows), _picked(names, rows), _picked(flat.values, rows),
        tuple(tensors), flat,
    )  # fmt: skip


def _without_errors(found: Sequence[LocalTensor | DcpError | None]) -> list[LocalTensor | None]:
    """The descriptions, now that no leaf is left without one."""
    return [None if isinstance(tensor, DcpError) else tensor for tensor in found]


def _plan_order(flat: FlatState) -> list[int]:
    """The rows by (plain name, encoded path). The order of code points is the order of their UTF-8 bytes."""
    rows, names, paths = range(len(flat.paths)), flat.plain_names, flat.paths
    if len(set(names)) == len(names):
        return sorted(rows, key=names.__getitem__)
    return sorted(rows, key=lambda row: (names[row], paths[row]))


def _picked(column: Sequence[_Cell], rows: Iterable[int]) -> tuple[_Cell, ...]:
    return tuple(map(column.__getitem__, rows))


def _named_later(error: Exception, value: Any) -> DcpError:
    """What went wrong with describing a value, as an error that is kept until its key is known."""
    if isinstance(error, DcpError):
        return error
    kind = type_name(value)
    return AdapterError(f"describing a value of type {kind} failed: {type(error).__name__}: {error}")


def tabulate(
    state: LocalState, value_digest: Callable[[Any], int], needs_pickle: Callable[[Any], bool], *, compare: bool
) -> LocalTable:
    """Write the leaves down as columns.

    Args:
        state: The leaves.
        value_digest: Digest of an object by value.
        needs_pickle: Whether an object has no exact encoding.
        compare: Take digests of values that ranks are expected to hold alike.
    """
    count = len(state.paths)
    tensors = [tensor for tensor in state.tensors if tensor is not None]
    is_tensor = np.array([tensor is not None for tensor in state.tensors], dtype=bool)
    shapes = [tensor.global_shape for tensor in tensors]
    boxes = [box for tensor in tensors for box in tensor.boxes]
    width = max(map(len, shapes), default=0)
    shape, counts = np.ones((count, width), dtype=np.int64), np.zeros(count, dtype=np.int32)
    shape[is_tensor] = _padded(shapes, width, 1)
    counts[is_tensor] = [len(tensor.boxes) for tensor in tensors]
    columns = np.zeros((4, count), dtype=np.uint8)
    columns[0, is_tensor] = TENSOR
    columns[1, is_tensor] = _small_numbers([tensor.dtype.code for tensor in tensors])
    columns[2, is_tensor] = _small_numbers(list(map(len, shapes)))
    columns[3, is_tensor] = _small_numbers([_tensor_flags(tensor) for tensor in tensors])
    for row in np.flatnonzero(~is_tensor).tolist():
        columns[:, row] = _object_columns(state.values[row], needs_pickle)
    values = np.zeros((count, 2), dtype=np.uint64)
    for row in np.flatnonzero(columns[3] & COMPARED).tolist() if compare else ():
        values[row] = _digest_words(state.values[row], state.tensors[row], value_digest)
    return LocalTable(
        state.paths, columns[0], columns[1], columns[2], columns[3], counts, _aliases(state.tensors), shape,
        _padded([box.offsets for box in boxes], width, 0), _padded([box.sizes for box in boxes], width, 1), values,
    )  # fmt: skip


def _small_numbers(numbers: list[int]) -> UInt8:
    """Numbers below 256 as a column; numpy takes a list in one by one, bytes at once."""
    return np.frombuffer(bytes(numbers), dtype=np.uint8)


def _padded(rows: Sequence[tuple[int, ...]], width: int, fill: int) -> Int64:
    """Tuples as the rows of a matrix. Most states have few different ones: numpy reads each once."""
    position: dict[tuple[int, ...], int] = {}
    positions = [position.setdefault(row, len(position)) for row in rows]
    padding = [(fill,) * (width - ndim) for ndim in range(width + 1)]
    distinct = np.array([row + padding[len(row)] for row in position], dtype=np.int64).reshape(len(position), width)
    picked: Int64 = distinct[np.array(positions, dtype=np.int64)]
    return picked


def _object_columns(value: Any, needs_pickle: Callable[[Any], bool]) -> tuple[int, int, int, int]:
    if isinstance(value, PerRank):
        return PER_RANK, 0, 0, 0
    return OBJECT, 0, 0, COMPARED | (PICKLED if needs_pickle(value) else 0)


def _tensor_flags(tensor: LocalTensor) -> int:
    compared = tensor.plain and tensor.device == "cpu"
    return (COMPARED if compared else 0) | (RAGGED if tensor.ragged else 0)


def _digest_words(value: Any, tensor: LocalTensor | None, value_digest: Callable[[Any], int]) -> tuple[int, int]:
    digest = value_digest(value) if tensor is None else tensor_digest(tensor)
    return digest & _LOW_WORD, digest >> 64


def _aliases(tensors: Sequence[LocalTensor | None]) -> Int32:
    """For each leaf the first one that is the same memory, cut the same way."""
    alias = np.arange(len(tensors), dtype=np.int32)
    storages = [tensor.storage if tensor is not None and tensor.boxes else None for tensor in tensors]
    known = [storage for storage in storages if storage is not None]
    if len(set(known)) == len(known):
        return alias
    rows_of: dict[Hashable, list[int]] = {}
    for row, storage in enumerate(storages):
        if storage is not None:
            rows_of.setdefault(storage, []).append(row)
    for rows in rows_of.values():
        first: dict[Any, int] = {}
        for row in rows if len(rows) > 1 else ():
            tensor = tensors[row]
            assert tensor is not None
            alias[row] = first.setdefault((tensor.boxes, tensor.global_shape, tensor.dtype.code), row)
    return alias


def compared_values(table: LocalTable, excluded: Sequence[int]) -> tuple[list[int], UInt64]:
    """Leaves whose values ranks are expected to hold alike, and their digests.

    Args:
        table: The local table.
        excluded: Leaves known to differ between ranks.
    """
    mask = (table.flags & COMPARED) != 0
    mask[list(excluded)] = False
    rows = np.flatnonzero(mask)
    return rows.tolist(), table.values[rows]


def special_containers(state: LocalState) -> tuple[tuple[bytes, str], ...]:
    """The containers that the paths of the leaves do not determine: empty ones, and kinds of their own. Sorted."""
    flat = state.flat
    kept = [(path, kind) for path, kind in flat.kinds.items() if path in flat.hollow or kind not in _DERIVED_KINDS]
    return tuple(sorted(kept))


def check_writable(tensor: LocalTensor, name: str) -> None:
    """Refuse a load target whose memory cannot be written.

    Raises:
        UnsupportedValueError: A read-only array, or one that repeats elements in memory.
        AdapterError: The adapter says neither why, nor None.
    """
    for view in tensor.views:
        problem = tensor.access.writable_problem(view)
        if problem is not None and not isinstance(problem, str):
            raise AdapterError(
                f"{name!r}: {type(tensor.access).__qualname__}.writable_problem returned {problem!r}: it must say in "
                "words why the view cannot be filled, or return None where it can; repair the adapter"
            )
        if problem is not None:
            raise UnsupportedValueError(f"{name!r} cannot be loaded into: {problem}")
