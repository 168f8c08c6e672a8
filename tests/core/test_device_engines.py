"""Saves and loads of arrays on a simulated device: right bits, bounded host memory, copies that overlap, no misuse.

The device does its copies as late as it may, or by a thread of its own. Its check at the end finds copies that were not
awaited, and host memory that was touched too early.
"""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dcp_core import api
from dcp_core.arrays import convert
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, DTYPES
from dcp_core.errors import CorruptError, DcpError, RankFailedError
from dcp_core.execution import staging
from dcp_core.planning import layout
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.testing.device_ranks import DeviceRankAdapter, ShardedDeviceArray
from dcp_core.testing.devices import DeviceArray, SimulatedDevice
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.streams import Pace
from tests.core.engine_fakes import bits_of, same
from tests.core.io_probes import FailingOperations, reader_over, refusal, writer_over

pytestmark = pytest.mark.timeout(120)

KIBIBYTE, MEBIBYTE = 1 << 10, 1 << 20
PACES: tuple[Pace, ...] = ("late", "thread", "at once")
HOST_LIMIT = 64 * MEBIBYTE
Array = npt.NDArray[Any]
Values = Mapping[str, tuple[Array, str]]


def save(state: Any, path: Path, **options: Any) -> None:
    planner = StandardSavePlanner(enable_plan_caching=False)  # the number of parts differs between tests
    api.save(state, checkpoint_id=path, adapter=DeviceRankAdapter(), planner=planner, durable=False, **options)


def load(state: Any, path: Path, **options: Any) -> None:
    api.load(state, checkpoint_id=path, adapter=DeviceRankAdapter(), **options)


@contextmanager
def device_of(pace: Pace = "late", **options: Any) -> Iterator[SimulatedDevice]:
    """A device that is checked at the end, when no thread may be left."""
    before = set(threading.enumerate())
    with SimulatedDevice(pace=pace, host_limit_nbytes=HOST_LIMIT, **options) as device:
        yield device
    assert set(threading.enumerate()) <= before


@contextmanager
def several_parts(nbytes: int) -> Iterator[None]:
    """Several files a rank already for little data, so that several threads write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PART_NBYTES", nbytes)
        yield


def small_values() -> dict[str, tuple[Array, str]]:
    """Every type and every kind of shape."""
    shapes = ((5, 7), (3,), (), (2, 3, 4), (0, 3), (1, 1, 1))
    return {
        f"{dtype.name} {shape}": (bits_of(shape, dtype, seed), dtype.name)
        for seed, dtype in enumerate(DTYPES)
        for shape in shapes
    }


def large_values() -> dict[str, tuple[Array, str]]:
    """Sizes beside the edges of blocks and buffers, and many small ones between them."""
    block, buffer = MEBIBYTE, staging.DEVICE_BUFFER_BYTES
    sizes = [block - 2, block, block + 2, buffer - 2, buffer, buffer + 2, 2 * buffer + 6, 5 * buffer + 2]
    values = {
        f"{number} large": (bits_of((size // 2,), BY_NAME["bfloat16"], number), "bfloat16")
        for number, size in enumerate(sizes)
    }
    for number in range(200):
        values[f"{number % 8} small {number}"] = (bits_of((number,), BY_NAME["float32"], number), "float32")
    return values


def is_free(device: SimulatedDevice) -> bool:
    """Whether no host memory outlives the calls."""
    gc.collect()
    return device.host_nbytes == 0


def put(device: SimulatedDevice, values: Values) -> dict[str, DeviceArray]:
    return {key: device.put(bits, name) for key, (bits, name) in values.items()}


def empty(device: SimulatedDevice, values: Values) -> dict[str, DeviceArray]:
    return put(device, {key: (np.zeros_like(bits), name) for key, (bits, name) in values.items()})


def differing(device: SimulatedDevice, state: Mapping[str, DeviceArray], values: Values) -> list[str]:
    return [key for key, (bits, _) in values.items() if not same(device.get(state[key]), bits)]


# -- right bits, without a blocking copy ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [small_values, large_values])
@pytest.mark.parametrize("pace", PACES)
def test_what_a_device_holds_is_saved_and_loaded_through_copies_that_do_not_block(
    tmp_path: Path, pace: Pace, make: Any
) -> None:
    values = make()
    with device_of(pace) as device:
        save(put(device, values), tmp_path / "checkpoint")
        target = empty(device, values)
        load(target, tmp_path / "checkpoint")
        assert differing(device, target, values) == []
        assert device.blocking_nbytes == 0
        assert device.copies_out >= sum(bits.size > 0 for bits, _ in values.values())
        assert device.copies_in >= sum(bits.size > 0 for bits, _ in values.values())
        assert is_free(device)


@pytest.mark.parametrize("pace", PACES)
def test_several_files_are_written_at_once_from_one_device(tmp_path: Path, pace: Pace) -> None:
    values = large_values()
    with device_of(pace) as device, several_parts(12 * MEBIBYTE):
        save(put(device, values), tmp_path / "checkpoint")
        assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 2
        target = empty(device, values)
        load(target, tmp_path / "checkpoint", verify="full")
        assert differing(device, target, values) == []
        assert device.blocking_nbytes == 0


def test_where_arrays_lie_makes_no_difference_to_the_data_files(tmp_path: Path) -> None:
    values = large_values() | small_values()
    with device_of() as device:
        save(put(device, values), tmp_path / "device")
    on_host = {key: bits.copy() for key, (bits, name) in values.items() if BY_NAME[name].numpy is not None}
    with device_of() as device:
        save({key: device.put(bits) for key, bits in on_host.items()}, tmp_path / "native on device")
    api.save(on_host, checkpoint_id=tmp_path / "native on host", adapter=NumpyRankAdapter(), durable=False)
    assert data_bytes(tmp_path / "native on device") == data_bytes(tmp_path / "native on host")


def data_bytes(directory: Path) -> dict[str, bytes]:
    """The data sections of the tensor files."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        found[path.name.partition(".")[0]] = raw[8 + int.from_bytes(raw[:8], "little") :]
    return found


