"""What carries broadcasts in one group of MindSpore ranks: MCCL or HCCL, by a group that was given or made.

Host memory goes through the job's store instead where nobody gave a group
(`dcp_core.coordination.store_communicator`): on CPU that is faster, and has deadlines.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import mindspore
import xxhash
from mindspore.communication import management

from dcp_core.coordination.store import PrefixedStore, Store
from dcp_mindspore import collectives
from dcp_mindspore.wires import DeviceWire

_broken: list[str] = []


class CollectiveCommunicator:
    """`dcp_core.coordination.broadcast_group.Communicator` over a communication group of MindSpore.

    What arrives in host memory is compared with a checksum that goes through the store: after a collective that has
    failed, MCCL delivers garbage. From then on this process broadcasts nothing by it any more.

    Args:
        name: Of the communication group.
        ranks: Global ranks of its members.
        rank: Global rank of this one.
        store: Where checksums go.
        prefix: Of this group in the store, new there.
        is_made: Whether to destroy the group at the end.
    """

    gives_up_itself = False

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, store: Store, prefix: str, *, is_made: bool = False
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.is_made = is_made
        self._sums = PrefixedStore(f"{prefix}/sums", store)
        self._count = 0
        self._waits: SimpleQueue[_HostWork | None] = SimpleQueue()
        self._waiter: threading.Thread | None = None

    def start(self, wire: Any, source: int, timeout_seconds: float) -> Any:
        """Start a broadcast of bytes; the source is a global rank.

        Raises:
            RuntimeError: The library or the store failed, now or before.
            CoordinationError: The wire would break the link; nothing was sent.
        """
        if _broken:
            raise RuntimeError(
                f"an earlier broadcast had failed ({_broken[0]}), after which MindSpore delivers garbage; restart the "
                "job"
            )
        number, self._count = self._count, self._count + 1
        if isinstance(wire, DeviceWire):
            return _DeviceWork(wire, source, self.rank, self.name)
        tensor = collectives.byte_tensor(wire)
        if source == self.rank:
            self._sums.set(str(number), xxhash.xxh3_64_digest(wire.data))
        tensor, handle = collectives.start_broadcast(wire, source, self.name)
        work = _HostWork(self, number, wire, (tensor, handle), source)
        if self._waiter is None:
            self._waiter = threading.Thread(target=_wait, args=(self._waits,), name="dcp-broadcast", daemon=True)
            self._waiter.start()
        self._waits.put(work)
        return work

    def abort(self) -> None:
        """Use this way no more: what is under way may fail, and then the link is of no use."""
        _broken.append(f"in the group {self.name}")

    def end(self) -> None:
        """Destroy the group if it was made."""
        self._waits.put(None)
        if self.is_made:
            with contextlib.suppress(Exception):
                management.destroy_group(self.name)

    def check_sum(self, number: int, wire: Any) -> bool | None:
        """Whether bytes that came are those that were sent; None while that cannot be told yet."""
        if not self._sums.check([str(number)]):
            return None
        is_right = self._sums.get(str(number)) == xxhash.xxh3_64_digest(wire.data)
        if self._sums.add(f"{number}/taken", 1) == len(self.ranks) - 1:
            self._sums.delete_key(str(number))
            self._sums.delete_key(f"{number}/taken")
        return is_right


def _wait(works: SimpleQueue[_HostWork | None]) -> None:
    """Wait for broadcasts, in their order; runs in a thread, since MindSpore cannot tell whether one is done."""
    while (work := works.get()) is not None:
        work.await_bytes()


class _HostWork:
    """A broadcast of host memory."""

    def __init__(
        self, group: CollectiveCommunicator, number: int, wire: Any, under_way: tuple[Any, Any], source: int
    ) -> None:
        self._group = group
        self._number = number
        self._wire = wire
        self._under_way = under_way
        self._is_source = source == group.rank
        self._has_come = False
        self._is_completed = False
        self._error: Exception | None = None

    def await_bytes(self) -> None:
        """Wait for the bytes."""
        try:
            self._under_way[0].asnumpy()
        except Exception as error:
            self._error = error
        self._has_come = True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if self._has_come and not self._is_completed:
            self._is_completed = self._is_source or self._error is not None or self._is_right()
        return self._is_completed

    def wait(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error

    def _is_right(self) -> bool:
        try:
            found = self._group.check_sum(self._number, self._wire)
        except RuntimeError as error:
            self._error = error
            return True
        if found is False:
            self._error = RuntimeError(
                "other bytes came than were sent: a collective of this job has failed before, after which MindSpore "
                "delivers garbage; restart the job"
            )
        return found is not None


class _DeviceWork:
    """A broadcast of a device's memory."""

    def __init__(self, wire: DeviceWire, source: int, rank: int, name: str) -> None:
        self._wire = wire
        self._tensor = wire.to_send() if source == rank else wire.to_fill()
        self._tensor, handle = collectives.start_broadcast(self._tensor, source, name)
        if handle is not None:
            handle.wait()  # for what follows on the device
        if source != rank:
            wire.take(self._tensor)
        self._event = mindspore.runtime.Event()
        self._event.record()

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Nothing: what follows on the device comes after it."""
