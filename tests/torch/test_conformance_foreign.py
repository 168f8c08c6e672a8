"""The conformance kit for describers, run on what is no DTensor: laid-out tensors, annotated shards, flat ranges."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

from dcp_core.adapter import Describer
from dcp_core.dtype import DType
from dcp_core.testing.conformance.describer import DescriberConformance
from dcp_core.testing.conformance.samples import Bits
from dcp_torch import annotate_shard, split_flat
from dcp_torch.adapter import TorchAdapter
from tests.torch.laid_out_stand_ins import LaidOutHolder, LaidOutTensor, Layout, OlderLayout, laid_out
from tests.torch.test_conformance_torch import TorchJob, tensor_of

pytestmark = pytest.mark.skipif("TORCHELASTIC_RUN_ID" in __import__("os").environ, reason="forks ranks of its own")


class TestLaidOutTensors(TorchJob, DescriberConformance):
    layouts = ("rows", "blocks", "two axes", "pieces", "other order", "holder", "ragged")
    shape = (8, 4)
    small_shape = None  # all but ragged ones cut evenly; there one of four ranks has no rows

    def make_describer(self) -> Describer:
        return TorchAdapter()

    def make_value(self, layout: str, whole: Bits, dtype: DType, rank: int, world_size: int) -> Any:
        tensor = tensor_of(whole, dtype).cpu()
        grid = (max(world_size // 2, 1), min(world_size, 2))
        if layout == "ragged":
            return self._ragged(tensor, rank, world_size)
        layouts: dict[str, Layout] = {
            "rows": Layout((world_size,), (0, -1)),
            "blocks": OlderLayout(grid, (1, 0)),
            "two axes": Layout(grid, ((0, 1), -1)),
            "pieces": Layout((*grid, 2), ((0, 2), 1), alias_name=("dp", "tp", "interleaved_parallel")),
            "other order": Layout((world_size,), (-1, 0), rank_list=tuple(reversed(range(world_size)))),
            "holder": Layout(grid, (0, -1)),
        }
        return laid_out(tensor, layouts[layout], LaidOutHolder if layout == "holder" else LaidOutTensor)

    def _ragged(self, tensor: torch.Tensor, rank: int, world_size: int) -> LaidOutTensor:
        units = {1: (1,), 2: (3, 5), 4: (1, 0, 5, 2)}[world_size]
        placement = SimpleNamespace(dims=(0,), local_units=units)
        bounds = [4 * bound for bound in itertools.accumulate((0, *(unit * 8 // sum(units) for unit in units)))]
        local = tensor.reshape(-1)[bounds[rank] : bounds[rank + 1]].clone()
        return LaidOutTensor(local, Layout((world_size,), (-1, -1), ragged_shard=(0, placement)), tensor.shape)

    def refused_values(self, rank: int, world_size: int) -> Iterable[Any]:
        return (
            LaidOutTensor(torch.zeros(2), Layout((world_size,), (-1,), partial=("sum",)), (2,)),
            LaidOutTensor(torch.zeros(2), Layout((world_size,), (0,)), (5,)),
            LaidOutTensor(torch.zeros(3), Layout((world_size,), (0,)), (4,)),
        )

    def foreign_values(self) -> Iterable[Any]:
        return (Layout((1,), (0,)), LaidOutTensor)


class TestPartsOfTensors(TorchJob, DescriberConformance):
    layouts = ("annotated rows", "annotated columns", "flat", "split", "sharded tensor")

    def make_describer(self) -> Describer:
        return TorchAdapter()

    def make_value(self, layout: str, whole: Bits, dtype: DType, rank: int, world_size: int) -> Any:
        tensor = tensor_of(whole, dtype)
        if layout in ("annotated rows", "annotated columns"):
            dim = 0 if layout == "annotated rows" else 1
            start, stop = (tensor.shape[dim] * at // world_size for at in (rank, rank + 1))
            offsets = (start, 0) if dim == 0 else (0, start)
            local = tensor.narrow(dim, start, stop - start).clone()
            return annotate_shard(local, offsets=offsets, global_shape=tensor.shape)
        if layout == "sharded tensor":
            return self._sharded(tensor, rank, world_size)
        start, stop = (tensor.numel() * at * at // world_size**2 for at in (rank, rank + 1))
        local = tensor.reshape(-1)[start:stop].clone()
        if layout == "flat":
            return annotate_shard(local, offsets=(start,), global_shape=tensor.shape)
        return split_flat(local, start=start + 5, shapes={"w": tensor.shape}, begins={"w": 5})["w"]

    def _sharded(self, tensor: torch.Tensor, rank: int, world_size: int) -> Any:
        """Rows dealt out one by one: several local shards."""
        shards = [
            LocalShard.from_tensor_and_offsets(tensor[row : row + 1].clone(), [row, 0], rank)
            for row in range(rank, tensor.shape[0], world_size)
        ]
        return init_from_local_shards(shards, list(tensor.shape))
