"""The state of a rank: its tensors, the values that they must have, and a check of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.ranks import Rank
from benchmarks.workloads import TensorSpec


@dataclass(frozen=True, slots=True)
class State:
    """What one rank holds.

    Attributes:
        rank: Which rank.
        specs: The global tensors.
        cut: The dimension along which they are cut.
        tensors: Plain tensors on one rank, DTensors on several, by name.
        locals: The memory of this rank, by name; contiguous and touched.
    """

    rank: Rank
    specs: tuple[TensorSpec, ...]
    cut: int
    tensors: dict[str, Tensor]
    locals: dict[str, Tensor]

    def zero(self) -> None:
        """Overwrite everything."""
        for tensor in self.locals.values():
            tensor.zero_()

    def digests(self) -> dict[str, bytes]:
        """A digest of the bits of each tensor, by name: a quick way to see whether they are as they were."""
        return {name: xxhash.xxh3_128_digest(_bits(tensor).numpy().data) for name, tensor in self.locals.items()}

    def first_difference(self) -> str | None:
        """The name of a tensor of which not every bit is as it was made, or None."""
        for spec in self.specs:
            expected = _shard_of(whole_tensor(spec), self.rank, self.cut)
            if not torch.equal(_bits(expected), _bits(self.locals[spec.name])):
                return spec.name
        return None


def make_state(specs: Sequence[TensorSpec], rank: Rank, cut: int = 0) -> State:
    """This rank's shards of tensors of random bits; the same bits in every process."""
    local = {spec.name: _shard_of(whole_tensor(spec), rank, cut) for spec in specs}
    if rank.world_size == 1:
        return State(rank, tuple(specs), cut, local, local)
    mesh = _mesh(rank.world_size)
    tensors: dict[str, Tensor] = {
        name: DTensor.from_local(tensor, mesh, [Shard(cut)], run_check=False) for name, tensor in local.items()
    }
    return State(rank, tuple(specs), cut, tensors, local)


@cache
def _mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


def whole_tensor(spec: TensorSpec) -> Tensor:
    """Random bits: nothing in them can be compressed."""
    generator = np.random.Generator(np.random.SFC64(zlib.crc32(spec.name.encode())))
    words = generator.integers(0, 1 << 64, -(-spec.nbytes // 8), dtype=np.uint64)
    raw = torch.from_numpy(words.view(np.uint8)[: spec.nbytes])
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return raw.view(dtype).reshape(spec.shape)


def _shard_of(whole: Tensor, rank: Rank, cut: int) -> Tensor:
    """An even share; a dimension that the ranks do not divide would make a state that not every peer can take."""
    if rank.world_size == 1:
        return whole
    if whole.shape[cut] % rank.world_size:
        raise ValueError(f"{tuple(whole.shape)} can't be cut evenly along dimension {cut} by {rank.world_size} ranks")
    return whole.chunk(rank.world_size, cut)[rank.rank].clone(memory_format=torch.contiguous_format)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
