"""The torch adapter: every dtype bit for bit, every kind of view, casts, refusals."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.adapter import Adapter
from dcp_core.box import Box
from dcp_core.dtype import DTYPES, DType, Kind, conversion, dtype_named
from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.leaves import LocalTensor
from dcp_torch.adapter import TorchAdapter
from dcp_torch.elements import dtype_of, storage_identity, tensor_of_bits, torch_dtype_of, writable_problem
from tests.torch.gloo_ranks import local_device

ADAPTER = TorchAdapter()
NAMES = [dtype.name for dtype in DTYPES]


def adapters() -> list[Adapter]:
    """Type-checked: the adapter fits the protocol."""
    return [ADAPTER]


def described(value: Any) -> LocalTensor:
    found = ADAPTER.describe(value)
    assert found is not None
    return found


def random_bits(dtype: DType, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Any bits at all: NaN payloads, infinities, subnormal numbers."""
    numel = int(np.prod(shape, dtype=np.int64))
    raw = np.random.default_rng(7).integers(0, 256, numel * dtype.itemsize, dtype=np.uint8)
    return (raw % 2 if dtype.kind is Kind.BOOL else raw).view(dtype.bits).reshape(shape)


def raw_bytes(array: npt.NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def of_dtype(name: str, shape: tuple[int, ...] = (5, 6)) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that complex32 is experimental
        return tensor_of_bits(random_bits(dtype_named(name), shape), dtype_named(name)).to(local_device())


def views_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "whole": tensor,
        "transposed": tensor.t(),
        "strided": tensor[::2, 1::3],
        "row": tensor[3],
        "column": tensor[:, 2],
        "scalar": tensor[1, 1],
        "empty": tensor[:0],
        "expanded": tensor[0].expand(4, 6),
    }


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_every_dtype_come_out_as_they_are(name: str) -> None:
    tensor = of_dtype(name)
    whole = random_bits(dtype_named(name), (5, 6))
    views = views_of(torch.arange(30).reshape(5, 6))
    for label, view in views_of(tensor).items():
        expected = whole.reshape(-1)[views[label].numpy()]
        found = ADAPTER.read_out(view)
        assert found.dtype == dtype_named(name).bits
        assert found.shape == tuple(view.shape)
        assert raw_bytes(found) == raw_bytes(expected), label


@pytest.mark.parametrize("name", NAMES)
def test_host_arrays_share_the_memory(name: str) -> None:
    if local_device().type != "cpu":
        pytest.skip("host tensors only")
    tensor = of_dtype(name)
    for label, view in views_of(tensor).items():
        array = ADAPTER.host_array(view)
        assert array is not None
        assert array.dtype == dtype_named(name).bits
        assert array.shape == tuple(view.shape)
        if view.numel() and label != "expanded":
            array[...] = np.zeros((), array.dtype)
            assert raw_bytes(ADAPTER.read_out(view)) == bytes(view.numel() * array.itemsize)


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_every_dtype_go_in_as_they_are(name: str) -> None:
    dtype = dtype_named(name)
    for label, view in views_of(of_dtype(name)).items():
        if label == "expanded":
            continue
        bits = random_bits(dtype, tuple(view.shape))[...]
        ADAPTER.copy_into(view, bits, dtype)
        assert raw_bytes(ADAPTER.read_out(view)) == raw_bytes(bits), label


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_is_described_by_its_name(name: str) -> None:
    found = described(of_dtype(name))
    assert found.dtype.name == name
    assert found.boxes == (Box((0, 0), (5, 6)),)
    assert found.plain
    assert torch_dtype_of(found.dtype) is dtype_to_torch(name)


