"""How buffers travel between torch ranks: broadcasts of bytes within groups that are given, found, or made for a load.

Goes in: ranks, and what type of device their buffers lie on. Comes out: a `dcp_core.adapter.BroadcastGroup`. What
carries the bytes is what the job has for that type of device (NCCL, HCCL), and for host memory gloo, which is made
whether the job has it or not.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dcp_core.errors import ArgumentError, CoordinationError, CoordinationTimeoutError
from dcp_torch import wires
from dcp_torch.communicators import Communicator, backends_of, can_make, given_communicator, make_communicator
from dcp_torch.meeting import Meeting
from dcp_torch.mesh_groups import group_named, groups_of_meshes

_FIRST_PAUSE_SECONDS = 0.00005
_LONGEST_PAUSE_SECONDS = 0.001
_GRACE_SECONDS = 1.0
_END_SECONDS = 1.0
_END_PAUSE_SECONDS = 0.01
_REMEDY = "see the logs of these ranks; or load with broadcast_replicated_tensors=False: every rank reads for itself"


class TorchBroadcasts:
    """`dcp_core.adapter.Broadcasts` for torch.

    Args:
        store: Where the members of groups meet; it is cloned where it can be.
        prefix: Goes before every name in it.
        rank: Global rank of this process.
        groups: Process groups that say what carries which type of device: the first that has something.
    """

    def __init__(self, store: Any, prefix: str, rank: int, groups: Sequence[Any]) -> None:
        self.rank = rank
        self._carriers = [backends_of(group) for group in groups]
        self._origin: Any = store
        self._connection: Any = None
        self._prefix = prefix
        self._token = ""
        self._meetings: list[Meeting] = []

    def kind(self, device: str) -> str | None:
        """Name the backend that carries broadcasts of memory on a type of device; None: nothing does.

        An accelerator's own is taken before gloo, which may carry it as well.
        """
        names = [carried[device] for carried in self._carriers if device in carried]
        own = [name for name in names if name != "gloo" and can_make(name)]
        if own:
            return own[0]
        is_gloos = device == "cpu" or (device == "cuda" and "gloo" in names)
        return "gloo" if is_gloos and can_make("gloo") else None

    def given_groups(self, groups: Mapping[tuple[int, ...], Any]) -> Mapping[tuple[int, ...], Any]:
        """Check the groups that a caller passed: torch process groups or one-dimensional DeviceMeshes.

        Raises:
            ArgumentError: A key is no tuple of ranks, or its group is none, is gone, or has other members.
        """
        found: dict[tuple[int, ...], Any] = {}
        for key, group in groups.items():
            ranks = _sorted_ranks(key)
            if ranks in found:
                raise ArgumentError(f"broadcast_groups has two groups for the ranks {_shown(ranks)}; leave one out")
            if self.rank in ranks:
                found[ranks] = _checked_group(ranks, group)
        return found

    def existing_groups(self, values: Iterable[Any]) -> Mapping[tuple[int, ...], str]:
        """Names of the groups of the meshes that DTensors among the values lie on, by ascending ranks."""
        return groups_of_meshes(values)

    def open(
        self, ranks: tuple[int, ...], given: Any | None, timeout_seconds: float, *, token: str, device: str = "cpu"
    ) -> TorchBroadcastGroup:
        """Open a group; see `dcp_core.adapter.Broadcasts`.

        Raises:
            CoordinationError: Members did not come in time, or the group could not be made.
        """
        if self.rank not in ranks or list(ranks) != sorted(set(ranks)):
            raise ArgumentError(
                f"rank {self.rank} opens a group of the ranks {ranks}: they must ascend, this one in them"
            )
        if token != self._token:
            self._forget_meetings()
            self._token = token
        meeting = Meeting(self._connected(), f"{self._prefix}/{token}", device, ranks, self.rank)
        self._meetings.append(meeting)
        try:
            communicator = self._find(ranks, given, device) or self._make(meeting, ranks, device, timeout_seconds)
        except CoordinationError as error:
            with contextlib.suppress(RuntimeError):
                meeting.give_up(_first_clause(error))
            raise
        return TorchBroadcastGroup(communicator, meeting, timeout_seconds)

    def _find(self, ranks: tuple[int, ...], given: Any | None, device: str) -> Communicator | None:
        if given is None:
            return None
        try:
            return given_communicator(group_named(given) if isinstance(given, str) else given, device)
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise CoordinationError(
                f"rank {self.rank} does not have the group of ranks {_shown(ranks)} any more that it had when the load "
                f"began ({error}); let no other thread destroy process groups while a load runs"
            ) from error

    def _make(self, meeting: Meeting, ranks: tuple[int, ...], device: str, timeout_seconds: float) -> Communicator:
        backend = self.kind(device)
        if backend is None:
            raise CoordinationError(f"no backend of this job broadcasts tensors on {device!r}; {_REMEDY}")
        what = f"rank {self.rank} could not make a {backend} group of ranks {_shown(ranks)}"
        try:
            missing = meeting.gather(timeout_seconds)
            if not missing:
                made = make_communicator(
                    backend, device, meeting.store, meeting.name, ranks, self.rank, timeout_seconds
                )
                meeting.ready()
                return made
        except RuntimeError as error:
            raise CoordinationError(f"{what}: {_reason(error)}; {_REMEDY}") from error
        raise CoordinationTimeoutError(
            f"{what}: ranks {_shown(missing)} did not come within {timeout_seconds:g} s; {_REMEDY}"
        )

    def _forget_meetings(self) -> None:
        """Remove what this rank left in the store for an earlier load, which every rank has ended by now."""
        meetings, self._meetings = self._meetings, []
        for meeting in meetings:
            with contextlib.suppress(RuntimeError):
                meeting.remove()

    def _connected(self) -> Any:
        """A connection of its own, so that nothing here holds up the trainer's use of the store."""
        if self._connection is None:
            clone = getattr(self._origin, "clone", None)
            self._connection = self._origin if clone is None else clone()
        return self._connection


