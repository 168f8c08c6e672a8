"""Elements of MindSpore tensors: memory is shared where it is host memory, and bits stay as they are."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, DTYPES, DType
from dcp_core.errors import UnsupportedValueError
from dcp_mindspore import elements
from dcp_mindspore.elements import DeviceAccess, DeviceView, dtype_of, memory_of, mindspore_dtype_of, tensor_of_bits

KNOWN = [dtype for dtype in DTYPES if hasattr(mindspore, "bool_" if dtype.name == "bool" else dtype.name)]
ON_HOST_ONLY = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # types whose elements MindSpore cannot assign on CPU


def random_bits(dtype: DType, shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[Any]:
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return (raw % 2 if dtype.name == "bool" else raw).view(dtype.bits).reshape(shape)


def test_every_dtype_that_mindspore_and_the_format_have_is_known() -> None:
    assert {dtype.name for dtype in KNOWN} >= {"bool", "int64", "uint16", "bfloat16", "float8_e4m3fn", "complex128"}
    for dtype in KNOWN:
        assert dtype_of(mindspore_dtype_of(dtype)) == dtype
    with pytest.raises(UnsupportedValueError, match="complex32"):
        mindspore_dtype_of(BY_NAME["complex32"])


@pytest.mark.parametrize("dtype", KNOWN, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (4, 6)])
def test_a_tensor_has_the_bits_that_it_is_made_of(dtype: DType, shape: tuple[int, ...]) -> None:
    bits = random_bits(dtype, shape)
    tensor = tensor_of_bits(bits, dtype)
    assert dtype_of(tensor.dtype) == dtype and tuple(tensor.shape) == shape
    memory = memory_of(tensor)
    assert memory.view.tobytes() == bits.tobytes() == elements.read_bits(tensor).tobytes()
    assert (memory.storage is None) == (0 in shape) and memory.device == "cpu"


@pytest.mark.parametrize("dtype", KNOWN, ids=lambda dtype: dtype.name)
def test_what_is_written_through_a_view_is_in_the_tensor_whatever_its_strides(dtype: DType) -> None:
    bits = random_bits(dtype, (4, 6))
    base = tensor_of_bits(bits, dtype)
    for part, expected in ((base, bits), (base[1:3], bits[1:3]), (base.T, bits.T), (base[:, 2:4], bits[:, 2:4])):
        memory = memory_of(part)
        assert memory.view.tobytes() == expected.tobytes()
        new = random_bits(dtype, expected.shape, seed=1)
        memory.access.copy_into(memory.view, new, dtype)
        assert memory_of(part).view.tobytes() == new.tobytes()
        memory_of(base).view[...] = bits


def test_a_parameter_is_written_in_place() -> None:
    parameter = mindspore.Parameter(mindspore.Tensor(np.zeros((3, 4), np.float32)), name="p")
    address = parameter.data_ptr()
    memory = memory_of(parameter)
    memory.access.copy_into(
        memory.access.narrow(memory.view, Box((1, 1), (2, 2))), np.ones((2, 2), "<f4"), memory.dtype
    )
    assert parameter.data_ptr() == address
    assert (parameter * 1).asnumpy().sum() == 4  # operations see it


def test_the_host_waits_for_what_computes_a_tensor() -> None:
    tensor = mindspore.mint.zeros((1000, 1000))
    for _ in range(20):
        tensor = tensor + 1
    assert (memory_of(tensor).view == 20).all()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_equal_storage_means_the_same_elements(shape: list[int], data: st.DataObject) -> None:
    base = mindspore.Tensor(np.zeros(shape, np.int32))
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    part = base[tuple(slice(start, None) for start in starts)]
    same = memory_of(part).storage == memory_of(base).storage
    assert same == (not any(starts))
    assert memory_of(base).storage != memory_of(mindspore.Tensor(np.zeros(shape, np.int32))).storage


def test_an_expanded_tensor_is_no_target() -> None:
    memory = memory_of(mindspore.mint.zeros((1, 3)).expand((2, 3)))
    assert memory.access.writable_problem(memory.view) is not None


@pytest.mark.parametrize("dtype", [d for d in KNOWN if d.name not in ON_HOST_ONLY], ids=lambda dtype: dtype.name)
def test_parts_of_a_tensor_on_a_device_are_read_and_written_in_place(dtype: DType) -> None:
    """A host tensor stands in for one on a device."""
    bits, access = random_bits(dtype, (4, 6)), DeviceAccess()
    tensor = tensor_of_bits(bits, dtype)
    address = tensor.data_ptr()
    part = access.narrow(access.narrow(DeviceView(tensor, Box.whole((4, 6))), Box((1, 1), (3, 4))), Box((0, 1), (2, 3)))
    assert access.read_out(part).tobytes() == bits[1:3, 2:5].tobytes()
    access.copy_into(part, bits[:2, :3], dtype)
    expected = bits.copy()
    expected[1:3, 2:5] = bits[:2, :3]
    assert memory_of(tensor).view.tobytes() == expected.tobytes() and tensor.data_ptr() == address
    access.copy_into(DeviceView(tensor, Box.whole((4, 6))), bits, dtype)
    assert memory_of(tensor).view.tobytes() == bits.tobytes() and tensor.data_ptr() == address
