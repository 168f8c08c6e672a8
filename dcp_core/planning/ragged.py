"""Ragged shards: parts of a flattened tensor whose lengths differ, given by units.

In: a global shape, and how many units each part has. Out: the range of the flattened tensor that one part is, for
`dcp_core.box.flat_range_to_boxes`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dcp_core.errors import UnsupportedValueError


def ragged_range(global_shape: Sequence[int], dims: Sequence[int], units: Sequence[int], index: int) -> tuple[int, int]:
    """Which elements of the flattened tensor one part holds.

    The first dimensions of the tensor, flattened, are a row of cells; all parts together have all of them, and a part
    has as many as its share of the units.

    Args:
        global_shape: Shape of the whole tensor.
        dims: The dimensions that are flattened: 0, or 0 and 1, and so on. What comes after them is never cut.
        units: How much each part has, in units of any size.
        index: Which part.

    Returns:
        First element, and one past the last, counted in row-major order.

    Raises:
        UnsupportedValueError: Other dimensions, negative units or none at all, a part that is not there, or cells that
            the units do not divide.

    >>> ragged_range((8, 3), dims=(0,), units=(1, 2, 1), index=1)
    (6, 18)
    """
    total = sum(units)
    if tuple(dims) != tuple(range(len(dims))) or not 0 < len(dims) <= len(global_shape):
        raise UnsupportedValueError(
            f"a ragged shard cuts the first dimensions of a tensor of shape {tuple(global_shape)}, in order: got the "
            f"dimensions {tuple(dims)}"
        )
    if not 0 <= index < len(units) or total <= 0 or min(units) < 0:
        raise UnsupportedValueError(f"part {index} of a ragged shard with the units {tuple(units)} has no meaning")
    cells = math.prod(global_shape[: len(dims)])
    if cells % total:
        raise UnsupportedValueError(
            f"the {cells} cells of dimensions {tuple(dims)} of a tensor of shape {tuple(global_shape)} are no multiple "
            f"of the {total} units that {tuple(units)} add up to; give units that divide them"
        )
    step = cells // total * math.prod(global_shape[len(dims) :])
    start = sum(units[:index]) * step
    return start, start + units[index] * step
