"""The read engine against numpy's own slicing: any chunk, region, target and thread count, and every way to fail."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from dcp_core.arrays import ArrayAccess
from dcp_core.box import Box, slices
from dcp_core.dtype import BY_NAME, DTYPES, DType
from dcp_core.errors import CorruptError, IncompleteError, ShapeMismatchError, StorageError
from dcp_core.execution import read_engine, read_requests
from dcp_core.execution.buffer_ring import BufferRing
from dcp_core.execution.interfaces import Verify
from dcp_core.execution.read_targets import Destination
from dcp_core.execution.read_threads import Crew, usable_threads
from dcp_core.planning.span_columns import columns_of
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.devices import SimulatedDevice
from dcp_core.testing.faults import FaultyOperations
from dcp_core.testing.streams import Pace
from tests.core.engine_fakes import SAVE_ID, Array, DeviceAccess, Region, bits_of
from tests.core.read_cases import Files, Goal, Targets, constants, make_goal, random_box, random_files, tiny, written

UINT8, FLOAT32 = BY_NAME["uint8"], BY_NAME["float32"]
VERIFY: tuple[Verify, ...] = (True, False, "full")
PACES: tuple[Pace, ...] = ("at once", "late", "thread")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert left == []


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BufferRing]]:
    """The rings that the engine made; all their buffers must be back at the end."""
    made: list[BufferRing] = []

    class Watched(BufferRing):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(read_engine, "BufferRing", Watched)
    yield made
    assert not any(ring._taken for ring in made)


def goals_of(draw: Random, files: Files, device: SimulatedDevice | None, most: int = 8) -> list[Goal]:
    goals = []
    for _ in range(draw.randint(1, most)):
        chunk = draw.randrange(len(files.chunks))
        goals.append(make_goal(draw, files, chunk, random_box(draw, files.chunks[chunk].array.shape), device))
    if draw.random() < 0.7:
        goals.sort(key=lambda goal: (goal.region.file, goal.region.byte_offset))
    return goals


class StrictDevice(SimulatedDevice):
    """Takes elements that lie together only: others are copied while the host waits."""

    def start_copy_in(self, view: Any, bits: Array, source_dtype: DType) -> Callable[[], None]:
        assert bits.flags.c_contiguous
        assert bits.flags.aligned
        return super().start_copy_in(view, bits, source_dtype)


# --- what comes out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_any_regions_come_back_in_any_targets(seed: int, tmp_path: Path, rings: list[BufferRing]) -> None:
    for case in range(8):
        draw = Random(100 * seed + case)
        directory = tmp_path / str(case)
        directory.mkdir()
        pace: Pace = draw.choice(PACES)
        with constants(**tiny(draw)), StrictDevice(pace=pace) as device:
            files = random_files(draw, directory)
            goals = goals_of(draw, files, device)
            targets = Targets.of(goals)
            files.operations = FaultyOperations(max_io_bytes=draw.choice([1, 7, 100, None]))
            files.read([goal.region for goal in goals], targets, draw.choice(VERIFY))
            assert targets.applied == targets.acquired == [goal.region.item.dest_index.index for goal in goals]
            for goal in goals:
                goal.check()


class Batched:
    """A plan whose spans know their columns, and a planner that answers for many of them at once."""

    def __init__(self, targets: Targets, regions: Sequence[Region]) -> None:
        self.targets, self.regions, self.columns = targets, list(regions), columns_of(regions)
        self.batches: list[int] = []

    def __len__(self) -> int:
        return len(self.regions)

    def __getitem__(self, index: Any) -> Any:
        return self.regions[index]

    def acquire_batch(self, spans: Sequence[Region]) -> list[tuple[Any, Any]]:
        self.batches.append(len(spans))
        return [(self.targets.acquire_tensor(span.item), self.targets.access(span.item)) for span in spans]

    def apply_batch(self, spans: Sequence[Region], views: Sequence[Any]) -> None:
        for span, view in zip(spans, views, strict=True):
            self.targets.apply_tensor(span.item, view)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_planner_that_answers_for_many_regions_at_once_is_asked_so(threads: int, tmp_path: Path) -> None:
    draw = Random(1)
    with constants(BATCH_ROWS=5, threads=threads, THREAD_BYTES=1):
        files = random_files(draw, tmp_path)
        goals = [make_goal(draw, files, 0, random_box(draw, files.chunks[0].array.shape)) for _ in range(12)]
        targets = Targets.of(goals)
        plan = Batched(targets, [goal.region for goal in goals])
        files.read(plan, plan)  # type: ignore[arg-type]  # plan and planner in one
    assert plan.batches == [5, 5, 2]
    assert targets.applied == targets.acquired == [goal.region.item.dest_index.index for goal in goals]


def test_of_targets_that_share_memory_the_last_one_wins_when_the_plan_says_that_they_do(tmp_path: Path) -> None:
    with constants(BLOCK_BYTES=64, TASK_BYTES=64, threads=4, THREAD_BYTES=1):
        files = written(tmp_path, [[(np.full(1000, value, np.uint8), UINT8) for value in range(20)]])
        shared = np.zeros(1000, np.uint8)
        outcome = np.full(1000, 19, np.uint8)
        goals = [Goal(files.region(i, Box((0,), (1000,))), shared, ArrayAccess(), shared, outcome) for i in range(20)]
        for goal in goals[:-1]:
            goal.outcome = shared  # what is there when it is applied does not matter
        plan = Batched(Targets.of(goals), [goal.region for goal in goals])
        plan.share_memory = True  # type: ignore[attr-defined]
        files.read(plan, plan)  # type: ignore[arg-type]
        assert (shared == 19).all()


def whole_goals(files: Files, access: Any = None) -> list[Goal]:
    """Every chunk whole into memory of its own."""
    goals = []
    for number, chunk in enumerate(files.chunks):
        view = np.zeros_like(chunk.array)
        region = files.region(number, Box.whole(chunk.array.shape))
        goals.append(Goal(region, view, access or ArrayAccess(chunk.dtype), view, chunk.array))
    return goals


def read_whole(files: Files, verify: Verify = True, access: Any = None, rank: int = 0) -> None:
    goals = whole_goals(files, access)
    targets = Targets.of(goals)
    files.read([goal.region for goal in goals], targets, verify, rank)
    assert len(targets.applied) == len(goals)


# --- how many bytes, calls, buffers, files -----------------------------------------------------------


class Counted(FileOperations):
    """Counts what is read after the header, and the files that are open."""

    def __init__(self) -> None:
        self.nbytes = self.calls = self.opened = 0
        self.threads: set[int] = set()
        self.open_files: set[int] = set()
        self.most_open = 0
        self._lock = threading.Lock()

    def open_read(self, path: str) -> int:
        descriptor = super().open_read(path)
        self.open_files.add(descriptor)
        self.opened += 1
        self.most_open = max(self.most_open, len(self.open_files))
        return descriptor

    def close(self, descriptor: int) -> None:
        self.open_files.remove(descriptor)
        super().close(descriptor)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        assert descriptor in self.open_files
        moved = super().preadv(descriptor, buffers, offset)
        with self._lock:
            if offset:
                self.nbytes += moved
                self.calls += 1
                self.threads.add(threading.get_ident())
        return moved


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("verify", VERIFY)
def test_long_runs_are_read_with_at_most_a_tenth_more_bytes_than_needed(
    verify: Verify, threads: int, tmp_path: Path
) -> None:
    shape = (24, 5, 40_000)
    files = written(tmp_path, [[(bits_of(shape, FLOAT32), FLOAT32)]])
    boxes = [
        Box((0, 0, 0), shape),
        Box((3, 0, 0), (20, 5, 40_000)),
        Box((3, 1, 0), (20, 3, 40_000)),
        Box((3, 1, 700), (20, 3, 39_000)),
        Box((0, 0, 20_000), (24, 5, 17_000)),
        Box((7, 2, 100), (1, 1, 39_000)),
    ]
    if verify == "full":
        boxes = boxes[:2]
    for box in boxes:
        files.operations = counted = Counted()
        goals = [make_goal(Random(0), files, 0, box)]
        with constants(threads=threads):
            files.read([goal.region for goal in goals], Targets.of(goals), verify)
        wanted = 4 * int(np.prod(box.sizes))
        blocks = 2 << 20 if verify == "full" else 0
        assert wanted <= counted.nbytes <= 1.1 * wanted + blocks, box
        goals[0].check()


@pytest.mark.parametrize("seed", range(10))
def test_in_full_mode_every_block_that_is_touched_is_read_once_and_only_those_at_the_ends_are_copied(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, put = Random(seed), [0]
    inner = Destination.put

    def counted_put(self: Destination, raw: Array, first: int, waits: Any) -> None:
        put[0] += len(raw)
        inner(self, raw, first, waits)

    monkeypatch.setattr(Destination, "put", counted_put)
    with constants(BLOCK_BYTES=64, TASK_BYTES=256, GAP_BYTES=8, threads=draw.choice([0, 3]), THREAD_BYTES=1):
        files = written(tmp_path, [[(bits_of((30, 50), UINT8), UINT8)]])
        for _ in range(20):
            box = random_box(draw, (30, 50))
            view = np.zeros(box.sizes, np.uint8)
            wanted = np.arange(1500).reshape(30, 50)[slices(box)].ravel()
            goal = Goal(files.region(0, box), view, ArrayAccess(), view, files.chunks[0].array[slices(box)])
            files.operations, put[0] = (counted := Counted()), 0
            files.read([goal.region], Targets.of([goal]), "full")
            touched = set((wanted // 64).tolist())
            assert counted.nbytes == sum(min(64, 1500 - 64 * block) for block in touched)
            if len(wanted) and wanted[-1] - wanted[0] < len(wanted):
                assert put[0] <= 2 * 64


def test_small_neighbours_are_read_by_few_calls_and_what_lies_between_them_by_the_same(tmp_path: Path) -> None:
    files = written(tmp_path, [[(bits_of((16_384,), FLOAT32, i), FLOAT32) for i in range(128)]])
    files.operations = counted = Counted()
    read_whole(files)
    assert counted.calls == 128 * 65536 // read_requests.TASK_BYTES
    assert counted.nbytes == 128 * 65536
    small = written(tmp_path, [[(bits_of((1000,), FLOAT32, i), FLOAT32) for i in range(200)]])
    small.operations = counted = Counted()
    goals = whole_goals(small)[::2]
    small.read([goal.region for goal in goals], Targets.of(goals))
    assert counted.calls == 1
    for goal in goals:
        goal.check()


@pytest.mark.parametrize("threads", [0, 1, 2, 4])
def test_buffers_are_few_and_threads_no_more_than_allowed(
    threads: int, tmp_path: Path, rings: list[BufferRing]
) -> None:
    with constants(BLOCK_BYTES=64, TASK_BYTES=128, threads=threads, THREAD_BYTES=1), SimulatedDevice() as device:
        files = written(tmp_path, [[(bits_of((500,), UINT8, i), UINT8) for i in range(60)]])
        files.operations = counted = Counted()
        goals = whole_goals(files, DeviceAccess(UINT8))
        for goal in goals[::2]:
            goal.view, goal.access = device.put(np.zeros(500, np.uint8)), device
        files.read([goal.region for goal in goals], Targets.of(goals))
        assert device.peak_host_nbytes <= 2 * max(threads, 1) * 128
        assert device.copies_in > 0
        assert device.blocking_nbytes == 0
    assert sorted(ring.buffer_nbytes * ring.count for ring in rings) == [2 * max(threads, 1) * 128] * 2
    assert len(counted.threads) <= max(threads, 1)
    assert (threading.get_ident() in counted.threads) == (threads < 2)


def test_elements_lie_aligned_in_a_buffer_whatever_came_before_them(tmp_path: Path) -> None:
    aligned = []

    class Watching(DeviceAccess):
        def copy_into(self, view: Array, bits: Array, source_dtype: DType) -> None:
            aligned.append(bits.flags.aligned)
            super().copy_into(view, bits, source_dtype)

    chunks = [(bits_of((number % 7 + 1,), dtype, number), dtype) for number, dtype in enumerate(DTYPES * 3)]
    files = written(tmp_path, [chunks])
    goals = whole_goals(files)
    for goal in goals:
        goal.access = Watching(goal.region.dtype)
    files.read([goal.region for goal in goals], Targets.of(goals))
    assert len(aligned) == len(chunks)
    assert all(aligned)


def test_a_second_device_takes_the_place_of_the_first(tmp_path: Path, rings: list[BufferRing]) -> None:
    with constants(BLOCK_BYTES=64, TASK_BYTES=128, threads=3, THREAD_BYTES=1, BATCH_ROWS=7):
        files = written(tmp_path, [[(bits_of((100,), FLOAT32, i), FLOAT32) for i in range(60)]])
        goals = whole_goals(files)
        with SimulatedDevice("simulated:0", pace="thread") as one, SimulatedDevice("simulated:1") as other:
            for index, goal in enumerate(goals):
                goal.access = (one, other)[index // 10 % 2]
                goal.view = goal.access.put(np.zeros(100, np.float32))
            files.read([goal.region for goal in goals], Targets.of(goals))
            for goal in goals:
                goal.check()
        assert sum(not ring._closed for ring in rings) == 0
        assert len(rings) == 6


@pytest.mark.parametrize("threads", [0, 4])
def test_at_most_so_many_files_are_open_and_none_is_closed_while_it_is_read(threads: int, tmp_path: Path) -> None:
    draw = Random(4)
    with constants(OPEN_FILES=3, BLOCK_BYTES=64, TASK_BYTES=64, threads=threads, THREAD_BYTES=1):
        contents = [[(bits_of((draw.randint(1, 900),), UINT8, i), UINT8)] for i in range(40)]
        files = written(tmp_path, contents)
        files.operations = counted = Counted()
        read_whole(files)
        assert counted.most_open == 3
        assert counted.opened == 40
        assert counted.open_files == set()


def test_threads_are_started_for_much_only(tmp_path: Path) -> None:
    files = written(tmp_path, [[(bits_of((100,), FLOAT32), FLOAT32)]])
    files.operations = counted = Counted()
    with constants(threads=4):
        read_whole(files)
    assert counted.threads == {threading.get_ident()}


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        (1, None, 1),
        (2, None, 2),
        (64, None, 4),
        (64, "8", 4),
        (8, "4", 2),
        (8, "8", 1),
        (2, "8", 1),
        (8, "x", 4),
        (8, "0", 4),
    ],
)
def test_all_ranks_of_a_machine_start_no_more_threads_than_it_has_cores(
    cores: int, ranks: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert usable_threads() == expected


# --- damage ------------------------------------------------------------------------------------------


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("threads", [0, 1, 2, 4])
@pytest.mark.parametrize("verify", [True, "full"])
@pytest.mark.parametrize("access", [None, DeviceAccess(UINT8)], ids=["straight", "by a buffer"])
def test_a_flipped_byte_of_a_block_that_is_read_whole_is_noticed(
    access: Any, verify: Verify, threads: int, tmp_path: Path
) -> None:
    draw = Random(threads)
    with constants(BLOCK_BYTES=64, TASK_BYTES=192, threads=threads, THREAD_BYTES=1, BATCH_ROWS=4):
        files = written(tmp_path, [[(bits_of((draw.randint(1, 400),), UINT8, i), UINT8) for i in range(12)]])
        record, good = files.records[0], files.path().read_bytes()
        read_whole(files, verify, access)
        for position in [
            record.data_start,
            len(good) - 1,
            *(draw.randrange(record.data_start, len(good)) for _ in range(60)),
        ]:
            flip(files.path(), position)
            key = next(
                chunk.key for chunk in reversed(files.chunks) if record.data_start + chunk.byte_offset <= position
            )
            with pytest.raises(CorruptError, match=rf"^{key}: bytes \d+ to \d+ of _rank0_.safetensors, read on rank 5"):
                read_whole(files, verify, access, rank=5)
            files.path().write_bytes(good)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_checked_of_a_part_are_its_whole_blocks_or_all_that_it_touches(seed: int, tmp_path: Path) -> None:
    draw, block, length = Random(seed), 32, 500
    with constants(BLOCK_BYTES=block, TASK_BYTES=96, threads=draw.choice([0, 3]), THREAD_BYTES=1):
        files = written(tmp_path, [[(bits_of((length,), UINT8), UINT8)]])
        good, data_start = files.path().read_bytes(), files.records[0].data_start
        for _ in range(20):
            low = draw.randint(0, length - 1)
            high, verify = draw.randint(low + 1, length), draw.choice(VERIFY)
            position = draw.randrange(length)
            flip(files.path(), data_start + position)
            edges = position // block * block, min((position // block + 1) * block, length)
            is_whole = low <= edges[0] and edges[1] <= high
            is_touched = low < edges[1] and edges[0] < high
            is_checked = {True: is_whole, "full": is_touched, False: False}[verify]
            goals = [make_goal(draw, files, 0, Box((low,), (high - low,)))]
            read: Callable[[], None] = lambda goals=goals, verify=verify: files.read(  # type: ignore[misc]  # noqa: E731
                [goal.region for goal in goals], _Silent.of(goals), verify
            )
            if is_checked:
                with pytest.raises(CorruptError, match="contradict their checksum"):
                    read()
            else:
                read()
                if not low <= position < high:
                    goals[0].check()
            files.path().write_bytes(good)


class _Silent(Targets):
    """Does not look at what came."""

    def apply_tensor(self, item: Any, view: Any) -> None:
        return


# --- storage that misbehaves -------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 3])
def test_reads_of_any_number_of_bytes_a_call_come_to_the_same(threads: int, tmp_path: Path) -> None:
    draw = Random(7)
    with constants(BLOCK_BYTES=64, TASK_BYTES=256, GAP_BYTES=10, threads=threads, THREAD_BYTES=1):
        files = random_files(draw, tmp_path)
        for most in [*range(1, 40), 63, 64, 65, 255, 256, 257]:
            files.operations = FaultyOperations(max_io_bytes=most)
            goals = goals_of(draw, files, None)
            files.read([goal.region for goal in goals], Targets.of(goals), draw.choice(VERIFY))


class Failing(FileOperations):
    """Reads of data fail from call `first` on, `count` times; each with what `error` makes."""

    def __init__(self, first: int, error: Callable[[], BaseException | None], count: int = 1 << 30) -> None:
        self.first, self.error, self.count = first, error, count
        self.calls = 0
        self.opened = 0
        self._lock = threading.Lock()

    def open_read(self, path: str) -> int:
        self.opened += 1
        return super().open_read(path)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        if offset > 200:
            with self._lock:
                self.calls += 1
                is_failing = self.first <= self.calls < self.first + self.count
            error = self.error() if is_failing else None
            if error is not None:
                raise error
        return super().preadv(descriptor, buffers, offset)


def many_tasks(tmp_path: Path) -> Files:
    return written(tmp_path, [[(bits_of((90,), UINT8, i), UINT8) for i in range(100)]])


MANY = {"BLOCK_BYTES": 64, "TASK_BYTES": 128, "THREAD_BYTES": 1, "BATCH_ROWS": 30}


@pytest.mark.parametrize("threads", [0, 2, 4])
@pytest.mark.parametrize("first", [1, 2, 30, 95])
@pytest.mark.parametrize("access", [None, DeviceAccess(UINT8)], ids=["straight", "by a buffer"])
def test_an_error_of_the_storage_names_file_key_and_rank_and_stops_the_rest(
    access: Any, first: int, threads: int, tmp_path: Path, rings: list[BufferRing]
) -> None:
    with constants(**MANY, threads=threads):
        files = many_tasks(tmp_path)
        files.operations = failing = Failing(first, lambda: OSError(errno.EIO, "out of luck"))
        goals = whole_goals(files, access)
        with pytest.raises(StorageError, match=r"0\.\d+.*_rank0_.safetensors.*\[EIO\].*rank 3") as caught:
            files.read([goal.region for goal in goals], Targets.of(goals), rank=3)
        assert caught.value.errno == errno.EIO
        assert first <= failing.calls <= first + (read_engine.TASKS_AHEAD if threads else 0)


@pytest.mark.parametrize("threads", [0, 3])
def test_a_file_that_is_cut_short_during_the_load_is_an_error_that_names_it(threads: int, tmp_path: Path) -> None:
    with constants(**MANY, threads=threads):
        files = many_tasks(tmp_path)
        size = files.path().stat().st_size
        files.operations = Failing(5, lambda: os.truncate(files.path(), size - 3000))
        goals = whole_goals(files)
        with pytest.raises(IncompleteError, match=r"_rank0_.safetensors.*cut short.*rank 0"):
            files.read([goal.region for goal in goals], Targets.of(goals))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("threads", [0, 3])
def test_a_file_that_the_server_has_forgotten_is_opened_again_once(
    threads: int, verify: Verify, tmp_path: Path
) -> None:
    with constants(**MANY, threads=threads):
        files = many_tasks(tmp_path)
        for first in (1, 2, 17, 60, 94):
            files.operations = failing = Failing(first, lambda: OSError(errno.ESTALE, "stale"), count=1)
            read_whole(files, verify)
            assert failing.opened == 2
        files.operations = failing = Failing(4, lambda: OSError(errno.ESTALE, "stale"))
        with pytest.raises(StorageError, match="ESTALE") as caught:
            read_whole(files, verify)
        assert caught.value.errno == errno.ESTALE
        assert failing.opened == 2


def test_a_file_that_the_server_forgets_a_second_time_is_an_error(tmp_path: Path) -> None:
    with constants(**MANY, threads=0):
        files = many_tasks(tmp_path)
        calls = [0]

        def twice() -> OSError | None:
            calls[0] += 1
            return OSError(errno.ESTALE, "stale") if calls[0] in (4, 30) else None

        files.operations = failing = Failing(1, twice)
        with pytest.raises(StorageError, match="ESTALE"):
            read_whole(files)
        assert failing.opened == 2
        assert calls[0] == 30


class Stale(FileOperations):
    """Every read by the first descriptor fails from a moment on, whatever thread it comes from."""

    def __init__(self, after: int) -> None:
        self.after, self.calls, self.descriptors = after, 0, list[int]()
        self._lock = threading.Lock()

    def open_read(self, path: str) -> int:
        self.descriptors.append(super().open_read(path))
        return self.descriptors[-1]

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        with self._lock:
            self.calls += 1
            is_stale = self.calls > self.after and descriptor == self.descriptors[0]
        if is_stale:
            raise OSError(errno.ESTALE, "stale")
        return super().preadv(descriptor, buffers, offset)


@pytest.mark.parametrize("after", [1, 2, 40])
def test_threads_that_all_find_the_file_forgotten_open_it_once_together(after: int, tmp_path: Path) -> None:
    with constants(**MANY, threads=4):
        files = many_tasks(tmp_path)
        files.operations = stale = Stale(after)
        read_whole(files)
        assert len(stale.descriptors) == 2


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("threads", [0, 3])
def test_a_forgotten_file_in_whose_place_another_lies_is_refused(threads: int, verify: Verify, tmp_path: Path) -> None:
    with constants(**MANY, threads=threads):
        files = many_tasks(tmp_path)
        good = files.path().read_bytes()
        for content, error, text in (
            (good.replace(SAVE_ID.encode(), b"f" * 32), CorruptError, "belongs to the save"),
            (good[:-1], IncompleteError, f"has {len(good) - 1} bytes, expected {len(good)}"),
            (None, IncompleteError, "was removed"),
        ):
            files.path().write_bytes(good)

            def replace(content: bytes | None = content) -> OSError:
                new = files.path().with_suffix(".new")
                new.write_bytes(content or b"")
                new.replace(files.path()) if content is not None else files.path().unlink(missing_ok=True)
                return OSError(errno.ESTALE, "stale")

            files.operations = Failing(9, replace, count=1)
            with pytest.raises(error, match=text):
                read_whole(files, verify)


# --- planners that misbehave, and interrupts ---------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("method", ["acquire_tensor", "access", "apply_tensor"])
@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("number", [1, 50, 100])
def test_what_a_planner_raises_comes_out_as_it_is(
    number: int, error: BaseException, method: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with constants(**MANY, threads=threads):
        files = many_tasks(tmp_path)
        goals = whole_goals(files)
        targets, calls, inner = Targets.of(goals), [0], getattr(Targets, method)

        def failing(self: Targets, *args: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                raise error
            return inner(self, *args)

        monkeypatch.setattr(Targets, method, failing)
        with pytest.raises(type(error)) as caught:
            files.read([goal.region for goal in goals], targets)
        assert caught.value is error
        assert calls[0] == number


@pytest.mark.parametrize("threads", [0, 3])
def test_a_signal_ends_the_load_and_its_threads(threads: int, tmp_path: Path) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    try:
        interrupt_a_load(tmp_path, threads, interrupt)
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_a_load(tmp_path: Path, threads: int, interrupt: Callable[[], None]) -> None:
    with constants(**MANY, threads=threads):
        files = many_tasks(tmp_path)
        files.operations = failing = Failing(10, interrupt, count=1)
        goals = whole_goals(files)
        with pytest.raises(KeyboardInterrupt):
            files.read([goal.region for goal in goals], Targets.of(goals))
        assert 10 <= failing.calls < len(goals)


def test_no_thread_is_left_when_the_wait_for_the_threads_is_interrupted_again_and_again() -> None:
    held, may_end = threading.Barrier(3), threading.Event()

    def hold(work: int) -> None:
        held.wait(20)
        may_end.wait(20)

    def lose_patience() -> None:
        while not crew._is_stopped:  # so that the signals find the calling thread in stop()
            time.sleep(0.005)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        may_end.set()

    crew: Crew[int] = Crew(hold, 2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        crew.hand_in(1)
        crew.hand_in(2)
        held.wait(20)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("dcp-read-")]
        assert len(names) == 2
        impatient = threading.Thread(target=lose_patience)
        impatient.start()
        with pytest.raises(KeyboardInterrupt):
            crew.stop()
    finally:
        signal.signal(signal.SIGINT, before)
    assert may_end.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dcp-read-")]
    impatient.join()


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("number", [0, 1, 20, 99])
def test_a_device_copy_that_fails_is_the_error_and_all_copies_are_awaited(
    number: int, threads: int, tmp_path: Path, rings: list[BufferRing]
) -> None:
    fault = RuntimeError("the device is lost")
    many = MANY | {"TASK_BYTES": 600}
    with constants(**many, threads=threads), SimulatedDevice(pace="late", faults={number: fault}) as device:
        files = many_tasks(tmp_path)
        goals = whole_goals(files)
        for goal in goals:
            goal.view, goal.access = device.put(np.zeros(90, np.uint8)), device
        with pytest.raises(RuntimeError, match="the device is lost"):
            files.read([goal.region for goal in goals], Targets.of(goals))
        device.check()


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("number", [1, 2, 3, 50])
def test_a_device_that_refuses_a_copy_has_those_before_awaited(
    number: int, threads: int, tmp_path: Path, rings: list[BufferRing]
) -> None:
    class Refusing(SimulatedDevice):
        starts = 0

        def start_copy_in(self, view: Any, bits: Array, source_dtype: DType) -> Callable[[], None]:
            self.starts += 1
            if self.starts == number:
                raise RuntimeError("no more copies")
            return super().start_copy_in(view, bits, source_dtype)

    with constants(**MANY | {"TASK_BYTES": 600}, threads=threads), Refusing(pace="late") as device:
        files = many_tasks(tmp_path)
        goals = whole_goals(files)
        for goal in goals:
            goal.view, goal.access = device.put(np.zeros(90, np.uint8)), device
        with pytest.raises(RuntimeError, match="no more copies"):
            files.read([goal.region for goal in goals], Targets.of(goals))
        device.check()


@pytest.mark.parametrize("threads", [0, 3])
def test_a_conversion_that_fails_on_a_thread_is_the_error(
    threads: int, tmp_path: Path, rings: list[BufferRing]
) -> None:
    class Broken(ArrayAccess):
        def copy_into(self, view: Array, bits: Array, source_dtype: Any) -> None:
            raise ZeroDivisionError

    with constants(**MANY, threads=threads):
        files = many_tasks(tmp_path)
        regions = [files.region(i, Box((0,), (90,)), BY_NAME["int64"]) for i in range(100)]
        goals = [Goal(region, np.zeros(90, np.int64), Broken(), None, np.zeros(0)) for region in regions]
        with pytest.raises(ZeroDivisionError):
            files.read(regions, Targets.of(goals))


@pytest.mark.parametrize("threads", [0, 2])
def test_a_target_of_another_shape_is_refused_by_name(threads: int, tmp_path: Path) -> None:
    with constants(threads=threads, THREAD_BYTES=1):
        files = written(tmp_path, [[(bits_of((4, 5), FLOAT32), FLOAT32)]])
        for box in (Box((0, 0), (4, 5)), Box((0, 1), (4, 3))):
            goal = Goal(files.region(0, box), np.zeros((5, 4), np.float32), ArrayAccess(), None, np.zeros(0))
            with pytest.raises(ShapeMismatchError, match=r"wanted 0.0: .*acquire_tensor gives the shape \(5, 4\)"):
                files.read([goal.region], Targets.of([goal]))


# --- the threads themselves --------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1, 2, 4])
def test_work_comes_out_done_and_of_each_thread_one_second_step_is_open(threads: int) -> None:
    open_steps, most, lock = [0], [0], threading.Lock()

    def carry_out(number: int) -> Callable[[], None] | None:
        if number % 3 == 0:
            return None
        with lock:
            open_steps[0] += 1
            most[0] = max(most[0], open_steps[0])

        def second() -> None:
            with lock:
                open_steps[0] -= 1

        return second

    crew: Crew[int] = Crew(carry_out, threads)
    found = []
    try:
        for number in range(200):
            crew.hand_in(number)
            while crew.in_flight > 7:
                found.append(crew.next_done(wait=True))
        while crew.in_flight:
            found.append(crew.next_done(wait=True))
        assert crew.next_done(wait=False) is None
    finally:
        assert crew.stop() == []
    assert sorted(found) == list(range(200))  # type: ignore[type-var]
    assert found == sorted(found) or threads > 1  # type: ignore[type-var]
    assert open_steps[0] == 0
    assert most[0] <= 2 * max(threads, 1)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_crew_that_is_stopped_ends_what_has_begun_and_gives_out_the_rest(threads: int) -> None:
    ended = []

    def carry_out(number: int) -> Callable[[], None]:
        if number == 5:
            raise ValueError(number)
        return lambda: ended.append(number)

    crew: Crew[int] = Crew(carry_out, threads)
    for number in range(20):
        crew.hand_in(number)
    with suppress(ValueError):
        while crew.next_done(wait=True) is not None:
            pass
    left = crew.stop()
    assert {0, 1, 2, 3, 4} <= set(ended)
    assert set(left) <= set(ended)
    assert len(ended) == len(set(ended))
