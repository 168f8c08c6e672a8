"""Staging of torch tensors: the bits of the moment, from host memory and from devices; memory locked for devices."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dcp_core import plugins
from dcp_core.background import data_copier, staging
from dcp_core.background.arena import Arena, Place
from dcp_core.background.data_copier import DataCopier, StagingEncoding
from dcp_core.dtype import BY_NAME, DTYPES, DType
from dcp_core.formats.objects import decode_value
from dcp_core.testing.streams import Pace
from dcp_torch import page_locking, transfers
from dcp_torch.adapter import TorchAdapter
from dcp_torch.page_locking import page_lock
from dcp_torch.transfers import TorchTransfers
from tests.core.staging_samples import Rank, differing, everything
from tests.torch import gloo_ranks
from tests.torch.stand_in_device import StandInAdapter, StandInStream
from tests.torch.transfer_samples import LAYOUTS, bits, random_tensor

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")]
PACES: tuple[Pace, ...] = ("late", "thread", "at once")
Memory = npt.NDArray[np.uint8]
_KIND = gloo_ranks.test_device_type()


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """Errors that tests have seen hold arenas, and tests elsewhere count those."""
    yield
    gc.collect()


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


def spoil(tensor: torch.Tensor) -> None:
    """Other bits in every element, through the memory below."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        memory.bitwise_xor_(1)  # bools stay bools


def check(state: dict[str, torch.Tensor], arena: Arena, adapter: TorchAdapter) -> None:
    """Stage twice, the state spoilt in between and after."""
    for _ in range(2):
        expected = {name: bits(tensor) for name, tensor in state.items() if tensor.numel()}
        rank = Rank.of(state, adapter=adapter)
        staged = rank.stage_all(arena)
        for storage in {tensor.untyped_storage().data_ptr(): tensor for tensor in state.values()}.values():
            spoil(storage)
        found = everything(rank.source(staged, arena), rank.table)
        assert sorted(found) == sorted(expected)
        assert differing(found, expected) == []


# -- host memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_every_type_and_layout_keep_the_bits_of_the_moment(arena: Arena, layout: str) -> None:
    state = {dtype.name: LAYOUTS[layout](random_tensor((6, 7), dtype, seed)) for seed, dtype in enumerate(DTYPES)}
    check(state, arena, TorchAdapter())


def test_odd_tensors_keep_the_bits_of_the_moment(arena: Arena) -> None:
    complex_tensor = random_tensor((3, 4), BY_NAME["complex64"], 1).view(torch.float32).abs_().view(torch.complex64)
    with torch.inference_mode():
        inference = torch.arange(5.0)
    state = {
        "parameter": torch.nn.Parameter(torch.randn(3, 2)), "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "expanded": torch.arange(3.0).expand(4, 3), "conjugated": complex_tensor.conj(),
        "imaginary": complex_tensor.clone().conj().imag, "overlapping": torch.arange(9.0).as_strided((4, 3), (2, 1)),
        "inference": inference, "flipped": torch.arange(6).flip(0), "empty": torch.zeros(0, 3),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }  # fmt: skip
    assert state["imaginary"].is_neg() and state["conjugated"].is_conj()
    check(state, arena, TorchAdapter())


def test_tied_parameters_are_staged_once(arena: Arena) -> None:
    weight = torch.nn.Parameter(torch.randn(100, 8))
    rank = Rank.of({"embedding": weight, "head": weight, "view": weight.data[:]}, adapter=TorchAdapter())
    staged = rank.stage_all(arena)
    assert len(set(staged.offset.tolist())) == 1
    expected = dict.fromkeys(("embedding", "head", "view"), bits(weight))
    assert differing(everything(rank.source(staged, arena), rank.table), expected) == []


class Sampler:
    def __init__(self, seen: torch.Tensor) -> None:
        self.seen = seen


