"""Compares the elements of two stored tensors, piece by piece.

In: two open sources and a tensor of one shape in each. Out: how many elements differ, where, and by how much. Of one
type, bits are compared; of two types, values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.arrays import convert
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, DType, Kind
from dcp_core.errors import DcpError
from dcp_core.inspection.description import repeated
from dcp_core.inspection.scope import Tolerance
from dcp_core.metadata import StoredTensor
from dcp_core.recipes.stored_source import PieceRequest, StoredSource

PIECE_BYTES = 4 << 20
"""Of one side of one piece, at most, unless one element is larger."""

BATCH_BYTES = 16 << 20
BATCH_PIECES = 4096
"""What is read at once of each side: so many bytes, so many pieces."""

_SMALL_BOX_BYTES = 256 << 10
Array = npt.NDArray[Any]
Pair = tuple[StoredTensor, StoredTensor]
"""One tensor on both sides."""


@dataclass(slots=True)
class ElementTally:
    """What is known so far of the elements of two tensors.

    Attributes:
        elements: How many were compared.
        differing: How many of them differ.
        nans: In how many places just one of the two is NaN.
        max_abs: Largest difference where both are numbers; None where there was none.
        first: Offsets of the first that differs.
        first_a: It, in words.
        first_b: The other one.
    """

    elements: int = 0
    differing: int = 0
    nans: int = 0
    max_abs: float | None = None
    first: tuple[int, ...] | None = None
    first_a: str = ""
    first_b: str = ""


class TensorComparer:
    """Compares tensors, many at a time where they are small.

    Args:
        sides: Where they are.
        pool: A thread that reads one side while this one reads the other.
        count: Told the bytes that have been compared, of the first side.
        tolerance: Which numbers count as equal.

    Attributes:
        tallies: What was found, by the numbers that tensors were added with.
        errors: Why a tensor could not be compared: it cannot be read, or has holes.
    """

    def __init__(
        self,
        sides: tuple[StoredSource, StoredSource],
        pool: ThreadPoolExecutor,
        count: Callable[[int], None],
        tolerance: Tolerance,
    ) -> None:
        self.tallies: dict[int, ElementTally] = {}
        self.errors: dict[int, SideError] = {}
        self._tolerance = tolerance
        self._sides = sides
        self._pool = pool
        self._count = count
        self._batch: list[_Piece] = []
        self._batch_nbytes = 0

    def add(self, number: int, stored: Pair, boxes: Sequence[Box] | None = None) -> None:
        """Compare two tensors of one shape, now or later; only these boxes of them, or all of them."""
        self.tallies[number] = ElementTally()
        itemsize = max(each.dtype.itemsize for each in stored)
        for box in _pieces(stored, itemsize, boxes):
            self._batch.append(_Piece(number, stored, box))
            self._batch_nbytes += box.numel * itemsize
            if self._batch_nbytes >= BATCH_BYTES or len(self._batch) >= BATCH_PIECES:
                self.finish()
            if number in self.errors:
                return

    def finish(self) -> None:
        """Compare what was added and is waiting."""
        batch, self._batch, self._batch_nbytes = self._batch, [], 0
        self._compare(batch)

    def _compare(self, batch: list[_Piece]) -> None:
        if not batch:
            return
        try:
            arrays = self._read(batch)
        except SideError as error:
            numbers = dict.fromkeys(piece.number for piece in batch)
            if len(numbers) == 1:
                self.errors[batch[0].number] = error
                return
            for number in numbers:  # to know whose error it is
                self._compare([piece for piece in batch if piece.number == number])
            return
        for piece, one, two in zip(batch, *arrays, strict=True):
            _tally_piece(self.tallies[piece.number], piece.box, one, two, piece.stored, self._tolerance)
        self._count(sum(array.nbytes for array in arrays[0]))

    def _read(self, batch: Sequence[_Piece]) -> tuple[list[Array], list[Array]]:
        """Read pieces from both sides at once."""
        one, two = ([piece.request(side) for piece in batch] for side in (0, 1))
        other = self._pool.submit(self._sides[1].fill, two)
        try:
            self._sides[0].fill(one)
        except DcpError as error:
            raise SideError(0, error) from error
        finally:
            other.exception()  # it is done then, and reads no more into what goes away
        try:
            other.result()
        except DcpError as error:
            raise SideError(1, error) from error
        return [request.array for request in one], [request.array for request in two]


class SideError(Exception):
    """Something could not be read; on which side, and why."""

    def __init__(self, side: int, error: DcpError) -> None:
        super().__init__(side, error)
        self.side = side
        self.error = error


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A part of two tensors."""

    number: int
    stored: Pair
    box: Box

    def request(self, side: int) -> PieceRequest:
        """What one side is asked for, with fresh memory."""
        stored = self.stored[side]
        memory = np.empty(self.box.numel * stored.dtype.itemsize, np.uint8)
        return PieceRequest(stored, self.box, stored.dtype, memory)


def boxes_of(stored: StoredTensor) -> list[Box]:
    """The boxes of a stored tensor, each once."""
    chunks = stored.chunks
    kept = np.flatnonzero(~repeated(np.zeros(len(chunks), np.int64), chunks))
    rows = zip(chunks.offsets[kept].tolist(), chunks.sizes[kept].tolist(), strict=True)
    return [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in rows]


