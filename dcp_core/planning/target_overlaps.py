"""Targets of a load that overlap in memory: found before the first of them is touched.

In: the views that a load fills. Out: nothing, or an error that names two keys. Where two targets are the same memory
throughout, as tied weights are, the one that is read last wins. Where they only overlap, no order of reading gives both
what is stored.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.leaves import HOST_MEMORY, MemoryRange, TensorAccess
from dcp_core.planning.target_memory import range_of

_MOST_PAIRS_WITH_GAPS = 2_000
_MOST_WORK_A_PAIR = 10_000


@dataclass(frozen=True, slots=True)
class Targets:
    """The views that a load fills on one rank, as columns.

    Attributes:
        names: Of their keys.
        leaves: Position of each key among the rank's leaves.
        views: The framework's views, with elements.
        accesses: How to reach the elements of each.
        storages: What `LocalTensor.storage` says of the whole key.
    """

    names: Sequence[str]
    leaves: Sequence[int]
    views: Sequence[Any]
    accesses: Sequence[TensorAccess]
    storages: Sequence[Hashable | None]


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """How the targets of a load lie to each other.

    Attributes:
        meet: Whether the ranges of some meet, be it where no element does, or cannot be told.
        other_looks: Whether two keys are the same memory in different shapes or dtypes, which `LocalTensor.storage`
            does not tell.
    """

    meet: bool = True
    other_looks: bool = False


def check_apart(targets: Targets) -> Neighbourhood:
    """See that no two targets overlap in memory, unless they are the same memory throughout.

    Ranges of memory that meet where no element does, as those of two columns of a matrix, are fine. What can't be told
    passes: views that have gaps and do not lie in host memory, and views that have gaps after 2,000 pairs of them.

    Args:
        targets: All targets of the load on this rank.

    Returns:
        How they lie to each other.

    Raises:
        UnsupportedValueError: Two overlap; it names their keys.

    Complexity:
        A sort of the ranges; pairs are looked at only where ranges meet.
    """
    found = _ranges(targets)
    rows = [row for row, place in enumerate(found) if place is not None]
    placed = found if len(rows) == len(found) else [place for place in found if place is not None]
    spaces, starts, stops, _ = zip(*placed, strict=True) if placed else ((), (), (), ())
    numbers = {space: number for number, space in enumerate(dict.fromkeys(spaces))}
    space = np.fromiter(map(numbers.__getitem__, spaces), np.int64, len(rows))
    start, stop = np.array(starts, dtype=np.uint64), np.array(stops, dtype=np.uint64)
    order = np.argsort(start, kind="stable") if len(numbers) < 2 else np.lexsort((start, space))
    space, start, stop = space[order], start[order], stop[order]
    if not bool(((stop[:-1] > start[1:]) & (space[:-1] == space[1:])).any()):
        return Neighbourhood(meet=len(rows) < len(found))
    sweep = _Sweep(targets)
    for at in order.tolist():
        sweep.take(rows[at], placed[at])
    return Neighbourhood(other_looks=sweep.found_other_looks)


def _ranges(targets: Targets) -> list[MemoryRange | None]:
    """Where each view lies: its access tells it, or the host array that it gives shows it."""
    tells = {id(access): getattr(access, "memory_range", None) for access in targets.accesses}
    found: list[MemoryRange | None] = []
    for view, access in zip(targets.views, targets.accesses, strict=True):
        tell = tells[id(access)]
        if tell is not None:
            found.append(tell(view))
            continue
        array = access.host_array(view)
        if array is None:
            found.append(None)
        else:
            start, stop = range_of(array)
            found.append((HOST_MEMORY, start, stop, stop - start == array.nbytes))
    return found


_Held = list[tuple[int, MemoryRange]]


class _Sweep:
    """Takes targets in the order of their memory, and holds those that may reach into what follows."""

    def __init__(self, targets: Targets) -> None:
        self.found_other_looks = False
        self._targets = targets
        self._dense: _Held = []
        self._with_gaps: _Held = []
        self._pairs = 0

    def take(self, row: int, place: MemoryRange) -> None:
        """Compare a target with those that are held and reach beyond its start, and hold it."""
        is_dense, is_held = place[3], False  # tied keys are held once: what holds for one of them holds for all
        self._dense = _reaching(self._dense, place)
        for held in self._dense:
            if is_dense or self._may_look():
                is_held = self._is_same(held, (row, place)) or is_held
        if self._with_gaps:
            self._with_gaps = _reaching(self._with_gaps, place) if self._may_look() else []
        for held in self._with_gaps:
            if self._may_look():
                is_held = self._is_same(held, (row, place)) or is_held
        if not is_held:
            (self._dense if is_dense else self._with_gaps).append((row, place))

    def _may_look(self) -> bool:
        self._pairs += 1
        return self._pairs <= _MOST_PAIRS_WITH_GAPS

    def _is_same(self, held: tuple[int, MemoryRange], other: tuple[int, MemoryRange]) -> bool:
        """Whether two targets whose ranges meet are the same memory; refuses them where they only overlap."""
        targets, (one, its), (two, place) = self._targets, held, other
        are_two_keys = targets.leaves[one] != targets.leaves[two]
        storage = targets.storages[one]
        if are_two_keys and storage is not None and storage == targets.storages[two]:
            return its == place
        if its[3] and place[3]:
            if are_two_keys and its == place:
                self.found_other_looks = True
                return True
            raise self._refusal(one, two)
        arrays = [targets.accesses[row].host_array(targets.views[row]) for row in (one, two)]
        first, second = arrays
        if first is None or second is None:
            return False
        if are_two_keys and its == place and (first.shape, first.strides) == (second.shape, second.strides):
            return True
        try:
            if np.shares_memory(first, second, max_work=_MOST_WORK_A_PAIR):
                raise self._refusal(one, two)
        except np.exceptions.TooHardError:
            pass
        return False

    def _refusal(self, one: int, two: int) -> UnsupportedValueError:
        names = self._targets.names
        first, second = sorted((names[one], names[two]))
        if self._targets.leaves[one] == self._targets.leaves[two]:
            return UnsupportedValueError(
                f"{first!r} cannot be loaded into: two of its parts overlap in memory, and what one of them is filled "
                "with would spoil the other; give each part memory of its own"
            )
        return UnsupportedValueError(
            f"{first!r} and {second!r} cannot be loaded together: their memory overlaps, and what one of them is "
            "filled with would spoil the other. Nothing was changed. Load one of them into memory of its own (a copy "
            "or clone()), or leave one key out; only keys that are the same memory throughout, as tied weights are, "
            "may share it"
        )


def _reaching(held: _Held, place: MemoryRange) -> _Held:
    """Those that may meet a range and what comes after it."""
    return [each for each in held if each[1][2] > place[1] and each[1][0] == place[0]]
