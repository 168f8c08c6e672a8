"""Torch tensors of every dtype, size and memory layout, through save and load: bit for bit, in little memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import dcp_torch
from dcp_core.dtype import DTYPES
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import memory_directory
from tests.core.io_probes import TornOperations, reader_over, writer_over
from tests.core.peak_memory import MEBIBYTE, need_peak_counter, peak_rise
from tests.torch import gloo_ranks
from tests.torch.gloo_ranks import TorchRank, local_device, run_gloo
from tests.torch.states import local_of, shard, values

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="saves alone, and in jobs of several sizes"),
]

ELEMENTS = [getattr(torch, dtype.name) for dtype in DTYPES if dtype.name != "float4_e2m1fn_x2"]
SHAPES = [(), (0, 3), (1,), (7,), (3, 5, 16, 17), (2, 1, 9_000)]


def bits_of(tensor: Tensor) -> bytes:
    """The elements in logical order, as bytes."""
    elements = local_of(tensor).cpu().clone(memory_format=torch.contiguous_format)
    return elements.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def directory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path / "checkpoint"


# --- memory layouts ----------------------------------------------------------------------------------


def _plain(whole: Tensor) -> Tensor:
    return whole.clone()


def _reversed_dimensions(whole: Tensor) -> Tensor:
    order = list(reversed(range(whole.ndim)))
    return whole.permute(order).contiguous().permute(order)


def _every_second(whole: Tensor) -> Tensor:
    memory = torch.zeros([2 * size + 1 for size in whole.shape], dtype=whole.dtype, device=whole.device)
    view = memory[tuple(slice(1, None, 2) for _ in whole.shape)]
    view.copy_(whole)
    return view


def _window(whole: Tensor) -> Tensor:
    memory = torch.zeros([size + 3 for size in whole.shape], dtype=whole.dtype, device=whole.device)
    view = memory[tuple(slice(1, size + 1) for size in whole.shape)]
    view.copy_(whole)
    return view


def _parameter(whole: Tensor) -> Tensor:
    can_learn = whole.is_floating_point() or whole.is_complex()
    return torch.nn.Parameter(whole.clone(), requires_grad=can_learn)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": _plain,
    "reversed dimensions": _reversed_dimensions,
    "every second element": _every_second,
    "a window": _window,
    "a parameter": _parameter,
}


def wholes(dtype: torch.dtype) -> dict[str, Tensor]:
    device, of_two_blocks = local_device(), (MEBIBYTE // 512 // dtype.itemsize, 513)
    return {f"{n}": values(shape, dtype, n).to(device) for n, shape in enumerate([*SHAPES, of_two_blocks])}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", ELEMENTS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_tensor_comes_back_from_any_memory_into_any_memory(dtype: torch.dtype, directory: Path) -> None:
    expected = wholes(dtype)
    state = {layout: {name: make(whole) for name, whole in expected.items()} for layout, make in LAYOUTS.items()}
    dcp_torch.save(state, checkpoint_id=directory, durable=False)
    for layout, make in LAYOUTS.items():
        targets = {
            source: {name: make(torch.zeros_like(whole)) for name, whole in expected.items()} for source in LAYOUTS
        }
        before = [(target.data_ptr(), target.stride()) for part in targets.values() for target in part.values()]
        dcp_torch.load(targets, checkpoint_id=directory, verify="full")
        assert before == [(target.data_ptr(), target.stride()) for part in targets.values() for target in part.values()]
        for source, part in targets.items():
            for name, target in part.items():
                assert bits_of(target) == bits_of(expected[name]), (source, layout, name)
    check_files(directory, {f"{layout}.{name}": whole for layout in LAYOUTS for name, whole in expected.items()})


def check_files(directory: Path, expected: dict[str, Tensor]) -> None:
    """Plain safetensors reads every tensor; types that it lacks are seen as what they are stored as."""
    found: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    assert sorted(found) == sorted(name for name, whole in expected.items() if whole.numel())
    for name, tensor in found.items():
        assert bits_of(tensor) == bits_of(expected[name]), name


def _views() -> dict[str, Tensor]:
    """Views whose elements are not what lies in memory, or that share elements."""
    base = values((300, 1000), torch.float32, 1).nan_to_num_()
    pairs = torch.view_as_complex(base.reshape(300, 500, 2))
    return {
        "conjugated": pairs.conj(),
        "conjugated, every second": pairs.conj()[:, ::2],
        "imaginary part of a conjugate": pairs.conj().imag,
        "real part": pairs.real,
        "expanded rows": base[3].expand(2000, 1000),
        "expanded element": base[3, 5].expand(1100, 1000),
        "windows": base[0].unfold(0, 100, 1),
        "channels last": base.reshape(3, 10, 100, 100).to(memory_format=torch.channels_last),
        "diagonal": base.diagonal(),
        "an inference tensor": _inference(base),
    }


@torch.inference_mode()
def _inference(base: Tensor) -> Tensor:
    return base[:, 1:] + 1


def test_views_are_saved_as_what_they_show(directory: Path) -> None:
    state = _views()
    dcp_torch.save(state, checkpoint_id=directory, durable=False)
    target = {name: torch.zeros(view.shape, dtype=view.dtype) for name, view in state.items()}
    dcp_torch.load(target, checkpoint_id=directory)
    for name, view in state.items():
        assert bits_of(target[name]) == bits_of(view.resolve_conj().resolve_neg()), name


def test_conjugated_and_negated_targets_show_what_was_saved(directory: Path) -> None:
    whole = values((200, 600), torch.complex64, 2)
    whole = torch.view_as_complex(torch.view_as_real(whole).nan_to_num())
    dcp_torch.save({"pairs": whole, "numbers": whole.imag.contiguous()}, checkpoint_id=directory, durable=False)
    memory = torch.zeros_like(whole)
    numbers = torch.zeros_like(whole)
    dcp_torch.load({"pairs": memory.conj(), "numbers": numbers.conj().imag}, checkpoint_id=directory)
    assert torch.equal(memory.conj().resolve_conj(), whole)
    assert torch.equal(numbers.conj().imag.resolve_neg(), whole.imag)


# --- several ranks -----------------------------------------------------------------------------------

PARAMETERS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed": ((5003, 260), torch.bfloat16),
    "up": ((1024, 1024), torch.float32),
    "down": ((515, 1029), torch.float32),
    "experts": ((5, 64, 700), torch.float8_e4m3fn),
    "bias": ((1031,), torch.float64),
}
CUTS: dict[str, list[list[Placement]]] = {
    "2x2": [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Replicate()]],
    "4": [[Shard(0)], [Shard(1)], [Replicate()]],
    "3": [[Shard(1)], [Shard(0)], [Replicate()]],
    "1": [[Replicate()]],
}


def sharded(rank: TorchRank, cut: str, *, poisoned: bool = False) -> dict[str, DTensor]:
    mesh = init_device_mesh(rank.device.type, tuple(int(size) for size in cut.split("x")))
    state = {}
    for number, (name, (shape, dtype)) in enumerate(PARAMETERS.items()):
        placements = CUTS[cut][number % len(CUTS[cut])]
        limited = [Shard(0) if isinstance(p, Shard) and p.dim >= len(shape) else p for p in placements]
        if limited.count(Shard(0)) > 1:
            limited = [Shard(0), *(Replicate() for _ in limited[1:])]
        whole = values(shape, dtype, 100 + number)
        state[name] = shard(torch.zeros_like(whole) if poisoned else whole, mesh, limited)
    return state


def save_sharded(rank: TorchRank, directory: str, cut: str) -> None:
    writer = writer_over(TornOperations(rank.rank))
    dcp_torch.save(sharded(rank, cut), checkpoint_id=directory, durable=False, storage_writer=writer)


def load_sharded(rank: TorchRank, directory: str, cut: str, verify: Any) -> None:
    target, expected = sharded(rank, cut, poisoned=True), sharded(rank, cut)
    reader = reader_over(TornOperations(rank.rank))
    dcp_torch.load(target, checkpoint_id=directory, verify=verify, storage_reader=reader)
    for name, tensor in target.items():
        assert bits_of(tensor) == bits_of(expected[name]), name


def test_sharded_tensors_of_several_blocks_come_back_under_other_cuts(directory: Path) -> None:
    run_gloo(save_sharded, 4, str(directory), "2x2")
    for world, cut, verify in [(4, "4", True), (3, "3", "full"), (1, "1", True)]:
        run_gloo(load_sharded, world, str(directory), cut, verify)


# --- memory ------------------------------------------------------------------------------------------

LIMIT_MIB = 128.0
SHAPE = (16384, 16384)
"""Half a gibibyte of bfloat16."""


def large(dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = SHAPE) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    whole[...] = torch.arange(shape[-1]).remainder(251)
    return whole


SOURCES: dict[str, Callable[[], Tensor]] = {
    "plain": large,
    "transposed": lambda: large().t(),
    "every second column": lambda: large(shape=(SHAPE[0], 2 * SHAPE[1]))[:, ::2],
    "conjugated": lambda: large(torch.complex64, (8192, 8192)).conj(),
}
TARGETS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.ones(SHAPE, dtype=torch.bfloat16),
    "transposed": lambda: torch.ones(SHAPE, dtype=torch.bfloat16).t(),
    "to float32": lambda: torch.ones(SHAPE, dtype=torch.float32),
    "to float32, transposed": lambda: torch.ones(SHAPE, dtype=torch.float32).t(),
    "columns": lambda: dcp_torch.annotate_shard(
        torch.ones(SHAPE[0], 6000, dtype=torch.bfloat16), offsets=(0, 5000), global_shape=SHAPE
    ),
    "columns to float32": lambda: dcp_torch.annotate_shard(
        torch.ones(SHAPE[0], 6000), offsets=(0, 5000), global_shape=SHAPE
    ),
}


def rise_of_torch_save(context: RankContext, directory: str, source: str) -> float:
    torch.set_num_threads(1)
    dcp_torch.save({"warm": torch.ones(3)}, checkpoint_id=directory + " warm", durable=False)
    state = {"large": SOURCES[source]()}
    return peak_rise(lambda: dcp_torch.save(state, checkpoint_id=directory, durable=False))


def rise_of_torch_load(context: RankContext, directory: str, target: str) -> float:
    torch.set_num_threads(1)
    state = {"large": TARGETS[target]()}
    rise = peak_rise(lambda: dcp_torch.load(state, checkpoint_id=directory))
    first = 5000 if "columns" in target else 0
    found = state["large"][::500].float()
    right = torch.arange(first, first + found.shape[1]).remainder(251).bfloat16().float()
    assert torch.equal(found, right.expand(found.shape))
    return rise


needs_host = pytest.mark.skipif(gloo_ranks.test_device_type() != "cpu", reason="measures tensors in host memory")


@needs_host
@pytest.mark.parametrize("source", list(SOURCES))
def test_a_save_needs_little_memory_beside_the_state(source: str, directory: Path) -> None:
    need_peak_counter()
    (rise,) = run_ranks(rise_of_torch_save, 1, str(directory), source)
    written = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert written >= 512 * MEBIBYTE
    assert rise <= LIMIT_MIB


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """Half a gibibyte in one tensor."""
    need_peak_counter()
    with memory_directory() as path:
        dcp_torch.save({"large": large()}, checkpoint_id=path / "step", durable=False)
        yield path / "step"


@needs_host
@pytest.mark.parametrize("target", list(TARGETS))
def test_a_load_needs_little_memory_beside_the_state(target: str, saved: Path) -> None:
    (rise,) = run_ranks(rise_of_torch_load, 1, str(saved), target)
    assert rise <= LIMIT_MIB


def test_two_names_on_one_memory_are_filled_from_different_chunks_and_the_last_one_stays(tmp_path: Path) -> None:
    saved = {name: torch.rand(40, 30) for name in "abc"}
    dcp_torch.save(saved, checkpoint_id=tmp_path)
    both = torch.zeros(40, 30)
    dcp_torch.load({"a": both, "b": both, "c": torch.zeros(40, 30)}, checkpoint_id=tmp_path)
    assert torch.equal(both, saved["b"])