class TorchBroadcastGroup:
    """`dcp_core.adapter.BroadcastGroup` for torch."""

    def __init__(self, communicator: Communicator, meeting: Meeting, timeout_seconds: float) -> None:
        self.ranks = meeting.ranks
        self.rank = meeting.rank
        self.timeout_seconds = timeout_seconds
        self.failure: CoordinationError | None = None
        self._communicator = communicator
        self._meeting = meeting
        self._pending: list[TorchBroadcastWork] = []
        self._moved_at = time.monotonic()
        self._looked_at = self._moved_at
        self._ending: threading.Thread | None = None

    def wire(self, view: torch.Tensor) -> torch.Tensor | None:
        """The view's own memory as bytes; None where it is not plain bytes."""
        return wires.wire_of(view)

    def temporary(self, nbytes: int, view: torch.Tensor) -> torch.Tensor:
        """Bytes on the device of a view, of undefined content."""
        return wires.new_wire(nbytes, view)

    def pack(self, views: Sequence[torch.Tensor], wire: torch.Tensor) -> None:
        """Copy the raw bits of views, one after the other, row-major, to a wire."""
        wires.pack(views, wire)

    def unpack(self, wire: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        """Undo `pack`, in one operation."""
        wires.unpack(wire, views)

    def broadcast(self, wire: torch.Tensor, source: int) -> TorchBroadcastWork:
        """Start to send a wire, or to receive into it."""
        if source not in self.ranks:
            raise ArgumentError(f"rank {source} is not in the group of ranks {_shown(self.ranks)}")
        work = TorchBroadcastWork(self, source, wire.numel())
        if self.failure is not None:
            work.finish(self.failure)
        elif wire.numel() == 0:
            work.finish(None)
        else:
            self._start(work, wire)
        return work

    def close(self) -> None:
        """Destroy the group if it was made, in bounded time whatever has happened."""
        if self._pending and self.failure is None:
            work = self._pending[0]
            self.fail(CoordinationError(f"{work.described}: the group was closed before"))
        if self.failure is None:
            self.failure = CoordinationError(f"the group of ranks {_shown(self.ranks)} is closed on rank {self.rank}")
            if self._communicator.is_made:
                with contextlib.suppress(RuntimeError):
                    self._meeting.await_ready(self.timeout_seconds)
            self._communicator.end()
        elif self._ending is not None:
            self._ending.join(_END_SECONDS)

    def look(self, work: TorchBroadcastWork) -> None:
        """See whether there is still hope for a broadcast that is not done; `fail` if not."""
        now = time.monotonic()
        grace = _GRACE_SECONDS if self._communicator.is_gloo else 0.0  # gloo gives up on its own, and says more
        if now - max(work.started_at, self._moved_at) > self.timeout_seconds + grace:
            self.fail(
                CoordinationTimeoutError(
                    f"{work.described}: it did not come within {self.timeout_seconds:g} s; {_REMEDY}"
                )
            )
        elif now - self._looked_at >= self._meeting.look_seconds:
            self._looked_at = now
            reason = self._meeting.failure()
            if reason:
                self.fail(CoordinationError(f"{work.described}: {reason}; {_REMEDY}"))

    def check(self, work: TorchBroadcastWork) -> None:
        """Raise what went wrong in what torch says is completed; let the device's later operations wait for it."""
        work.work.wait()
        if not self._communicator.is_gloo and work.work.exception() is not None:  # others may not raise it above
            raise RuntimeError(str(work.work.exception()))

    def moved(self, work: TorchBroadcastWork) -> None:
        """Note that a broadcast has ended well."""
        self._pending.remove(work)
        self._moved_at = time.monotonic()

    def blame(self, work: TorchBroadcastWork, error: Exception) -> None:
        """Give the group up for what a broadcast ended with."""
        reason = _reason(error)
        kind = CoordinationTimeoutError if re.search("timed out|timeout", reason, re.I) else CoordinationError
        told = self._meeting.failure()  # whoever failed first has told before it cut its connections
        failure = kind(f"{work.described}: {reason}{told and f' ({told})'}; {_REMEDY}")
        failure.__cause__ = error
        self.fail(failure)

    def fail(self, error: CoordinationError) -> None:
        """Give the group up: end what is under way, tell the others, and destroy it if it was made."""
        self.failure = error
        left: list[Any] = []
        for work in self._pending:
            left.append(work.give_up(error))
        self._pending = []
        with contextlib.suppress(RuntimeError):
            self._meeting.fail(f"rank {self.rank} had failed before: {_first_clause(error)}")
        most_seconds = 2 * self.timeout_seconds + _END_SECONDS
        self._ending = threading.Thread(
            target=_end, args=(self._communicator, left, most_seconds), name="dcp-broadcast-end", daemon=True
        )
        self._ending.start()

    def _start(self, work: TorchBroadcastWork, wire: torch.Tensor) -> None:
        self._pending.append(work)
        try:
            work.work = self._communicator.start(wire, work.source, self.timeout_seconds)
        except RuntimeError as error:
            self.blame(work, error)


class TorchBroadcastWork:
    """`dcp_core.adapter.BroadcastWork` for torch.

    Args:
        group: Where it runs.
        source: Global rank.
        nbytes: What is sent.
    """

    def __init__(self, group: TorchBroadcastGroup, source: int, nbytes: int) -> None:
        self.source = source
        self.nbytes = nbytes
        self.started_at = time.monotonic()
        self.work: Any = None
        self._group = group
        self._is_done = False
        self._error: CoordinationError | None = None

    @property
    def described(self) -> str:
        """What it comes to when it fails."""
        group = self._group
        done = "send" if self.source == group.rank else f"get from rank {self.source}"
        return (
            f"rank {group.rank} could not {done} {self.nbytes} bytes by a broadcast within the group of ranks "
            f"{_shown(group.ranks)}"
        )

    def is_done(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        if not self._is_done:
            if self.work.is_completed():
                self._settle()
            else:
                self._group.look(self)
        return self._is_done

    def wait(self) -> None:
        """Wait for the bytes to be here, or on the source, with the others.

        Raises:
            CoordinationError: They will not come.
        """
        began = time.monotonic()
        while not self.is_done():
            waited = time.monotonic() - began
            time.sleep(min(max(waited / 10, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS))
        if self._error is not None:
            raise self._error

    def finish(self, error: CoordinationError | None) -> None:
        """Be done."""
        self._is_done = True
        self._error = error

    def give_up(self, error: CoordinationError) -> Any:
        """Be done, with an error; returns what was under way. No other reference to that is kept: it holds sockets."""
        work, self.work = self.work, None
        self.finish(error)
        return work

    def _settle(self) -> None:
        try:
            self._group.check(self)
        except Exception as error:
            self._group.blame(self, error)
        else:
            self.work = None
            self.finish(None)
            self._group.moved(self)


def _end(communicator: Communicator, left: list[Any], most_seconds: float) -> None:
    """Destroy a group that has failed; runs in a thread.

    To destroy a gloo group would block until the broadcasts that run have ended, at the latest when their time is up,
    and a thread that is in there when the process ends brings it down. So they are waited for here.
    """
    communicator.abort()
    deadline = time.monotonic() + most_seconds
    while left and time.monotonic() < deadline:
        left[:] = [work for work in left if work is not None and not work.is_completed()]
        if left:
            time.sleep(_END_PAUSE_SECONDS)
    left.clear()
    communicator.end()


def _first_clause(error: CoordinationError) -> str:
    """An error without what to do about it."""
    return error.message.partition(";")[0]


def _sorted_ranks(key: Any) -> tuple[int, ...]:
    is_ranks = isinstance(key, tuple) and len(key) > 0 and all(type(rank) is int and rank >= 0 for rank in key)
    if not is_ranks or len(set(key)) != len(key):
        raise ArgumentError(
            f"broadcast_groups has the key {key!r}: it must be a tuple of the global ranks of a group, each once"
        )
    return tuple(sorted(key))


def _checked_group(ranks: tuple[int, ...], group: Any) -> Any:
    of_mesh = hasattr(group, "get_group") and getattr(group, "ndim", None) == 1
    found = group.get_group() if of_mesh else group
    what = f"broadcast_groups has for the ranks {_shown(ranks)}"
    if not isinstance(found, dist.ProcessGroup):
        raise ArgumentError(f"{what} {group!r}; it must be a torch process group or a 1-d DeviceMesh that they are in")
    try:
        members = tuple(sorted(dist.get_process_group_ranks(found)))
    except (KeyError, ValueError) as error:
        raise ArgumentError(f"{what} a process group that was destroyed; pass one that exists") from error
    if members != ranks:
        raise ArgumentError(f"{what} a group of the ranks {_shown(members)}; let the key be the ranks of its members")
    return found


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def _reason(error: BaseException) -> str:
    """What a backend says, without where in its code, and without its advice."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"\[/[^]]*\] ", "", text).split(". This is typically", 1)[0]
