"""From a state to the columns of the local plan.

In: the nested state and a way to describe its tensors. Out: `LocalState`, the leaves in plan order with what is known
of each, and its `LocalTable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dcp_core.errors import AdapterError, DcpError, UnsupportedValueError
from dcp_core.metadata import UInt64
from dcp_core.planning.balance import TINY_NBYTES
from dcp_core.planning.leaves import LocalTensor
from dcp_core.planning.local_table import COMPARED, OBJECT, PER_RANK, PICKLED, RAGGED, TENSOR, LocalTable
from dcp_core.state_path import PerRank, StatePath, encode_path, plain_name, spell_names
from dcp_core.state_tree import FlatState, flatten

Describe = Callable[[Any], LocalTensor | None]

_PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, PerRank, dict, list, tuple, set})
_DERIVED_KINDS = ("dict", "list", "tuple")
_SAMPLES = 8
_SAMPLE_NBYTES = 1024
_LOW_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of this rank's state.

    Attributes:
        path: Where it lies.
        name: Its name, unique among the leaves of this rank.
        value: What the user has there.
        tensor: What is known of it; None for an object.
    """

    path: StatePath
    name: str
    value: Any
    tensor: LocalTensor | None


@dataclass(frozen=True, slots=True)
class LocalState:
    """The leaves of a state in plan order, and how it was nested.

    Attributes:
        leaves: Sorted by (UTF-8 plain name, encoded path).
        flat: Containers, as they were walked.
    """

    leaves: tuple[Leaf, ...]
    flat: FlatState


def read_state(state: Mapping[Any, Any], describe: Describe) -> LocalState:
    """Walk a state and describe its tensors, each once.

    Raises:
        UnsupportedValueError: A value that cannot be stored, named by its key.
    """
    known: dict[int, LocalTensor | DcpError | None] = {}

    def look(value: Any) -> bool:
        if type(value) in _PLAIN_TYPES:
            return False
        found = known.get(id(value), known)
        if found is known:
            found = known[id(value)] = _describe(value, describe)
        return found is not None

    flat = flatten(state, look)
    leaves = []
    for (path, value), name in zip(flat.leaves.items(), spell_names(list(flat.leaves)), strict=True):
        tensor = known[id(value)] if type(value) not in _PLAIN_TYPES and look(value) else None
        if isinstance(tensor, DcpError):
            raise type(tensor)(f"{name!r}: {tensor}") from tensor
        leaves.append(Leaf(path, name, value, tensor))
    leaves.sort(key=lambda leaf: (plain_name(leaf.path).encode("utf-8", "surrogatepass"), encode_path(leaf.path)))
    return LocalState(tuple(leaves), flat)


def _describe(value: Any, describe: Describe) -> LocalTensor | DcpError | None:
    """Describe a value; an error is kept until its key is known."""
    try:
        return describe(value)
    except DcpError as error:
        return error
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
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
    leaves = state.leaves
    tensors = [leaf.tensor for leaf in leaves if leaf.tensor is not None]
    width = max((len(tensor.global_shape) for tensor in tensors), default=0)
    boxes = [box for tensor in tensors for box in tensor.boxes]
    offsets, sizes = np.zeros((len(boxes), width), dtype=np.int64), np.ones((len(boxes), width), dtype=np.int64)
    for row, box in enumerate(boxes):
        offsets[row, : box.ndim], sizes[row, : box.ndim] = box.offsets, box.sizes
    shape = np.ones((len(leaves), width), dtype=np.int64)
    columns = np.zeros((4, len(leaves)), dtype=np.uint8)
    counts = np.zeros(len(leaves), dtype=np.int32)
    values = np.zeros((len(leaves), 2), dtype=np.uint64)
    for row, leaf in enumerate(leaves):
        tensor = leaf.tensor
        if tensor is None:
            columns[:, row] = _object_columns(leaf.value, needs_pickle)
        else:
            shape[row, : len(tensor.global_shape)] = tensor.global_shape
            columns[:, row] = TENSOR, tensor.dtype.code, len(tensor.global_shape), _tensor_flags(tensor)
            counts[row] = len(tensor.boxes)
        if compare and columns[3, row] & COMPARED:
            values[row] = _digest_words(leaf, value_digest)
    return LocalTable(
        tuple(encode_path(leaf.path) for leaf in leaves), columns[0], columns[1], columns[2], columns[3], counts,
        _aliases(leaves), shape, offsets, sizes, values,
    )  # fmt: skip


def _object_columns(value: Any, needs_pickle: Callable[[Any], bool]) -> tuple[int, int, int, int]:
    if isinstance(value, PerRank):
        return PER_RANK, 0, 0, 0
    return OBJECT, 0, 0, COMPARED | (PICKLED if needs_pickle(value) else 0)


def _tensor_flags(tensor: LocalTensor) -> int:
    compared = tensor.plain and tensor.device == "cpu"
    return (COMPARED if compared else 0) | (RAGGED if tensor.ragged else 0)


def _digest_words(leaf: Leaf, value_digest: Callable[[Any], int]) -> tuple[int, int]:
    if leaf.tensor is None:
        digest = value_digest(leaf.value)
    else:
        digest = xxhash.xxh3_128_intdigest(b"".join(_sample(leaf.tensor.access.read_out(v)) for v in leaf.tensor.views))
    return digest & _LOW_WORD, digest >> 64


def _sample(bits: npt.NDArray[Any]) -> bytes:
    """What of a value is compared between ranks: all of a small one, blocks spread evenly over a larger one."""
    if bits.nbytes < TINY_NBYTES:
        return np.ascontiguousarray(bits).tobytes()
    count = _SAMPLE_NBYTES // bits.itemsize
    starts = np.linspace(0, bits.size - count, _SAMPLES).astype(np.int64).tolist()
    flat = bits.reshape(-1) if bits.flags.c_contiguous else bits.flat
    return b"".join(flat[start : start + count].tobytes() for start in starts)


def _aliases(leaves: Sequence[Leaf]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """For each leaf the first one that is the same memory, cut the same way."""
    alias = np.arange(len(leaves), dtype=np.int32)
    first: dict[Any, int] = {}
    for row, leaf in enumerate(leaves):
        tensor = leaf.tensor
        if tensor is not None and tensor.storage is not None and tensor.boxes:
            key = (tensor.storage, tensor.boxes, tensor.global_shape, tensor.dtype.code)
            alias[row] = first.setdefault(key, row)
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
    kept = [path for path, kind in flat.containers.items() if path in flat.empty or kind not in _DERIVED_KINDS]
    return tuple(sorted((encode_path(path), flat.containers[path]) for path in kept))


def check_writable(tensor: LocalTensor, name: str) -> None:
    """Refuse a load target whose memory cannot be written.

    Raises:
        UnsupportedValueError: A read-only array, or one that repeats elements in memory.
    """
    for view in tensor.views:
        problem = tensor.access.writable_problem(view)
        if problem is not None:
            raise UnsupportedValueError(f"{name!r} cannot be loaded into: {problem}")
