"""Tells in what two checkpoints differ: keys, types, shapes, values bit by bit, whatever their layouts and formats.

In: two readers. Out: differences. Values go through in pieces of a few MiB that are read from both sides at once, so
memory stays bounded; a piece is a box that one side has stored, or a part of one. No object is made: encodings are
compared, and a pickled one is described by the classes that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from dcp_core.dtype import BY_CODE
from dcp_core.errors import DcpError
from dcp_core.execution.interfaces import StorageReader
from dcp_core.formats.columns_source import MetadataColumns
from dcp_core.inspection.description import columns_of
from dcp_core.inspection.object_summaries import summary_of
from dcp_core.inspection.value_differences import ElementTally, TensorComparer
from dcp_core.metadata import EVERY_RANK, StoredObject, StoredTensor
from dcp_core.recipes.stored_source import StoredSource
from dcp_core.state_path import decode_path

DifferenceKind = Literal["only in a", "only in b", "kind", "type", "shape", "values", "object", "path", "unreadable"]
Key = tuple[str, int]
"""Name, and rank or `EVERY_RANK`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two checkpoints differ.

    Attributes:
        key: Name of the tensor or value.
        rank: Whose own value it is; None for all ranks'.
        kind: In what they differ; "unreadable" where that cannot be told.
        a: What the first has, in words.
        b: What the second has.
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
    """

    tensors: int
    objects: int
    nbytes: int
    values_compared: bool
    differences: tuple[Difference, ...]

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
    a: StorageReader, b: StorageReader, *, values: bool = True, wanted: Callable[[str], bool] | None = None,
    advance: Callable[[int], None] | None = None,
) -> Comparison:  # fmt: skip
    """Compare two checkpoints.

    Args:
        a: A reader that was made for the first one.
        b: The same for the second one.
        values: Whether to compare values, too, which reads both.
        wanted: Says of a name whether it is compared; None: all are.
        advance: Told how many more bytes of elements have been compared.

    Raises:
        DcpError: A description cannot be read.
    """
    sides = StoredSource(a, verify=True), StoredSource(b, verify=True)
    work = _Comparing(sides, values, advance or (lambda nbytes: None))
    return work.run(wanted or (lambda name: True))


def all_nbytes(columns: MetadataColumns, wanted: Callable[[str], bool]) -> int:
    """Bytes of the elements of the tensors that are wanted."""
    tensors = columns.tensors
    chosen = [row for row, name in enumerate(tensors.names) if wanted(name)]
    return sum(
        int(np.prod(tensors.shape[row], dtype=object)) * BY_CODE[int(tensors.dtype[row])].itemsize for row in chosen
    )  # fmt: skip


class _Comparing:
    """One comparison."""

    def __init__(
        self, sides: tuple[StoredSource, StoredSource], values: bool, advance: Callable[[int], None]
    ) -> None:  # fmt: skip
        self._sides = sides
        self._columns = (columns_of(sides[0].metadata.source), columns_of(sides[1].metadata.source))
        self._values = values
        self._advance = advance
        self._nbytes = 0

    def run(self, wanted: Callable[[str], bool]) -> Comparison:
        tensors = [_keys(columns.tensors.names, columns.tensors.rank.tolist(), wanted) for columns in self._columns]
        objects = [_keys(columns.objects.names, columns.objects.rank.tolist(), wanted) for columns in self._columns]
        both, both_objects = tensors[0].keys() & tensors[1].keys(), objects[0].keys() & objects[1].keys()
        found = list(self._lonely(tensors, objects))
        found += self._tensors([(key, tensors[0][key], tensors[1][key]) for key in sorted(both)])
        for key in sorted(both_objects):
            found += self._object(key, objects[0][key], objects[1][key])
        found.sort(key=lambda each: (each.key, EVERY_RANK if each.rank is None else each.rank))
        return Comparison(len(both), len(both_objects), self._nbytes, self._values, tuple(found))

    def _lonely(self, tensors: Sequence[dict[Key, int]], objects: Sequence[dict[Key, int]]) -> Iterator[Difference]:
        """What one side lacks, or has as something else."""
        for key in sorted((tensors[0].keys() | objects[0].keys()) | (tensors[1].keys() | objects[1].keys())):
            kinds = [
                "a tensor" if key in tensors[side] else "a value" if key in objects[side] else "" for side in (0, 1)
            ]
            if kinds[0] == kinds[1]:
                continue
            shown = [
                self._described(side, tensors[side][key]) if key in tensors[side] else kinds[side] for side in (0, 1)
            ]
            kind: DifferenceKind = "kind" if all(kinds) else "only in a" if kinds[0] else "only in b"
            yield _difference(key, kind, *shown)

    def _described(self, side: int, row: int) -> str:
        tensors = self._columns[side].tensors
        shape = tensors.shape[row, : tensors.ndim[row]].tolist()
        return f"{BY_CODE[int(tensors.dtype[row])].name} {shape}"

    def _tensors(self, entries: Sequence[tuple[Key, int, int]]) -> Iterator[Difference]:
        """What both sides have as tensors."""
        with ThreadPoolExecutor(1, "dcp-diff") as pool:
            comparer = TensorComparer(self._sides, pool, self._count)
            for number, (key, row_a, row_b) in enumerate(entries):
                yield from self._tensor(number, key, row_a, row_b, comparer)
            comparer.finish()
        for number, tally in comparer.tallies.items():
            key, row_a, row_b = entries[number]
            error = comparer.errors.get(number)
            if error is not None:
                yield _difference(key, "unreadable", str(error), "")
            elif self._columns[0].tensors.dtype[row_a] != self._columns[1].tensors.dtype[row_b]:
                yield _tallied(key, "type", (self._described(0, row_a), self._described(1, row_b)), tally)
            elif tally.differing:
                yield _tallied(key, "values", (tally.first_a, tally.first_b), tally)

    def _tensor(
        self, number: int, key: Key, row_a: int, row_b: int, comparer: TensorComparer
    ) -> Iterator[Difference]:  # fmt: skip
        """Compare what describes a tensor, and have its values compared."""
        paths = self._columns[0].tensors.paths[row_a], self._columns[1].tensors.paths[row_b]
        yield from self._path(key, *paths)
        try:
            stored = self._stored(0, key), self._stored(1, key)
        except DcpError as error:
            yield _difference(key, "unreadable", str(error), "")
            return
        shown = self._described(0, row_a), self._described(1, row_b)
        if stored[0].shape != stored[1].shape:
            yield _difference(key, "shape", *shown)
        elif self._values:
            comparer.add(number, stored)
        elif stored[0].dtype != stored[1].dtype:
            yield _difference(key, "type", *shown)

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._advance(nbytes)

    def _stored(self, side: int, key: Key) -> StoredTensor:
        found = self._sides[side].metadata.source.tensors(key[0])
        return next(stored for stored in found if stored.rank == key[1])

    def _path(self, key: Key, path_a: bytes, path_b: bytes) -> Iterator[Difference]:
        """Two paths of one name, such as a position in a list and a key; of one component is what has no nesting."""
        if path_a == path_b:
            return
        try:
            one, other = decode_path(path_a), decode_path(path_b)
        except DcpError as error:
            yield _difference(key, "unreadable", str(error), "")
            return
        if len(one) > 1 and len(other) > 1:
            yield _difference(key, "path", repr(one), repr(other))

    def _object(self, key: Key, row_a: int, row_b: int) -> Iterator[Difference]:
        yield from self._path(key, self._columns[0].objects.paths[row_a], self._columns[1].objects.paths[row_b])
        if not self._values:
            return
        try:
            blobs = [self._sides[side].read_object(self._stored_object(side, row))
                     for side, row in enumerate((row_a, row_b))]  # fmt: skip
            if blobs[0] == blobs[1]:
                return
            shown = [summary_of(blob) for blob in blobs]
        except DcpError as error:
            yield _difference(key, "unreadable", str(error), "")
            return
        yield _difference(key, "object", *shown)

    def _stored_object(self, side: int, row: int) -> StoredObject:
        objects = self._columns[side].objects
        rank, per_rank = int(objects.rank[row]), bool(objects.per_rank[row])
        return StoredObject(objects.names[row], (), rank, per_rank, int(objects.file[row]), int(objects.ordinal[row]))


def _keys(names: Sequence[str], ranks: Sequence[int], wanted: Callable[[str], bool]) -> dict[Key, int]:
    return {(name, rank): row for row, (name, rank) in enumerate(zip(names, ranks, strict=True)) if wanted(name)}


def _difference(key: Key, kind: DifferenceKind, a: str, b: str) -> Difference:
    return Difference(key[0], None if key[1] == EVERY_RANK else key[1], kind, a, b)


def _tallied(key: Key, kind: DifferenceKind, shown: tuple[str, str], tally: ElementTally) -> Difference:
    return Difference(
        key[0], None if key[1] == EVERY_RANK else key[1], kind, *shown, tally.differing, tally.elements, tally.first,
        tally.max_abs, tally.nans,
    )  # fmt: skip
