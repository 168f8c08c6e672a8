"""Broadcasts between numpy ranks, over the board of messages that they talk through anyway.

As with a real backend, a broadcast is done on the source only when every member has taken it, and the members of a
group must start the same ones in the same order. So what would hang there hangs here, until the time is up; what would
deliver wrong bytes there is an error here.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.adapter import KeyValueChannel
from dcp_core.errors import ArgumentError, CoordinationError, CoordinationTimeoutError

Wire = npt.NDArray[np.uint8]

_HEAD = struct.Struct("<qqq")  # number of the broadcast, source, bytes
_FIRST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.01
_HEAR_SECONDS = 0.5
_REMEDY = "look at the log of that rank"


class NumpyBroadcasts:
    """`dcp_core.adapter.Broadcasts` for numpy ranks.

    Args:
        channel: How the ranks talk.
        rank: This rank in the job.
    """

    def __init__(self, channel: KeyValueChannel, rank: int) -> None:
        self.rank = rank
        self._channel = channel
        self._token = ""
        self._groups: list[NumpyBroadcastGroup] = []

    def kind(self, device: str) -> str | None:
        """The channel carries host memory, and nothing else is carried."""
        return "channel" if device == "cpu" else None

    def carries(self, view: Any) -> bool:
        """Arrays are carried, and nothing else."""
        return isinstance(view, np.ndarray)

    def given_groups(self, groups: Mapping[tuple[int, ...], Any]) -> Mapping[tuple[int, ...], Any]:
        """Check the groups that a caller passed: tuples of ranks, equal to their keys but for the order.

        Raises:
            ArgumentError: They are not.
        """
        found: dict[tuple[int, ...], Any] = {}
        for key, group in groups.items():
            if not isinstance(key, tuple) or not all(type(rank) is int for rank in key) or len(set(key)) != len(key):
                raise ArgumentError(f"broadcast_groups has the key {key!r}: it must be a tuple of ranks, each once")
            if not isinstance(group, tuple) or sorted(group) != sorted(key):
                raise ArgumentError(
                    f"broadcast_groups has for the ranks {key} the group {group!r}, not a tuple of them"
                )
            if self.rank in key:
                found[tuple(sorted(key))] = group
        return found

    def existing_groups(self, values: Iterable[Any]) -> Mapping[tuple[int, ...], str]:
        """None: arrays bring no groups along."""
        return {}

    def open(
        self, ranks: tuple[int, ...], given: Any | None, timeout_seconds: float, *, token: str, device: str = "cpu"
    ) -> NumpyBroadcastGroup:
        """Open a group; see `dcp_core.adapter.Broadcasts`. Waits for nobody."""
        if token != self._token:
            for group in self._groups:
                group.remove()
            self._token, self._groups = token, []
        digest = hashlib.blake2b(f"{token} {device} {ranks}".encode(), digest_size=12).hexdigest()
        opened = NumpyBroadcastGroup(self._channel, f"broadcast-{digest}", ranks, self.rank, timeout_seconds)
        self._groups.append(opened)
        return opened

    def give_up(self, ranks: tuple[int, ...], reason: str, *, token: str, device: str = "cpu") -> None:
        """Tell the members of a group that this rank will not open it; see `dcp_core.adapter.Broadcasts`."""
        self.open(ranks, None, 0.0, token=token, device=device).fail(CoordinationError(reason))


class NumpyBroadcastGroup:
    """`dcp_core.adapter.BroadcastGroup` for numpy ranks.

    Args:
        channel: How the ranks talk.
        name: Of the group, on the channel.
        ranks: Its members, ascending.
        rank: This one.
        timeout_seconds: How long to wait for a broadcast since the one before it, at least.
    """

    def __init__(
        self, channel: KeyValueChannel, name: str, ranks: tuple[int, ...], rank: int, timeout_seconds: float
    ) -> None:
        self.channel = channel
        self.name = name
        self.ranks = ranks
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self.failure: CoordinationError | None = None
        self.moved_at = time.monotonic()
        self._pending: list[NumpyBroadcastWork] = []
        self._posted: set[str] = set()
        self._count = 0
        self._heard_at = time.monotonic()

    def wire(self, view: npt.NDArray[Any]) -> Wire | None:
        """The array's own memory as bytes; None where that is not its elements in order, little-endian."""
        if not view.flags.c_contiguous or view.dtype != view.dtype.newbyteorder("<"):
            return None
        wire: Wire = view.reshape(-1).view(np.uint8)
        return wire

    def temporary(self, nbytes: int, view: npt.NDArray[Any]) -> Wire:
        """Bytes of undefined content."""
        return np.empty(nbytes, np.uint8)

    def pack(self, views: Sequence[npt.NDArray[Any]], wire: Wire) -> None:
        """Copy the raw bits of arrays, one after the other, row-major, to a wire."""
        for part, view in zip(_parts(wire, views), views, strict=True):
            part[...] = view

    def unpack(self, wire: Wire, views: Sequence[npt.NDArray[Any]]) -> None:
        """Undo `pack`."""
        for part, view in zip(_parts(wire, views), views, strict=True):
            view[...] = part

    def broadcast(self, wire: Wire, source: int) -> NumpyBroadcastWork:
        """Start to send a wire, or to receive into it."""
        if source not in self.ranks:
            raise ArgumentError(f"rank {source} is not in the group of ranks {self.ranks}")
        work = NumpyBroadcastWork(self, self._count, source, wire)
        self._count += 1
        if self.failure is not None:
            work.finish(self.failure)
            return work
        self._pending.append(work)
        if source == self.rank:
            self.post(work.name, _HEAD.pack(work.number, source, wire.nbytes) + wire.tobytes())
        return work

    def close(self) -> None:
        """Give up what is not done. What others may still take stays, until they have ended the load."""
        if self._pending:
            self.fail(CoordinationError(f"{self._pending[0].described}: the group was closed before"))

    def advance(self) -> None:
        """Take what has come; broadcasts end in the order in which they were started."""
        while self._pending and self._pending[0].take():
            if self.failure is not None:
                return
            self._pending.pop(0)
            self.moved_at = time.monotonic()
        if self._pending:
            self._pending[0].check_time()
        if self._pending:
            self._hear()

    def fail(self, error: CoordinationError) -> None:
        """Give the group up, and tell the others why."""
        self.failure = error
        told = self._told(self.rank)
        if told not in self._posted:
            with suppress(Exception):
                self.post(told, f"rank {self.rank} had failed before: {error.message}".encode())
        pending, self._pending = self._pending, []
        for work in pending:
            work.finish(error)

    def _hear(self) -> None:
        """Give the group up if another member has."""
        now = time.monotonic()
        if now - self._heard_at < _HEAR_SECONDS:
            return
        self._heard_at = now
        for rank in self.ranks:
            told = None if rank == self.rank else self.channel.wait(self._told(rank), 0)
            if told is not None:
                self.fail(CoordinationError(f"{self._pending[0].described}: {told.decode()}; {_REMEDY}"))
                return

    def _told(self, rank: int) -> str:
        return f"{self.name}.failed-{rank}"

    def post(self, name: str, payload: bytes) -> None:
        """Post a message."""
        self._posted.add(name)
        self.channel.put(name, payload)

    def unpost(self, names: Iterable[str]) -> None:
        """Remove messages that every member has done with, whoever posted them."""
        for name in names:
            self.channel.delete(name)
            self._posted.discard(name)

    def remove(self) -> None:
        """Remove what this rank left, once every member has ended the load."""
        self.unpost(sorted(self._posted))


