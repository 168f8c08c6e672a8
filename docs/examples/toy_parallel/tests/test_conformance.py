"""DCP's conformance kit, on the describer and on every cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from ranks import gloo_group
from toy_parallel import Columns, Cut, Experts, Ragged, Rows, ShardedTensor
from toy_parallel_dcp.describer import ShardedTensorDescriber

from dcp_core.adapter import Adapter, Describer
from dcp_core.dtype import DType
from dcp_core.testing.conformance.describer import DescriberConformance
from dcp_core.testing.conformance.samples import Bits
from dcp_core.testing.ranks import RankContext
from dcp_torch.adapter import TorchAdapter
from dcp_torch.elements import tensor_of_bits


class TestShardedTensorDescriber(DescriberConformance):
    layouts = ("rows", "columns", "experts", "ragged")
    worlds = (1, 2, 4)

    @contextmanager
    def in_rank(self, context: RankContext) -> Iterator[Adapter]:
        with gloo_group(context):
            yield TorchAdapter()

    def make_describer(self) -> Describer:
        return ShardedTensorDescriber()

    def make_value(self, layout: str, whole: Bits, dtype: DType, rank: int, world_size: int) -> ShardedTensor:
        cuts: dict[str, Cut] = {
            "rows": Rows(),
            "columns": Columns(),
            "experts": Experts(),
            "ragged": Ragged(tuple(range(world_size, 0, -1))),
        }
        return ShardedTensor.of(tensor_of_bits(whole, dtype), cuts[layout], rank=rank, ranks=world_size)

    def foreign_values(self) -> Iterable[Any]:
        return (torch.zeros(2), torch.nn.Parameter(torch.zeros(2)))
