"""Tells in what two checkpoints differ: keys, types, shapes, values bit by bit, whatever their layouts and formats.

In: two readers. Out: differences. Values go through in pieces of a few MiB that are read from both sides at once, so
memory stays bounded; a piece is a box that one side has stored, or a part of one. No object is made: encodings are
compared, and a pickled one is described by the classes that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from dcp_core.dtype import BY_CODE, ITEMSIZE
from dcp_core.errors import DcpError
from dcp_core.execution.interfaces import StorageReader
from dcp_core.inspection.description import columns_of, open_metadata
from dcp_core.inspection.object_summaries import summary_of
from dcp_core.inspection.scope import Key, Scope
from dcp_core.inspection.value_differences import ElementTally, Pair, TensorComparer, boxes_of
from dcp_core.metadata import EVERY_RANK, StoredObject, StoredTensor
from dcp_core.recipes.stored_source import StoredSource
from dcp_core.state_path import decode_path

_ATTEMPTS = 3  # where a save replaces what is compared

DifferenceKind = Literal[
    "only in a", "only in b", "kind", "ranks", "type", "shape", "part", "values", "object", "path", "unreadable"
]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two checkpoints differ.

    Attributes:
        key: Name of the tensor or value.
        rank: Whose own value it is; None for all ranks'.
        kind: In what they differ; "unreadable" where that cannot be told.
        a: What the first has, in words; what is wrong with it where it cannot be read.
        b: The same of the second.
        elements: How many elements differ.
        of: How many there are.
        first: Where the first element lies that differs, by offsets.
        max_abs: Largest difference of two elements, where they are numbers and none of them is NaN; infinite where one
            is; None where there is no such pair.
        nans: In how many places just one of the two is NaN.
    """

    key: str
    rank: int | None
    kind: DifferenceKind
    a: str
    b: str
    elements: int = 0
    of: int = 0
    first: tuple[int, ...] | None = None
    max_abs: float | None = None
    nans: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found.

    Attributes:
        tensors: How many tensors both have.
        objects: How many other values both have.
        nbytes: Bytes of elements that were compared, of one side.
        values_compared: False where only what is described was compared.
        differences: In what they differ, in the order of names.
        left_out: How many keys were left out, because only one of them has them.
    """

    tensors: int
    objects: int
    nbytes: int
    values_compared: bool
    differences: tuple[Difference, ...]
    left_out: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs, and all could be read."""
        return not self.differences

    @property
    def is_sure(self) -> bool:
        """Whether all could be read."""
        return all(each.kind != "unreadable" for each in self.differences)

    def to_values(self) -> dict[str, Any]:
        """As plain values for JSON; what JSON has no number for is a text."""
        values = asdict(self)
        for each in values["differences"]:
            if each["max_abs"] is not None and not np.isfinite(each["max_abs"]):
                each["max_abs"] = str(each["max_abs"])
        return {**values, "is_equal": self.is_equal}


def compare(
    a: StorageReader, b: StorageReader, scope: Scope | None = None, *, advance: Callable[[int], None] | None = None
) -> Comparison:
    """Compare two checkpoints. Where a save replaces one of them meanwhile, the new one is compared.

    Args:
        a: A reader that was made for the first one.
        b: The same for the second one.
        scope: What is compared, and how closely; None: all of it, bit by bit.
        advance: Told how many more bytes of elements have been compared.

    Raises:
        DcpError: A description cannot be read.
        ArgumentError: A rank that one of them does not have; names that cannot be changed like that.
    """
    scope = scope or Scope()
    readers = a, b
    for _ in range(_ATTEMPTS):
        sides = _opened(a, scope.rank), _opened(b, scope.rank)
        found = _Comparing(sides, scope, advance or (lambda nbytes: None)).run()
        if found.is_sure or not any(map(_is_replaced, readers, sides, (scope.rank, scope.rank))):
            break
    return found


def _is_replaced(reader: StorageReader, side: StoredSource, rank: int | None) -> bool:
    """Whether a save has put another description in the place of the one that was read."""
    try:
        return open_metadata(reader, rank).source.save.save_id != side.metadata.source.save.save_id
    except DcpError:
        return False


def compared_nbytes(reader: StorageReader, scope: Scope) -> int:
    """Bytes of the elements of the first checkpoint that will be compared, where the second one has them all."""
    reader.initialize_reader()
    tensors = columns_of(open_metadata(reader, scope.rank).source).tensors
    rows = list(scope.chosen(tensors.names, tensors.rank.tolist(), scope.new_names(tensors.names)).values())
    shapes, itemsizes = tensors.shape[rows].tolist(), ITEMSIZE[tensors.dtype[rows]].tolist()
    return sum(prod(shape) * itemsize for shape, itemsize in zip(shapes, itemsizes, strict=True))