def dtype_to_torch(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def test_every_dtype_that_torch_has_is_mapped_or_refused_clearly() -> None:
    every = {found for found in vars(torch).values() if isinstance(found, torch.dtype)}
    refused = set()
    for dtype in every:
        try:
            assert dtype_of(dtype).itemsize == dtype.itemsize
        except UnsupportedValueError:
            refused.add(str(dtype))
    assert all("int" in name or "bits" in name for name in refused), refused
    assert len(every) - len(refused) == len(DTYPES)


def numeric_pairs() -> list[tuple[str, str]]:
    pairs = itertools.permutations([dtype for dtype in DTYPES if dtype.kind is not Kind.OPAQUE], 2)
    return [(a.name, b.name) for a, b in pairs if conversion(a, b) in ("lossless", "lossy")]


@pytest.mark.parametrize(("source", "target"), numeric_pairs())
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_allowed_conversions_follow_torch(source: str, target: str) -> None:
    values = torch.tensor([1, 2, 1, 4, 1, 2]).to(dtype_to_torch(source)).reshape(2, 3)
    view = of_dtype(target, (3, 2)).t()
    ADAPTER.copy_into(view, ADAPTER.read_out(values), dtype_named(source))
    assert raw_bytes(ADAPTER.read_out(view)) == raw_bytes(ADAPTER.read_out(values.to(view.dtype)))


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_float32_goes_into_bfloat16_as_torch_rounds(values: list[float]) -> None:
    source = torch.tensor(values, dtype=torch.float32)
    target = torch.zeros(len(values), dtype=torch.bfloat16)
    ADAPTER.copy_into(target, source.numpy(), dtype_named("float32"))
    assert torch.equal(target.view(torch.int16), source.to(torch.bfloat16).view(torch.int16))


@pytest.mark.parametrize("name", ["complex64", "complex128", "complex32"])
def test_a_conjugated_view_is_read_by_its_values_and_written_through(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that complex32 is experimental
        tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128).to(dtype_to_torch(name))
    view = tensor.conj()
    assert view.is_conj()
    assert described(view).device == "cpu"
    assert ADAPTER.host_array(view) is None
    resolved = ADAPTER.read_out(view)
    assert raw_bytes(resolved) == raw_bytes(ADAPTER.read_out(view.resolve_conj()))
    ADAPTER.copy_into(view, resolved[::-1], dtype_named(name))
    assert tensor.to(torch.complex128).tolist() == [3 - 4j, 1 + 2j]


def test_a_negated_view_is_read_by_its_values_and_written_through() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    view = tensor.conj().imag
    assert view.is_neg()
    assert ADAPTER.host_array(view) is None
    assert ADAPTER.read_out(view).tolist() == [-2.0, 4.0]
    ADAPTER.copy_into(view, np.array([5, 6], dtype=np.float32), dtype_named("float32"))
    assert tensor.tolist() == [1 - 5j, 3 - 6j]


def test_channels_last_keeps_logical_values_both_ways() -> None:
    tensor = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last).to(local_device())
    bits = ADAPTER.read_out(tensor)
    assert np.array_equal(bits, np.arange(120).reshape(2, 3, 4, 5))
    target = torch.zeros_like(tensor, memory_format=torch.channels_last)
    ADAPTER.copy_into(target, bits, dtype_named("int64"))
    assert torch.equal(target, tensor)
    assert target.is_contiguous(memory_format=torch.channels_last)


def test_parameters_are_read_and_written_in_place_without_autograd() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, device=local_device()))
    address = parameter.data_ptr()
    ADAPTER.copy_into(parameter, np.ones(3, dtype=np.float32), dtype_named("float32"))
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    assert parameter.data_ptr() == address
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    assert described(parameter).views[0].grad_fn is None


def test_tensors_made_in_inference_mode_can_be_written() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    ADAPTER.copy_into(tensor, np.ones(3, dtype=np.int32), dtype_named("int32"))
    assert tensor.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["read-only", "reversed", "big strides", "unaligned", "0-d"])
def test_bits_that_torch_cannot_share_are_taken_too(kind: str) -> None:
    base = np.arange(8, dtype=np.float32)
    bits: npt.NDArray[Any] = {
        "read-only": np.frombuffer(base.tobytes(), dtype=np.float32),
        "reversed": base[::-1],
        "big strides": np.arange(16, dtype=np.float32)[::2],
        "unaligned": np.frombuffer(bytearray(b"x" + base.tobytes()), dtype=np.float32, offset=1),
        "0-d": np.frombuffer(base.tobytes(), dtype=np.float32)[3:4].reshape(()),
    }[kind]
    target = torch.zeros(bits.shape)
    ADAPTER.copy_into(target, bits, dtype_named("float32"))
    assert np.array_equal(target.numpy(), bits)


