"""The simulated device: right bits, copies no sooner than they are awaited, and every broken rule found."""

from __future__ import annotations

import gc
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dcp_core import api
from dcp_core.arrays import convert
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, DTYPES, DType
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.planning.leaves import DeviceTransfers, TensorAccess
from dcp_core.testing.device_ranks import DeviceRankAdapter, ShardedDeviceArray
from dcp_core.testing.devices import POISON, DeviceArray, DeviceMisuseError, SimulatedDevice
from dcp_core.testing.numpy_ranks import even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from dcp_core.testing.streams import Pace, WorkStream
from tests.core.engine_fakes import bits_of, same

pytestmark = pytest.mark.timeout(60)
PACES: tuple[Pace, ...] = ("at once", "late", "thread")
Array = npt.NDArray[Any]


def conforms(device: SimulatedDevice) -> tuple[TensorAccess, DeviceTransfers]:
    return device, device


def copied_out(device: SimulatedDevice, view: DeviceArray) -> Array:
    target = device.host_memory(view.nbytes)
    device.start_copy_out(view, target)()
    return target.view(view.dtype.bits).reshape(view.shape).copy()


def in_host_memory(device: SimulatedDevice, bits: Array) -> Array:
    memory = device.host_memory(bits.nbytes).view(bits.dtype).reshape(bits.shape)
    memory[...] = bits
    return memory


def stored(device: SimulatedDevice, bits: Array, dtype: DType) -> DeviceArray:
    return device.put(bits, dtype.name)


# -- the stream -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", PACES)
def test_work_is_done_in_order_and_before_its_wait_returns(pace: Pace) -> None:
    done: list[int] = []
    with WorkStream(pace) as stream:
        waits = [stream.queue(partial(done.append, number)) for number in range(5)]
        for number, wait in enumerate(waits):
            wait()
            assert done[: number + 1] == list(range(number + 1))
            wait()
    assert done == list(range(5))


def test_late_work_is_done_when_a_later_piece_is_awaited_and_no_sooner() -> None:
    done: list[str] = []
    with WorkStream("late") as stream:
        first = stream.queue(lambda: done.append("first"))
        second = stream.queue(lambda: done.append("second"))
        stream.queue(lambda: done.append("third"))
        assert done == []
        second()
        assert done == ["first", "second"]
        first()
    assert done == ["first", "second"]


def test_stepped_work_is_done_as_far_as_it_is_allowed() -> None:
    done: list[int] = []
    with WorkStream("steps") as stream, ThreadPoolExecutor(1) as pool:
        waits = [stream.queue(partial(done.append, number)) for number in range(3)]
        future = pool.submit(waits[1])
        stream.wait_queued(3)
        assert done == []
        stream.step(2)
        future.result(60)
        assert done == [0, 1]
    assert done == [0, 1, 2], "closing does the rest"


@pytest.mark.parametrize("pace", PACES)
def test_what_work_raises_is_raised_where_it_is_awaited_and_later_work_goes_on(pace: Pace) -> None:
    def fail() -> None:
        raise OSError("device lost")

    done: list[int] = []
    with WorkStream(pace) as stream:
        failed, other = stream.queue(fail), stream.queue(lambda: done.append(1))
        other()
        with pytest.raises(OSError, match="device lost"):
            failed()
    assert done == [1]
    with pytest.raises(ArgumentError, match="closed"):
        stream.queue(lambda: None)


def test_waiting_for_work_that_is_never_queued_ends() -> None:
    with WorkStream("late") as stream, pytest.raises(TimeoutError, match="0 pieces of work were queued"):
        stream.wait_queued(1, 0.01)


