"""Torch values inside objects: safe, exact, and refused when they are not well formed."""

from __future__ import annotations

import pytest
import torch

from dcp_core.dtype import DTYPES
from dcp_core.errors import DcpError, UnsupportedValueError
from dcp_core.formats.objects import decode_value, encode_value, needs_pickle, register_codec, value_digest
from dcp_torch import codecs


@pytest.fixture(autouse=True, scope="module")
def torch_codecs() -> None:
    for name in ("tensor", "parameter", "size", "dtype", "device"):
        register_codec(getattr(codecs, f"{name}_codec")())


@pytest.mark.parametrize(
    "value",
    [torch.Size([2, 3]), torch.Size([]), torch.float32, torch.bfloat16, torch.device("cuda", 1), torch.device("cpu")],
)
def test_plain_torch_values_come_back_equal(value: object) -> None:
    assert not needs_pickle([value])
    found = decode_value(encode_value(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_every_dtype_come_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    width = getattr(torch, name).itemsize
    raw = torch.arange(2 * 3 * width, dtype=torch.uint8)[: numel * width]
    raw = raw % 2 if name == "bool" else raw
    tensor = raw.view(getattr(torch, name)).reshape(shape)
    found = decode_value(encode_value((tensor,)))
    assert isinstance(found, tuple)
    (back,) = found
    assert back.dtype is tensor.dtype
    assert back.shape == tensor.shape
    assert back.reshape(-1).view(torch.uint8).tolist() == raw.tolist()


def test_parameters_stay_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    found = decode_value(encode_value([parameter, torch.ones(1, requires_grad=True)]))
    assert isinstance(found, list)
    assert type(found[0]) is torch.nn.Parameter
    assert [tensor.requires_grad for tensor in found] == [False, True]


def test_equal_tensors_have_equal_digests() -> None:
    base = torch.arange(6).reshape(2, 3)
    assert value_digest([base.t()]) == value_digest([base.t().contiguous()])
    assert value_digest([base]) != value_digest([base.t()])


def test_a_tensor_that_cannot_be_stored_is_refused_inside_an_object_too() -> None:
    with pytest.raises(UnsupportedValueError, match="sparse"):
        encode_value([torch.eye(2).to_sparse()])


@pytest.mark.parametrize(
    "plain",
    [
        None,
        ("float32", [2], b"1234", False),
        ("float32", [-1], b"1234", False),
        ("float32", [2**40, 2**40], b"1234", False),
        ("nonsense", [1], b"1234", False),
        ("int32", [1], b"1234", True),
        ("bool", [1], b"\2", False),
        ("float32", "x", b"1234", False),
    ],
)
def test_a_tensor_that_is_not_well_formed_is_refused(plain: object) -> None:
    with pytest.raises(DcpError):
        codecs.tensor_codec().decode(plain)


def test_names_that_torch_lacks_are_refused() -> None:
    for codec, plain in ((codecs.dtype_codec(), "Tensor"), (codecs.device_codec(), "moon"), (codecs.size_codec(), 3)):
        with pytest.raises(DcpError):
            codec.decode(plain)