def test_a_part_of_a_view_shares_its_memory() -> None:
    tensor = torch.zeros(4, 5, requires_grad=True)
    part = ADAPTER.narrow(tensor, Box((1, 2), (2, 3)))
    ADAPTER.copy_into(part, np.ones((2, 3), dtype=np.float32), dtype_named("float32"))
    assert tensor.sum().item() == 6
    assert tensor[1:3, 2:].sum().item() == 6
    scalar = torch.zeros(())
    assert ADAPTER.narrow(scalar, Box((), ())) is scalar


# -- identity ------------------------------------------------------------------------------------------------------


def test_storage_is_equal_exactly_for_the_same_elements_of_the_same_memory() -> None:
    base = torch.zeros(4, 6)
    assert storage_identity(base) == storage_identity(base.detach()) == storage_identity(base[:])
    assert storage_identity(base) == storage_identity(torch.nn.Parameter(base))
    assert storage_identity(base[:1]) == storage_identity(base[:1].as_strided((1, 6), (99, 1)))
    others = [base.clone(), base[1:], base.t(), base.view(6, 4), base.view(torch.int32), base[:2]]
    assert len({storage_identity(other) for other in [base, *others]}) == len(others) + 1
    complex_base = torch.zeros(3, dtype=torch.complex64)
    assert storage_identity(complex_base) != storage_identity(complex_base.conj())


def test_storage_of_an_empty_tensor_cannot_be_told() -> None:
    assert storage_identity(torch.zeros(0, 3)) is None
    assert described(torch.zeros(0, 3)).storage is None
    assert described(torch.zeros(0, 3)).boxes == ()


# -- targets -------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    strides=st.lists(st.integers(0, 7), min_size=3, max_size=3),
)
def test_only_tensors_whose_elements_are_apart_can_be_targets(sizes: list[int], strides: list[int]) -> None:
    view = torch.zeros(64).as_strided(sizes, strides[: len(sizes)])
    grids = np.meshgrid(*(np.arange(size) for size in sizes), indexing="ij")
    addresses = sum(grid * stride for grid, stride in zip(grids, strides, strict=False))
    are_apart = len(np.unique(addresses)) == view.numel()
    assert (writable_problem(view) is None) == are_apart
    assert (ADAPTER.writable_problem(view) is None) == are_apart


def test_the_problem_with_an_expanded_target_says_what_to_do() -> None:
    problem = writable_problem(torch.zeros(1, 3).expand(2, 3))
    assert problem is not None
    assert "clone()" in problem


# -- refusals ------------------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    pass


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to drop them
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(2).as_subclass(Wrapped), "Wrapped.*dcp_describers"),
        (lambda: torch.eye(3).to_sparse(), "sparse_coo.*to_dense"),
        (quantized, "quantized.*dequantize"),
        (lambda: torch.empty(3, device="meta"), "meta.*to_empty"),
        (nested, r"values\(\)"),
        (lambda: torch.nn.LazyLinear(3).weight, "UninitializedParameter.*run"),
        (lambda: torch.empty(3, dtype=torch.bits8), "bits8"),
    ],
    ids=["subclass", "sparse", "quantized", "meta", "nested", "lazy", "bits"],
)
def test_what_cannot_be_stored_is_refused_with_what_to_do(make: Any, words: str) -> None:
    with pytest.raises(UnsupportedValueError, match=words):
        ADAPTER.describe(make())


@pytest.mark.parametrize("value", [1, 2.0, "x", None, [1], np.ones(3), torch.float32, torch.Size([1])])
def test_values_that_are_no_tensors_are_left_to_others(value: object) -> None:
    assert ADAPTER.describe(value) is None
