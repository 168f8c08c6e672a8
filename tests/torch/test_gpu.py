"""Tensors on accelerators: what can only be seen where there is one.

`DCP_TEST_DEVICE=cuda` or `npu` picks the device. The same tests run everywhere on host memory that stands in for a
device, so that they are right before they meet one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open

from dcp_core import api
from dcp_core.dtype import BY_NAME, DTYPES, DType
from dcp_core.execution.buffer_ring import BufferRing
from dcp_torch.adapter import TorchAdapter
from dcp_torch.elements import assign_bits, torch_dtype_of
from dcp_torch.transfers import TorchTransfers
from tests.torch import gloo_ranks
from tests.torch.stand_in_device import StandInAdapter
from tests.torch.transfer_samples import LAYOUTS, bits, in_host_memory, random_tensor, same

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")]

_KIND = gloo_ranks.test_device_type()
_MARK = pytest.mark.npu if _KIND == "npu" else pytest.mark.gpu
_PLACES = ["stand-in"] if _KIND == "cpu" else [pytest.param("device", marks=_MARK), "stand-in"]
_CASTS = [
    ("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32"), ("float32", "float16"),
    ("float64", "float32"), ("int32", "int64"), ("bool", "float32"), ("float8_e4m3fn", "bfloat16"),
]  # fmt: skip
_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where tensors lie.

    Attributes:
        devices: All of its devices; one for the stand-in.
        adapter: Moves them.
    """

    devices: tuple[torch.device, ...]
    adapter: TorchAdapter

    @property
    def is_accelerator(self) -> bool:
        return not isinstance(self.adapter, StandInAdapter)

    @property
    def module(self) -> Any:
        return torch.get_device_module(self.devices[0])

    def put(self, tensor: torch.Tensor, number: int = 0) -> torch.Tensor:
        """A tensor's copy on a device."""
        try:
            return tensor.to(self.devices[number], copy=True)
        except (RuntimeError, TypeError) as error:
            pytest.skip(f"{self.devices[number]} holds no tensor of {tensor.dtype}: {error}")

    def moves(self, view: torch.Tensor) -> TorchTransfers:
        found = self.adapter.transfers(view)
        assert isinstance(found, TorchTransfers)
        return found


