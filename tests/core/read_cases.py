"""Data files of random chunks and targets of every kind for random regions of them, for tests of the read engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from random import Random
from threading import get_ident
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from dcp_core.arrays import ArrayAccess, convert
from dcp_core.box import Box, slices
from dcp_core.dtype import DTYPES, DType, conversion
from dcp_core.execution import data_files, read_engine, read_ranges, read_requests
from dcp_core.execution.data_files import TensorFiles
from dcp_core.execution.filesystem import file_columns
from dcp_core.execution.interfaces import FileRecord, ReadContext, ReadTarget, Verify, WriteResult
from dcp_core.execution.read_engine import read_tensors
from dcp_core.file_names import data_file_name
from dcp_core.formats import checksums
from dcp_core.formats.safetensors_file import HeaderEntry, build_header, fill_header
from dcp_core.metadata import MetadataIndex, SaveRecord
from dcp_core.planning.items import ItemType, ReadItem
from dcp_core.planning.leaves import TensorAccess
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.devices import DeviceArray, SimulatedDevice
from tests.core.engine_fakes import SAVE_ID, Array, DeviceAccess, Region, bits_of

Shape = tuple[int, ...]


@contextmanager
def constants(**values: int) -> Iterator[None]:
    """Set constants of the engine, and how many threads it may start."""
    homes: Mapping[str, Any] = {
        "BLOCK_BYTES": checksums,
        "TASK_BYTES": read_requests,
        "TASK_PIECES": read_requests,
        "GAP_BYTES": read_ranges,
        "GAP_SHARE": read_ranges,
        "LONG_BYTES": read_ranges,
        "BATCH_ROWS": read_engine,
        "BATCH_BYTES": read_engine,
        "TASKS_AHEAD": read_engine,
        "THREAD_BYTES": read_engine,
        "OPEN_FILES": data_files,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            if name == "threads":
                patch.setattr(read_engine, "usable_threads", lambda value=value: value)
            else:
                patch.setattr(homes[name], name, value)
        yield


def tiny(draw: Random) -> dict[str, int]:
    """Constants that make the engine cut, merge and wait with chunks of a few hundred bytes."""
    return {
        "BLOCK_BYTES": draw.choice([16, 64, 256]),
        "TASK_BYTES": draw.choice([16, 128, 512]),
        "TASK_PIECES": draw.choice([1, 3, 512]),
        "GAP_BYTES": draw.choice([1, 8, 64]),
        "LONG_BYTES": draw.choice([1, 24, 100]),
        "BATCH_ROWS": draw.choice([1, 2, 100]),
        "BATCH_BYTES": draw.choice([1, 200, 10_000]),
        "TASKS_AHEAD": draw.choice([1, 3, 16]),
        "THREAD_BYTES": 1,
        "OPEN_FILES": draw.choice([1, 2, 16]),
        "threads": draw.randint(0, 4),
    }


@dataclass
class Stored:
    """A chunk in a file."""

    key: str
    array: Array
    dtype: DType
    file: int
    byte_offset: int


@dataclass
class Files:
    """Data files of one checkpoint, written by hand."""

    directory: Path
    records: list[FileRecord]
    chunks: list[Stored]
    operations: FileOperations = field(default_factory=FileOperations)
    keys: Iterator[int] = field(default_factory=itertools.count)

    def path(self, file: int = 0) -> Path:
        return self.directory / data_file_name(self.records[file].rank, 0, 0, "")

    def region(self, chunk: int, box: Box, target_dtype: DType | None = None) -> Region:
        """A region of a chunk; its target is known by its number, in the order of the calls."""
        stored, number = self.chunks[chunk], next(self.keys)
        dest = MetadataIndex(f"wanted {stored.key}", None, number)
        item = ReadItem(ItemType.TENSOR, dest, box.offsets, MetadataIndex(stored.key), box.offsets, box.sizes)
        sizes = stored.array.shape
        return Region(item, stored.file, stored.byte_offset, sizes, stored.dtype, target_dtype or stored.dtype)

    def read(self, regions: Any, target: ReadTarget, verify: Verify = True, rank: int = 0) -> None:
        storage = LocalStorage(self.directory, self.operations)
        columns = file_columns([WriteResult(record.rank, (record,), 0.0, 0) for record in self.records])
        with TensorFiles(storage, columns, SaveRecord(SAVE_ID, ""), verify=verify is not False) as files:
            read_tensors(files, ReadContext(rank, 1, verify), regions, target)


def written(directory: Path, contents: Sequence[Sequence[tuple[Array, DType]]]) -> Files:
    """Write one file for each sequence of chunks; blocks are as long as `checksums.BLOCK_BYTES` says now."""
    files, block = Files(directory, [], []), checksums.BLOCK_BYTES
    for rank, content in enumerate(contents):
        position, entries, data, digests = 0, [], bytearray(), []
        for number, (array, dtype) in enumerate(content):
            key, raw = f"{rank}.{number}", array.tobytes()
            entries.append(HeaderEntry(key, dtype, array.shape, position, len(raw)))
            files.chunks.append(Stored(key, array, dtype, rank, position))
            digests += [xxh3_64_intdigest(raw[start : start + block]) for start in range(0, len(raw), block)]
            data += raw
            position += len(raw)
        layout = build_header(entries)
        header, digest = fill_header(layout, SAVE_ID, digests)
        record = FileRecord(
            rank, 0, 0, layout.nbytes, layout.data_start, layout.field_start, layout.field_nbytes, digest
        )
        files.records.append(record)
        files.path(rank).write_bytes(header + bytes(data))
    return files


def random_box(draw: Random, shape: Shape) -> Box:
    """Often the whole, sometimes some rows, else anything, now and then nothing."""
    kind = draw.random()
    sizes = [size if kind < 0.3 else draw.randint(min(size, kind < 0.95), size) for size in shape]
    if 0.3 <= kind < 0.5 and sizes:
        sizes[1:] = shape[1:]
    return Box(tuple(draw.randint(0, a - b) for a, b in zip(shape, sizes, strict=True)), tuple(sizes))


def random_files(draw: Random, directory: Path, most_numel: int = 300) -> Files:
    """A few files of a few chunks, of any types and shapes."""

    def chunk() -> tuple[Array, DType]:
        dtype, shape = draw.choice(DTYPES), tuple(draw.randint(1, 9) for _ in range(draw.randint(0, 4)))
        while prod(shape) > most_numel:
            shape = shape[1:]
        return bits_of(shape, dtype, draw.randrange(1 << 30)), dtype

    return written(directory, [[chunk() for _ in range(draw.randint(1, 6))] for _ in range(draw.randint(1, 4))])


# --- targets -----------------------------------------------------------------------------------------


@dataclass
class Goal:
    """A region, its target, and what must be there afterwards.

    Attributes:
        memory: The host memory that the target is a part of.
        outcome: What must be in it; for a target on a device, in the array.
    """

    region: Region
    view: Any
    access: TensorAccess
    memory: Array | None
    outcome: Array

    def check(self) -> None:
        if isinstance(self.view, DeviceArray):
            assert self.view.device.get(self.view).tobytes() == self.outcome.tobytes(), self.region
        else:
            assert self.memory is not None
            assert self.memory.tobytes() == self.outcome.tobytes(), self.region


def _strides(draw: Random, sizes: Shape, itemsize: int) -> tuple[Shape, int, int]:
    """Strides in which elements share no memory, where the first one lies, and how much memory it takes."""
    order = list(range(len(sizes)))
    if draw.random() < 0.4:
        draw.shuffle(order)
    strides, reach, first = [0] * len(sizes), itemsize, 0
    is_plain = draw.random() < 0.4
    for dim in reversed(order):
        step = 1 if is_plain else draw.choice([1, 1, 1, 2])
        strides[dim] = reach * step
        if not is_plain and draw.random() < 0.2:
            first += strides[dim] * (sizes[dim] - 1)
            strides[dim] = -strides[dim]
        reach = reach * step * sizes[dim] + (0 if is_plain else itemsize * draw.choice([0, 0, 1, 3]))
    lead = draw.choice([0, itemsize, 3 * itemsize])
    return tuple(strides), lead + first, lead + reach + 5


def _on_host(draw: Random, sizes: Shape, bits: Array) -> tuple[Array, Array, Array]:
    """A target of any strides, the memory around it, and what that must become."""
    strides, first, nbytes = (
        _strides(draw, sizes, bits.itemsize) if bits.size else ((bits.itemsize,) * len(sizes), 0, 16)
    )
    memory = np.full(nbytes, 0xA5, np.uint8)
    outcome = memory.copy()
    np.ndarray(sizes, bits.dtype, outcome, first, strides)[...] = bits
    return np.ndarray(sizes, bits.dtype, memory, first, strides), memory, outcome


def make_goal(draw: Random, files: Files, chunk: int, box: Box, device: SimulatedDevice | None = None) -> Goal:
    """A target of a random kind for a region: of any strides, of another type, out of the host's reach."""
    stored = files.chunks[chunk]
    place: Any = (*slices(box), ...)
    bits: Array = np.array(stored.array[place], order="C")
    dtype = stored.dtype
    if draw.random() < 0.25:
        others = [other for other in DTYPES if conversion(dtype, other) in ("lossless", "lossy")]
        dtype = draw.choice(others or [dtype])
    bits = convert(bits, stored.dtype, dtype)
    region = files.region(chunk, box, dtype)
    kind = draw.random()
    if kind < 0.2 and device is not None:
        return Goal(region, device.put(np.zeros(box.sizes, dtype.bits), dtype.name), device, None, bits)
    view, memory, outcome = _on_host(draw, box.sizes, bits)
    is_out_of_reach = kind < 0.3 and dtype == stored.dtype
    return Goal(region, view, DeviceAccess(dtype) if is_out_of_reach else ArrayAccess(dtype), memory, outcome)


@dataclass
class Targets:
    """A planner of goals; checks how it is called.

    Attributes:
        acquired: Numbers of the regions that were asked for.
        applied: Numbers of the regions that are in.
    """

    goals: Mapping[int, Goal]
    acquired: list[int] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)
    thread: int = field(default_factory=get_ident)

    @classmethod
    def of(cls, goals: Sequence[Goal]) -> Targets:
        return cls({goal.region.item.dest_index.index or 0: goal for goal in goals})

    def acquire_tensor(self, item: ReadItem) -> Any:
        assert get_ident() == self.thread
        self.acquired.append(item.dest_index.index or 0)
        return self.goals[self.acquired[-1]].view

    def access(self, item: ReadItem) -> TensorAccess:
        return self.goals[item.dest_index.index or 0].access

    def apply_tensor(self, item: ReadItem, view: Any) -> None:
        assert get_ident() == self.thread
        number = item.dest_index.index or 0
        assert view is self.goals[number].view
        self.goals[number].check()
        self.applied.append(number)
