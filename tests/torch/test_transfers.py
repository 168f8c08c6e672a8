"""Copies between torch tensors and host memory: the right bits, later than their start, in the right stream."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp_core import api
from dcp_core.dtype import BY_NAME, DTYPES, DType
from dcp_core.testing.streams import Pace
from dcp_torch import transfers
from dcp_torch.adapter import TorchAdapter
from dcp_torch.elements import assign_bits, torch_dtype_of
from dcp_torch.transfers import DeviceStream, TorchTransfers, transfers_of
from tests.torch.stand_in_device import StandInAdapter, StandInStream
from tests.torch.transfer_samples import CASTS, LAYOUTS, bits, in_host_memory, random_tensor, same

pytestmark = pytest.mark.timeout(60)
PACES: tuple[Pace, ...] = ("at once", "late", "thread")


@pytest.fixture(params=PACES)
def moves(request: pytest.FixtureRequest) -> Iterator[TorchTransfers]:
    stream = StandInStream(request.param)
    yield TorchTransfers(stream)
    stream.work.close()


@pytest.fixture
def late() -> Iterator[TorchTransfers]:
    stream = StandInStream("late")
    yield TorchTransfers(stream)
    stream.work.close()


# -- right bits -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_bits_of_every_type_travel_out_and_in_unchanged(moves: TorchTransfers, dtype: DType, layout: str) -> None:
    whole = random_tensor((6, 7), dtype, 1)
    view = LAYOUTS[layout](whole)
    target = moves.host_memory(view.numel() * dtype.itemsize)
    moves.start_copy_out(view, target)()
    assert target.tobytes() == bits(view).tobytes()

    expected = whole.clone()
    new = bits(random_tensor(tuple(view.shape), dtype, 2))
    assign_bits(LAYOUTS[layout](expected), new, dtype)
    moves.start_copy_in(view, in_host_memory(moves, new), dtype)()
    assert same(bits(view), new)
    assert same(bits(whole), bits(expected)), "elements beside the view stay as they were"


@pytest.mark.parametrize("lead", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["bfloat16", "float32", "complex128", "float8_e5m2", "bool"])
def test_host_memory_may_start_at_any_byte(moves: TorchTransfers, name: str, lead: int) -> None:
    dtype = BY_NAME[name]
    view, new = random_tensor((5, 3), dtype, 1), bits(random_tensor((5, 3), dtype, 2))
    buffer = moves.host_memory(lead + 15 * dtype.itemsize + 5)
    buffer[:] = 0xA5
    moves.start_copy_out(view, buffer[lead:-5])()
    assert buffer[lead:-5].tobytes() == bits(view).tobytes()
    assert (buffer[:lead] == 0xA5).all()
    assert (buffer[-5:] == 0xA5).all()
    moves.start_copy_in(view, in_host_memory(moves, new, lead), dtype)()
    assert same(bits(view), new)


@pytest.mark.parametrize("strides", ["fortran", "every other", "backwards", "read-only"])
def test_elements_may_lie_in_host_memory_in_any_order(moves: TorchTransfers, strides: str) -> None:
    dtype = BY_NAME["float32"]
    new = bits(random_tensor((4, 6), dtype, 2))
    memory = in_host_memory(moves, np.zeros((8, 12), np.float32))
    source = {
        "fortran": memory.reshape(-1)[:24].reshape(6, 4).T,
        "every other": memory[::2, ::2],
        "backwards": memory[3::-1, 5::-1],
        "read-only": memory.reshape(-1)[:24].reshape(4, 6),
    }[strides]
    source[...] = new
    source.flags.writeable = strides != "read-only"
    view = torch.zeros(4, 6)
    moves.start_copy_in(view, source, dtype)()
    assert same(bits(view), new)


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize(("source", "target"), CASTS, ids=lambda dtype: dtype.name)
def test_elements_of_another_type_are_converted_as_blocking_copies_convert_them(
    late: TorchTransfers, source: DType, target: DType
) -> None:
    new = bits(random_tensor((9, 8), source, 3))
    expected = torch.zeros(9, 8).to(torch_dtype_of(target))
    assign_bits(expected, new, source)
    for whole in (torch.zeros(9, 8).to(torch_dtype_of(target)), torch.zeros(8, 9).to(torch_dtype_of(target)).t()):
        late.start_copy_in(whole, in_host_memory(late, new), source)()
        assert same(bits(whole), bits(expected))


@pytest.mark.parametrize("caller", ["inference", "normal", "no grad"])
@pytest.mark.parametrize("kind", ["inference", "normal", "leaf that requires grad", "parameter"])
def test_tensors_of_every_grad_mode_travel_in_every_grad_mode(moves: TorchTransfers, kind: str, caller: str) -> None:
    with torch.inference_mode(kind == "inference"):
        view = torch.arange(12.0).reshape(3, 4)
    if kind == "leaf that requires grad":
        view.requires_grad_()
    if kind == "parameter":
        view = torch.nn.Parameter(view)
    new = np.random.default_rng(1).random((3, 4), np.float32)
    modes = {"inference": torch.inference_mode, "normal": nullcontext, "no grad": torch.no_grad}
    with modes[caller]():
        target = moves.host_memory(48)
        waits = [moves.start_copy_out(view, target)]
        waits.append(moves.start_copy_in(view, in_host_memory(moves, new), BY_NAME["float32"]))
    for wait in waits:
        wait()
    assert target.tobytes() == np.arange(12, dtype=np.float32).tobytes()
    assert same(bits(view), new)
    assert view.grad_fn is None
    moves.start_copy_out(view, target)()
    assert target.tobytes() == new.tobytes()


def test_host_memory_that_was_made_in_inference_mode_may_be_used_outside(moves: TorchTransfers) -> None:
    with torch.inference_mode():
        target = moves.host_memory(12)
    assert isinstance(target.base, torch.Tensor)
    assert not target.base.is_inference()
    moves.start_copy_out(torch.arange(12, dtype=torch.uint8), target)()
    assert target.tolist() == list(range(12))


# -- later than their start -------------------------------------------------------------------------------------------


def test_copies_are_done_on_the_stream_and_not_by_their_start(late: TorchTransfers) -> None:
    view = torch.ones(4)
    target = late.host_memory(16)
    target[:] = 0
    out = late.start_copy_out(view, target)
    into = late.start_copy_in(view, in_host_memory(late, np.full(4, 2, np.float32)), BY_NAME["float32"])
    assert (target == 0).all()
    assert (view == 1).all()
    into()
    assert (target.view(np.float32) == 1).all(), "copies keep their order"
    assert (view == 2).all()
    out()


def test_host_memory_and_views_live_as_long_as_a_copy_that_uses_them(late: TorchTransfers) -> None:
    source = in_host_memory(late, np.arange(1000, dtype=np.float32))
    view = torch.zeros(1000)
    kept = view[:]
    wait = late.start_copy_in(view, source, BY_NAME["float32"])
    del source, view
    torch.empty(1000).fill_(7)
    wait()
    assert torch.equal(kept, torch.arange(1000.0))


def test_a_copy_knows_its_host_memory_as_a_part_of_one_page_locked_storage(late: TorchTransfers) -> None:
    memory = late.host_memory(100)
    part = transfers._pinned_part(memory[8:40].view(np.float32).reshape(2, 4), torch.float32)
    assert part is not None
    storage = part.untyped_storage()
    assert (storage.data_ptr(), storage.nbytes()) == (memory.ctypes.data, 100)
    assert (part.shape, part.storage_offset(), part.dtype) == ((8,), 2, torch.float32)
    assert transfers._pinned_part(memory[9:41], torch.float32) is None, "not aligned"
    assert transfers._pinned_part(memory[8:40:2], torch.uint8) is None, "not contiguous"
    assert transfers._pinned_part(np.zeros(32, np.uint8), torch.uint8) is None, "from elsewhere"


def test_without_an_accelerator_host_memory_is_plain_and_the_log_says_so(
    late: TorchTransfers, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator, so memory is page-locked")
    transfers._warn_once.cache_clear()
    memory = late.host_memory(100)
    late.host_memory(100)
    assert memory.dtype == np.uint8
    assert (memory.shape, memory.flags.writeable) == ((100,), True)
    assert caplog.text.count("no page-locked memory") == 1


# -- the accelerator's own stream -------------------------------------------------------------------------------------


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def synchronize(self) -> None:
        self._log.append("synchronize")


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self._log = log
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> FakeEvent:
        self._log.append(f"event on {self.name}")
        return FakeEvent(self._log)


class FakeModule:
    """What `torch.cuda` has, as far as it is used."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def take(self) -> list[str]:
        """What happened since the last time."""
        taken = list(self.log)
        self.log.clear()
        return taken

    def Stream(self, *, device: torch.device) -> FakeStream:  # noqa: N802  # the name of the real one
        self.log.append(f"new stream on {device}")
        return FakeStream(self.log, "side")

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self.log, f"current of {device} in {threading.current_thread().name}")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"enter {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")


