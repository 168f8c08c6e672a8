"""The conformance kit, run on what dcp_mindspore brings along: its adapter, groups, broadcasts and laid-out tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np

from dcp_core.adapter import Adapter
from dcp_core.dtype import DType
from dcp_core.errors import UnsupportedValueError
from dcp_core.testing.conformance.adapter import AdapterConformance
from dcp_core.testing.conformance.broadcasts import BroadcastConformance
from dcp_core.testing.conformance.groups import GroupConformance
from dcp_core.testing.conformance.samples import Bits
from dcp_core.testing.ranks import RankContext
from dcp_mindspore.adapter import MindSporeAdapter
from dcp_mindspore.elements import mindspore_dtype_of, read_bits
from tests.mindspore.ms_ranks import mindspore_rank

_NAMED_OTHERWISE = {1: np.uint8, 2: np.int16}


def tensor_of(bits: Bits, dtype: DType) -> Any | None:
    """A tensor of raw bits, made by MindSpore alone; None for a type that it lacks."""
    try:
        kind = mindspore_dtype_of(dtype)
    except UnsupportedValueError:
        return None
    if dtype.numpy is not None:
        return mindspore.Tensor.from_numpy(np.array(bits, order="C").view(dtype.numpy))
    return mindspore.Tensor.from_numpy(np.array(bits, order="C").view(_NAMED_OTHERWISE[dtype.itemsize])).view(kind)


class MindSporeTensors:
    """Plain tensors."""

    lacking_dtypes: tuple[str, ...] = (
        "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"
    )  # fmt: skip

    def make_tensor(self, bits: Bits, dtype: DType) -> Any | None:
        return tensor_of(bits, dtype)

    def bits_of(self, tensor: Any) -> Bits:
        return np.array(read_bits(tensor))


class MindSporeJob:
    """What jobs of MindSpore ranks get."""

    @contextmanager
    def in_rank(self, context: RankContext) -> Iterator[Adapter]:
        with mindspore_rank(context):
            yield MindSporeAdapter()


class TestMindSporeAdapter(MindSporeTensors, AdapterConformance):
    def make_adapter(self) -> Adapter:
        return MindSporeAdapter()

    def foreign_values(self) -> Iterable[Any]:
        return (np.zeros(3), mindspore.float32, mindspore.nn.ReLU())


class TestParameters(TestMindSporeAdapter):
    """Parameters: MindSpore copies a tensor to make one, and has no copy of 8-bit floats on the CPU."""

    lacking_dtypes = (*MindSporeTensors.lacking_dtypes, "float8_e4m3fn", "float8_e5m2")

    def make_tensor(self, bits: Bits, dtype: DType) -> Any | None:
        tensor = tensor_of(bits, dtype)
        return tensor if tensor is None or not bits.size else mindspore.Parameter(tensor, name="w")


class TestMindSporeGroup(MindSporeJob, GroupConformance):
    pass


class TestMindSporeBroadcasts(MindSporeTensors, MindSporeJob, BroadcastConformance):
    def foreign_values(self) -> Iterable[Any]:
        return (np.zeros(3), mindspore.float32)