def _opened(reader: StorageReader, rank: int | None) -> StoredSource:
    reader.initialize_reader()
    return StoredSource(reader, verify=True, metadata=open_metadata(reader, rank))


class _Comparing:
    """One comparison."""

    def __init__(
        self, sides: tuple[StoredSource, StoredSource], scope: Scope, advance: Callable[[int], None]
    ) -> None:  # fmt: skip
        self._sides = sides
        self._columns = (columns_of(sides[0].metadata.source), columns_of(sides[1].metadata.source))
        self._is_part = [side.metadata.source.save.rank is not None for side in sides]
        self._scope = scope
        self._advance = advance
        self._nbytes = 0
        self._left_out = 0

    def run(self) -> Comparison:
        tensors, objects = self._chosen()
        both, both_objects = tensors[0].keys() & tensors[1].keys(), objects[0].keys() & objects[1].keys()
        found = list(self._lonely(tensors, objects))
        found += self._tensors([(key, tensors[0][key], tensors[1][key]) for key in sorted(both)])
        for key in sorted(both_objects):
            found += self._object(key, objects[0][key], objects[1][key])
        found.sort(key=lambda each: (each.key, EVERY_RANK if each.rank is None else each.rank))
        return Comparison(len(both), len(both_objects), self._nbytes, self._scope.values, tuple(found), self._left_out)

    def _chosen(self) -> tuple[list[dict[Key, int]], list[dict[Key, int]]]:
        """Tensors and objects of both sides that are compared."""
        scope = self._scope
        all_names = [(*columns.tensors.names, *columns.objects.names) for columns in self._columns]
        wanted = scope.wanted or (lambda name: True)
        new_names = [scope.new_names(all_names[0]), {name: name for name in all_names[1] if wanted(name)}]
        tensors, objects = (
            [scope.chosen(each.names, each.rank.tolist(), names) for each, names in zip(kinds, new_names, strict=True)]
            for kinds in zip(*((columns.tensors, columns.objects) for columns in self._columns), strict=True)
        )
        return tensors, objects

    def _lonely(self, tensors: Sequence[dict[Key, int]], objects: Sequence[dict[Key, int]]) -> Iterator[Difference]:
        """What one side lacks, or has as something else."""
        keys = [tensors[side].keys() | objects[side].keys() for side in (0, 1)]
        shared = [{name for name, rank in each if rank == EVERY_RANK} for each in keys]
        own = [{name for name, rank in each if rank != EVERY_RANK} for each in keys]
        mixed = shared[0] & own[1] | shared[1] & own[0]
        for name in sorted(mixed):
            texts = ["one for all ranks" if name in shared[side] else "one for each rank" for side in (0, 1)]
            yield _difference((name, EVERY_RANK), "ranks", *texts)
        for key in sorted(keys[0] | keys[1]):
            is_there = key in keys[0], key in keys[1]
            is_tensor = key in tensors[0], key in tensors[1]
            if key[0] in mixed or (all(is_there) and is_tensor[0] == is_tensor[1]):
                continue
            if self._scope.only_common and not all(is_there):
                self._left_out += 1
                continue
            shown = [
                self._described(side, tensors[side][key]) if is_tensor[side] else "a value" if is_there[side] else ""
                for side in (0, 1)
            ]
            kind: DifferenceKind = "kind" if all(is_there) else "only in a" if is_there[0] else "only in b"
            yield _difference(key, kind, *shown)

    def _described(self, side: int, row: int) -> str:
        tensors = self._columns[side].tensors
        shape = tensors.shape[row, : tensors.ndim[row]].tolist()
        return f"{BY_CODE[int(tensors.dtype[row])].name} {shape}"

    def _tensors(self, entries: Sequence[tuple[Key, int, int]]) -> Iterator[Difference]:
        """What both sides have as tensors."""
        with ThreadPoolExecutor(1, "dcp-diff") as pool:
            comparer = TensorComparer(self._sides, pool, self._count, self._scope.tolerance)
            for number, (key, row_a, row_b) in enumerate(entries):
                yield from self._tensor(number, key, row_a, row_b, comparer)
            comparer.finish()
        for number, tally in comparer.tallies.items():
            key, row_a, row_b = entries[number]
            failed = comparer.errors.get(number)
            if failed is not None:
                yield _unreadable(key, failed.side, failed.error)
            elif self._scope.types and not self._is_one_type(row_a, row_b):
                yield _tallied(key, "type", (self._described(0, row_a), self._described(1, row_b)), tally)
            elif tally.differing:
                yield _tallied(key, "values", (tally.first_a, tally.first_b), tally)

    def _is_one_type(self, row_a: int, row_b: int) -> bool:
        return bool(self._columns[0].tensors.dtype[row_a] == self._columns[1].tensors.dtype[row_b])

    def _tensor(
        self, number: int, key: Key, row_a: int, row_b: int, comparer: TensorComparer
    ) -> Iterator[Difference]:  # fmt: skip
        """Compare what describes a tensor, and have its values compared."""
        paths = self._columns[0].tensors.paths[row_a], self._columns[1].tensors.paths[row_b]
        yield from self._path(key, *paths)
        stored = self._stored(0, row_a), self._stored(1, row_b)
        if stored[0].shape != stored[1].shape:
            yield _difference(key, "shape", self._described(0, row_a), self._described(1, row_b))
        elif all(self._is_part) and not _are_same_boxes(stored):
            yield _difference(key, "part", *(_part_text(each) for each in stored))
        elif self._scope.values:
            partial = next((each for each, is_part in zip(stored, self._is_part, strict=True) if is_part), None)
            comparer.add(number, stored, None if partial is None else boxes_of(partial))
        elif self._scope.types and stored[0].dtype != stored[1].dtype:
            yield _difference(key, "type", self._described(0, row_a), self._described(1, row_b))

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._advance(nbytes)

    def _stored(self, side: int, row: int) -> StoredTensor:
        columns = self._columns[side]
        tensors, ndim = columns.tensors, int(columns.tensors.ndim[row])
        own = columns.chunks.part(slice(int(tensors.row[row]), int(tensors.row[row + 1])), ndim)
        dtype, shape = BY_CODE[int(tensors.dtype[row])], tuple(tensors.shape[row, :ndim].tolist())
        return StoredTensor(tensors.names[row], (), int(tensors.rank[row]), dtype, shape, own)

    def _path(self, key: Key, path_a: bytes, path_b: bytes) -> Iterator[Difference]:
        """Two paths of one name, such as a position in a list and a key; of one component is what has no nesting."""
        if path_a == path_b or self._scope.prefix or self._scope.rename is not None:
            return
        try:
            one, other = decode_path(path_a), decode_path(path_b)
        except DcpError as error:
            yield _unreadable(key, 0, error)
            return
        if len(one) > 1 and len(other) > 1:
            yield _difference(key, "path", repr(one), repr(other))

    def _object(self, key: Key, row_a: int, row_b: int) -> Iterator[Difference]:
        yield from self._path(key, self._columns[0].objects.paths[row_a], self._columns[1].objects.paths[row_b])
        if not self._scope.values:
            return
        blobs, shown = [], []
        for side, row in enumerate((row_a, row_b)):
            try:
                blobs.append(self._sides[side].read_object(self._stored_object(side, row)))
                shown.append(summary_of(blobs[-1]))
            except DcpError as error:
                yield _unreadable(key, side, error)
                return
        if blobs[0] != blobs[1]:
            yield _difference(key, "object", *shown)

    def _stored_object(self, side: int, row: int) -> StoredObject:
        objects = self._columns[side].objects
        rank, per_rank = int(objects.rank[row]), bool(objects.per_rank[row])
        return StoredObject(objects.names[row], (), rank, per_rank, int(objects.file[row]), int(objects.ordinal[row]))


def _are_same_boxes(stored: Pair) -> bool:
    one, two = (np.unique(np.hstack([each.chunks.offsets, each.chunks.sizes]), axis=0) for each in stored)
    return np.array_equal(one, two)


def _part_text(stored: StoredTensor) -> str:
    return f"{sum(box.numel for box in boxes_of(stored))} of {prod(stored.shape)} elements, other boxes"


def _unreadable(key: Key, side: int, error: DcpError) -> Difference:
    """That something cannot be read, said of the side where it lies."""
    text = str(error).replace(". Targets are undefined now", "")  # there are none
    return _difference(key, "unreadable", *((text, "") if side == 0 else ("", text)))


def _difference(key: Key, kind: DifferenceKind, a: str, b: str) -> Difference:
    return Difference(key[0], None if key[1] == EVERY_RANK else key[1], kind, a, b)


def _tallied(key: Key, kind: DifferenceKind, shown: tuple[str, str], tally: ElementTally) -> Difference:
    return Difference(
        key[0], None if key[1] == EVERY_RANK else key[1], kind, *shown, tally.differing, tally.elements, tally.first,
        tally.max_abs, tally.nans,
    )  # fmt: skip