@pytest.mark.parametrize("pace", PACES)
def test_arrays_of_any_order_in_memory_are_saved_and_filled(tmp_path: Path, pace: Pace) -> None:
    dtype = BY_NAME["float16"]
    bits = bits_of((700, 900, 3), dtype, 1)
    with device_of(pace) as device:
        wide = device.put(np.repeat(bits, 2, axis=1))
        every_other = DeviceArray(device, dtype, wide.memory[:, ::2])
        fortran = device.put(np.asfortranarray(bits))
        save({"fortran": fortran, "every other": every_other}, tmp_path / "checkpoint")
        target = {"fortran": device.put(np.zeros_like(bits)), "every other": device.put(np.zeros((3, 900, 700), "f2"))}
        target["every other"] = DeviceArray(device, dtype, target["every other"].memory.T)
        load(target, tmp_path / "checkpoint")
        assert [key for key in target if not same(device.get(target[key]), bits)] == []
        before = device.get(wide)
        every_other.memory[...] = 0
        load({"every other": every_other}, tmp_path / "checkpoint")
        assert same(device.get(wide), before), "the elements are back, and nothing beside them is written"
        assert device.blocking_nbytes == 0


@pytest.mark.parametrize("verify", [True, "full", False])
@pytest.mark.parametrize("seed", range(6))
def test_shards_of_any_cut_are_loaded_into_shards_of_any_other(tmp_path: Path, seed: int, verify: Any) -> None:
    rng = Random(seed)
    shape = (rng.randint(100, 900), rng.randint(100, 1500))
    name = rng.choice(["float32", "bfloat16", "uint8", "complex128"])
    bits = bits_of(shape, BY_NAME[name], seed)
    with device_of(rng.choice(PACES)) as device:
        save({"w": ShardedDeviceArray.cut(device, bits, cut(rng, shape), name)}, tmp_path / "checkpoint")
        boxes = cut(rng, shape)
        target = ShardedDeviceArray.cut(device, np.zeros_like(bits), boxes, name)
        load({"w": target}, tmp_path / "checkpoint", verify=verify)
        for box, array in zip(boxes, target.arrays, strict=True):
            (top, left), (height, width) = box.offsets, box.sizes
            assert same(device.get(array), bits[top : top + height, left : left + width])
        assert (device.blocking_nbytes, device.scattered_copies) == (0, 0)


