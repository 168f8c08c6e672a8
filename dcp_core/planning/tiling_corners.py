"""The exact tiling check by signed corners, for boxes in any arrangement.

Give each of a box's 2^k corners the sign (-1)^(number of coordinates at the upper end). Summed over all boxes, a sum
per point vanishes everywhere but at the corners of the whole tensor, where it keeps their signs, exactly when the
boxes tile the tensor: the signed corners are the mixed difference of "how many boxes hold this element", and that
determines it. Instead of sums we compare two sorted lists, what must occur with plus and with minus. Points are packed
into exact keys, never hashed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dcp_core.planning.tiling_rows import Bools, BoxRows, Int64, packed_bases

_BATCH_CORNERS = 1 << 20


def untiled_by_corners(rows: BoxRows) -> Int64:
    """Find the tensors whose boxes do not tile them.

    Args:
        rows: All boxes of the tensors in question, tensors ascending, those of one tensor in any order.

    Returns:
        Their numbers, ascending. Tensors without a row are not looked at.

    Complexity:
        A sort of 2^k keys a row, where k dimensions of the tensor are cut.
    """
    if not len(rows):
        return np.zeros(0, np.int64)
    cut_axes = np.zeros(int(rows.tensor.max()) + 1, np.uint64)
    for axis in range(rows.naxes):
        cut_axes[np.unique(rows.tensor[rows.cuts(axis)])] |= np.uint64(1 << axis)
    masks = cut_axes[rows.tensor]
    found = []
    for mask in np.unique(masks).tolist():
        axes = [axis for axis in range(rows.naxes) if mask >> axis & 1]
        found += [_untiled(batch, axes) for batch in _batches(rows.take(masks == mask), len(axes))]
    return np.unique(np.concatenate(found))


def _batches(rows: BoxRows, ncut: int) -> Iterator[BoxRows]:
    """Cut rows between tensors into parts of bounded size; tensors are numbered as before."""
    step = max(1, _BATCH_CORNERS >> ncut)
    start = 0
    while start < len(rows):
        last = rows.tensor[min(start + step, len(rows)) - 1]
        stop = int(np.searchsorted(rows.tensor, last, side="right"))
        yield rows.take(np.arange(start, stop))
        start = stop


def _untiled(rows: BoxRows, axes: list[int]) -> Int64:
    """Find the untiled among tensors that are cut along all of `axes`; rows are sorted by tensor."""
    tensors, local, counts = np.unique(rows.tensor, return_inverse=True, return_counts=True)
    if not axes:
        repeated: Int64 = tensors[counts != 1]
        return repeated
    shapes = [rows.shapes[axis][tensors] for axis in axes]
    starts = [rows.offsets[axis] for axis in axes]
    ends = [rows.offsets[axis] + rows.sizes[axis] for axis in axes]
    bases = packed_bases([shape + 1 for shape in shapes])
    if bases is None:
        wrong = _differ_in_columns(local, starts, ends, shapes)
    else:
        wrong = _differ_in_keys(local, starts, ends, shapes, bases)
    # Both lists hold as many points of each tensor, so a difference is at a place of the tensor it is about.
    ends_of_points = np.cumsum((counts + 1) << (len(axes) - 1))
    untiled: Int64 = tensors[np.unique(np.searchsorted(ends_of_points, np.flatnonzero(wrong), side="right"))]
    return untiled


def _differ_in_keys(local: Int64, starts: list[Int64], ends: list[Int64], shapes: list[Int64], bases: Int64) -> Bools:
    """Compare the sorted points as packed keys; True where the lists differ."""
    strides: list[Int64] = []
    stride = np.ones_like(bases)
    for shape in reversed(shapes):
        strides.insert(0, stride)
        stride = stride * (shape + 1)
    scaled = [column[local] for column in strides]
    plus, minus = _signed_keys(
        bases[local],
        [start * column for start, column in zip(starts, scaled, strict=True)],
        [end * column for end, column in zip(ends, scaled, strict=True)],
    )
    whole_plus, whole_minus = _signed_keys(
        bases,
        [np.zeros_like(bases) for _ in shapes],
        [shape * column for shape, column in zip(shapes, strides, strict=True)],
    )
    have = np.sort(np.concatenate([plus, whole_minus]))
    want = np.sort(np.concatenate([minus, whole_plus]))
    differ: Bools = have != want
    return differ


def _signed_keys(base: Int64, starts: list[Int64], ends: list[Int64]) -> tuple[Int64, Int64]:
    """The keys of all corners with sign plus, and of all with sign minus."""
    plus, minus = base[None], np.zeros((0, len(base)), np.int64)
    for start, end in zip(starts, ends, strict=True):
        plus, minus = np.concatenate([plus + start, minus + end]), np.concatenate([minus + start, plus + end])
    return plus.ravel(), minus.ravel()


def _differ_in_columns(local: Int64, starts: list[Int64], ends: list[Int64], shapes: list[Int64]) -> Bools:
    """The same comparison where points are too large to be packed: column by column."""
    tensors = np.arange(len(shapes[0]))
    zeros = [np.zeros_like(shape) for shape in shapes]
    have: list[list[Int64]] = []
    want: list[list[Int64]] = []
    for corner in range(1 << len(shapes)):
        is_minus = corner.bit_count() % 2 == 1
        box, whole = (want, have) if is_minus else (have, want)
        box.append([local, *_corner(corner, starts, ends)])
        whole.append([tensors, *_corner(corner, zeros, shapes)])
    differ: Bools = np.zeros(sum(len(part[0]) for part in have), np.bool_)
    for one, other in zip(_sorted_points(have), _sorted_points(want), strict=True):
        differ |= one != other
    return differ


def _corner(corner: int, starts: list[Int64], ends: list[Int64]) -> list[Int64]:
    return [ends[axis] if corner >> axis & 1 else starts[axis] for axis in range(len(starts))]


def _sorted_points(parts: list[list[Int64]]) -> list[Int64]:
    """Put points together, as a column a coordinate, and sort them."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.lexsort(columns[::-1])
    return [column[order] for column in columns]