@pytest.fixture(params=_PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "stand-in":
        stand_in = StandInAdapter("late")
        yield Place((torch.device("cpu"),), stand_in)
        stand_in.close()
        return
    gloo_ranks.local_device()
    devices = tuple(torch.device(_KIND, number) for number in range(torch.get_device_module(_KIND).device_count()))
    yield Place(devices, TorchAdapter())


def finite(dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
    """Values that all types hold nearly."""
    drawn = torch.from_numpy(np.random.default_rng(4).integers(-1000, 1000, shape)) / 64
    return (drawn > 0) if dtype.name == "bool" else drawn.to(torch_dtype_of(dtype))


@_MARK
@pytest.mark.skipif(
    _KIND == "cpu",
    reason="the tests of this file ran on a stand-in only; DCP_TEST_DEVICE=cuda or npu, where there is one",
)
def test_this_run_has_an_accelerator() -> None:
    assert gloo_ranks.local_device().type == _KIND


# -- the right bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_bits_of_every_type_travel_out_and_in_unchanged(place: Place, dtype: DType, layout: str) -> None:
    on_host = random_tensor((6, 7), dtype, 1)
    whole = place.put(on_host)
    view, expected = LAYOUTS[layout](whole), LAYOUTS[layout](on_host)
    moves = place.moves(view)
    target = moves.host_memory(view.numel() * dtype.itemsize)
    moves.start_copy_out(view, target)()
    assert target.tobytes() == bits(expected).tobytes()

    new = bits(random_tensor(tuple(view.shape), dtype, 2))
    assign_bits(expected, new, dtype)
    moves.start_copy_in(view, in_host_memory(moves, new), dtype)()
    assert same(bits(whole.cpu()), bits(on_host))


@pytest.mark.parametrize(("source_name", "target_name"), _CASTS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "steps"])
def test_elements_are_converted_on_the_device_as_the_host_converts_them(
    place: Place, source_name: str, target_name: str, layout: str
) -> None:
    source, target = BY_NAME[source_name], BY_NAME[target_name]
    place.put(torch.zeros(1, dtype=torch_dtype_of(source)))
    whole = place.put(torch.zeros(6, 8, dtype=torch_dtype_of(target)))
    view = LAYOUTS[layout](whole)
    new = finite(source, tuple(view.shape))
    moves = place.moves(view)
    moves.start_copy_in(view, in_host_memory(moves, bits(new)), source)()
    assert same(bits(view.cpu()), bits(new.to(torch_dtype_of(target))))


# -- beside the device's other work -----------------------------------------------------------------------------------


def test_host_memory_is_page_locked_where_there_is_an_accelerator(place: Place) -> None:
    view = place.put(torch.arange(4.0))
    memory = torch.from_numpy(place.moves(view).host_memory(4096))
    assert memory.is_pinned() == place.is_accelerator


def test_a_copy_sees_what_its_caller_has_queued_on_the_device(place: Place) -> None:
    view = place.put(torch.zeros(8 * _MEBIBYTE))
    for _ in range(20):
        view += 1
    moves = place.moves(view)
    target = moves.host_memory(view.nbytes)
    moves.start_copy_out(view, target)()
    assert (target.view(np.float32) == 20).all()


def test_a_copy_sees_what_its_caller_has_queued_on_a_stream_of_its_own(place: Place) -> None:
    view = place.put(torch.zeros(8 * _MEBIBYTE))
    with place.module.stream(place.module.Stream()):
        for _ in range(20):
            view += 1
        moves = place.moves(view)
    target = moves.host_memory(view.nbytes)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(moves.start_copy_out, view, target).result()()
    assert (target.view(np.float32) == 20).all()


def test_work_after_a_copy_sees_its_elements(place: Place) -> None:
    view = place.put(torch.zeros(8 * _MEBIBYTE))
    moves = place.moves(view)
    new = in_host_memory(moves, np.full(view.numel(), 3, np.float32))
    moves.start_copy_in(view, new, BY_NAME["float32"])()
    new[...] = 0
    assert bool((view * 2 == 6).all())


def test_a_copy_behind_long_work_has_started_and_not_ended(place: Place) -> None:
    view = place.put(torch.zeros(1000))
    if place.is_accelerator and not hasattr(place.module, "_sleep"):
        pytest.skip(f"{place.devices[0].type} has nothing that keeps a device busy for long")
    if place.is_accelerator:
        place.module._sleep(int(4e9))  # a few seconds
    view += 1
    moves = place.moves(view)
    target = moves.host_memory(view.nbytes)
    target[:] = 0
    wait = moves.start_copy_out(view, target)
    assert (target == 0).all(), "the host goes on meanwhile"
    wait()
    assert (target.view(np.float32) == 1).all()


def test_many_threads_copy_through_one_ring_without_mixing_anything_up(place: Place) -> None:
    size = _MEBIBYTE // 4
    views = [place.put(torch.full((size,), float(number))) for number in range(8)]
    moves = place.moves(views[0])

    def copy(number: int) -> int:
        wrong = 0
        for _ in range(6):
            buffer = ring.take()
            moves.start_copy_out(views[number], buffer)()
            wrong += not (buffer.view(np.float32) == number).all()
            moves.start_copy_in(views[number], buffer.view(np.float32), BY_NAME["float32"])()
            ring.give_back(buffer)
        return wrong

    with BufferRing(moves.host_memory, buffer_nbytes=_MEBIBYTE, count=3) as ring, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(copy, range(8))) == [0] * 8
    assert [float(view.sum()) / size for view in views] == list(range(8))