def cut(rng: Random, shape: tuple[int, int]) -> list[Box]:
    """Boxes that tile a matrix."""
    edges = [sorted({0, size, *(rng.randint(1, size - 1) for _ in range(rng.randint(0, 3)))}) for size in shape]
    return [
        Box((top, left), (bottom - top, right - left))
        for top, bottom in zip(edges[0][:-1], edges[0][1:], strict=True)
        for left, right in zip(edges[1][:-1], edges[1][1:], strict=True)
    ]


@pytest.mark.parametrize(("source", "target"), [("bfloat16", "float32"), ("float64", "bfloat16"), ("int8", "int64")])
def test_elements_are_converted_by_the_device(tmp_path: Path, source: str, target: str) -> None:
    values = np.random.default_rng(2).integers(-100, 100, (1200, 1100))
    bits = convert(values.astype("int64"), BY_NAME["int64"], BY_NAME[source])
    expected = convert(bits, BY_NAME[source], BY_NAME[target])
    with device_of() as device:
        save({"w": device.put(bits, source)}, tmp_path / "checkpoint")
        array = device.put(np.zeros_like(expected), target)
        load({"w": array}, tmp_path / "checkpoint")
        assert same(device.get(array), expected)
        assert device.blocking_nbytes == 0


def test_arrays_on_devices_and_on_the_host_are_saved_in_one_state(tmp_path: Path) -> None:
    values = large_values()
    with device_of() as first, device_of("thread") as second, device_of(has_streams=False) as blocking:
        devices = (first, second, blocking, None)
        places = {key: devices[number % 4] for number, key in enumerate(values)}
        state = {
            key: np.array(bits) if device is None else device.put(bits, name)
            for (key, (bits, name)), device in zip(values.items(), places.values(), strict=True)
        }
        save(state, tmp_path / "checkpoint")
        for array in state.values():
            memory = array if isinstance(array, np.ndarray) else array.memory
            memory[...] = 0
        load(state, tmp_path / "checkpoint")
        for key, array in state.items():
            found = array if isinstance(array, np.ndarray) else array.device.get(array)
            assert same(found, values[key][0])
        assert (first.blocking_nbytes, second.blocking_nbytes) == (0, 0)
        assert (blocking.copies_out, blocking.copies_in) == (0, 0)


# -- overlap and memory -----------------------------------------------------------------------------------------------


def test_copies_overlap_with_writing_and_reading_in_a_few_buffers(tmp_path: Path) -> None:
    values = {"w": (bits_of((40 * MEBIBYTE,), BY_NAME["uint8"], 1), "uint8")}
    with device_of("late") as device:
        save(put(device, values), tmp_path / "checkpoint")
        buffers = staging.DEVICE_BUFFERS * staging.DEVICE_BUFFER_BYTES
        assert device.most_in_flight == staging.DEVICE_BUFFERS > 1
        assert device.peak_host_nbytes == buffers
        assert is_free(device)
        target = empty(device, values)
        device.most_in_flight = device.peak_host_nbytes = 0
        load(target, tmp_path / "checkpoint")
        assert device.most_in_flight > 1
        assert 0 < device.peak_host_nbytes <= 16 * MEBIBYTE
        assert differing(device, target, values) == []


def test_a_little_work_takes_a_little_memory(tmp_path: Path) -> None:
    values = small_values()
    with device_of() as device:
        save(put(device, values), tmp_path / "checkpoint")
        assert device.peak_host_nbytes <= staging.DEVICE_BUFFER_BYTES
        load(empty(device, values), tmp_path / "checkpoint")
        assert device.peak_host_nbytes <= staging.DEVICE_BUFFER_BYTES


def test_while_the_device_copies_one_buffer_others_are_written(tmp_path: Path) -> None:
    """The device stands still after two copies: the save has queued more, and written what came before."""
    values = {f"{number}": (bits_of((4 * MEBIBYTE,), BY_NAME["uint8"], number), "uint8") for number in range(8)}
    writes = FailingOperations("pwritev")
    with device_of("steps") as device, ThreadPoolExecutor(1) as pool:
        state = put(device, values)
        saving = pool.submit(save, state, tmp_path / "checkpoint", storage_writer=writer_over(writes))
        try:
            device.stream.wait_queued(staging.DEVICE_BUFFERS)
            assert writes.calls == 0
            device.stream.step(2)
            device.stream.wait_queued(staging.DEVICE_BUFFERS + 2)
            assert writes.calls > 0
            assert not saving.done()
        finally:
            device.stream.step(1000)
        saving.result()
        assert device.most_in_flight == staging.DEVICE_BUFFERS


