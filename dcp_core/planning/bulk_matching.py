"""Which stored entry fills which target, for all targets at once that fit without a question.

In: the leaves and the checkpoint's metadata. Out: what fills the leaves whose name holds one entry, of all ranks, of
their path, shape, and a dtype that converts. The other leaves are left to be looked at one by one, in their order: so
it is there alone that anything is refused, and the words for it are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq

import numpy as np
import numpy.typing as npt

from dcp_core.dtype import BY_CODE, DType
from dcp_core.errors import CorruptError
from dcp_core.metadata import (
    EVERY_RANK,
    FoundTensors,
    Int64,
    MetadataSource,
    StoredObject,
    StoredTensor,
    UInt8,
)
from dcp_core.planning.leaves import LocalTensor
from dcp_core.planning.local_plan import LocalState
from dcp_core.planning.wanted import ChunkPlaces, WantedBoxes, padded
from dcp_core.state_path import canonical_names, decode_path

Mask = npt.NDArray[np.bool_]
KindOf = Callable[[DType, DType], str]
"""For the stored and the target's dtype: how the one becomes the other, see `conversion`; `REFUSED` if it may not."""
REFUSED = "refused here"


@dataclass(frozen=True, slots=True, eq=False)
class PlainMatches:
    """What was found for the leaves that fit without a question.

    Attributes:
        leaf: Positions of tensor leaves, ascending. Shape (M,).
        part: In which of `parts` the tensor is that fills it. Shape (M,).
        row: Its row there. Shape (M,).
        parts: Stored tensors.
        objects: What fills object leaves, by their position.
        lossy: See `lossy_text`.
    """

    leaf: Int64
    part: Int64
    row: Int64
    parts: Sequence[FoundTensors]
    objects: dict[int, StoredObject]
    lossy: list[str]

    @classmethod
    def nothing(cls) -> PlainMatches:
        """No leaf was matched."""
        none = np.empty(0, dtype=np.int64)
        return cls(none, none, none, (), {}, [])

    def stored(self, position: int, name: str) -> StoredTensor:
        """Make the stored tensor of one of the M leaves."""
        part, row = self.parts[int(self.part[position])], int(self.row[position])
        ndim, rows = int(part.ndim[row]), slice(int(part.first[row]), int(part.first[row] + part.count[row]))
        chunks = part.chunks.part(rows, ndim)
        shape = tuple(part.shape[row, :ndim].tolist())
        return StoredTensor(
            name, decode_path(part.paths[row]), EVERY_RANK, BY_CODE[int(part.dtype[row])], shape, chunks
        )


def lossy_text(name: str, stored: DType, target: DType) -> str:
    """How a conversion that loses precision is reported."""
    return f"{name}: {stored.name} to {target.name}"


def match_plainly(state: LocalState, source: MetadataSource, kind_of: KindOf) -> PlainMatches:
    """Look all leaves up at once.

    Args:
        state: The target's leaves.
        source: What is stored.
        kind_of: How a stored dtype becomes the target's.

    Raises:
        CorruptError: The part of the metadata that some leaf needs is not sound.

    Complexity:
        Linear in the leaves and in the names of the groups of `.metadata` that hold theirs.
    """
    tensor_leaves = [row for row, tensor in enumerate(state.tensors) if tensor is not None and state.plain_names[row]]
    parts, _ = source.find_tensors([state.plain_names[row] for row in tensor_leaves])
    every_leaf = np.array(tensor_leaves, dtype=np.int64)
    leaves, numbers, rows, lossy = [], [], [], []
    for number, part in enumerate(parts):
        leaf = every_leaf[part.asked]
        kept, loses = _fitting(state, source, leaf, part, kind_of)
        leaves.append(leaf[kept])
        numbers.append(np.full(len(kept), number))
        rows.append(kept)
        for position, code in zip(leaf[loses].tolist(), part.dtype[loses].tolist(), strict=True):
            lossy.append(lossy_text(state.names[position], BY_CODE[code], state.tensors[position].dtype))
    nothing = np.empty(0, dtype=np.int64)
    leaf = np.concatenate([nothing, *leaves])
    order = np.argsort(leaf, kind="stable")
    number, row = np.concatenate([nothing, *numbers])[order], np.concatenate([nothing, *rows])[order]
    return PlainMatches(leaf[order], number, row, parts, _plain_objects(state, source), lossy)


def _fitting(
    state: LocalState, source: MetadataSource, leaf: Int64, part: FoundTensors, kind_of: KindOf
) -> tuple[Int64, Int64]:
    """The rows that fit their leaves, and those of them that lose precision."""
    tensors = [state.tensors[row] for row in leaf.tolist()]
    fits = _same_shapes(tensors, part)
    converts, loses = _converted(tensors, part, kind_of)
    fits &= converts
    fits &= _named_alike(state, source, leaf, part)
    rows = np.flatnonzero(fits).tolist()
    fits[rows] = _are_writable([tensors[row] for row in rows])
    return np.flatnonzero(fits), np.flatnonzero(fits & loses)


def _same_shapes(tensors: Sequence[LocalTensor], part: FoundTensors) -> Mask:
    shapes = list(map(attrgetter("global_shape"), tensors))
    ndim = np.fromiter(map(len, shapes), dtype=np.int64, count=len(shapes))
    shape = padded(shapes, ndim, 1)
    same: Mask = ndim == part.ndim
    for dim in range(min(shape.shape[1], part.shape.shape[1])):
        same &= shape[:, dim] == part.shape[:, dim]
    return same