def test_a_large_tensor_goes_through_a_small_ring_block_by_block(place: Place) -> None:
    rows, block = 21, 2
    on_host = random_tensor((rows, _MEBIBYTE // 2), BY_NAME["bfloat16"], 5)
    whole = place.put(on_host)
    moves = place.moves(whole)
    found: list[npt.NDArray[Any]] = []
    with BufferRing(moves.host_memory, buffer_nbytes=block * _MEBIBYTE, count=3) as ring:
        waiting: list[tuple[npt.NDArray[np.uint8], int, Any]] = []
        for start in range(0, rows, block):
            if len(waiting) == ring.count:
                _empty(ring, waiting.pop(0), found)
            part = whole[start : start + block]
            buffer = ring.take()
            waiting.append((buffer, part.nbytes, moves.start_copy_out(part, buffer[: part.nbytes])))
        for each in waiting:
            _empty(ring, each, found)
    assert np.concatenate(found).tobytes() == bits(on_host).tobytes()


def _empty(
    ring: BufferRing, filled: tuple[npt.NDArray[np.uint8], int, Any], found: list[npt.NDArray[np.uint8]]
) -> None:
    buffer, nbytes, wait = filled
    wait()
    found.append(buffer[:nbytes].copy())
    ring.give_back(buffer)


# -- whole saves and loads --------------------------------------------------------------------------------------------


def _values(place: Place, number: int = 0) -> dict[str, torch.Tensor]:
    values = {
        "large": random_tensor((5, 2 * _MEBIBYTE + 1), BY_NAME["bfloat16"], 1),
        "transposed": random_tensor((300, 500), BY_NAME["float32"], 2).t(),
        "steps": random_tensor((64, 64), BY_NAME["int64"], 3)[::3, 1::2],
        "bytes": random_tensor((1000,), BY_NAME["uint8"], 4),
        "flags": random_tensor((77,), BY_NAME["bool"], 5),
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.linspace(0, 1, 100)),
    }
    return {key: place.put(value.detach(), number) for key, value in values.items()}


@pytest.mark.parametrize("number", [0, -1], ids=["first device", "last device"])
def test_a_state_on_the_device_is_saved_and_loaded_bit_by_bit(place: Place, tmp_path: Path, number: int) -> None:
    values = _values(place, number)
    api.save(values, checkpoint_id=tmp_path / "checkpoint", adapter=place.adapter, durable=False)
    targets = {key: torch.zeros_like(value) for key, value in values.items()}
    targets["transposed"] = torch.zeros_like(values["transposed"].t().contiguous()).t()
    places = {key: (value.data_ptr(), value.stride()) for key, value in targets.items()}
    api.load(targets, checkpoint_id=tmp_path / "checkpoint", adapter=place.adapter)
    assert [key for key in values if not same(bits(targets[key].cpu()), bits(values[key].cpu()))] == []
    assert {key: (value.data_ptr(), value.stride()) for key, value in targets.items()} == places


def test_a_state_on_the_device_is_loaded_on_the_host_and_the_other_way_round(place: Place, tmp_path: Path) -> None:
    on_device = _values(place)
    on_host = {key: value.cpu().clone() for key, value in on_device.items()}
    api.save(on_device, checkpoint_id=tmp_path / "device", adapter=place.adapter, durable=False)
    api.save(on_host, checkpoint_id=tmp_path / "host", adapter=TorchAdapter(), durable=False)
    assert _data(tmp_path / "device") == _data(tmp_path / "host"), "where tensors lie makes no difference to the files"
    targets = {key: torch.zeros_like(value) for key, value in on_device.items()}
    api.load(targets, checkpoint_id=tmp_path / "host", adapter=place.adapter)
    assert [key for key in on_host if not same(bits(targets[key].cpu()), bits(on_host[key]))] == []
    host_targets = {key: torch.zeros_like(value) for key, value in on_host.items()}
    api.load(host_targets, checkpoint_id=tmp_path / "device", adapter=TorchAdapter())
    assert [key for key in on_host if not same(bits(host_targets[key]), bits(on_host[key]))] == []


def _data(directory: Path) -> dict[str, dict[str, bytes]]:
    """The tensors of the data files of a checkpoint."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        name = path.name.partition(".")[0]
        with safe_open(path, "pt") as file:
            names = file.keys()
            found[name] = {key: bits(file.get_tensor(key)).tobytes() for key in names}
    return found


def test_tensors_of_another_type_are_loaded_with_a_conversion(place: Place, tmp_path: Path) -> None:
    saved = {name: place.put(finite(BY_NAME[name], (513, 129))) for name in ("float32", "bfloat16", "float16")}
    api.save(saved, checkpoint_id=tmp_path / "checkpoint", adapter=place.adapter, durable=False)
    wanted = {"float32": torch.bfloat16, "bfloat16": torch.float32, "float16": torch.float64}
    targets = {name: place.put(torch.zeros(129, 513, dtype=dtype)).t() for name, dtype in wanted.items()}
    api.load(targets, checkpoint_id=tmp_path / "checkpoint", adapter=place.adapter)
    expected = {name: value.cpu().to(wanted[name]) for name, value in saved.items()}
    assert [name for name in saved if not torch.equal(targets[name].cpu(), expected[name])] == []


def test_tensors_on_all_devices_of_the_host_are_saved_and_loaded_in_one_call(place: Place, tmp_path: Path) -> None:
    count = len(place.devices)
    values = {f"on {number}": place.put(torch.full((1000, 999), number + 0.5), number) for number in range(count)}
    values["on host"] = torch.arange(1000.0)
    api.save(values, checkpoint_id=tmp_path / "checkpoint", adapter=place.adapter, durable=False)
    targets = {
        f"on {number}": place.put(torch.zeros(1000, 999), (number + 1) % count) for number in range(count)
    } | {"on host": torch.zeros(1000)}  # fmt: skip
    api.load(targets, checkpoint_id=tmp_path / "checkpoint", adapter=place.adapter)
    assert [key for key, value in values.items() if not torch.equal(targets[key].cpu(), value.cpu())] == []


def test_saving_leaves_nothing_on_the_device(place: Place, tmp_path: Path) -> None:
    values = _values(place)
    for number in range(3):
        gc.collect()
        before = place.module.memory_allocated() if place.is_accelerator else 0
        api.save(values, checkpoint_id=tmp_path / f"{number}", adapter=place.adapter, durable=False)
        api.load(values, checkpoint_id=tmp_path / f"{number}", adapter=place.adapter)
        gc.collect()
        assert before == (place.module.memory_allocated() if place.is_accelerator else 0)
