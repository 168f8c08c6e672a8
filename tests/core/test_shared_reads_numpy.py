"""Loads of numpy ranks that share reads: the core without a framework, in real processes."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dcp_core import api
from dcp_core.box import Box
from dcp_core.errors import CoordinationError, CorruptError, StorageError
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.storage.local import LocalStorage
from dcp_core.storage.operations import FileOperations
from dcp_core.testing.numpy_broadcasts import NumpyBroadcastGroup
from dcp_core.testing.numpy_ranks import ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks
from tests.core.rank_jobs import ADAPTER, SECONDS, load, save, together

pytestmark = pytest.mark.timeout(90)

MODES: tuple[bool | str, ...] = (True, False, "auto")
BATCH_BYTES = (0, 500, 6 << 20)
DTYPES = (np.dtype("f4"), np.dtype("i2"), np.dtype("c16"), np.dtype("?"))
State = dict[str, Any]


def true_array(name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Random bits; every element follows from the name."""
    seed = zlib.crc32(name.encode())
    dtype = DTYPES[seed % len(DTYPES)]
    most = 2 if dtype.kind == "b" else 256
    nbytes = dtype.itemsize * int(np.prod(shape))
    return np.random.default_rng(seed).integers(0, most, nbytes, np.uint8).view(dtype).reshape(shape)


def arrays_of(state: Mapping[str, Any]) -> dict[str, Sequence[npt.NDArray[Any]]]:
    return {
        name: value.arrays if isinstance(value, ShardedArray) else [value]
        for name, value in state.items()
        if isinstance(value, (ShardedArray, np.ndarray))
    }


def bits_of(state: Mapping[str, Any]) -> dict[str, list[bytes]]:
    return {name: [array.tobytes() for array in arrays] for name, arrays in arrays_of(state).items()}


def poison(state: Mapping[str, Any]) -> None:
    for arrays in arrays_of(state).values():
        for array in arrays:
            if array.dtype.kind == "b":
                np.logical_not(array, out=array)
            else:
                bits = array.view(f"u{array.itemsize}") if array.itemsize <= 8 else array.view("u8")
                np.bitwise_not(bits, out=bits)


def job_state(rank: int, step: int) -> State:
    """pp2 x dp2 x tp2, and a table tied between the first and the last ranks; values in between."""
    stage, tp = rank // 4, rank % 2
    state: State = {"step": step, "nested": [step / 7, ("x", step)]}
    for number in range(12):
        name = f"stage{stage}.w{number}"
        shape = (6 + number, 10)
        state[name] = ShardedArray.cut(true_array(name, shape), even_boxes(shape, 2, tp, number % 2))
        state[f"stage{stage}.norm{number}"] = true_array(f"stage{stage}.norm{number}", (7,))
    if rank in (0, 1, 6, 7):
        state["tied"] = true_array("tied", (300, 40))
    two = [Box((2, 2), (2, 3)), Box((2, 0), (2, 2))] if tp else [Box((4, 0), (4, 5)), Box((0, 0), (2, 5))]
    state["scattered"] = ShardedArray.cut(true_array("scattered", (8, 5)), two)
    return state


def whole_state() -> State:
    """Everything, as one process saves it."""
    state: State = {"step": 3, "nested": [3 / 7, ("x", 3)], "scattered": true_array("scattered", (8, 5))}
    for stage in range(2):
        for number in range(12):
            name = f"stage{stage}.w{number}"
            state[name] = true_array(name, (6 + number, 10))
            state[f"stage{stage}.norm{number}"] = true_array(f"stage{stage}.norm{number}", (7,))
    return state | {"tied": true_array("tied", (300, 40))}


def descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def load_in_every_mode(context: RankContext, directory: str) -> list[str]:
    expected, wrong = job_state(context.rank, 3), []
    pairs = {(0, 1): (0, 1), (2, 0): (0, 2), (0, 1, 6, 7): (7, 6, 1, 0)}
    own = {ranks: group for ranks, group in pairs.items() if context.rank in ranks}
    prints = []
    for mode in MODES:
        for batch_bytes in BATCH_BYTES:
            for groups in (None, own) if mode is True else (None,):
                state = job_state(context.rank, 0)
                poison(state)
                load(
                    state,
                    directory,
                    broadcast_replicated_tensors=mode,
                    broadcast_batch_bytes=batch_bytes,
                    broadcast_groups=groups,
                )
                found, right = bits_of(state), bits_of(expected)
                wrong += [f"{mode} {batch_bytes} {name}" for name in right if found[name] != right[name]]
                if (state["step"], state["nested"]) != (3, [3 / 7, ("x", 3)]):
                    wrong.append(f"{mode} {batch_bytes} values")
                prints.append(descriptors_and_threads())
    return wrong + ([] if prints[1:] == [prints[1]] * (len(prints) - 1) else [f"left over: {prints}"])


def small_arrays() -> State:
    return {f"w{number}": true_array(f"w{number}", (10,)) for number in range(100)}


def load_in_many_batches(context: RankContext, directory: str) -> list[int]:
    """Whether a load is right, and of what sizes temporary memory was made for it."""
    temporary, made = NumpyBroadcastGroup.temporary, list[int]()

    def counted(group: NumpyBroadcastGroup, nbytes: int, view: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        made.append(nbytes)
        return temporary(group, nbytes, view)

    state = small_arrays()
    poison(state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumpyBroadcastGroup, "temporary", counted)
        load(state, directory, broadcast_batch_bytes=200)
    assert bits_of(state) == bits_of(small_arrays())
    return made


def test_memory_of_batches_is_used_again(tmp_path: Path) -> None:
    api.save(small_arrays(), checkpoint_id=tmp_path / "c", durable=False)
    for made in run_ranks(load_in_many_batches, 2, str(tmp_path / "c")):
        assert 1 <= len(made) <= 8
        assert max(made) <= 200


def test_every_rank_of_a_job_gets_every_element(tmp_path: Path) -> None:
    api.save(whole_state(), checkpoint_id=tmp_path / "c", durable=False)
    assert run_ranks(load_in_every_mode, 8, str(tmp_path / "c"), timeout_seconds=80) == [[]] * 8


# -- bytes ------------------------------------------------------------------------------------------------------------


class CountedOperations(FileOperations):
    """Counts bytes that are read of files of tensors.

    Args:
        data_start: Where data starts in them.
    """

    def __init__(self, data_start: int = 0) -> None:
        self.nbytes = 0
        self.data_start = data_start
        self._tensors: dict[int, bool] = {}
        self._lock = threading.Lock()

    def open_read(self, path: str) -> int:
        descriptor = super().open_read(path)
        self._tensors[descriptor] = path.endswith(".safetensors")
        return descriptor

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        count = super().preadv(descriptor, buffers, offset)
        if self._tensors[descriptor]:
            with self._lock:
                self.nbytes += max(0, offset + count - max(offset, self.data_start))
        return count


def reader_on(directory: str, operations: FileOperations) -> FileSystemReader:
    return FileSystemReader(storage=LocalStorage(directory, operations))


def load_by(reader: FileSystemReader, state: State, **options: Any) -> None:
    api.load(state, storage_reader=reader, adapter=ADAPTER, **{"timeout_seconds": SECONDS, **options})


def tables(seed: int = 0) -> State:
    random = np.random.default_rng(seed)
    return {f"w{n:02}": random.integers(0, 256, (40 + n, 4000), np.uint8) for n in range(40)}


def load_counted(context: RankContext, directory: str, data_start: int) -> tuple[bool, list[int]]:
    right, counts = True, []
    for mode in (True, False):
        operations, state = CountedOperations(data_start), tables(1)
        load_by(reader_on(directory, operations), state, broadcast_replicated_tensors=mode)
        right = right and bits_of(state) == bits_of(tables())
        counts.append(operations.nbytes)
    return right, counts


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_what_all_ranks_want_is_taken_from_storage_once(replicas: int, tmp_path: Path) -> None:
    api.save(tables(), checkpoint_id=tmp_path / "c", durable=False)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    data_start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    total = sum(array.nbytes for array in tables().values())
    found = run_ranks(load_counted, replicas, str(tmp_path / "c"), data_start)
    assert all(right for right, _ in found)
    shared = [counts[0] for _, counts in found]
    assert sum(shared) == total
    assert max(shared) <= 1.1 * min(shared)
    assert [counts[1] for _, counts in found] == [total] * replicas


def load_and_count_answers(context: RankContext, directory: str) -> list[int]:
    """How many answers for one rank alone this rank posts, in loads of rows and in loads of whole tensors."""
    channel = ADAPTER.process_group().channel
    assert channel is not None
    put = type(channel).put
    posted: list[str] = []

    def counted(self: Any, name: str, payload: bytes) -> None:
        posted.append(name)
        put(self, name, payload)

    whole, counts = true_array("table", (8, 5)), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(channel), "put", counted)
        for target in (ShardedArray.cut(whole, even_boxes((8, 5), 2, context.rank, 0)), whole):
            for mode in (True, False):
                state: State = {"table": target}
                expected = bits_of(state)
                poison(state)
                posted.clear()
                load(state, directory, broadcast_replicated_tensors=mode)
                assert bits_of(state) == expected
                counts.append(sum(name.endswith(".answer") for name in posted))
    return counts