def test_a_copy_runs_on_the_side_stream_behind_the_callers_work_and_is_awaited_by_its_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = FakeModule()
    view = torch.arange(4.0)

    def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
        assert tensor.data_ptr() == view.data_ptr()
        module.log.append(f"memory kept for {stream.name}")

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    moves = TorchTransfers(DeviceStream(module, torch.device("cuda", 1)))
    assert module.take() == ["new stream on cuda:1"]
    moves.follow()
    assert module.take() == ["side waits for current of cuda:1 in MainThread"]
    target = moves.host_memory(16)
    wait = moves.start_copy_out(view, target)
    assert module.take() == ["enter side", "memory kept for side", "event on side", "leave side"]
    wait()
    assert module.take() == ["synchronize"]
    assert target.tobytes() == np.arange(4, dtype=np.float32).tobytes()


def test_a_device_whose_memory_is_not_kept_for_streams_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
        raise NotImplementedError("aten::record_stream")

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    target = np.zeros(16, np.uint8)
    TorchTransfers(DeviceStream(FakeModule(), torch.device("cuda", 0))).start_copy_out(torch.arange(4.0), target)()
    assert target.tobytes() == np.arange(4, dtype=np.float32).tobytes()


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mtia"])
def test_the_modules_of_accelerators_have_what_a_stream_of_theirs_needs(kind: str) -> None:
    module = torch.get_device_module(kind)
    assert {"wait_stream", "record_event"} <= set(dir(module.Stream))
    assert "synchronize" in dir(module.Event)
    assert "device" in inspect.signature(module.current_stream).parameters
    assert list(inspect.signature(module.stream).parameters) == ["stream"]


