"""The conformance kit, run on what dcp_mindspore brings along: its adapter, groups, broadcasts and laid-out tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import mindspore
import numpy as np

from dcp_core.adapter import Adapter, Describer
from dcp_core.dtype import DType
from dcp_core.errors import UnsupportedValueError
from dcp_core.testing.conformance.adapter import AdapterConformance
from dcp_core.testing.conformance.broadcasts import BroadcastConformance
from dcp_core.testing.conformance.describer import DescriberConformance
from dcp_core.testing.conformance.groups import GroupConformance
from dcp_core.testing.conformance.samples import Bits
from dcp_core.testing.ranks import RankContext
from dcp_mindspore.adapter import MindSporeAdapter
from dcp_mindspore.annotate import annotate_shard
from dcp_mindspore.elements import mindspore_dtype_of, read_bits
from tests.mindspore.laid_out import DTensor
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


class Described(MindSporeJob, DescriberConformance):
    """What the adapter itself says of parts of tensors."""

    plugin = "mindspore"

    def make_describer(self) -> Describer:
        return MindSporeAdapter()


class TestLaidOutTensors(Described):
    """DTensors by their surface; each dimension is cut evenly."""

    layouts = ("rows", "blocks", "two axes", "whole", "other order", "last ranks")
    shape = (8, 4)
    small_shape = (8, 4)
    small_layouts = ("last ranks",)

    def make_value(self, layout: str, whole: Bits, dtype: DType, rank: int, world_size: int) -> Any:
        grid, ranks = (max(world_size // 2, 1), min(world_size, 2)), tuple(range(world_size))
        last = ranks[world_size // 2 :]
        mesh_shape, tensor_map, rank_list = {
            "rows": ((world_size,), (0, -1), ranks),
            "blocks": (grid, (1, 0), ranks),
            "two axes": (grid, ((1, 0), -1), ranks),
            "whole": ((world_size,), (-1, -1), ranks),
            "other order": ((world_size,), (0, -1), ranks[::-1]),
            "last ranks": ((len(last),), (0, -1), last),
        }[layout]
        place = rank_list.index(rank) if rank in rank_list else 0
        at = dict(enumerate(reversed(np.unravel_index(place, mesh_shape))))
        part = whole
        for dim, axes in enumerate(tensor_map):
            for axis in axes if isinstance(axes, tuple) else (axes,):
                if axis != -1:
                    part = np.split(part, mesh_shape[len(mesh_shape) - 1 - axis], dim)[at[axis]]
        laid_out = SimpleNamespace(mesh_shape=mesh_shape, tensor_map=tensor_map, rank_list=rank_list)
        return DTensor(tensor_of(part, dtype), laid_out, whole.shape)

    def refused_values(self, rank: int, world_size: int) -> Iterable[Any]:
        local = mindspore.Tensor.from_numpy(np.zeros((4, 2), np.float32))
        whole = {"mesh_shape": (1,), "tensor_map": (-1, -1), "rank_list": tuple(range(world_size))}
        return (
            DTensor(local, SimpleNamespace(**whole, partial=["sum"]), (4, 2)),
            DTensor(local, SimpleNamespace(**whole), (5, 2)),
        )


class TestAnnotatedShards(Described):
    layouts = ("rows", "columns", "flat")

    def make_value(self, layout: str, whole: Bits, dtype: DType, rank: int, world_size: int) -> Any:
        if layout == "flat":
            start, stop = (whole.size * at * at // world_size**2 for at in (rank, rank + 1))
            return annotate_shard(
                tensor_of(whole.reshape(-1)[start:stop], dtype), offsets=[start], global_shape=whole.shape
            )
        dim = 0 if layout == "rows" else 1
        start, stop = (whole.shape[dim] * at // world_size for at in (rank, rank + 1))
        part = whole[start:stop] if dim == 0 else whole[:, start:stop]
        offsets = (start, 0) if dim == 0 else (0, start)
        return annotate_shard(tensor_of(part, dtype), offsets=offsets, global_shape=whole.shape)