def test_where_nobody_shares_one_answer_is_for_all_ranks(tmp_path: Path) -> None:
    api.save({"table": true_array("table", (8, 5))}, checkpoint_id=tmp_path / "c", durable=False)
    assert run_ranks(load_and_count_answers, 2, str(tmp_path / "c")) == [[0, 0, 1, 0], [0] * 4]


ODD_SHAPE = (3000, 1001)
"""Of a table whose rows end nowhere near the edges of checksum blocks."""

BLOCKS = -(-3000 * 1001 * 4 >> 20)


def flip(directory: str, block: int) -> None:
    """Flip a bit of a checksum block of the data."""
    [path] = Path(directory).glob("_rank0_*safetensors")
    with path.open("r+b") as file:
        place = 8 + int.from_bytes(file.read(8), "little") + (block << 20) + 1001
        file.seek(place)
        value = file.read(1)[0] ^ 4
        file.seek(place)
        file.write(bytes([value]))


def load_damaged(context: RankContext, directory: str) -> list[int]:
    """In which blocks damage is not seen."""
    unseen = []
    for block in range(BLOCKS):
        with together(context):
            if context.rank == 0:
                flip(directory, block)
        try:
            load({"w": np.zeros(ODD_SHAPE, np.float32)}, directory)
        except CorruptError:
            pass
        else:
            unseen.append(block)
        with together(context):
            if context.rank == 0:
                flip(directory, block)
    return unseen


def test_damage_is_seen_wherever_readers_cut_a_buffer(tmp_path: Path) -> None:
    table = np.arange(3000 * 1001, dtype=np.float32).reshape(ODD_SHAPE)
    api.save({"w": table}, checkpoint_id=tmp_path / "c", durable=False)
    assert run_ranks(load_damaged, 3, str(tmp_path / "c"), timeout_seconds=80) == [[]] * 3


WIDE_SHAPE = (12, 300_001)
"""Of a table whose rows are longer than checksum blocks."""

COLUMNS = 100_000


def flip_beside(directory: str, row: int) -> None:
    """Flip a bit right behind the columns of a row that are loaded: in a block of which they are a part."""
    [path] = Path(directory).glob("_rank0_*safetensors")
    with path.open("r+b") as file:
        place = 8 + int.from_bytes(file.read(8), "little") + 4 * (row * WIDE_SHAPE[1] + COLUMNS)
        file.seek(place)
        value = file.read(1)[0] ^ 4
        file.seek(place)
        file.write(bytes([value]))


