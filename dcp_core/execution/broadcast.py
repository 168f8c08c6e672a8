"""Carries out a schedule of broadcasts while a rank reads.

In: operations in their order, the groups that carry them, and word of what has been read. Out: targets filled by other
ranks. All of it happens on the calling thread, in between other work: `advance` starts what is possible and never
waits; `finish` walks to the end. A rank that fails walks to the end too, sending whatever is there, so that nobody is
left in a broadcast: the final exchange tells all of its error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_core.adapter import BroadcastGroup, BroadcastWork
from dcp_core.planning.buffer_parts import box_of_run
from dcp_core.planning.leaves import TensorAccess
from dcp_core.planning.rank_groups import GroupKey
from dcp_core.planning.schedule import Broadcast
from dcp_core.planning.sharing import Sharing
from dcp_core.planning.wanted import WantedBoxes

TargetOf = Callable[[int], tuple[Any, TensorAccess]]
"""Gives the view of a wanted box, and how to reach its elements."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    """An operation that was started.

    Attributes:
        work: Waits for it.
        group: Carries it.
        wire: What travels, where that is not the target's own memory.
        views: Where it goes from there; none on the rank that sends.
    """

    work: BroadcastWork
    group: BroadcastGroup
    wire: Any = None
    views: Sequence[Any] = field(default_factory=list)


class BroadcastWalker:
    """One rank's way through its schedule.

    Args:
        sharing: What it sends and receives.
        boxes: What it wants.
        groups: The open groups of the schedule.
        target_of: Gives the targets.
    """

    def __init__(
        self,
        sharing: Sharing,
        boxes: WantedBoxes,
        groups: Mapping[GroupKey, BroadcastGroup],
        target_of: TargetOf,
    ) -> None:
        self._operations = sharing.schedule.operations
        self._parts = sharing.schedule.parts
        self._rank = sharing.rank
        self._boxes = boxes
        self._target_of = target_of
        self._groups = [groups[shared.key] for shared in sharing.schedule.groups]
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
        while self._under_way and self._under_way[0].work.is_done():
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
        if self._error is not None:
            raise self._error

    def _start(self, operation: Broadcast) -> None:
        group = self._groups[operation.group]
        is_source = operation.source == self._rank
        views = [self._view(part) for part in operation.parts]
        wire = group.wire(views[0]) if len(views) == 1 else None
        packed = wire is None
        if packed:
            wire = group.temporary(operation.nbytes, views[0])
            if is_source:
                self._try(lambda: group.pack(views, wire))
        work = group.broadcast(wire, operation.source)
        self._under_way.append(_UnderWay(work, group, wire, views if packed and not is_source else ()))
        self._next += 1

    def _complete(self) -> None:
        """Wait for the oldest operation under way."""
        oldest = self._under_way.popleft()
        self._done += 1
        if self._try(oldest.work.wait) and oldest.views:
            self._try(lambda: oldest.group.unpack(oldest.wire, oldest.views))

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
