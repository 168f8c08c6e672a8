"""What tests of loads that share reads have in common: layouts, their states, and readers that count or fail.

A layout says for one rank which boxes of which tensors it holds. Every element follows from the tensor's name, so each
process knows what is right.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dcp_torch
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_torch.broadcasts import TorchBroadcasts
from tests.torch.states import bits_of, poison

SECONDS = 30.0

Bounds = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows or columns of a tensor.

    Attributes:
        shape: Of the whole tensor.
        dtype: Element type, as saved.
        dim: Which dimension is cut.
        bounds: What is held of it; None: all.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    dim: int = 0
    bounds: Bounds | None = None

    @classmethod
    def even(cls, shape: tuple[int, ...], parts: int, part: int, dim: int = 0) -> Part:
        """One of several parts of about equal size."""
        extent = shape[dim]
        return cls(shape, dim=dim, bounds=(extent * part // parts, extent * (part + 1) // parts))

    def true_elements(self, name: str) -> Tensor:
        """What is right, in memory of its own."""
        whole = _whole(name, self.shape, self.dtype)
        if self.bounds is None:
            return whole.clone()
        first, last = self.bounds
        return whole.narrow(self.dim, first, last - first).clone()

    @property
    def nbytes(self) -> int:
        """Bytes of what is held."""
        extent = self.shape[self.dim] if self.shape else 1
        held = extent if self.bounds is None else self.bounds[1] - self.bounds[0]
        return math.prod(self.shape) // max(extent, 1) * held * self.dtype.itemsize

    def target(self, name: str) -> Tensor:
        """The right elements, with a note of where they lie."""
        tensor = self.true_elements(name)
        if self.bounds is not None:
            offsets = [0] * len(self.shape)
            offsets[self.dim] = self.bounds[0]
            dcp_torch.annotate_shard(tensor, offsets=tuple(offsets), global_shape=self.shape)
        return tensor


@functools.lru_cache(maxsize=100)
def _whole(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    raw = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw & 1 if dtype is torch.bool else raw).view(dtype).reshape(shape)


Layout = Mapping[str, Part]


def filled(layout: Layout) -> dict[str, Any]:
    """A state with the right elements."""
    return {name: part.target(name) for name, part in layout.items()}


def poisoned(layout: Layout) -> dict[str, Any]:
    """A state in which no element is right."""
    state = filled(layout)
    poison(state)
    return state


def wrong_in(state: Mapping[str, Any], layout: Layout) -> list[str]:
    """The names whose elements are not right."""
    return [name for name, part in layout.items() if bits_of(state[name]) != bits_of(part.true_elements(name))]


def save_whole(directory: Path | str, *layouts: Layout) -> None:
    """Save every tensor of some layouts whole, from this process alone."""
    parts = {name: part for layout in layouts for name, part in layout.items()}
    state = {name: _whole(name, part.shape, part.dtype) for name, part in parts.items()}
    dcp_torch.save(state, checkpoint_id=directory, durable=False)


def load(state: Mapping[str, Any], directory: Path | str | None, **options: Any) -> None:
    """Load on all ranks."""
    dcp_torch.load(state, checkpoint_id=directory, **{"timeout_seconds": SECONDS, **options})


# -- what a load did --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """A group that a load opened on this rank.

    Attributes:
        ranks: Its members.
        how: "given", "existing" or "made".
    """

    ranks: tuple[int, ...]
    how: str


@dataclass(slots=True)
class Seen:
    """What one rank's loads did.

    Attributes:
        opened: The groups, in the order in which they were opened.
        closed: The ranks of those that were closed, in that order.
        in_flight: How many broadcasts have been started and not been waited for.
        most_in_flight: How many broadcasts were under way at most.
        sent: Bytes that this rank sent.
        sizes: Bytes of each broadcast that this rank took part in.
    """

    opened: list[Opened] = field(default_factory=list)
    closed: list[tuple[int, ...]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    sent: int = 0
    sizes: list[int] = field(default_factory=list)


class _WatchedGroup:
    """Stands before a group and notes what it carries."""

    def __init__(self, group: Any, seen: Seen, rank: int) -> None:
        self._group = group
        self._seen = seen
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def broadcast(self, wire: Tensor, source: int) -> _WatchedWork:
        seen = self._seen
        seen.in_flight += 1
        seen.most_in_flight = max(seen.most_in_flight, seen.in_flight)
        seen.sizes.append(wire.numel())
        seen.sent += wire.numel() if source == self._rank else 0
        return _WatchedWork(self._group.broadcast(wire, source), seen)

    def close(self) -> None:
        self._seen.closed.append(self._group.ranks)
        self._group.close()


class _WatchedWork:
    """Stands before a broadcast that was started."""

    def __init__(self, work: Any, seen: Seen) -> None:
        self.is_done = work.is_done
        self._work = work
        self._seen = seen

    def wait(self) -> None:
        self._seen.in_flight -= 1
        self._work.wait()


@contextmanager
def watched() -> Iterator[Seen]:
    """See which groups are opened and what they carry, and that they are closed in the same order."""
    seen = Seen()
    open_group = TorchBroadcasts.open

    def open_watched(self: TorchBroadcasts, ranks: tuple[int, ...], given: Any, *args: Any, **kwargs: Any) -> Any:
        how = "made" if given is None else "existing" if isinstance(given, str) else "given"
        seen.opened.append(Opened(ranks, how))
        return _WatchedGroup(open_group(self, ranks, given, *args, **kwargs), seen, self.rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBroadcasts, "open", open_watched)
        yield seen
    assert seen.in_flight == 0, "every broadcast that is started is waited for"
    assert seen.closed == [group.ranks for group in seen.opened]


def footprint() -> tuple[int, int, int]:
    """Process groups, threads and descriptors of this process; `gc.freeze` before makes it fast."""
    gc.collect()
    groups = len(dist.distributed_c10d._world.pg_map)
    return groups, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


# -- readers ----------------------------------------------------------------------------------------------------------


class CountedOperations(FileOperations):
    """Counts what is read of the data of tensor files, without their headers.

    Attributes:
        ranges: What was read: file, first byte, one past the last byte.
    """

    def __init__(self) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        self._opened: dict[int, tuple[str, int]] = {}
        self._lock = threading.Lock()

    def open_read(self, path: str) -> int:
        """Open a file, and remember which and where its data starts."""
        descriptor = super().open_read(path)
        data_start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little") if path.endswith(".safetensors") else -1
        with self._lock:
            self._opened[descriptor] = os.path.basename(path), data_start
        return descriptor

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        """Read and count."""
        count = super().preadv(descriptor, buffers, offset)
        with self._lock:
            name, data_start = self._opened[descriptor]
            if data_start >= 0 and offset + count > data_start:
                self.ranges.append((name, max(offset, data_start), offset + count))
        return count

    @property
    def nbytes(self) -> int:
        """Bytes that were read."""
        return sum(last - first for _, first, last in self.ranges)


def reader_on(directory: Path | str, operations: FileOperations) -> FileSystemReader:
    """A reader that works through some operations."""
    return FileSystemReader(storage=LocalStorage(directory, operations))


def data_nbytes(layouts: Sequence[Layout]) -> int:
    """Bytes of the different boxes of some ranks."""
    return sum({(name, part.bounds): part.nbytes for layout in layouts for name, part in layout.items()}.values())
