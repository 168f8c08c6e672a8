"""Boxes: N-dimensional half-open regions of a global tensor, in elements.

The algebra that plans are made of. Everything here is pure and works on a handful of boxes; millions of them are
columns and belong to `planning.tiling`. As sets of elements: an empty box is inside every box and meets none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcp_core.errors import ArgumentError


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements whose index `i` has `offsets[d] <= i[d] < offsets[d] + sizes[d]` in every dimension.

    Boxes sort by offsets, then sizes. A box without dimensions holds one element (a 0-d tensor).

    Attributes:
        offsets: First index in each dimension.
        sizes: Extent in each dimension; 0 makes the box empty.

    Raises:
        ArgumentError: Lengths differ, or a number is negative or no integer.

    Examples:
        >>> Box((2, 0), (3, 4)).ends
        (5, 4)
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        offsets, sizes = self.offsets, self.sizes
        if _are_counts(offsets) and _are_counts(sizes) and len(offsets) == len(sizes):
            return
        offsets, sizes = _as_ints(offsets), _as_ints(sizes)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "sizes", sizes)
        if len(offsets) != len(sizes):
            raise ArgumentError(f"a box needs as many sizes as offsets: got offsets {offsets} and sizes {sizes}")
        if offsets and (min(offsets) < 0 or min(sizes) < 0):
            raise ArgumentError(f"a box has no negative numbers: got offsets {offsets} and sizes {sizes}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Make the box of all elements of a tensor.

        >>> Box.whole((3, 4))
        Box(offsets=(0, 0), sizes=(3, 4))
        """
        try:
            return cls((0,) * len(shape), tuple(shape))
        except TypeError as error:
            raise ArgumentError(f"a shape is a sequence of integers: got {shape!r}") from error

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)

    @property
    def numel(self) -> int:
        """Number of elements; 1 without dimensions."""
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        """True when the box has no element."""
        return 0 in self.sizes

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index in each dimension."""
        return tuple(map(operator.add, self.offsets, self.sizes))


def _are_counts(numbers: object) -> bool:
    """Whether this is a plain tuple of plain integers, none of them negative."""
    if type(numbers) is not tuple:
        return False
    for number in numbers:  # noqa: SIM110  (a generator would cost more than the checks)
        if type(number) is not int or number < 0:
            return False
    return True


def _as_ints(numbers: Iterable[object]) -> tuple[int, ...]:
    """Accept what counts as integers (numpy's, a shape object), refuse the rest."""
    try:
        return tuple(int(operator.index(number)) for number in numbers)  # type: ignore[arg-type]  # it raises
    except TypeError as error:
        raise ArgumentError(f"a box is made of integers: got {numbers!r}") from error


def _check_same_ndim(one: Box, other: Box) -> None:
    if len(one.sizes) != len(other.sizes):
        raise ArgumentError(f"boxes of one tensor have the same number of dimensions: got {one} and {other}")


def intersect(one: Box, other: Box) -> Box | None:
    """Compute the elements that two boxes share.

    Args:
        one: A box.
        other: A box of the same tensor.

    Returns:
        The common box in the same coordinates, or None when they share nothing.

    Raises:
        ArgumentError: The numbers of dimensions differ.

    Examples:
        >>> intersect(Box((0, 0), (4, 4)), Box((2, 3), (4, 4)))
        Box(offsets=(2, 3), sizes=(2, 1))
        >>> intersect(Box((0,), (4,)), Box((4,), (4,))) is None
        True
    """
    _check_same_ndim(one, other)
    starts = tuple(map(max, one.offsets, other.offsets))
    sizes = tuple(map(operator.sub, map(min, one.ends, other.ends), starts))
    if sizes and min(sizes) <= 0:
        return None
    return Box(starts, sizes)


def contains(outer: Box, inner: Box) -> bool:
    """Tell whether every element of `inner` is one of `outer`; so an empty `inner` is inside every box.

    Raises:
        ArgumentError: The numbers of dimensions differ.

    Examples:
        >>> contains(Box((0, 0), (4, 4)), Box((1, 0), (2, 4)))
        True
    """
    _check_same_ndim(outer, inner)
    if inner.is_empty:
        return True
    return all(map(operator.le, outer.offsets, inner.offsets)) and all(map(operator.le, inner.ends, outer.ends))


def subtract(one: Box, other: Box) -> tuple[Box, ...]:
    """Compute the elements of `one` that are not in `other`.

    Args:
        one: The box to take from.
        other: The box to take away, of the same tensor.

    Returns:
        Disjoint, non-empty boxes, at most two a dimension: `(one,)` when they share nothing, `()` when nothing is left.

    Raises:
        ArgumentError: The numbers of dimensions differ.

    Examples:
        >>> subtract(Box((0, 0), (4, 4)), Box((1, 0), (2, 4)))
        (Box(offsets=(0, 0), sizes=(1, 4)), Box(offsets=(3, 0), sizes=(1, 4)))
    """
    common = intersect(one, other)
    if common is None:
        return () if one.is_empty else (one,)
    pieces = []
    offsets, sizes = list(one.offsets), list(one.sizes)
    for dim, (start, end) in enumerate(zip(common.offsets, common.ends, strict=True)):
        for piece_start, piece_end in ((offsets[dim], start), (end, offsets[dim] + sizes[dim])):
            if piece_start < piece_end:
                piece_offsets = (*offsets[:dim], piece_start, *offsets[dim + 1 :])
                pieces.append(Box(piece_offsets, (*sizes[:dim], piece_end - piece_start, *sizes[dim + 1 :])))
        offsets[dim], sizes[dim] = start, end - start
    return tuple(pieces)


def uncovered(wanted: Box, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Compute the elements of `wanted` that none of `boxes` holds.

    Args:
        wanted: The box that should be covered.
        boxes: Boxes of the same tensor; they may overlap, reach outside or be empty.

    Returns:
        Disjoint, non-empty, sorted boxes; `()` when all is covered. The same for any order of `boxes`.

    Raises:
        ArgumentError: The numbers of dimensions differ.

    Complexity:
        O(boxes x pieces left); sorted boxes keep the pieces few where they tile regularly.

    Examples:
        >>> uncovered(Box((0,), (10,)), [Box((0,), (4,)), Box((6,), (4,))])
        (Box(offsets=(4,), sizes=(2,)),)
    """
    left = [] if wanted.is_empty else [wanted]
    for box in sorted(boxes):
        if not left:
            break
        left = [piece for whole in left for piece in subtract(whole, box)]
    return tuple(sorted(left))


def relative(box: Box, origin: tuple[int, ...]) -> Box:
    """Move a box into the coordinates of a region that starts at `origin`.

    Raises:
        ArgumentError: The box starts before the origin, or the numbers of dimensions differ.

    Examples:
        >>> relative(Box((5, 2), (1, 1)), (4, 0))
        Box(offsets=(1, 2), sizes=(1, 1))
    """
    if len(origin) != len(box.offsets):
        raise ArgumentError(f"the origin has as many dimensions as the box: got {origin} and {box}")
    return Box(tuple(map(operator.sub, box.offsets, origin)), box.sizes)


def slices(box: Box, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
    """Spell a box as an index for an array.

    Args:
        box: What to select, in global coordinates.
        origin: Where the array starts in the global tensor; None for the global tensor itself.

    Returns:
        One slice a dimension; `()` selects the one element of a 0-d array.

    Raises:
        ArgumentError: The box starts before the origin, or the numbers of dimensions differ.

    Examples:
        >>> slices(Box((5, 2), (1, 3)), (4, 0))
        (slice(1, 2, None), slice(2, 5, None))
    """
    moved = box if origin is None else relative(box, origin)
    return tuple(map(slice, moved.offsets, moved.ends))


def flat_range_to_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Split a range of the flattened tensor into boxes.

    Args:
        shape: Shape of the tensor.
        start: First element, counted in row-major order.
        stop: One past the last element.

    Returns:
        The fewest boxes that are each a contiguous range of the flattened tensor, in that order: at most 2 ndim - 1.
        Their elements one after the other, each box in row-major order, are the range. `()` for an empty range.

    Raises:
        ArgumentError: The range is not inside the tensor.

    Examples:
        >>> flat_range_to_boxes((4, 4), 2, 12)
        (Box(offsets=(0, 2), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(2, 4)))
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ArgumentError(f"elements {start} to {stop} are not a range of a tensor of shape {tuple(shape)}")
    boxes = []
    while start < stop:
        box, numel_taken = _longest_flat_box(shape, start, stop)
        boxes.append(box)
        start += numel_taken
    return tuple(boxes)


def _longest_flat_box(shape: Sequence[int], start: int, stop: int) -> tuple[Box, int]:
    """The longest box that begins at flat element `start`, is contiguous and ends by `stop`; and its numel."""
    stride = 1
    offsets: list[int] = []
    sizes: list[int] = []
    remaining = start
    for dim in range(len(shape) - 1, -1, -1):
        remaining, index = divmod(remaining, shape[dim])
        count = min(shape[dim] - index, (stop - start) // stride)
        offsets.insert(0, index)
        sizes.insert(0, count)
        stride *= shape[dim]
        if index or count < shape[dim]:
            break
    outer = len(shape) - len(offsets)
    for dim in range(outer - 1, -1, -1):
        remaining, index = divmod(remaining, shape[dim])
        offsets.insert(0, index)
        sizes.insert(0, 1)
    box = Box(tuple(offsets), tuple(sizes))
    return box, box.numel
