"""Carries out a schedule of broadcasts while a rank reads.

In: operations in their order, the groups that carry them, and word of what has been read. Out: targets filled by other
ranks. All of it happens on the calling thread, in between other work: `advance` starts what is possible and never
waits; `finish` walks to the end. A rank that fails walks to the end too, sending whatever is there, so that nobody is
left in a broadcast: the final exchange tells all of its error. Where it cannot even start an operation it gives the
group up, which the other members hear at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dcp_core.adapter import BroadcastGroup, BroadcastWork
from dcp_core.coordination.verdict import name_ranks
from dcp_core.errors import CoordinationError, PlanningError
from dcp_core.planning.buffer_parts import box_of_run
from dcp_core.planning.leaves import TensorAccess
from dcp_core.planning.rank_groups import GroupKey
from dcp_core.planning.schedule import Broadcast
from dcp_core.planning.sharing import Sharing
from dcp_core.planning.wanted import WantedBoxes

TargetOf = Callable[[int], tuple[Any, TensorAccess]]
"""Gives the view of a wanted box, and how to reach its elements."""


@dataclass(frozen=True, slots=True, eq=False)
class _Temporary:
    """Memory that packed parts travel in.

    Attributes:
        memory: From `BroadcastGroup.temporary`.
        nbytes: Its size.
    """

    memory: Any
    nbytes: int


class _Temporaries:
    """Temporary memory that is free to be used again: fresh memory costs more than copying.

    Args:
        least: Bytes of an allocation, by kind of communicator: what its largest batch needs.
    """

    def __init__(self, least: Mapping[str, int]) -> None:
        self._least = least
        self._free: dict[str, list[_Temporary]] = {}

    def take(self, kind: str, group: BroadcastGroup, nbytes: int, view: Any) -> _Temporary:
        """Memory of at least so many bytes, on the device of a view."""
        free = self._free.get(kind, [])
        while free:
            found = free.pop()
            if found.nbytes >= nbytes:
                return found
        nbytes = max(nbytes, self._least.get(kind, 0))
        return _Temporary(group.temporary(nbytes, view), nbytes)

    def give_back(self, kind: str, temporary: _Temporary) -> None:
        """Say that nobody uses it any more."""
        self._free.setdefault(kind, []).append(temporary)


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """An operation that was started.

    Attributes:
        group: Index of the group that carries it.
        work: Waits for it; None where it could not be started.
        temporary: What its wire lies in, where that is not the target's own memory.
        wire: What travels.
        views: Where it goes from there; none on the rank that sends, and where it is the target's own memory.
    """

    group: int
    work: BroadcastWork | None = None
    temporary: _Temporary | None = None
    wire: Any = None
    views: Sequence[Any] = ()

    def is_done(self) -> bool:
        """Whether to wait for it would take no time."""
        return self.work is None or self.work.is_done()


class BroadcastWalker:
    """One rank's way through its schedule.

    Args:
        sharing: What it sends and receives.
        boxes: What it wants.
        groups: The open groups of the schedule.
        target_of: Gives the targets.

    Raises:
        PlanningError: Another one has been through the schedule, or is on its way.
    """

    def __init__(
        self,
        sharing: Sharing,
        boxes: WantedBoxes,
        groups: Mapping[GroupKey, BroadcastGroup],
        target_of: TargetOf,
    ) -> None:
        if sharing.is_begun:
            raise PlanningError(
                "this plan's shared reads have been carried out already; a reader that reads twice must say "
                "`shares_reads = False`"
            )
        self._sharing = sharing
        sharing.is_begun = True
        self._operations = sharing.schedule.operations
        self._parts = sharing.schedule.parts
        self._rank = sharing.rank
        self._boxes = boxes
        self._target_of = target_of
        self._groups = [groups[shared.key] for shared in sharing.schedule.groups]
        self._ranks_of = [shared.key.ranks for shared in sharing.schedule.groups]
        self._kinds = [shared.key.kind for shared in sharing.schedule.groups]
        self._temporaries = _Temporaries(self._largest_batches())
        ready = sharing.own.ready.tolist()
        self._needs = [max([ready[part] for part in operation.parts]) for operation in self._operations]
        self._under_way: deque[_UnderWay] = deque()
        self._next = 0
        self._done = 0
        self._error: BaseException | None = None

    def advance(self, rows_in: int) -> None:
        """Start what is possible; never waits.

        Args:
            rows_in: How many of this rank's own reads, from the first on, are in.
        """
        while self._under_way and self._under_way[0].is_done():
            self._complete()
        while self._next < len(self._operations) and self._operations[self._next].after <= self._done:
            if self._needs[self._next] > rows_in:
                return
            self._start(self._operations[self._next])

    def finish(self) -> None:
        """Start all that is left and wait for it, whatever has been read.

        Raises:
            BaseException: The first thing that went wrong on this rank's way.
        """
        for operation in self._operations[self._next :]:
            while self._done < operation.after:
                self._complete()
            self._start(operation)
        while self._under_way:
            self._complete()
        self._sharing.is_done = True
        if self._error is not None:
            raise self._error

    def _largest_batches(self) -> Mapping[str, int]:
        largest: dict[str, int] = {}
        for operation in self._operations:
            if len(operation.parts) > 1:
                kind = self._kinds[operation.group]
                largest[kind] = max(largest.get(kind, 0), operation.nbytes)
        return largest

    def _start(self, operation: Broadcast) -> None:
        self._next += 1
        started = _UnderWay(operation.group)
        try:
            started = self._started(operation)
        except Exception as error:
            self._error = self._error or error
            self._give_up(operation, error)
        self._under_way.append(started)

    def _started(self, operation: Broadcast) -> _UnderWay:
        group, kind = self._groups[operation.group], self._kinds[operation.group]
        is_source = operation.source == self._rank
        views = [self._view(part) for part in operation.parts]
        wire = group.wire(views[0]) if len(views) == 1 else None
        if wire is not None:
            return _UnderWay(operation.group, group.broadcast(wire, operation.source))
        temporary = self._temporaries.take(kind, group, operation.nbytes, views[0])
        wire = temporary.memory[: operation.nbytes]
        if is_source:
            group.pack(views, wire)
        work = group.broadcast(wire, operation.source)
        return _UnderWay(operation.group, work, temporary, wire, () if is_source else views)

    def _give_up(self, operation: Broadcast, error: Exception) -> None:
        """Leave a group whose next operation this rank cannot start: the others would wait for it."""
        ranks = name_ranks(self._ranks_of[operation.group])
        text = (
            f"rank {self._rank} could not start a broadcast of {operation.nbytes} bytes from rank {operation.source} "
            f"within a group of {ranks}: {type(error).__name__}: {error}"
        )
        with suppress(Exception):
            self._groups[operation.group].fail(CoordinationError(text))

    def _complete(self) -> None:
        """Wait for the oldest operation under way."""
        oldest = self._under_way.popleft()
        self._done += 1
        if oldest.work is None or not self._try(oldest.work.wait):
            return  # what failed may still write to its memory
        if oldest.views:
            self._try(lambda: self._groups[oldest.group].unpack(oldest.wire, oldest.views))
        if oldest.temporary is not None:
            self._temporaries.give_back(self._kinds[oldest.group], oldest.temporary)

    def _view(self, part: int) -> Any:
        """The part of a target that a part of the schedule is: an array where it lies in host memory as it is.

        A state may hold tensors of several frameworks, and arrays; groups know arrays and tensors of their own.
        """
        row, first, last = (int(column[part]) for column in (self._parts.row, self._parts.first, self._parts.last))
        view, access = self._target_of(row)
        sizes = self._boxes.boxes[row].sizes
        box = box_of_run(first, last, sizes)
        found = view if box.sizes == sizes else access.narrow(view, box)
        array = access.host_array(found)
        return found if array is None else array

    def _try(self, action: Callable[[], object]) -> bool:
        """Do something, and remember the first error."""
        try:
            action()
        except Exception as error:
            self._error = self._error or error
            return False
        return True
