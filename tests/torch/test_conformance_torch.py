"""The conformance kit, run on what dcp_torch brings along: its adapter, groups, broadcasts, channels, and DTensor."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]  # torch lists no exports
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from dcp_core.adapter import Adapter, Describer, KeyValueChannel
from dcp_core.dtype import DType, dtype_named
from dcp_core.testing.conformance.adapter import AdapterConformance
from dcp_core.testing.conformance.broadcasts import BroadcastConformance
from dcp_core.testing.conformance.carrier import CarrierConformance
from dcp_core.testing.conformance.describer import DescriberConformance
from dcp_core.testing.conformance.groups import GroupConformance
from dcp_core.testing.conformance.samples import Bits
from dcp_core.testing.ranks import RankContext
from dcp_torch.adapter import TorchAdapter
from dcp_torch.store_channel import StoreChannel
from tests.torch.gloo_ranks import local_device, torch_rank

pytestmark = pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="forks ranks of its own")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_of(bits: Bits, dtype: DType) -> torch.Tensor:
    """A tensor of raw bits, made by torch alone."""
    torch_type = getattr(torch, dtype.name)
    if not bits.size:
        return torch.empty(bits.shape, dtype=torch_type, device=local_device())
    raw = torch.from_numpy(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).copy())
    return raw.to(local_device()).view(torch_type).reshape(bits.shape)


class TorchTensors:
    """Plain tensors."""

    def make_tensor(self, bits: Bits, dtype: DType) -> Any | None:
        return tensor_of(bits, dtype)

    def bits_of(self, tensor: torch.Tensor) -> Bits:
        dtype = dtype_named(str(tensor.dtype).removeprefix("torch."))
        as_integers = tensor.detach().view(_INTEGERS[dtype.itemsize]) if dtype.itemsize in _INTEGERS else tensor
        plain = as_integers.cpu().contiguous().numpy().copy()
        return plain.view(dtype.bits).reshape(tuple(tensor.shape))


class TorchJob:
    """What jobs of torch ranks get."""

    @contextmanager
    def in_rank(self, context: RankContext) -> Iterator[Adapter]:
        with torch_rank(context, str(context.channel_directory / "store")):
            yield TorchAdapter()


class TestTorchAdapter(TorchTensors, AdapterConformance):
    def make_adapter(self) -> Adapter:
        return TorchAdapter()

    def foreign_values(self) -> Iterable[Any]:
        return (np.zeros(3), torch.float32, torch.Size([2]), torch.nn.Linear(1, 1), torch.device("cpu"))

    def unwritable_views(self) -> Iterable[Any]:
        return (torch.zeros(3).expand(2, 3), torch.zeros(5).as_strided((3, 3), (1, 1)))


class TestParameters(TestTorchAdapter):
    """Tensors that require grad, where their type can."""

    def make_tensor(self, bits: Bits, dtype: DType) -> Any | None:
        tensor = tensor_of(bits, dtype)
        is_trained = tensor.is_floating_point() or tensor.is_complex()
        return torch.nn.Parameter(tensor) if is_trained else tensor

    def bits_of(self, tensor: torch.Tensor) -> Bits:
        return super().bits_of(tensor.detach())


class TestTorchGroup(TorchJob, GroupConformance):
    pass


class TestTorchBroadcasts(TorchTensors, TorchJob, BroadcastConformance):
    device = local_device().type

    def foreign_values(self) -> Iterable[Any]:
        return (np.zeros(3), torch.float32, memoryview(b"x"))


class TestStoreChannel(CarrierConformance):
    def open_channel(self, place: Path, rank: int, world_size: int) -> KeyValueChannel:
        return StoreChannel(FileStore(str(place / "store"), -1), "prefix", rank=rank, world_size=world_size)


def tcp_store(place: Path, rank: int) -> TCPStore:
    """The store of a place: rank 0's process hosts one; others find its port in a file.

    A process makes one only: to connect takes torch five seconds now and then.
    """
    port = place / "port"
    if rank == 0 and not _hosted:
        _hosted.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    if _hosted:
        port.with_suffix(".new").write_text(str(_hosted[0].port))
        port.with_suffix(".new").rename(port)
        return _hosted[0]
    deadline = time.monotonic() + 30
    while not port.exists():
        assert time.monotonic() < deadline, "rank 0 does not host a store"
        time.sleep(0.002)
    return TCPStore("127.0.0.1", int(port.read_text()), is_master=False, wait_for_workers=False)


_hosted: list[TCPStore] = []  # a store lives as long as its host holds it


class TestStoreChannelOverTcp(CarrierConformance):
    def open_channel(self, place: Path, rank: int, world_size: int) -> KeyValueChannel:
        return StoreChannel(tcp_store(place, rank), str(place), rank=rank, world_size=world_size)


class TestTorchGroupOverTcp(GroupConformance):
    """A job that was started by MASTER_ADDR and MASTER_PORT: its background processes have a channel."""

    @contextmanager
    def in_rank(self, context: RankContext) -> Iterator[Adapter]:
        store = tcp_store(context.channel_directory, context.rank)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
        dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
        dist.barrier()
        adapter = TorchAdapter()
        assert context.world_size == 1 or adapter.process_group().remote is not None
        try:
            yield adapter
            dist.barrier()
        finally:
            dist.destroy_process_group()


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh(local_device().type, shape, mesh_dim_names=("outer", "inner")[: len(shape)])


class TestDTensor(TorchJob, DescriberConformance):
    layouts = ("rows", "columns", "whole", "rows twice", "blocks", "replicated rows")

    def make_describer(self) -> Describer:
        return TorchAdapter()

    def make_value(self, layout: str, whole: Bits, dtype: DType, rank: int, world_size: int) -> Any:
        grid = mesh_of(max(world_size // 2, 1), min(world_size, 2))
        places: dict[str, tuple[DeviceMesh, list[Placement]]] = {
            "rows": (mesh_of(world_size), [Shard(0)]),
            "columns": (mesh_of(world_size), [Shard(1)]),
            "whole": (mesh_of(world_size), [Replicate()]),
            "rows twice": (grid, [Shard(0), Shard(0)]),
            "blocks": (grid, [Shard(0), Shard(1)]),
            "replicated rows": (grid, [Replicate(), Shard(0)]),
        }
        mesh, placements = places[layout]
        return distribute_tensor(tensor_of(whole, dtype), mesh, placements, src_data_rank=None)

    def refused_values(self, rank: int, world_size: int) -> Iterable[Any]:
        return (DTensor.from_local(torch.zeros(2, 2), mesh_of(world_size), [Partial()], run_check=False),)

    def foreign_values(self) -> Iterable[Any]:
        return (np.zeros(3), torch.float32)
