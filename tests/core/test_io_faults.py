"""What the disk refuses, tears or interrupts, at every call that moves data: right values or one clear error.

After any error no thread, descriptor or file is left of it, and the checkpoint that was there loads.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.testing.numpy_ranks import even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import Outcome, memory_directory, names_in, outcome_of
from tests.core.io_probes import FailingOperations, TornOperations, calls_of, reader_over, refusal, writer_over
from tests.core.io_samples import MEBIBYTE, Sample, Shards
from tests.core.rank_jobs import OPTIONS, together

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "large": ("float32", (420, 1000)),
    "bytes": ("uint8", (MEBIBYTE + 1,)),
    "halves": ("bfloat16", (350, 801)),
    "block": ("int64", (128, 1024)),
    "scalar": ("complex128", ()),
    **{f"small.{number}": ("float64", (1 + number % 9, 31)) for number in range(40)},
}


def shards_of(tag: int, ranks: int = 1, rank: int = 0, dim: int = 0, *, poisoned: bool = False) -> list[Shards]:
    """What a rank holds in a save: rows or columns, in memory of any layout; no two saves have the same values."""
    rng, shards = Random(tag), []
    for number, (name, (dtype, shape)) in enumerate(SHAPES.items()):
        boxes = even_boxes(shape, ranks, rank, min(dim, len(shape) - 1)) if shape else [Box.whole(shape)]
        shards.append(
            Shards.cut(Sample(name, BY_NAME[dtype], shape, 1000 * tag + number), boxes, rng, poisoned=poisoned)
        )
    return shards


def save(tag: int, directory: Path | str, ranks: int = 1, rank: int = 0, **options: Any) -> None:
    state: dict[str, Any] = {part.sample.name: part.value for part in shards_of(tag, ranks, rank)} | {"step": tag}
    api.save(state, checkpoint_id=directory, **({"durable": False} | OPTIONS | options))


def target_of(tag: int, ranks: int = 1, rank: int = 0, dim: int = 0) -> tuple[list[Shards], dict[str, Any]]:
    """A poisoned target."""
    shards = shards_of(tag, ranks, rank, dim, poisoned=True)
    return shards, {part.sample.name: part.value for part in shards} | {"step": -1}


def load(tag: int, directory: Path | str, ranks: int = 1, rank: int = 0, dim: int = 0, **options: Any) -> None:
    """Load into poisoned targets; after a success every element must be that of one save."""
    shards, state = target_of(tag, ranks, rank, dim)
    api.load(state, checkpoint_id=directory, **(OPTIONS | options))
    assert state["step"] == tag
    for part in shards:
        part.check()


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "checkpoint"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """No thread is left that was not there before, and no descriptor."""
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    yield
    assert set(threading.enumerate()) <= threads
    if open_descriptors() > descriptors:  # an error may wait for the collection with what it saw
        gc.collect()
    assert open_descriptors() <= descriptors


# --- short reads and writes --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_reads_and_writes_that_move_some_bytes_only_give_the_right_result(seed: int, directory: Path) -> None:
    writing, reading = TornOperations(seed), TornOperations(seed + 10)
    with nothing_left_behind():
        save(seed, directory, storage_writer=writer_over(writing))
        for verify in (True, "full", False):
            load(seed, directory, dim=seed % 2, storage_reader=reader_over(reading), verify=verify)
    load(seed, directory)
    assert writing.torn > 10
    assert reading.torn > 30


def save_and_load_torn(context: RankContext, directory: str) -> int:
    torn, seat = TornOperations(context.rank), (context.world_size, context.rank)
    with together(context):
        save(3, directory, *seat, storage_writer=writer_over(torn))
    with together(context):
        load(3, directory, *seat, dim=1, storage_reader=reader_over(torn))
    return torn.torn


def test_torn_reads_and_writes_on_every_rank_give_the_right_result(directory: Path) -> None:
    assert min(run_ranks(save_and_load_torn, 3, str(directory))) > 10


# --- a call that fails -------------------------------------------------------------------------------


def outcome_of_fault(call: Callable[..., None], operations: FailingOperations, error: int) -> Outcome | None:
    """How a call ended of whose operations one failed, and that nothing is left; None where none failed."""
    with nothing_left_behind():
        outcome = outcome_of(call, operations)
    if not operations.has_failed:
        assert outcome.kind == "", outcome
        return None
    assert outcome.kind == "StorageError", outcome
    assert f"[{errno.errorcode[error]}]" in outcome.message, outcome
    return outcome


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("method", ["create", "preallocate", "pwritev", "fsync", "close_written"])
def test_a_write_that_fails_at_any_call_leaves_the_old_checkpoint_and_nothing_else(
    method: str, error: int, directory: Path
) -> None:
    save(1, directory)
    before, failures = names_in(directory), 0
    with memory_directory() as elsewhere:
        calls = calls_of(method, lambda probe: save(2, elsewhere, durable=True, storage_writer=writer_over(probe)))
    for number in range(1, calls + 1):
        operations = FailingOperations(method, number, refusal(error))
        outcome = outcome_of_fault(
            lambda failing: save(2, directory, durable=True, storage_writer=writer_over(failing)), operations, error
        )
        if outcome is not None:
            failures += 1
            assert "_rank0_" in outcome.message, outcome
            assert names_in(directory) == before, number
    assert failures > 0
    load(1, directory)


@pytest.mark.parametrize(("error", "forever"), [(errno.EIO, False), (errno.ESTALE, True)], ids=["EIO", "ESTALE"])
@pytest.mark.parametrize("method", ["open_read", "preadv"])
@pytest.mark.parametrize(("dim", "verify"), [(0, True), (1, False), (1, "full")])
def test_a_read_that_fails_at_any_call_is_one_error_and_the_next_load_is_whole(
    dim: int, verify: Any, method: str, error: int, forever: bool, directory: Path
) -> None:
    save(1, directory)
    (_, target), failures = target_of(1, dim=dim), 0
    options: dict[str, Any] = {"checkpoint_id": directory, "verify": verify} | OPTIONS

    def fill(operations: FailingOperations) -> None:
        api.load(target, storage_reader=reader_over(operations), **options)

    for number in range(1, calls_of(method, fill, suffix="") + 1):
        operations = FailingOperations(method, number, refusal(error), suffix="", forever=forever)
        failures += outcome_of_fault(fill, operations, error) is not None
    assert failures > 2
    load(1, directory, dim=dim)


def test_a_handle_that_is_stale_once_is_an_error_or_makes_no_difference(directory: Path) -> None:
    save(1, directory)
    calls = calls_of("preadv", lambda probe: load(1, directory, dim=1, storage_reader=reader_over(probe)))
    for number in range(1, calls + 1):
        operations = FailingOperations("preadv", number, refusal(errno.ESTALE))
        with nothing_left_behind():
            outcome = outcome_of(load, 1, directory, dim=1, storage_reader=reader_over(operations))
        assert operations.has_failed
        assert outcome.kind == "" or (outcome.kind == "StorageError" and "[ESTALE]" in outcome.message), outcome


def fail_on_one_rank(context: RankContext, directory: str) -> list[tuple[str, str]]:
    """Each rank in turn fails at some call of a save, then of a load; between them all is well."""
    seat, seen = (context.world_size, context.rank), []
    with together(context):
        writes = calls_of("pwritev", lambda probe: save(0, directory, *seat, storage_writer=writer_over(probe)))
    with together(context):
        reads = calls_of("preadv", lambda probe: load(0, directory, *seat, dim=1, storage_reader=reader_over(probe)))
    for rank in range(context.world_size):
        for number in range(3):
            here = context.rank == rank
            writing = FailingOperations("pwritev", 1 + number % writes if here else 0, refusal(errno.ENOSPC))
            reading = FailingOperations("preadv", 1 + number % reads if here else 0, refusal(errno.EIO))
            with together(context), nothing_left_behind():
                outcome = outcome_of(save, 1 + number, directory, *seat, storage_writer=writer_over(writing))
                seen.append((outcome.kind, outcome.message))
            with together(context), nothing_left_behind():
                outcome = outcome_of(load, 0, directory, *seat, dim=1, storage_reader=reader_over(reading))
                seen.append((outcome.kind, outcome.message))
            with together(context):
                load(0, directory, *seat, dim=1)
    return seen


def test_an_error_of_one_rank_is_that_of_all_and_leaves_nothing_behind(directory: Path) -> None:
    seen = run_ranks(fail_on_one_rank, 3, str(directory))
    assert seen[0] == seen[1] == seen[2]
    assert [kind for kind, _ in seen[0]] == ["StorageError"] * 18
    for number, (_, message) in enumerate(seen[0]):
        assert f"rank {number // 6}: " in message and ("[EIO]" if number % 2 else "[ENOSPC]") in message, message
    assert not [name for name in names_in(directory) if name.count(".") > 2]


def test_descriptors_and_threads_stay_flat_over_many_saves_and_loads_with_errors_in_between(directory: Path) -> None:
    writes = calls_of("pwritev", lambda probe: save(0, directory, storage_writer=writer_over(probe)))
    reads = calls_of("preadv", lambda probe: load(0, directory, storage_reader=reader_over(probe)))
    with nothing_left_behind():
        for number in range(50):
            before = open_descriptors()
            broken = FailingOperations("pwritev", 1 + number % writes, refusal(errno.ENOSPC))
            assert outcome_of(save, 1, directory, storage_writer=writer_over(broken)).kind == "StorageError"
            save(number, directory)
            broken = FailingOperations("preadv", 1 + number % reads, refusal(errno.EIO))
            assert outcome_of(load, number, directory, storage_reader=reader_over(broken)).kind == "StorageError"
            load(number, directory, dim=number % 2)
            assert open_descriptors() <= before + 1, number  # what an error holds goes with the next collection


# --- errors of the planner ---------------------------------------------------------------------------


class FailingSavePlanner(StandardSavePlanner):
    """Raises when asked for the bytes of its n-th item."""

    def __init__(self, number: int, error: BaseException) -> None:
        super().__init__()
        self._left, self._error = number, error

    def get_data(self, item: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return super().get_data(item)


class FailingLoadPlanner(StandardLoadPlanner):
    """Raises at the n-th call of one method."""

    def __init__(self, method: str, number: int, error: BaseException) -> None:
        super().__init__()
        self._method, self._left, self._error = method, number, error

    def _count(self, method: str) -> None:
        self._left -= method == self._method
        if self._left == 0:
            self._left = -1
            raise self._error

    def acquire_tensor(self, item: Any) -> Any:
        self._count("acquire_tensor")
        return super().acquire_tensor(item)

    def access(self, item: Any) -> Any:
        self._count("access")
        return super().access(item)

    def apply_tensor(self, item: Any, tensor: Any) -> None:
        self._count("apply_tensor")
        super().apply_tensor(item, tensor)


@pytest.mark.parametrize(
    ("error", "kind"), [(RuntimeError, "RankFailedError"), (KeyboardInterrupt, "KeyboardInterrupt")]
)
def test_a_planner_that_raises_at_any_item_leaves_nothing_behind(
    error: type[BaseException], kind: str, directory: Path
) -> None:
    save(1, directory)
    before = names_in(directory)
    for number in range(1, len(SHAPES) + 1, 7):
        with nothing_left_behind():
            outcome = outcome_of(save, 2, directory, planner=FailingSavePlanner(number, error()))
        assert outcome.kind == kind, (number, outcome)
        assert names_in(directory) == before, number
    _, target = target_of(1)
    for method in ("acquire_tensor", "access", "apply_tensor"):
        for number in range(1, len(SHAPES) + 1, 7):
            options: dict[str, Any] = {"planner": FailingLoadPlanner(method, number, error())} | OPTIONS
            with nothing_left_behind():
                outcome = outcome_of(api.load, target, checkpoint_id=directory, **options)
                del options["planner"]
            assert outcome.kind == kind, (method, number, outcome)
    load(1, directory)


# --- several threads, interrupts ---------------------------------------------------------------------

LARGE = (700, MEBIBYTE)
"""Enough for a rank to write several files, and for several threads to read."""


def large_state() -> dict[str, Any]:
    row = np.random.default_rng(5).integers(0, 256, MEBIBYTE, np.uint8)
    return {f"large.{half}": np.broadcast_to(row[half:], (LARGE[0] // 2, MEBIBYTE - half)) for half in range(2)}


def save_large(directory: Path, **options: Any) -> None:
    api.save(large_state(), checkpoint_id=directory, durable=False, **OPTIONS, **options)


@pytest.fixture(scope="module")
def large_directory() -> Iterator[Path]:
    """A checkpoint of several large files."""
    with memory_directory() as path:
        save_large(path)
        yield path


def interrupt(path: str) -> None:
    """Press Ctrl-C; the call itself goes on."""
    os.kill(os.getpid(), signal.SIGINT)


_LARGE_FAULTS = [(refusal(errno.EIO), "StorageError"), (interrupt, "KeyboardInterrupt")]


@pytest.mark.parametrize(("error", "kind"), _LARGE_FAULTS, ids=["refused", "interrupted"])
def test_a_fault_in_one_of_several_writing_threads_stops_them_all(
    error: Callable[[str], BaseException | None], kind: str, directory: Path
) -> None:
    calls = calls_of("pwritev", lambda probe: save_large(directory, storage_writer=writer_over(probe)))
    assert len(list(directory.glob("_rank0_*.safetensors"))) > 1, "one file: the state is too small for this test"
    save(1, directory)
    before = names_in(directory)
    for number in sorted({1, 1 + calls // 2, calls}):
        operations = FailingOperations("pwritev", number, error)
        with nothing_left_behind():
            outcome = outcome_of(save_large, directory, storage_writer=writer_over(operations))
        assert outcome.kind == kind, (number, outcome)
        assert names_in(directory) == before, number
    load(1, directory)


@pytest.mark.parametrize(("error", "kind"), _LARGE_FAULTS, ids=["refused", "interrupted"])
def test_a_fault_in_one_of_several_reading_threads_stops_them_all(
    error: Callable[[str], BaseException | None], kind: str, large_directory: Path
) -> None:
    target = {key: np.empty(value.shape, np.uint8) for key, value in large_state().items()}

    def load_large(operations: FailingOperations) -> None:
        api.load(target, checkpoint_id=large_directory, storage_reader=reader_over(operations), **OPTIONS)

    calls = calls_of("preadv", load_large)
    for number in sorted({1, 1 + calls // 2, calls}):
        with nothing_left_behind():
            outcome = outcome_of(load_large, FailingOperations("preadv", number, error))
        assert outcome.kind == kind, (number, outcome)
    for array in target.values():
        array[...] = 0
    load_large(FailingOperations("preadv"))
    for key, value in large_state().items():
        assert all(np.array_equal(*rows) for rows in zip(target[key], value, strict=True)), key