# -- right bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_bits_of_every_type_travel_out_and_in_unchanged(dtype: DType, pace: Pace) -> None:
    bits, other = bits_of((5, 4), dtype, 1), bits_of((5, 4), dtype, 2)
    with SimulatedDevice(pace=pace) as device:
        view = stored(device, bits, dtype)
        assert same(copied_out(device, view), bits)
        device.start_copy_in(view, in_host_memory(device, other), dtype)()
        assert same(device.get(view), other)
        assert same(device.read_out(view), other)
        device.copy_into(view, bits, dtype)
        assert same(device.get(view), bits)
    assert (device.copies_out, device.copies_in, device.blocking_nbytes) == (1, 1, 2 * bits.nbytes)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2)])
def test_arrays_without_dimensions_or_elements_travel(shape: tuple[int, ...]) -> None:
    dtype = BY_NAME["float32"]
    bits, other = bits_of(shape, dtype, 1), bits_of(shape, dtype, 2)
    with SimulatedDevice() as device:
        view = stored(device, bits, dtype)
        assert same(copied_out(device, view), bits)
        device.start_copy_in(view, in_host_memory(device, other), dtype)()
        assert same(device.get(view), other)


def test_a_narrowed_part_shares_the_memory_of_the_whole() -> None:
    dtype = BY_NAME["bfloat16"]
    whole = bits_of((6, 8), dtype, 1)
    with SimulatedDevice() as device:
        view = device.put(np.asfortranarray(whole), "bfloat16")
        part = device.narrow(view, Box((1, 2), (3, 5)))
        assert same(copied_out(device, part), whole[1:4, 2:7])
        new = bits_of((3, 5), dtype, 2)
        device.start_copy_in(part, in_host_memory(device, new), dtype)()
        expected = whole.copy()
        expected[1:4, 2:7] = new
        assert same(device.get(view), expected)


def test_elements_of_another_type_are_converted_on_the_way_in() -> None:
    values = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
    float32, bfloat16 = BY_NAME["float32"], BY_NAME["bfloat16"]
    with SimulatedDevice() as device:
        view = stored(device, np.zeros((3, 4), np.uint16), bfloat16)
        device.start_copy_in(view, in_host_memory(device, values), float32)()
        assert same(device.get(view), convert(values, float32, bfloat16))


def test_values_whose_type_cannot_be_stored_are_refused() -> None:
    with SimulatedDevice() as device:
        for array, name in ((np.array(["text"]), None), (np.zeros(3, np.uint8), "bfloat16")):
            with pytest.raises(UnsupportedValueError):
                device.put(array, name)


# -- no sooner than it is awaited -------------------------------------------------------------------------------------


def test_the_target_of_a_copy_holds_poison_until_it_is_done() -> None:
    dtype = BY_NAME["int32"]
    with SimulatedDevice(pace="late") as device:
        view = stored(device, bits_of((4,), dtype), dtype)
        target = device.host_memory(16)
        target[:] = 0
        wait = device.start_copy_out(view, target)
        assert (target == POISON).all()
        wait()
        assert not (target == POISON).all()
        wait = device.start_copy_in(view, in_host_memory(device, bits_of((4,), dtype, 3)), dtype)
        assert (device.get(view).view(np.uint8) == POISON).all()
        wait()
        assert same(device.get(view), bits_of((4,), dtype, 3))


def test_the_host_cannot_go_around_the_device() -> None:
    with SimulatedDevice() as device, SimulatedDevice("simulated:1") as other:
        view = device.put(np.arange(3))
        assert device.host_array(view) is None
        with pytest.raises(DeviceMisuseError, match="copy it out"):
            np.asarray(view)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(view)
        assert repr(view) == "DeviceArray(int64[3] on simulated:0)"
        with pytest.raises(DeviceMisuseError, match="does not lie on simulated:1"):
            other.read_out(view)
        other.misuses.clear()


def test_a_device_without_streams_has_blocking_copies_only() -> None:
    with SimulatedDevice(has_streams=False) as device:
        assert device.transfers(device.put(np.arange(3))) is None
    with SimulatedDevice() as device:
        assert device.transfers(device.put(np.arange(3))) is device