def _converted(tensors: Sequence[LocalTensor], part: FoundTensors, kind_of: KindOf) -> tuple[Mask, Mask]:
    """Which dtypes convert, and which of them lose precision."""
    pair = 256 * part.dtype.astype(np.int64) + dtype_codes(tensors)
    converts, loses = np.zeros(256 * 256, np.bool_), np.zeros(256 * 256, np.bool_)
    for code in np.flatnonzero(np.bincount(pair)).tolist():
        kind = kind_of(BY_CODE[code // 256], BY_CODE[code % 256])
        converts[code], loses[code] = kind != REFUSED, kind == "lossy"
    return converts[pair], loses[pair]


def dtype_codes(tensors: Sequence[LocalTensor]) -> UInt8:
    """`DType.code` of each tensor. Shape (N,)."""
    return np.fromiter(map(attrgetter("dtype.code"), tensors), dtype=np.uint8, count=len(tensors))


def _are_writable(tensors: Sequence[LocalTensor]) -> list[bool]:
    found = []
    for tensor in tensors:
        problem_of, is_writable = tensor.access.writable_problem, True
        for view in tensor.views:
            is_writable = is_writable and problem_of(view) is None
        found.append(is_writable)
    return found


def _named_alike(state: LocalState, source: MetadataSource, leaf: Int64, part: FoundTensors) -> Mask:
    """Which rows have the path of their leaf; or but its name, where nothing else is stored that has the path."""
    paths = [state.paths[row] for row in leaf.tolist()]
    alike = np.fromiter(map(eq, part.paths, paths), dtype=np.bool_, count=len(paths))
    others = np.flatnonzero(~alike).tolist()
    if others and _are_paths(part.paths[row] for row in others):
        plain = [state.plain_names[row] for row in leaf[others].tolist()]
        exact = canonical_names(paths[row] for row in others)
        asked = (source.find_tensors(exact), source.find_objects(exact), source.find_objects(plain))
        taken = {at for found, rest in asked for at in (*rest, *(row for part in found for row in part.asked.tolist()))}
        alike[[row for at, row in enumerate(others) if at not in taken]] = True
    return alike


def _are_paths(encoded: Iterable[bytes]) -> bool:
    """Whether what was read is sound; where not all is, it is looked at one by one."""
    try:
        canonical_names(encoded)
    except CorruptError:
        return False
    return True


def _plain_objects(state: LocalState, source: MetadataSource) -> dict[int, StoredObject]:
    """What fills object leaves: what has their path, where no tensor has their name."""
    leaves = [row for row, tensor in enumerate(state.tensors) if tensor is None and state.plain_names[row]]
    if not leaves:
        return {}
    names = [state.plain_names[row] for row in leaves]
    found, _ = source.find_objects(names)
    tensors, others = source.find_tensors(names)
    taken = {*others, *(at for part in tensors for at in part.asked.tolist())}
    objects: dict[int, StoredObject] = {}
    for part in found:
        for at, path, file, ordinal in zip(
            part.asked.tolist(), part.paths, part.file.tolist(), part.ordinal.tolist(), strict=True
        ):
            if path == state.paths[leaves[at]] and at not in taken:
                objects[leaves[at]] = StoredObject(names[at], decode_path(path), EVERY_RANK, False, file, ordinal)
    return objects


def wanted_boxes(state: LocalState, plain: PlainMatches, others: Mapping[int, StoredTensor]) -> WantedBoxes:
    """The boxes of all matched tensor leaves, in the order of the leaves.

    Args:
        state: The target's leaves.
        plain: What fills those that were matched all at once.
        others: What fills further tensor leaves, by position.
    """
    leaf = np.concatenate([plain.leaf, np.array(list(others), dtype=np.int64)])
    order = np.argsort(leaf, kind="stable")
    tensors = [state.tensors[row] for row in leaf[order].tolist()]
    boxes = [tensor.boxes for tensor in tensors]
    tensor_of = np.repeat(np.arange(len(order)), list(map(len, boxes)))
    row_of, leaf_of = order[tensor_of], leaf[order][tensor_of].tolist()
    keys = [state.plain_names[row] for row in plain.leaf.tolist()] + [stored.name for stored in others.values()]
    stored_dtype, places = _stored_columns(plain, list(others.values()))
    made: dict[int, StoredTensor] = dict(enumerate(others.values(), start=len(plain.leaf)))

    def stored(index: int) -> StoredTensor:
        row = int(row_of[index])
        if row not in made:
            made[row] = plain.stored(row, keys[row])
        return made[row]

    dtype = dtype_codes(tensors)
    return WantedBoxes(
        [state.names[row] for row in leaf_of],
        [keys[row] for row in row_of.tolist()],
        leaf_of,
        [ordinal for own in boxes for ordinal in range(len(own))],
        [box for own in boxes for box in own],
        dtype[tensor_of], stored_dtype[row_of], places.take(row_of), stored,
    )  # fmt: skip


def _stored_columns(plain: PlainMatches, others: Sequence[StoredTensor]) -> tuple[UInt8, ChunkPlaces]:
    """Dtypes and places of the stored tensors: those that were matched all at once, then others."""
    first, count = (np.zeros(len(plain.leaf), dtype=np.int64) for _ in range(2))
    dtype = np.zeros(len(plain.leaf), dtype=np.uint8)
    for number, part in enumerate(plain.parts):
        mine = np.flatnonzero(plain.part == number)
        row = plain.row[mine]
        first[mine], count[mine], dtype[mine] = part.first[row], part.count[row], part.dtype[row]
    places = ChunkPlaces(tuple(part.chunks for part in plain.parts), plain.part.astype(np.int32), first, count)
    rest = np.array([stored.dtype.code for stored in others], dtype=np.uint8)
    return np.concatenate([dtype, rest]), places.with_tensors(others)