class NumpyBroadcastWork:
    """`dcp_core.adapter.BroadcastWork` for numpy ranks.

    Args:
        group: Where it runs.
        number: Of the broadcast in the group.
        source: Who sends.
        wire: What is sent or filled.
    """

    def __init__(self, group: NumpyBroadcastGroup, number: int, source: int, wire: Wire) -> None:
        self.number = number
        self.source = source
        self.name = f"{group.name}.{number}"
        self._group = group
        self._wire = wire
        self._started_at = time.monotonic()
        self._is_done = False
        self._error: CoordinationError | None = None
        self._missing = [rank for rank in group.ranks if rank != source] if source == group.rank else [source]

    @property
    def described(self) -> str:
        """What it comes to when it fails."""
        group = self._group
        done = f"send to ranks {self._missing}" if self.source == group.rank else f"get from rank {self.source}"
        return (
            f"rank {group.rank} could not {done} {self._wire.nbytes} bytes by broadcast {self.number} within the group "
            f"of ranks {group.ranks}"
        )

    def is_done(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        if not self._is_done:
            self._group.advance()
        return self._is_done

    def wait(self) -> None:
        """Wait for the bytes to be here, or on the source, with the others.

        Raises:
            CoordinationError: They did not come in time, or members started different broadcasts.
        """
        pause = _FIRST_PAUSE_SECONDS
        while not self.is_done():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        if self._error is not None:
            raise self._error

    def finish(self, error: CoordinationError | None) -> None:
        """Be done."""
        self._is_done = True
        self._error = error

    def take(self) -> bool:
        """Go on as far as what has come allows; whether that is the end."""
        if self._is_done:
            return True
        channel = self._group.channel
        if self.source == self._group.rank:
            self._missing = [rank for rank in self._missing if channel.wait(self._taken(rank), 0) is None]
            if not self._missing:
                others = [rank for rank in self._group.ranks if rank != self.source]
                self._group.unpost([self.name, *map(self._taken, others)])
                self.finish(None)
        else:
            message = channel.wait(self.name, 0)
            if message is not None:
                self._receive(message)
        return self._is_done

    def check_time(self) -> None:
        """Give the group up if its time is up."""
        group = self._group
        if time.monotonic() - max(self._started_at, group.moved_at) > group.timeout_seconds:
            group.fail(
                CoordinationTimeoutError(
                    f"{self.described}: it was not there, or not taken, within {group.timeout_seconds:g} s; {_REMEDY}"
                )
            )

    def _receive(self, message: bytes) -> None:
        found = _HEAD.unpack_from(message)
        expected = (self.number, self.source, self._wire.nbytes)
        if found != expected:
            text = f"broadcast, source and bytes are {expected} here and {found} on rank {found[1]}"
            self._group.fail(CoordinationError(f"{self.described}: {text}; members must start the same broadcasts"))
            return
        self._wire[:] = np.frombuffer(message, np.uint8, offset=_HEAD.size)
        self._group.post(self._taken(self._group.rank), b"")
        self.finish(None)

    def _taken(self, rank: int) -> str:
        return f"{self.name}.{rank}"


def _parts(wire: Wire, views: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """For each array its part of a wire, as elements of its type and shape."""
    found, at = [], 0
    for view in views:
        part = wire[at : at + view.nbytes].view(view.dtype.newbyteorder("<")).reshape(view.shape)
        found.append(part)
        at += view.nbytes
    if at != wire.nbytes:
        raise CoordinationError(f"{at} bytes of arrays do not fit a wire of {wire.nbytes} bytes")
    return found