def test_copies_in_flight_are_counted_until_they_are_awaited() -> None:
    with SimulatedDevice() as device:
        view = device.put(np.arange(4))
        waits = [device.start_copy_out(view, device.host_memory(32)) for _ in range(3)]
        for wait in waits:
            wait()
        device.start_copy_out(view, device.host_memory(32))()
        assert (device.most_in_flight, device.copies_out) == (3, 4)


def test_copies_from_memory_that_is_not_contiguous_are_right_and_counted() -> None:
    with SimulatedDevice() as device:
        memory = in_host_memory(device, np.arange(8))
        view = device.put(np.zeros(4, np.int64))
        device.start_copy_in(view, memory[::2], BY_NAME["int64"])()
        assert device.get(view).tolist() == [0, 2, 4, 6]
        device.start_copy_in(view, memory[4:], BY_NAME["int64"])()
        assert (device.scattered_copies, device.copies_in) == (1, 2)


def test_a_fault_is_raised_where_the_copy_is_awaited() -> None:
    with SimulatedDevice(faults={1: RuntimeError("uncorrectable memory error")}) as device:
        view = device.put(np.arange(4))
        copied_out(device, view)
        target = device.host_memory(32)
        wait = device.start_copy_out(view, target)
        with pytest.raises(RuntimeError, match="uncorrectable"):
            wait()
        assert (target == POISON).all()
        copied_out(device, view)


# -- every broken rule ------------------------------------------------------------------------------------------------


def misused(device: SimulatedDevice, text: str) -> None:
    """The device knows, and says so at the end."""
    with pytest.raises(DeviceMisuseError, match=text):
        device.check()
    device.misuses.clear()


@pytest.mark.parametrize("offset", [0, 17, 31])
def test_writing_to_the_target_of_a_copy_before_it_is_done_is_found(offset: int) -> None:
    with SimulatedDevice(pace="late") as device:
        target = device.host_memory(32)
        wait = device.start_copy_out(device.put(np.arange(4)), target)
        target[offset] ^= 1
        with pytest.raises(DeviceMisuseError, match="target of copy 0 before it was done"):
            wait()
        misused(device, "target of copy 0 before it was done")


def test_writing_to_memory_of_a_copy_that_is_done_but_not_awaited_is_found() -> None:
    with SimulatedDevice(pace="at once") as device:
        target, source = device.host_memory(32), device.host_memory(32)
        view = device.put(np.arange(4))
        wait = device.start_copy_out(view, target)
        target[3] ^= 1
        with pytest.raises(DeviceMisuseError, match="memory of copy 0 before it was awaited"):
            wait()
        wait = device.start_copy_in(view, source.view(np.int64), BY_NAME["int64"])
        source[3] ^= 1
        with pytest.raises(DeviceMisuseError, match="memory of copy 1 before it was awaited"):
            wait()
        misused(device, "copy 0 .*copy 1")


def test_writing_to_the_source_of_a_copy_before_it_is_done_is_found() -> None:
    with SimulatedDevice(pace="late") as device:
        source = device.host_memory(32)
        wait = device.start_copy_in(device.put(np.arange(4)), source.view(np.int64), BY_NAME["int64"])
        source[31] ^= 1
        with pytest.raises(DeviceMisuseError, match="source of copy 0 before it was done"):
            wait()
        misused(device, "source of copy 0 before it was done")


def test_memory_that_is_in_use_by_another_copy_is_found() -> None:
    with SimulatedDevice() as device:
        view = device.put(np.arange(4))
        memory = device.host_memory(48)
        wait = device.start_copy_out(view, memory[:32])
        with pytest.raises(DeviceMisuseError, match="memory of copy 0, which was not awaited"):
            device.start_copy_out(view, memory[16:])
        wait()
        device.start_copy_out(view, memory[16:])()
        misused(device, "memory of copy 0")