# -- failures ---------------------------------------------------------------------------------------------------------


def faulty_values() -> dict[str, tuple[Array, str]]:
    """Some copies that fill a buffer, and some that share one."""
    sizes = [900 * KIBIBYTE] * 7 + [100] * 5
    return {f"{number}": (bits_of((size,), BY_NAME["uint16"], number), "uint16") for number, size in enumerate(sizes)}


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("pace", PACES)
def test_a_copy_that_fails_ends_the_save_with_its_error_and_leaves_nothing_behind(
    tmp_path: Path, pace: Pace, parts: int
) -> None:
    values = faulty_values()
    with device_of(pace) as counting:
        save(put(counting, values), tmp_path / "counted")
    for number in range(counting.copies_out):
        path = tmp_path / f"{number}"
        with (
            device_of(pace, faults={number: RuntimeError("device lost")}) as device,
            several_parts(16 * MEBIBYTE // parts),
        ):
            with pytest.raises(RankFailedError, match="RuntimeError: device lost"):
                save(put(device, values), path)
            assert not list(path.glob("*.safetensors"))
            assert not list(path.glob(".metadata"))


@pytest.mark.parametrize("pace", PACES)
def test_a_copy_that_fails_ends_the_load_with_its_error(tmp_path: Path, pace: Pace) -> None:
    values = faulty_values()
    with device_of(pace) as device:
        save(put(device, values), tmp_path / "checkpoint")
        load(empty(device, values), tmp_path / "checkpoint")
    assert device.copies_in >= len(values)
    for number in range(device.copies_in):
        with device_of(pace, faults={number: RuntimeError("device lost")}) as faulty:
            target = empty(faulty, values)
            with pytest.raises(RankFailedError, match="RuntimeError: device lost"):
                load(target, tmp_path / "checkpoint")


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("method", ["pwritev", "create", "close_written"])
def test_a_disk_that_fails_during_copies_leaves_no_copy_behind(tmp_path: Path, method: str, parts: int) -> None:
    values = large_values()
    counted = FailingOperations(method)
    with several_parts(40 * MEBIBYTE // parts):
        with device_of() as device:
            save(put(device, values), tmp_path / "counted", storage_writer=writer_over(counted))
        assert counted.calls >= parts
        for number in {1, 1 + counted.calls // 2, counted.calls}:
            failing = FailingOperations(method, number, refusal(errno.ENOSPC))
            with device_of("thread") as device, pytest.raises(DcpError, match="No space left"):
                save(put(device, values), tmp_path / f"{number}", storage_writer=writer_over(failing))


@pytest.mark.parametrize("verify", [True, "full"])
def test_damaged_bytes_end_the_load_and_every_copy_is_awaited(tmp_path: Path, verify: Any) -> None:
    values = large_values()
    with device_of() as device:
        save(put(device, values), tmp_path / "checkpoint")
    path = next((tmp_path / "checkpoint").glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    for place in (len(raw) - 1, len(raw) // 2, len(raw) // 3):
        damaged = bytearray(raw)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with device_of("thread") as device, pytest.raises(CorruptError, match="contradict their checksum"):
            load(empty(device, values), tmp_path / "checkpoint", verify=verify)


def test_a_disk_that_fails_during_a_load_leaves_no_copy_behind(tmp_path: Path) -> None:
    values = large_values()
    counted = FailingOperations("preadv")
    with device_of() as device:
        save(put(device, values), tmp_path / "checkpoint")
        load(empty(device, values), tmp_path / "checkpoint", storage_reader=reader_over(counted))
    for number in {1, 1 + counted.calls // 2, counted.calls}:
        failing = FailingOperations("preadv", number, refusal(errno.EIO))
        with device_of("thread") as device, pytest.raises(DcpError, match="Input/output error"):
            load(empty(device, values), tmp_path / "checkpoint", storage_reader=reader_over(failing))
