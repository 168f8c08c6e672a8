"""What ranks said of their values, brought back to the test's process, and what is to be found out from that.

In: descriptions of one value on every rank. Out: whether they overlap, and whether together they are the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dcp_core.box import Box, intersect, slices
from dcp_core.coordination.verdict import name_ranks
from dcp_core.errors import DcpError
from dcp_core.planning.leaves import LocalTensor
from dcp_core.planning.tiling import check_tiling
from dcp_core.testing.conformance.samples import raw

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank's value was described as.

    Attributes:
        is_tensor: Whether `describe` gave a `LocalTensor` that can be looked at; only `problem` is filled in where not.
        global_shape: Of the whole tensor.
        dtype: Name of the element type.
        boxes: What the rank holds.
        view_shapes: Of the views.
        bits: What the views hold, raw.
        landed: What a second description of the value holds after other bits were written to the views of the first.
        replica_ranks: Ranks said to hold the same.
        is_steady: Whether both descriptions tell the same boxes and the same storage.
        is_apart: Whether a second value has another storage, where that is told.
        is_plain: Whether it is said to be a whole value.
        problem: Why a save would refuse the description, or None.
    """

    is_tensor: bool
    global_shape: tuple[int, ...] = ()
    dtype: str = ""
    boxes: tuple[Box, ...] = ()
    view_shapes: tuple[tuple[int, ...], ...] = ()
    bits: tuple[bytes, ...] = ()
    landed: tuple[bytes, ...] = ()
    replica_ranks: tuple[int, ...] | None = None
    is_steady: bool = True
    is_apart: bool = True
    is_plain: bool = False
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of value on one number of ranks.

    Attributes:
        words: What it is, for messages.
        shape: Of the whole tensor.
        dtype: Name of its element type.
        ranks: What each rank's value was described as.
    """

    words: str
    shape: Shape
    dtype: str
    ranks: tuple[Held, ...]


def bits_of(found: LocalTensor) -> tuple[bytes, ...]:
    """What the views hold, raw."""
    return tuple(raw(found.access.read_out(view)) for view in found.views)


def boxes_of(ranks: Iterable[Held]) -> list[Box]:
    """The boxes of all ranks."""
    return [box for held in ranks for box in held.boxes]


def count_of_ranks(world: int) -> str:
    """A number of ranks, in words."""
    return "1 rank" if world == 1 else f"{world} ranks"


def tiling_problem(case: Case) -> str | None:
    """What is wrong with the boxes of all ranks, as a save would say it; found by counting."""
    holders: dict[Box, list[int]] = {}
    for rank, held in enumerate(case.ranks):
        for box in held.boxes:
            holders.setdefault(box, []).append(rank)
    count = np.zeros(case.shape, np.int64)
    for box in holders:
        count[slices(box)] += 1
    if (count == 1).all():
        return None
    boxes, ndim = list(holders), len(case.shape)
    offsets, sizes = (
        np.array([getattr(box, name) for box in boxes], np.int64).reshape(-1, ndim) for name in ("offsets", "sizes")
    )
    try:
        tensor = np.zeros(len(boxes), np.int64)
        faults = check_tiling(tensor, offsets, sizes, np.array([case.shape], np.int64), np.array([ndim], np.int64))
    except DcpError as error:
        return str(error)
    words = [f"offsets {box.offsets} sizes {box.sizes} on {name_ranks(ranks)}" for box, ranks in holders.items()]
    told = [fault.told(case.dtype, case.shape, [words[row] for row in fault.rows]) for fault in faults]
    return "; ".join(told) or f"how often each element is held: {count.tolist()}"


def is_apart(one: Box, other: Box) -> bool:
    """Whether boxes have no element in common."""
    common = intersect(one, other)
    return common is None or common.is_empty
