"""The floor: the same bytes by plain `pwritev` and `preadv`, one file and one thread a rank, no names, no plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from benchmarks.cases import Case
from benchmarks.contestant import Contestant, is_resharded
from benchmarks.places import sync

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.states import State

_Transfer = Callable[[int, list[memoryview], int], int]

_IOV_MAX = 1024
_CALL_NBYTES = 1 << 30  # the kernel moves at most 2 GiB a call
_BLOCK_NBYTES = 1 << 20
_LONG_RUN_NBYTES = 1 << 16  # from here on a call for each run is cheaper than reading what lies between


class Plain(Contestant):
    """`pwritev` from the tensors' memory, then fsync; `preadv` into the tensors' memory."""

    name = "plain"
    about = "pwritev + fsync, preadv into the targets: the floor"
    is_hashed: ClassVar[bool] = False

    def save(self, state: State, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        descriptor = os.open(_file(directory, self.rank.rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            at = 0
            for batch in self._batches(state):
                if self.is_hashed:
                    _hash(batch)
                at += _transfer(os.pwritev, descriptor, batch, at)
            if self.settings.durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if self.settings.durable:
            sync(directory)

    def load(self, state: State, directory: str) -> None:
        if state.cut != 0:
            _load_columns(state, directory)
            return
        descriptor = os.open(_file(directory, self.rank.rank), os.O_RDONLY)
        try:
            at = 0
            for batch in self._batches(state):
                at += _transfer(os.preadv, descriptor, batch, at)
                if self.is_hashed:
                    _hash(batch)
        finally:
            os.close(descriptor)

    def _batches(self, state: State) -> Iterator[list[memoryview]]:
        limit = _BLOCK_NBYTES if self.is_hashed else _CALL_NBYTES
        return _batches([_bytes_of(tensor) for tensor in state.locals.values()], limit)


class PlainHashed(Plain):
    """The same, and xxh3 of every block of 1 MiB while it is in cache: what checksums cost at least."""

    name = "plain-hashed"
    about = "plain, and xxh3 of each MiB right before or after the call"
    is_hashed = True

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return "hashes whole blocks only" if is_resharded(case) else None


def _file(directory: str, rank: int) -> str:
    return os.path.join(directory, f"rank{rank}.bin")


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    return tensor.view(-1).view(torch.uint8).numpy().data


def _batches(buffers: Sequence[memoryview], limit: int) -> Iterator[list[memoryview]]:
    """Cut buffers so that no batch has more than `limit` bytes or more buffers than one call takes."""
    batch: list[memoryview] = []
    nbytes = 0
    for buffer in buffers:
        while len(buffer):
            piece = buffer[: limit - nbytes]
            batch.append(piece)
            nbytes += len(piece)
            buffer = buffer[len(piece) :]
            if nbytes == limit or len(batch) == _IOV_MAX:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _transfer(call: _Transfer, descriptor: int, batch: list[memoryview], offset: int) -> int:
    """Move a whole batch, however many calls that takes; give the number of bytes."""
    total = 0
    while batch:
        moved = call(descriptor, batch, offset + total)
        if moved == 0:
            raise EOFError(f"the file ended {sum(map(len, batch))} bytes early")
        total += moved
        batch = _rest(batch, moved)
    return total


def _rest(batch: list[memoryview], moved: int) -> list[memoryview]:
    for position, buffer in enumerate(batch):
        if moved < len(buffer):
            return [buffer[moved:], *batch[position + 1 :]]
        moved -= len(buffer)
    return []


def _hash(batch: list[memoryview]) -> None:
    import xxhash

    for buffer in batch:
        xxhash.xxh3_64_intdigest(buffer)


def _load_columns(state: State, directory: str) -> None:
    """Read this rank's columns out of files that hold rows."""
    for source in range(state.rank.world_size):
        descriptor = os.open(_file(directory, source), os.O_RDONLY)
        try:
            at = 0
            for spec in state.specs:
                at += _read_columns(state, spec.name, descriptor, at, source)
        finally:
            os.close(descriptor)


def _read_columns(state: State, name: str, descriptor: int, at: int, source: int) -> int:
    """Read one tensor's runs from one file; give the number of bytes that the file has of it."""
    local = state.locals[name]
    ranks = state.rank.world_size
    rows, run = local.shape[0] // ranks, local.shape[1] * local.itemsize
    target = _bytes_of(local)[source * rows * run : (source + 1) * rows * run]
    first = at + state.rank.rank * run
    runs = [target[row * run : (row + 1) * run] for row in range(rows)]
    if run >= _LONG_RUN_NBYTES:
        for row, buffer in enumerate(runs):
            _transfer(os.preadv, descriptor, [buffer], first + row * run * ranks)
    else:
        _read_with_gaps(descriptor, runs, first, run * (ranks - 1))
    return rows * run * ranks


def _read_with_gaps(descriptor: int, runs: list[memoryview], first: int, gap_nbytes: int) -> None:
    """Read runs that lie close together with what is between them, which goes to one place and is forgotten."""
    gap = memoryview(bytearray(gap_nbytes))
    a_call = _IOV_MAX // 2
    for start in range(0, len(runs), a_call):
        buffers = [part for run in runs[start : start + a_call] for part in (run, gap)][:-1]
        _transfer(os.preadv, descriptor, buffers, first + start * (len(runs[0]) + gap_nbytes))