class FakeView:
    def __init__(self, device: str, *, lazy: bool = False) -> None:
        self.device = torch.device(device)
        self._lazy = lazy

    def is_conj(self) -> bool:
        return self._lazy

    def is_neg(self) -> bool:
        return False


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What `torch.get_device_module` knows, by kind of device."""
    known: dict[str, Any] = {}

    def module_of(device: torch.device) -> Any:
        if device.type not in known:
            raise RuntimeError(f"Device '{device.type}' does not have a corresponding module")
        return known[device.type]

    monkeypatch.setattr(torch, "get_device_module", module_of)
    transfers._transfers_on.cache_clear()
    yield known
    transfers._transfers_on.cache_clear()


def test_every_device_has_transfers_of_its_own_which_follow_the_caller(modules: dict[str, Any]) -> None:
    module = modules["cuda"] = FakeModule()
    first: Any = FakeView("cuda:0")
    found = transfers_of(first)
    assert isinstance(found, TorchTransfers)
    assert module.log == ["new stream on cuda:0", "side waits for current of cuda:0 in MainThread"]
    assert transfers_of(first) is found
    assert len(module.log) == 3, "no new stream, but the caller's later work is seen"
    second: Any = FakeView("cuda:1")
    assert transfers_of(second) is not found
    assert TorchAdapter().transfers(first) is found


def test_tensors_without_memory_or_streams_have_no_transfers(modules: dict[str, Any]) -> None:
    modules["cuda"] = modules["cpu"] = FakeModule()
    modules["mps"] = object()
    kinds: list[Any] = [FakeView("mps:0"), FakeView("meta"), FakeView("xla:0"), FakeView("cuda:0", lazy=True)]
    assert [transfers_of(view) for view in kinds] == [None] * 4
    assert transfers_of(torch.zeros(3)) is None
    assert TorchAdapter().transfers(torch.zeros(3)) is None
    assert transfers_of(torch.zeros(3, device="meta")) is None


# -- whole saves and loads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", PACES)
def test_a_state_on_the_stand_in_device_is_saved_and_loaded_bit_by_bit(tmp_path: Path, pace: Pace) -> None:
    adapter = StandInAdapter(pace)
    names = ("float32", "bfloat16", "float8_e4m3fn", "bool", "complex64", "int64")
    values = {name: random_tensor((33, 17), BY_NAME[name], seed) for seed, name in enumerate(names)}
    values["transposed"] = random_tensor((40, 50), BY_NAME["float16"], 9).t()
    values["scalar"] = torch.tensor(2.5)
    values["conjugated"] = random_tensor((8, 8), BY_NAME["complex64"], 10).conj()
    api.save(values, checkpoint_id=tmp_path / "checkpoint", adapter=adapter, durable=False)
    targets = {key: torch.zeros_like(value) for key, value in values.items()}
    api.load(targets, checkpoint_id=tmp_path / "checkpoint", adapter=adapter)
    adapter.close()
    wrong = [key for key, value in values.items() if not same(bits(targets[key]), bits(value))]
    assert wrong == []