def test_memory_from_elsewhere_is_found() -> None:
    with SimulatedDevice() as device:
        view = device.put(np.arange(4))
        with pytest.raises(DeviceMisuseError, match="32 bytes that are not from host_memory"):
            device.start_copy_out(view, np.zeros(32, np.uint8))
        with pytest.raises(DeviceMisuseError, match="not from host_memory"):
            device.start_copy_in(view, np.arange(4), BY_NAME["int64"])
        misused(device, "not from host_memory.*not from host_memory")


def test_registered_memory_serves_copies_until_that_is_undone() -> None:
    with SimulatedDevice(host_limit_nbytes=0) as device:
        view, memory = device.put(np.arange(4)), np.zeros(64, np.uint8)
        undo = device.register_memory(memory)
        assert undo is not None and device.registered_nbytes == 64
        device.start_copy_out(view, memory[16:48])()
        assert memory[16:48].view(np.int64).tolist() == [0, 1, 2, 3]
        undo()
        assert device.registered_nbytes == 0
        with pytest.raises(DeviceMisuseError, match="not from host_memory or registered"):
            device.start_copy_out(view, memory[:32])
        device.misuses.clear()
        assert SimulatedDevice(can_register=False).register_memory(memory) is None


def test_memory_that_is_registered_twice_or_unregistered_too_early_or_twice_is_found() -> None:
    with SimulatedDevice() as device:
        view, memory = device.put(np.arange(4)), np.zeros(64, np.uint8)
        undo = device.register_memory(memory)
        assert undo is not None
        with pytest.raises(DeviceMisuseError, match="32 bytes are registered that are known already"):
            device.register_memory(memory[32:])
        wait = device.start_copy_out(view, memory[:32])
        with pytest.raises(DeviceMisuseError, match="memory is unregistered that copy 0 uses"):
            undo()
        wait()
        undo()
        with pytest.raises(DeviceMisuseError, match="memory is unregistered that is not registered"):
            undo()
        device.misuses.clear()


def test_a_target_or_source_of_another_size_or_type_is_found() -> None:
    with SimulatedDevice() as device:
        view = device.put(np.arange(4))
        memory = device.host_memory(64)
        for target in (memory[:31], memory[:32].view(np.int8), memory[::2], memory[:32].reshape(4, 8)):
            with pytest.raises(DeviceMisuseError, match=r"expected uint8\[32\]"):
                device.start_copy_out(view, target)  # type: ignore[arg-type]  # one is no uint8
        bits = memory[:32].view(np.int64)
        for source, dtype in ((bits[:3], "int64"), (bits, "float64"), (bits.reshape(2, 2), "int64")):
            with pytest.raises(DeviceMisuseError, match="expected (int64|float64)"):
                device.start_copy_in(view, source, BY_NAME[dtype])
        device.misuses.clear()


def test_a_copy_that_nobody_awaits_is_found() -> None:
    device = SimulatedDevice()
    device.start_copy_out(device.put(np.arange(4)), device.host_memory(32))
    with pytest.raises(DeviceMisuseError, match="copy 0 was never awaited"), device:
        pass
    with pytest.raises(ValueError, match="the test's own"), device:
        raise ValueError("the test's own failure comes first")


def test_more_host_memory_than_agreed_is_found_and_memory_that_is_let_go_is_not_counted() -> None:
    with SimulatedDevice(host_limit_nbytes=96) as device:
        for _ in range(5):
            kept = device.host_memory(64)[3:]  # a part keeps the whole alive
            gc.collect()
            assert device.host_nbytes == 64
            del kept
        assert (device.host_nbytes, device.peak_host_nbytes) == (0, 64)
        blocks = [device.host_memory(48), device.host_memory(48)]
        with pytest.raises(DeviceMisuseError, match="97 bytes of host memory in use, at most 96"):
            blocks.append(device.host_memory(1))
        misused(device, "97 bytes")