def test_a_copy_of_a_users_type_may_hold_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_copier, "_COPIERS", {})
    plugins.activate_codecs()
    DataCopier.register(Sampler)(lambda sampler: {"seen": sampler.seen.clone(), "kind": "sampler"})
    sampler = Sampler(torch.arange(4, dtype=torch.bfloat16))
    blob = StagingEncoding().encode(sampler, "sampler")
    sampler.seen.zero_()
    found: Any = decode_value(blob)
    assert found["kind"] == "sampler"
    assert torch.equal(found["seen"], torch.arange(4, dtype=torch.bfloat16))


# -- devices ----------------------------------------------------------------------------------------------------------


def _state(layout: str) -> dict[str, torch.Tensor]:
    state = {dtype.name: LAYOUTS[layout](random_tensor((6, 7), dtype, seed)) for seed, dtype in enumerate(DTYPES)}
    return state | {"conjugated": LAYOUTS[layout](random_tensor((6, 7), BY_NAME["complex64"], 50)).conj()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pace", PACES)
def test_a_device_copies_straight_to_memory_that_it_was_told_of(arena: Arena, pace: Pace, layout: str) -> None:
    known: list[int] = []

    def register(memory: Memory) -> Callable[[], None]:
        known.append(memory.nbytes)
        return lambda: known.remove(memory.nbytes)

    adapter = StandInAdapter(pace, register)
    state = _state(layout)
    check(state, arena, adapter)
    assert known == ([arena.nbytes] if layout != "nothing" else [])
    assert adapter.stream.queued == (2 * len(DTYPES) if layout != "nothing" else 0)
    assert adapter.blocking_copies == (2 if layout != "nothing" else 0), "of the lazily conjugated one"
    arena.close()
    assert known == []
    adapter.close()


@pytest.mark.parametrize("pace", PACES)
def test_a_device_that_cannot_be_told_of_memory_copies_through_its_own(arena: Arena, pace: Pace) -> None:
    adapter = StandInAdapter(pace)
    state = _state("contiguous") | {"large": random_tensor((3 << 20,), BY_NAME["bfloat16"], 4)}
    check(state, arena, adapter)
    assert adapter.stream.queued > 2 * len(DTYPES)
    adapter.close()


def test_copies_are_awaited_once_and_at_the_end(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BATCH_REGIONS", 1)
    adapter = StandInAdapter("late", lambda memory: lambda: None)
    events: list[str] = []
    queue = adapter.stream.work.queue

    def watched(work: Callable[[], None]) -> Callable[[], None]:
        events.append("start")
        wait = queue(work)

        def awaited() -> None:
            events.append("wait")
            wait()

        return awaited

    monkeypatch.setattr(adapter.stream.work, "queue", watched)
    state = {str(number): torch.full((number,), number) for number in range(1, 9)}
    Rank.of(state, adapter=adapter).stage_all(arena)
    assert events == ["start"] * 8 + ["wait"] * 8
    adapter.close()


# -- page-locking -----------------------------------------------------------------------------------------------------


class FakeRuntime:
    """What `torch.cuda.cudart()` has, as far as it is used."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.calls: list[Any] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  # the name of the real one
        self.calls.append(("register", address, nbytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # the name of the real one
        self.calls.append(("unregister", address))
        return self.status


class ForgetfulRuntime(FakeRuntime):
    def cudaGetLastError(self) -> int:  # noqa: N802  # the name of the real one
        self.calls.append("take error")
        return self.status


class FakeModule:
    def __init__(self, runtime: FakeRuntime | Exception) -> None:
        self.runtime = runtime

    def cudart(self) -> FakeRuntime:
        if isinstance(self.runtime, Exception):
            raise self.runtime
        return self.runtime


HOST = torch.device("cpu")


@pytest.fixture
def memory() -> Memory:
    page_locking._warn_once.cache_clear()
    return np.zeros(4096, np.uint8)


def test_memory_is_locked_for_all_devices_until_that_is_undone(memory: Memory) -> None:
    runtime, address = FakeRuntime(), memory.__array_interface__["data"][0]
    undo = page_lock(FakeModule(runtime), HOST, memory)
    assert runtime.calls == [("register", address, 4096, 1)]
    assert undo is not None
    undo()
    assert runtime.calls[1:] == [("unregister", address)]


def test_where_memory_cannot_be_locked_nothing_is_left_of_the_attempt(
    memory: Memory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = ForgetfulRuntime(2)
    with caplog.at_level(logging.WARNING, "dcp.torch"):
        for _ in range(3):
            assert page_lock(FakeModule(runtime), HOST, memory) is None
    assert [call if call == "take error" else call[0] for call in runtime.calls] == ["register", "take error"] * 3
    assert len(caplog.messages) == 1 and "error 2 for 4096 bytes" in caplog.messages[0]

    taken: list[torch.device] = []

    def zeros(size: int, *, device: torch.device) -> torch.Tensor:
        taken.append(device)
        raise RuntimeError("CUDA error: what was left by an earlier call")

    monkeypatch.setattr(torch, "zeros", zeros)
    assert page_lock(FakeModule(FakeRuntime(1)), HOST, memory) is None
    assert taken == [HOST], "an operation takes the error away where there is no function for it"


def test_devices_without_such_a_function_and_broken_ones_will_do(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    assert page_lock(object(), HOST, memory) is None
    assert page_lock(FakeModule(FakeRuntime()), HOST, memory[:0]) is None
    assert caplog.messages == []
    for error in (RuntimeError("no driver"), AssertionError("not compiled with CUDA")):
        assert page_lock(FakeModule(error), HOST, memory) is None
        assert str(error) in caplog.messages[-1]


def test_memory_that_stays_locked_is_reported(memory: Memory) -> None:
    runtime = ForgetfulRuntime()
    undo = page_lock(FakeModule(runtime), HOST, memory)
    assert undo is not None
    runtime.status = 713
    with pytest.raises(RuntimeError, match="stays page-locked: error 713"):
        undo()
    assert runtime.calls[-1] == "take error"


def test_the_transfers_of_a_device_lock_memory_through_its_module(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeRuntime()

    class Module(FakeModule):
        Stream = stream = current_stream = staticmethod(lambda *args, **options: None)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module(runtime))
    found = transfers._transfers_on.__wrapped__(torch.device("cuda", 0))
    assert isinstance(found, TorchTransfers)
    assert found.register_memory(memory) is not None
    assert runtime.calls[0][0] == "register"
    stream = StandInStream()
    assert TorchTransfers(stream).register_memory(memory) is None
    stream.work.close()


@pytest.mark.parametrize("name", ["cudaHostRegister", "cudaHostUnregister"])
def test_cuda_has_the_functions_that_lock_memory(name: str) -> None:
    module: Any = torch.cuda
    assert hasattr(module, "cudart")
    if module.is_available():
        assert hasattr(module.cudart(), name)


# -- an accelerator ---------------------------------------------------------------------------------------------------


@pytest.mark.npu if _KIND == "npu" else pytest.mark.gpu
@pytest.mark.skipif(_KIND == "cpu", reason="there is no accelerator; DCP_TEST_DEVICE=cuda or npu, where there is one")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_accelerator_copies_to_locked_memory(arena: Arena, layout: str) -> None:
    device = gloo_ranks.local_device()

    def put(dtype: DType, seed: int) -> torch.Tensor | None:
        try:
            return LAYOUTS[layout](random_tensor((6, 7), dtype, seed).to(device, copy=True))
        except (RuntimeError, TypeError):
            return None  # a type that this device lacks

    tensors = {dtype.name: put(dtype, seed) for seed, dtype in enumerate(DTYPES)}
    check({name: tensor for name, tensor in tensors.items() if tensor is not None}, arena, TorchAdapter())
    if _KIND == "cuda" and layout != "nothing":
        assert torch.from_numpy(arena.buffer(Place(0, 0, 4096))).is_pinned()
    arena.close()
    assert torch.ones(3, device=device).sum().item() == 3, "no error was left behind"
