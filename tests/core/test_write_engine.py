"""The write engine: whatever a rank's tensors are and however many threads write them, its files are the same bytes.

After an error or an interrupt no file, thread or descriptor is left, and the first error is the one that is raised.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from dcp_core.dtype import DTYPES, DType, dtype_named
from dcp_core.errors import DTypeMismatchError, PlanningError, StorageError, UnsupportedValueError
from dcp_core.execution import staging, write_runs, write_stream, write_threads
from dcp_core.execution.interfaces import FileRecord, WriteContext
from dcp_core.execution.write_engine import write_files
from dcp_core.file_names import TENSOR_FILE, data_file_name
from dcp_core.formats.safetensors_file import HeaderEntry, build_header, fill_header
from dcp_core.metadata import MetadataIndex
from dcp_core.planning.items import ItemType, WriteItem
from dcp_core.planning.leaves import DeviceBits
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import BytesLike, FileOperations
from dcp_core.testing.devices import DeviceArray, SimulatedDevice
from dcp_core.testing.faults import FaultyOperations, OperationRecord
from dcp_core.testing.streams import Pace
from tests.core.engine_fakes import SAVE_ID, Array, ArraySource, Span, bits_of

MEBIBYTE = 1 << 20
BLOCK = 1 << 20
UINT8, FLOAT32 = dtype_named("uint8"), dtype_named("float32")

Values = Mapping[str, tuple[Array, DType]]


def spans_of(values: Values, parts: int = 1) -> list[Span]:
    """Chunks in the order of the values, cut into parts by number."""
    spans: list[Span] = []
    for row, (key, (array, dtype)) in enumerate(values.items()):
        part = row * parts // len(values)
        byte_offset = spans[-1].byte_offset + spans[-1].nbytes if spans and spans[-1].part == part else 0
        nbytes = array.size * dtype.itemsize
        item = WriteItem(MetadataIndex(key), ItemType.TENSOR, array.shape, nbytes, row)
        spans.append(Span(item, key, dtype, byte_offset, nbytes, part))
    return spans


def expected_files(values: Values, parts: int) -> dict[str, bytes]:
    """The whole content of every file, made in the plainest way."""
    files = {}
    spans = spans_of(values, parts)
    for part in sorted({span.part for span in spans}):
        mine = [span for span in spans if span.part == part]
        raw = [np.ascontiguousarray(values[span.key][0]).tobytes() for span in mine]
        blocks = [xxh3_64_intdigest(chunk[at : at + BLOCK]) for chunk in raw for at in range(0, len(chunk), BLOCK)]
        entries = [HeaderEntry(s.key, s.dtype, s.item.sizes, s.byte_offset, s.nbytes) for s in mine]
        header, _ = fill_header(build_header(entries), SAVE_ID, blocks)
        files[data_file_name(0, part, TENSOR_FILE, "")] = header + b"".join(raw)
    return files


def write(
    directory: Path,
    values: Values,
    parts: int = 1,
    source: Any = None,
    operations: FileOperations | None = None,
    *,
    objects: Mapping[str, bytes] | None = None,
    durable: bool = False,
) -> tuple[FileRecord, ...]:
    objects = objects or {}
    items = [WriteItem(MetadataIndex(key), ItemType.BYTES, (), 0, 0) for key in objects]
    source = source or ArraySource({**{key: array for key, (array, _) in values.items()}, **objects})
    context = WriteContext(0, 1, True, SAVE_ID, "", durable=durable)
    return write_files(LocalStorage(directory, operations), context, spans_of(values, parts), items, source)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def writers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dcp-write")]


@pytest.fixture(params=["on the calling thread", "with threads"])
def crew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of sharing the work, whatever the machine and however little there is to write."""
    monkeypatch.setattr(write_threads, "threads_pay", lambda files: request.param == "with threads")
    return str(request.param)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_threads, "threads_pay", lambda files: True)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a writing thread or an open file behind."""
    gc.collect()  # files of tests before
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert writers() == []
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


# --- every byte --------------------------------------------------------------------------------------


def small_values(count: int) -> dict[str, tuple[Array, DType]]:
    """Chunks of all dtypes, from one element to a few KiB."""
    values = {}
    for number in range(count):
        dtype = DTYPES[number % len(DTYPES)]
        shape = [(), (number % 7 + 1,), (3, number % 50 + 1), (2, 1, number % 300 + 1)][number % 4]
        values[f"small.{number}"] = (bits_of(shape, dtype, number), dtype)
    return values


def odd_values() -> dict[str, tuple[Array, DType]]:
    """Chunks around every border of blocks, calls and runs, and in memory of all kinds."""
    values: dict[str, tuple[Array, DType]] = {}
    borders = (BLOCK, write_stream.CALL_BYTES, write_runs.RUN_BYTES)
    for nbytes in sorted({border + more for border in borders for more in (-1, 0, 1)}):
        values[f"of {nbytes} bytes"] = (bits_of((nbytes,), UINT8, nbytes), UINT8)
    grid = bits_of((700, 900), FLOAT32, 1)
    cube = bits_of((30, 40, 50), dtype_named("complex128"), 2)
    read_only = bits_of((5, 5), FLOAT32, 3)
    read_only.setflags(write=False)
    views = {
        "transposed": grid.T, "steps": grid[::3, 1::2], "backwards": grid[::-1, ::-2], "column": grid[:, 5],
        "expanded": np.broadcast_to(grid[7], (600, 900)), "fortran": np.asfortranarray(grid), "read-only": read_only,
    }  # fmt: skip
    values |= {key: (view, FLOAT32) for key, view in views.items()}
    values["cube"] = (cube, dtype_named("complex128"))
    values["turned cube"] = (cube.transpose(2, 0, 1), dtype_named("complex128"))
    values["small and turned"] = (cube[:3, :2, 0].T, dtype_named("complex128"))
    values["nothing"] = (np.zeros((0, 3), np.float32), FLOAT32)
    values["odd address"] = (bits_of((801,), UINT8, 4)[1:].view("<f4"), FLOAT32)
    return values


@lru_cache(maxsize=1)
def mixed_values() -> dict[str, tuple[Array, DType]]:
    """Small and odd chunks by turns."""
    small, odd = list(small_values(600).items()), list(odd_values().items())
    mixed = []
    for number, pair in enumerate(odd):
        mixed += [*small[number * 20 : number * 20 + number % 20], pair]
    return dict([*mixed, *small[len(odd) * 20 :]])


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_files_are_the_bytes_that_the_plainest_way_makes(crew: str, parts: int, tmp_path: Path) -> None:
    values = mixed_values()
    records = write(tmp_path, values, parts)
    expected = expected_files(values, parts)
    assert content(tmp_path) == expected
    assert [record.part for record in records] == list(range(parts))
    assert [record.nbytes for record in records] == [len(file) for file in expected.values()]


def test_short_writes_are_continued_wherever_they_end(crew: str, tmp_path: Path) -> None:
    values = small_values(12)
    values["turned"] = (bits_of((9, 7), FLOAT32).T, FLOAT32)
    expected = expected_files(values, 1)
    for room in range(1, 120):
        directory = tmp_path / str(room)
        directory.mkdir()
        write(directory, values, operations=FaultyOperations(max_io_bytes=room))
        assert content(directory) == expected, room


def test_more_chunks_than_one_call_takes_are_written(crew: str, tmp_path: Path) -> None:
    values: Values = {f"k{number}": (bits_of((number % 5 + 1,), UINT8, number), UINT8) for number in range(3000)}
    write(tmp_path, values)
    assert content(tmp_path) == expected_files(values, 1)


def test_objects_and_tensors_are_written_by_one_call(crew: str, tmp_path: Path) -> None:
    records = write(tmp_path, small_values(3), objects={"a": b"first", "b": b"", "c": b"third"})
    assert [(record.kind, record.part) for record in records] == [(0, 0), (1, 0)]
    assert (tmp_path / "_rank0_.bytes").read_bytes().endswith(b"firstthird")


def test_a_rank_with_nothing_to_write_makes_no_file(tmp_path: Path) -> None:
    assert write(tmp_path, {}) == ()
    assert content(tmp_path) == {}


# --- the order of things -----------------------------------------------------------------------------


class CopyingSource:
    """Makes a copy of each array, and knows how many bytes of copies there are."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.nbytes = self.peak_nbytes = 0
        self.asked: list[tuple[str, int]] = []
        self._lock = threading.RLock()

    def get_data(self, item: WriteItem) -> Array:
        copy = np.array(self.values[item.index.fqn][0], order="K")
        self.asked.append((item.index.fqn, threading.get_ident()))
        with self._lock:
            self.nbytes += copy.nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        weakref.finalize(copy, self._forget, copy.nbytes)
        return copy

    def _forget(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes -= nbytes


def test_the_planner_is_asked_on_the_calling_thread_in_the_order_of_each_file(crew: str, tmp_path: Path) -> None:
    values = mixed_values()
    source = CopyingSource(values)
    write(tmp_path, values, 3, source)
    assert {thread for _, thread in source.asked} == {threading.get_ident()}
    for part in range(3):
        keys = [span.key for span in spans_of(values, 3) if span.part == part]
        assert [key for key, _ in source.asked if key in keys] == keys


def test_what_happens_to_a_file_happens_in_order(crew: str, tmp_path: Path) -> None:
    operations = FaultyOperations()
    write(tmp_path, odd_values(), 3, operations=operations, durable=True)
    for name in content(tmp_path):
        kinds = [record.operation for record in operations.log if record.name == name]
        writes = kinds.count("pwritev")
        assert kinds == ["create", "preallocate", *["pwritev"] * writes, "fsync", "close_written"]
    created = [record.number for record in operations.log if record.operation == "preallocate"]
    assert max(created) < min(record.number for record in operations.log if record.operation == "pwritev")


class Placed(FileOperations):
    """Notes where bytes went, and where the disk was told to begin."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, int]] = []
        self.begun: list[tuple[int, int]] = []

    def pwritev(self, descriptor: int, buffers: Sequence[BytesLike], offset: int, path: str) -> int:
        self.writes.append((offset, offset + sum(memoryview(buffer).nbytes for buffer in buffers)))
        return super().pwritev(descriptor, buffers, offset, path)

    def write_back(self, descriptor: int, offset: int, nbytes: int) -> None:
        self.begun.append((offset, offset + nbytes))
        super().write_back(descriptor, offset, nbytes)


@pytest.mark.parametrize("durable", [True, False])
def test_the_disk_begins_with_what_was_written_while_the_rest_is_being_written(
    durable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = 3 * MEBIBYTE
    monkeypatch.setattr(write_stream, "WRITE_BACK_BYTES", step)
    operations = Placed()
    values: Values = {f"k{number}": (bits_of((MEBIBYTE,), UINT8, number), UINT8) for number in range(20)}
    write(tmp_path, values, operations=operations, durable=durable)
    assert len(operations.begun) == (20 * MEBIBYTE // (4 * MEBIBYTE) if durable else 0)  # whole calls of 2 MiB
    start = operations.writes[0][0]
    for begun in operations.begun:
        assert begun[0] == start and begun[1] - begun[0] >= step
        start = begun[1]
    assert all(before[1] == after[0] for before, after in zip(operations.writes, operations.writes[1:-1], strict=False))
    assert operations.writes[-1][0] == 0  # the header comes last


def test_small_chunks_share_calls(crew: str, tmp_path: Path) -> None:
    operations = Placed()
    values: Values = {f"k{number}": (bits_of((64 << 10,), UINT8, number), UINT8) for number in range(400)}
    write(tmp_path, values, operations=operations)
    assert len(operations.writes) <= 400 * (64 << 10) / write_stream.CALL_BYTES + 8


# --- memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 4])
def test_copies_that_a_planner_makes_do_not_pile_up(crew: str, parts: int, tmp_path: Path) -> None:
    base = bits_of((MEBIBYTE // 2,), UINT8)
    values: Values = {f"k{number}": (base, UINT8) for number in range(400)}
    source = CopyingSource(values)
    write(tmp_path, values, parts, source)
    assert len(source.asked) == 400
    assert source.peak_nbytes <= 64 * MEBIBYTE


@pytest.mark.parametrize("parts", [1, 2])
def test_of_large_copies_there_is_one_for_each_file(crew: str, parts: int, tmp_path: Path) -> None:
    large = bits_of((20 * MEBIBYTE,), UINT8)
    values: Values = {f"k{number}": (large, UINT8) for number in range(6)}
    source = CopyingSource(values)
    write(tmp_path, values, parts, source)
    assert source.peak_nbytes <= parts * large.nbytes


# --- devices -----------------------------------------------------------------------------------------


class DeviceSource:
    """Keeps some of its values on a device."""

    def __init__(self, values: Values, device: SimulatedDevice, is_there: Callable[[str], bool]) -> None:
        self.host = {key: array for key, (array, _) in values.items() if not is_there(key)}
        self.there = {key: device.put(array, dtype.name) for key, (array, dtype) in values.items() if is_there(key)}
        self.device = device

    def get_data(self, item: WriteItem) -> Any:
        key = item.index.fqn
        if key in self.host:
            return self.host[key]
        array: DeviceArray = self.there[key]
        return DeviceBits(array, self.device, array.shape, array.dtype.bits)


class Followed(SimulatedDevice):
    """Notes who asks for transfers: copies wait for what that thread has queued on the device."""

    threads: frozenset[int] = frozenset()

    def transfers(self, view: DeviceArray) -> SimulatedDevice | None:
        self.threads |= {threading.get_ident()}
        return super().transfers(view)


PLACES: dict[str, Callable[[str], bool]] = {
    "all": lambda key: key != "nothing",
    "half": lambda key: len(key) % 2 == 0,
    "a few": lambda key: key in ("cube", "transposed", "small.7", "small.300"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pace", ["late", "at once", "thread"])
def test_what_lies_on_a_device_is_written_with_the_rest(crew: str, place: str, pace: Pace, tmp_path: Path) -> None:
    values = mixed_values()
    limit = 2 * staging.DEVICE_BUFFERS * staging.DEVICE_BUFFER_BYTES
    device = Followed(pace=pace, host_limit_nbytes=limit)
    with device:
        write(tmp_path, values, 2, DeviceSource(values, device, PLACES[place]))
        assert device.blocking_nbytes == 0
        assert device.threads == {threading.get_ident()}
    assert content(tmp_path) == expected_files(values, 2)


def test_blocks_are_on_their_way_while_the_ones_before_are_hashed_and_written(tmp_path: Path) -> None:
    """Nothing is copied before somebody allows it: by then all buffers but none of the bytes are under way."""
    size = staging.DEVICE_BUFFER_BYTES
    values: Values = {"a": (bits_of((6 * size,), UINT8), UINT8)}
    with SimulatedDevice(pace="steps") as device:
        source = DeviceSource(values, device, lambda key: True)
        thread = threading.Thread(target=write, args=(tmp_path, values, 1, source))
        thread.start()
        device.stream.wait_queued(staging.DEVICE_BUFFERS)
        assert device.copies_out == staging.DEVICE_BUFFERS
        device.stream.step(6)
        thread.join()
        assert device.most_in_flight == staging.DEVICE_BUFFERS
    assert content(tmp_path) == expected_files(values, 1)


def test_a_device_with_blocking_copies_only_is_read_in_parts(crew: str, tmp_path: Path) -> None:
    values = mixed_values()
    total = sum(array.nbytes for array, _ in values.values())
    largest: list[int] = []

    class Watched(SimulatedDevice):
        def read_out(self, view: DeviceArray) -> Array:
            largest.append(view.nbytes)
            return super().read_out(view)

    with Watched(has_streams=False) as device:
        write(tmp_path, values, 2, DeviceSource(values, device, PLACES["all"]))
        assert device.blocking_nbytes == total
    assert content(tmp_path) == expected_files(values, 2)
    assert max(largest) <= staging.HOST_BUFFER_BYTES


def test_tensors_of_two_devices_are_written(crew: str, tmp_path: Path) -> None:
    values = mixed_values()
    with SimulatedDevice("simulated:0") as first, SimulatedDevice("simulated:1") as second:
        sources = [DeviceSource(values, device, lambda key: key != "nothing") for device in (first, second)]

        class Both:
            def get_data(self, item: WriteItem) -> Any:
                return sources[item.leaf % 3 == 0].get_data(item)

        write(tmp_path, values, 2, Both())
    assert content(tmp_path) == expected_files(values, 2)


@pytest.mark.parametrize("copy", [0, 1, 5, 17])
def test_a_copy_that_fails_is_the_error_and_no_other_copy_is_left_alone(crew: str, copy: int, tmp_path: Path) -> None:
    values = mixed_values()
    with SimulatedDevice(pace="late", faults={copy: RuntimeError("the device is gone")}) as device:
        with pytest.raises(RuntimeError, match="the device is gone"):
            write(tmp_path, values, 2, DeviceSource(values, device, PLACES["all"]))
        device.check()
    assert content(tmp_path) == {}


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3])
def test_whatever_operation_fails_all_files_are_gone(crew: str, parts: int, tmp_path: Path) -> None:
    values, objects = small_values(30), {"a": b"object"}
    counted = FaultyOperations()
    write(tmp_path, values, parts, operations=counted, objects=objects, durable=True)
    for name in content(tmp_path):
        (tmp_path / name).unlink()
    assert len(counted.log) == 6 * parts + 5
    for number in range(1, len(counted.log) + 1):
        operations = FaultyOperations(fail_at=number, error_number=errno.EIO)
        with pytest.raises(StorageError, match="EIO") as caught:
            write(tmp_path, values, parts, operations=operations, objects=objects, durable=True)
        assert caught.value.errno == errno.EIO
        assert content(tmp_path) == {}, number
        assert writers() == []


class Elsewhere:
    """An array source whose answer for one key is something else."""

    def __init__(self, values: Values, key: str, answer: Callable[[], Any]) -> None:
        self.values = values
        self.key = key
        self.answer = answer

    def get_data(self, item: WriteItem) -> Any:
        return self.answer() if item.index.fqn == self.key else self.values[item.index.fqn][0]


def raising(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (partial(raising, RuntimeError("out of luck")), RuntimeError),
        (partial(raising, KeyboardInterrupt()), KeyboardInterrupt),
        (partial(raising, MemoryError()), MemoryError),
        (lambda: b"bytes", UnsupportedValueError),
        (lambda: np.zeros(3, np.complex64), DTypeMismatchError),
    ],
    ids=["an error", "an interrupt", "no memory", "bytes", "another dtype"],
)
@pytest.mark.parametrize("key", ["small.0", "small.150", "small.299"])
def test_a_planner_that_fails_leaves_no_file(
    crew: str, key: str, answer: Callable[[], Any], error: type[BaseException], tmp_path: Path
) -> None:
    values = small_values(300)
    with pytest.raises(error):
        write(tmp_path, values, 3, Elsewhere(values, key, answer))
    assert content(tmp_path) == {}


def test_a_planner_that_gives_too_few_arrays_at_once_is_refused(tmp_path: Path) -> None:
    values = small_values(5)

    class Short(ArraySource):
        def get_batch(self, spans: Sequence[Span]) -> list[Any]:
            return [self.get_data(span.item) for span in spans[1:]]

    with pytest.raises(PlanningError, match="on rank 0 gives 4 arrays for 5 regions"):
        write(tmp_path, values, 1, Short({key: array for key, (array, _) in values.items()}))
    assert content(tmp_path) == {}


def test_parts_that_are_not_in_order_are_refused(tmp_path: Path) -> None:
    spans = spans_of(small_values(4), 2)
    mixed = [spans[0], spans[2], replace(spans[1], byte_offset=0), spans[3]]
    context = WriteContext(0, 1, True, SAVE_ID, "")
    with pytest.raises(PlanningError, match="part after part|laid out"):
        write_files(LocalStorage(tmp_path), context, mixed, [], ArraySource({}))
    assert content(tmp_path) == {}


def test_files_that_do_not_fit_together_are_refused_before_one_is_made(tmp_path: Path) -> None:
    class AlmostFull(FaultyOperations):
        def free_bytes(self, path: str) -> int:
            return 3_500_000

    values: Values = {f"k{number}": (bits_of((MEBIBYTE,), UINT8), UINT8) for number in range(4)}
    operations = AlmostFull()
    with pytest.raises(
        StorageError, match=r"reserve \d+ bytes in .*\d+ bytes needed, 3500000 available.*free"
    ) as caught:
        write(tmp_path, values, 4, operations=operations)
    assert caught.value.errno == errno.ENOSPC
    assert operations.log == []


def test_copies_of_a_write_that_failed_are_freed_even_if_the_error_is_kept(threads: None, tmp_path: Path) -> None:
    """It fails when the queue is full; what was being written may stay with the error's frames."""
    values: Values = {f"k{number}": (bits_of((MEBIBYTE,), UINT8), UINT8) for number in range(40)}
    is_full = threading.Event()
    prepared = (write_runs.RUN_BYTES + write_threads.QUEUE_BYTES) // MEBIBYTE

    class Counting(CopyingSource):
        def get_data(self, item: WriteItem) -> Array:
            copy = super().get_data(item)
            if len(self.asked) == prepared:
                is_full.set()
            return copy

    def refuse_then() -> None:
        assert is_full.wait(60)
        refuse(errno.EIO)

    source = Counting(values)
    with pytest.raises(StorageError, match="EIO") as caught:
        write(tmp_path, values, 1, source, Scripted({0: refuse_then}))
    assert caught.value.__traceback__ is not None
    assert len(source.asked) <= prepared + write_runs.RUN_BYTES // MEBIBYTE
    assert source.nbytes <= write_runs.RUN_BYTES


# --- several threads at once -------------------------------------------------------------------------


@dataclass
class Meeting:
    """Lets two threads do things in a certain order.

    Attributes:
        failed: Set once an error is known to all threads.
    """

    failed: threading.Event

    def wait(self) -> None:
        assert self.failed.wait(60), "the first error did not become known"


@pytest.fixture
def meeting(threads: None, monkeypatch: pytest.MonkeyPatch) -> Meeting:
    meeting = Meeting(threading.Event())
    inner = write_threads.FirstFailure.note

    def note(failure: write_threads.FirstFailure, error: BaseException) -> None:
        inner(failure, error)
        meeting.failed.set()

    monkeypatch.setattr(write_threads.FirstFailure, "note", note)
    return meeting


class Scripted(FileOperations):
    """Does something of its own before it writes to a part."""

    def __init__(self, scripts: Mapping[int, Callable[[], object]]) -> None:
        self.scripts = {data_file_name(0, part, TENSOR_FILE, ""): script for part, script in scripts.items()}
        self.written: list[str] = []

    def pwritev(self, descriptor: int, buffers: Sequence[BytesLike], offset: int, path: str) -> int:
        name = os.path.basename(path)
        self.scripts.get(name, lambda: None)()
        self.written.append(name)
        return super().pwritev(descriptor, buffers, offset, path)


def refuse(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_the_first_error_is_the_one_that_is_raised(meeting: Meeting, tmp_path: Path) -> None:
    def refuse_later() -> None:
        meeting.wait()
        refuse(errno.EIO)

    operations = Scripted({0: refuse_later, 1: partial(refuse, errno.EDQUOT), 2: refuse_later})
    with pytest.raises(StorageError, match="EDQUOT") as caught:
        write(tmp_path, small_values(30), 3, operations=operations)
    assert "_rank0_1_.safetensors" in str(caught.value)
    assert content(tmp_path) == {}


def test_an_error_in_one_thread_soon_stops_the_others(meeting: Meeting, tmp_path: Path) -> None:
    values: Values = {f"k{number}": (bits_of((40 * MEBIBYTE,), UINT8), UINT8) for number in range(2)}
    is_writing = threading.Event()

    def write_on() -> None:
        is_writing.set()
        meeting.wait()

    def refuse_meanwhile() -> None:
        assert is_writing.wait(60)
        refuse(errno.EIO)

    operations = Scripted({0: write_on, 1: refuse_meanwhile})
    with pytest.raises(StorageError, match="EIO"):
        write(tmp_path, values, 2, operations=operations)
    assert operations.written == ["_rank0_.safetensors"]  # the call that was under way, and none after it


def test_an_error_while_the_planner_is_asked_ends_the_asking(meeting: Meeting, tmp_path: Path) -> None:
    values: Values = {f"k{number}": (bits_of((MEBIBYTE,), UINT8), UINT8) for number in range(100)}
    asked = []

    class Patient(ArraySource):
        def get_data(self, item: WriteItem) -> Any:
            asked.append(item.index.fqn)
            if len(asked) == 10:
                meeting.wait()
            return super().get_data(item)

    source = Patient({key: array for key, (array, _) in values.items()})
    with pytest.raises(StorageError, match="EIO"):
        write(tmp_path, values, 1, source, Scripted({0: partial(refuse, errno.EIO)}))
    assert len(asked) <= 10 + write_runs.RUN_BYTES // MEBIBYTE


class Interrupts:
    """Interrupts the calling thread from another one, each time that it waits, and goes on when it waits again."""

    def __init__(self, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = 0
        self._times = times
        self._is_waiting = False
        interrupts = self

        class Announced(threading.Condition):
            def wait(self, timeout: float | None = None) -> bool:
                if threading.current_thread() is threading.main_thread():
                    interrupts._is_waiting = True
                return super().wait(timeout)

        monkeypatch.setattr(write_threads, "Condition", Announced)

    def __call__(self) -> None:
        while self.seen < self._times:
            seen = self.seen
            self._wait_until_it_waits(seen)
            os.kill(os.getpid(), signal.SIGINT)
            self._wait_until_it_waits(seen + 1)

    def handle(self, *_: object) -> None:
        self.seen += 1
        self._is_waiting = False
        raise KeyboardInterrupt

    def _wait_until_it_waits(self, seen: int) -> None:
        for _ in range(60_000):
            if self.seen == seen and self._is_waiting:
                return
            time.sleep(0.001)
        raise AssertionError("the calling thread does not wait")


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("moment", ["while it waits for room", "while it waits for the end"])
def test_an_interrupt_of_the_calling_thread_stops_the_others(
    moment: str, times: int, threads: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A thread that writes sends the signal, and goes on when the calling thread waits for it to end."""
    count = 400 if moment == "while it waits for room" else 3
    values: Values = {f"k{number}": (bits_of((MEBIBYTE // 2,), UINT8), UINT8) for number in range(count)}
    interrupts = Interrupts(times, monkeypatch)
    operations = Scripted({0: interrupts})
    previous = signal.signal(signal.SIGINT, interrupts.handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, values, 1, operations=operations)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert interrupts.seen == times
    assert operations.written == ["_rank0_.safetensors"]
    assert content(tmp_path) == {}
    assert writers() == []


def test_a_handler_that_raises_in_the_middle_of_a_write_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(write_threads, "threads_pay", lambda files: False)
    values = small_values(10)
    operations = Scripted({0: partial(os.kill, os.getpid(), signal.SIGINT)})
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, values, 1, operations=operations)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert content(tmp_path) == {}


def test_each_file_has_a_thread_of_its_own_where_there_are_several_files_and_processors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for cores, parts, expected in ((8, 3, 3), (2, 3, 3), (1, 3, 1), (8, 1, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        seen: dict[str, set[int]] = {}

        def before(record: OperationRecord, seen: dict[str, set[int]] = seen) -> None:
            if record.operation in ("pwritev", "fsync", "close_written"):
                seen.setdefault(record.name, set()).add(threading.get_ident())

        directory = tmp_path / f"{cores} {parts}"
        directory.mkdir()
        write(directory, small_values(30), parts, operations=FaultyOperations(before=before), durable=True)
        assert len(seen) == parts
        assert {len(threads) for threads in seen.values()} == {1}
        writing = set.union(*seen.values())
        assert len(writing) == expected
        assert (threading.get_ident() in writing) == (expected == 1)