def test_many_threads_may_use_one_device() -> None:
    dtype = BY_NAME["float16"]
    problems: list[str] = []
    with SimulatedDevice(pace="thread") as device:
        values = [bits_of((64,), dtype, seed) for seed in range(8)]
        views = [stored(device, bits, dtype) for bits in values]

        def work(number: int) -> None:
            for _ in range(50):
                if not same(copied_out(device, views[number]), values[number]):
                    problems.append(threading.current_thread().name)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    assert problems == []
    assert device.copies_out == 400


# -- whole saves and loads --------------------------------------------------------------------------------------------

_ADAPTER = DeviceRankAdapter()
_SHAPE = (12, 10)


def _values() -> dict[str, tuple[Array, str]]:
    names = ("float32", "bfloat16", "float8_e4m3fn", "bool", "complex64")
    return {name: (bits_of(_SHAPE, BY_NAME[name], seed), name) for seed, name in enumerate(names)}


def _state(device: SimulatedDevice, context: RankContext, dim: int, *, is_empty: bool) -> dict[str, Any]:
    boxes = even_boxes(_SHAPE, context.world_size, context.rank, dim)
    state: dict[str, Any] = {"step": 0 if is_empty else 7, "on host": np.zeros(5) if is_empty else np.arange(5.0)}
    for name, (bits, _) in _values().items():
        filled = np.zeros_like(bits) if is_empty else bits
        state[name] = {
            "sharded": ShardedDeviceArray.cut(device, filled, boxes, name),
            "whole": device.put(filled, name),
        }
    return state


def save_and_load_on_ranks(context: RankContext, directory: str, pace: Pace) -> list[str]:
    with SimulatedDevice(f"simulated:{context.rank}", pace=pace, host_limit_nbytes=64 << 20) as device:
        state = _state(device, context, 0, is_empty=False)
        api.save(state, checkpoint_id=directory, adapter=_ADAPTER, durable=False, timeout_seconds=30)
        target = _state(device, context, 1, is_empty=True)
        api.load(target, checkpoint_id=directory, adapter=_ADAPTER, timeout_seconds=30)
        wrong = [] if target["step"] == 7 and (target["on host"] == np.arange(5.0)).all() else ["host"]
        for name, (bits, _) in _values().items():
            sharded, whole = target[name]["sharded"], target[name]["whole"]
            wrong += [] if same(device.get(whole), bits) else [f"{name} whole"]
            for box, array in zip(sharded.boxes, sharded.arrays, strict=True):
                rows, columns = box.offsets[0], box.offsets[1]
                expected = bits[rows : rows + box.sizes[0], columns : columns + box.sizes[1]]
                wrong += [] if same(device.get(array), expected) else [f"{name} sharded"]
    return wrong


@pytest.mark.parametrize("pace", ["late", "thread"])
def test_ranks_save_arrays_on_their_devices_and_load_them_in_another_layout(tmp_path: Path, pace: Pace) -> None:
    assert run_ranks(save_and_load_on_ranks, 2, str(tmp_path / "checkpoint"), pace, timeout_seconds=60) == [[], []]


def test_what_a_device_array_is_described_as() -> None:
    with SimulatedDevice("npu:3") as device, SimulatedDevice("npu:4") as other:
        view = device.put(np.zeros((2, 3), np.uint16), "bfloat16")
        found = _ADAPTER.describe(view)
        assert found is not None
        assert (found.device, found.dtype.name, found.boxes) == ("npu", "bfloat16", (Box.whole((2, 3)),))
        assert (found.plain, found.access, found.views) == (True, device, (view,))
        empty = _ADAPTER.describe(device.put(np.zeros((0, 3))))
        assert empty is not None
        assert (empty.global_shape, empty.boxes, empty.storage) == ((0, 3), (), None)
        whole = Box.whole((2, 3))
        with pytest.raises(ArgumentError, match="more than one device"):
            ShardedDeviceArray((4, 3), (whole, whole), (view, other.put(np.zeros((2, 3)))))
        with pytest.raises(ArgumentError, match="don't fit"):
            ShardedDeviceArray((4, 3), (whole,), (other.put(np.zeros((3, 3))),))