def load_columns(context: RankContext, directory: str) -> list[tuple[int, bool | str, bool, bool]]:
    """Whether damage beside what is loaded is seen: by row, way to check, and way to read."""
    target = ShardedArray.cut(np.zeros(WIDE_SHAPE, np.float32), [Box((0, 0), (WIDE_SHAPE[0], COLUMNS))])
    found: list[tuple[int, bool | str, bool, bool]] = []
    for row in (0, 5, 11):
        with together(context):
            if context.rank == 0:
                flip_beside(directory, row)
        for verify in (True, "full"):
            for shared in (True, False):
                try:
                    load({"w": target}, directory, verify=verify, broadcast_replicated_tensors=shared)
                except CorruptError:
                    found.append((row, verify, shared, True))
                else:
                    found.append((row, verify, shared, False))
        with together(context):
            if context.rank == 0:
                flip_beside(directory, row)
    load({"w": target}, directory, verify="full")
    return found


def test_all_that_is_touched_is_checked_where_readers_share_it_too(tmp_path: Path) -> None:
    table = np.arange(np.prod(WIDE_SHAPE), dtype=np.float32).reshape(WIDE_SHAPE)
    api.save({"w": table}, checkpoint_id=tmp_path / "c", durable=False)
    for found in run_ranks(load_columns, 3, str(tmp_path / "c"), timeout_seconds=80):
        assert [is_seen for *_, is_seen in found] == [False, False, True, True] * 3, found


# -- faults -----------------------------------------------------------------------------------------------------------


class FailingOperations(CountedOperations):
    """Reads of data fail, or kill the process."""

    def __init__(self, kills: bool) -> None:
        super().__init__()
        self._kills = kills

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        count = super().preadv(descriptor, buffers, offset)
        if self.nbytes > 100_000:
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return count


def load_while_disks_fail(context: RankContext, directory: str) -> list[str]:
    found = []
    for failing in range(context.world_size):
        operations = FailingOperations(kills=False) if context.rank == failing else CountedOperations()
        began = time.monotonic()
        with pytest.raises(StorageError, match="undefined") as caught:
            load_by(reader_on(directory, operations), tables(1))
        assert time.monotonic() - began < SECONDS
        found.append(str(caught.value))
        state = tables(1)
        load(state, directory)
        assert bits_of(state) == bits_of(tables())
    return found


def test_the_error_of_one_disk_is_that_of_all_ranks_and_the_next_load_works(tmp_path: Path) -> None:
    api.save(tables(), checkpoint_id=tmp_path / "c", durable=False)
    found = run_ranks(load_while_disks_fail, 4, str(tmp_path / "c"))
    assert found == [found[0]] * 4
    assert all(f"rank {rank}" in text for rank, text in enumerate(found[0]))


def load_while_one_dies(context: RankContext, directory: str) -> str:
    operations = FailingOperations(kills=True) if context.rank == 1 else CountedOperations()
    with pytest.raises(CoordinationError) as caught:
        load_by(reader_on(directory, operations), tables(1), timeout_seconds=2.0)
    return str(caught.value)


def test_a_rank_that_is_killed_is_named_in_bounded_time(tmp_path: Path) -> None:
    api.save(tables(), checkpoint_id=tmp_path / "c", durable=False)
    found = run_ranks(load_while_one_dies, 3, str(tmp_path / "c"), return_exceptions=True)
    assert isinstance(found.pop(1), RankProcessError)
    assert all("rank 1" in text or "ranks 1" in text for text in found), found


# -- what was shared is saved again -----------------------------------------------------------------------------------


def save_and_load_by_turns(context: RankContext, directory: str) -> bool:
    state = job_state(context.rank, 5)
    for turn in range(3):
        with together(context):
            save(state, f"{directory}/{turn}")
        poison(state)
        load(state, f"{directory}/{turn}")
    return bits_of(state) == bits_of(job_state(context.rank, 5))


def test_saves_and_loads_by_turns_keep_every_element(tmp_path: Path) -> None:
    assert run_ranks(save_and_load_by_turns, 8, str(tmp_path)) == [True] * 8
