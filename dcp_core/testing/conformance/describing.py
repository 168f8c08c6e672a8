"""What a rank finds out about its value, by asking a describer about it. Runs in the ranks.

In: a describer and values. Out: what was said of them, as plain values that the test's process can look at.
"""

from __future__ import annotations

from typing import Any

from dcp_core.adapter import Adapter, Describer
from dcp_core.box import Box, contains, slices
from dcp_core.dtype import DType
from dcp_core.planning.description_checks import description_problem
from dcp_core.planning.leaves import LocalTensor
from dcp_core.testing.conformance.described import Held, bits_of, count_of_ranks
from dcp_core.testing.conformance.samples import Bits
from dcp_core.testing.ranks import RankContext


def describe_in_rank(describer: Describer, value: Any, second: Any, other: Bits, dtype: DType) -> Held:
    """Describe a value, write to its views, and describe it again.

    Args:
        describer: What describes it.
        value: The value; overwritten.
        second: A value alike, in other memory.
        other: Other elements of the whole tensor.
        dtype: What they are.
    """
    found, of_second = describer.describe(value), describer.describe(second)
    problem = None if found is None else description_problem(found)
    try:
        return _looked_at(describer, value, found, of_second, other, dtype)
    except Exception:
        if problem is None:
            raise
        return Held(is_tensor=False, problem=problem)


def _looked_at(
    describer: Describer,
    value: Any,
    found: LocalTensor | None,
    of_second: LocalTensor | None,
    other: Bits,
    dtype: DType,
) -> Held:
    """What there is to know of a value and its first description."""
    if not isinstance(found, LocalTensor):
        return Held(is_tensor=False, problem=None if found is None else description_problem(found))
    bits = bits_of(found)
    for box, view in zip(found.boxes, found.views, strict=False):
        if tuple(view.shape) == box.sizes and contains(Box.whole(other.shape), box):
            found.access.copy_into(view, other[slices(box)], dtype)
    again = describer.describe(value)
    if again is None or of_second is None:
        return Held(is_tensor=False)
    return Held(
        True,
        found.global_shape,
        found.dtype.name,
        found.boxes,
        tuple(tuple(view.shape) for view in found.views),
        bits,
        bits_of(again),
        found.replica_ranks,
        is_steady=(found.boxes, found.storage) == (again.boxes, again.storage),
        is_apart=found.storage is None or not found.boxes or found.storage != of_second.storage,
        is_plain=found.plain,
        problem=description_problem(found),
    )


def problem_of_group(context: RankContext, adapter: Adapter | None) -> str | None:
    """Whether `in_rank` has made the process a rank of a job; where not, why saves would not meet.

    Args:
        context: The rank that was started.
        adapter: What `in_rank` gave.
    """
    if adapter is None:
        return "in_rank gives no adapter; it must start the framework's job and give the adapter"
    found = adapter.process_group(None, with_channel=False)
    if (found.rank, found.world_size) == (context.rank, context.world_size):
        return None
    return (
        f"in_rank's group has {count_of_ranks(found.world_size)} with this as rank {found.rank}, and "
        f"{count_of_ranks(context.world_size)} were started, this one as rank {context.rank}: in_rank must start the "
        "framework's job, and give an adapter that finds it"
    )