def _pieces(stored: Pair, itemsize: int, boxes: Sequence[Box] | None) -> Iterator[Box]:
    """Parts of the boxes; or boxes that cover the tensor: those of the first side, where they do and are not tiny."""
    most = PIECE_BYTES // itemsize
    for box in _large_boxes(stored, itemsize) if boxes is None else boxes:
        yield from split(box, most)


def _large_boxes(stored: Pair, itemsize: int) -> Iterable[Box]:
    shape, sizes = stored[0].shape, stored[0].chunks.sizes
    numel = prod(shape)
    if not numel:
        return ()
    about = len(sizes) * _SMALL_BOX_BYTES
    if numel * itemsize <= PIECE_BYTES or numel * itemsize < about:
        return (Box.whole(shape),)
    boxes = boxes_of(stored[0])
    return boxes if sum(box.numel for box in boxes) == numel else (Box.whole(shape),)


def split(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into parts of at most so many elements, along its outer dimensions, in order.

    >>> [part.offsets for part in split(Box((0, 0), (4, 3)), 6)]
    [(0, 0), (2, 0)]
    """
    if box.numel <= max(most, 1):
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    inner = box.numel // box.sizes[dim]
    step = max(1, most // inner)
    for start in range(0, box.sizes[dim], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = min(step, box.sizes[dim] - start)
        yield from split(Box(tuple(offsets), tuple(sizes)), most)


def _tally_piece(
    tally: ElementTally, box: Box, one: Array, two: Array, stored: Pair, tolerance: Tolerance
) -> None:  # fmt: skip
    """Compare one piece."""
    tally.elements += one.size
    types = stored[0].dtype, stored[1].dtype
    if types[0] == types[1]:
        if one.tobytes() == two.tobytes() if one.nbytes < 4096 else np.array_equal(_raw(one), _raw(two)):
            return
        differs = (_bytes_of(one) != _bytes_of(two)).any(axis=-1)
    else:
        differs = _values_differ(one.reshape(-1), two.reshape(-1), types)
    where = np.flatnonzero(differs)
    if not len(where):
        return
    values = [_numbers(array.reshape(-1)[where], dtype) for array, dtype in zip((one, two), types, strict=True)]
    if values[0] is not None and values[1] is not None and not tolerance.is_exact:
        far = tolerance.exceeded(values[0], values[1])
        where, values = where[far], [values[0][far], values[1][far]]
        if not len(where):
            return
    first = np.unravel_index(int(where[0]), box.sizes) if box.sizes else ()
    offsets = tuple(int(at) + start for at, start in zip(first, box.offsets, strict=True))
    if tally.first is None or offsets < tally.first:
        shown = [str(one.reshape(-1)[where[0]]), str(two.reshape(-1)[where[0]])]
        tally.first = offsets
        tally.first_a, tally.first_b = (
            shown[side] if numbers is None else str(numbers[0]) for side, numbers in enumerate(values)
        )
    tally.differing += len(where)
    if values[0] is not None and values[1] is not None:
        _measure(tally, values[0], values[1])


def _raw(array: Array) -> Array:
    """A contiguous array as words, or as bytes where there is half a word."""
    flat = array.reshape(-1).view(np.uint8)
    return flat.view(np.uint64) if flat.nbytes % 8 == 0 else flat


def _bytes_of(array: Array) -> Array:
    """The bytes of each element. Shape (N, itemsize)."""
    return array.reshape(-1).view(np.uint8).reshape(array.size, array.itemsize)


def _numbers(bits: Array, dtype: DType) -> Array | None:
    """Elements as floats or complex numbers, which hold them exactly; None for what is no number."""
    if dtype.kind is Kind.OPAQUE:
        return None
    if dtype.kind in (Kind.SIGNED, Kind.UNSIGNED) and dtype.itemsize == 8:
        return bits.astype(np.longdouble)  # of integers beyond 2**53 float64 has every other one at most
    return convert(bits, dtype, BY_NAME["complex128" if dtype.kind is Kind.COMPLEX else "float64"])


def _values_differ(one: Array, two: Array, types: tuple[DType, DType]) -> Array:
    """Which elements of different types have different values; NaN is like NaN."""
    values = [_numbers(array, dtype) for array, dtype in zip((one, two), types, strict=True)]
    if values[0] is None or values[1] is None:
        return np.ones(one.size, np.bool_)
    differs: Array = (values[0] != values[1]) & ~(np.isnan(values[0]) & np.isnan(values[1]))
    return differs


def _measure(tally: ElementTally, one: Array, two: Array) -> None:
    """Take the largest difference into account."""
    is_nan = np.isnan(one), np.isnan(two)
    tally.nans += int((is_nan[0] ^ is_nan[1]).sum())
    both = ~(is_nan[0] | is_nan[1])
    if both.any():
        with np.errstate(all="ignore"):
            apart = np.abs(one[both] - two[both])
        largest = float(np.where(np.isnan(apart), 0.0, apart).max())  # of two equal infinities
        tally.max_abs = largest if tally.max_abs is None else max(tally.max_abs, largest)
