"""A tensor that is cut over ranks, in one of four ways.

A `Cut` says which parts of a tensor a rank holds; a `ShardedTensor` holds them. Nothing in here knows of checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What lies in one piece in a rank's memory.

    `start` is where it begins in the whole tensor; one number for a part of the *flattened* tensor.
    """

    start: Shape
    shape: Shape


class Cut(Protocol):
    """How a tensor is cut over ranks."""

    def parts(self, shape: Shape, rank: int, ranks: int) -> list[Part]:
        """The parts of a tensor that a rank holds; none with an empty shape."""
        ...


@dataclass(frozen=True)
class Rows:
    """Each rank has some rows, the first ones one more where they don't divide."""

    def parts(self, shape: Shape, rank: int, ranks: int) -> list[Part]:
        return _slice(shape, 0, rank, ranks)


@dataclass(frozen=True)
class Columns:
    """Each rank has some columns."""

    def parts(self, shape: Shape, rank: int, ranks: int) -> list[Part]:
        return _slice(shape, 1, rank, ranks)


@dataclass(frozen=True)
class Experts:
    """The first dimension counts experts, which are dealt out one by one: a rank has several, apart from each other."""

    def parts(self, shape: Shape, rank: int, ranks: int) -> list[Part]:
        rest = shape[1:]
        return [Part((expert, *[0] * len(rest)), (1, *rest)) for expert in range(rank, shape[0], ranks)]


@dataclass(frozen=True)
class Ragged:
    """The flattened tensor is cut anywhere: each rank has a share of its elements, by weight."""

    weights: tuple[int, ...]

    def parts(self, shape: Shape, rank: int, ranks: int) -> list[Part]:
        if len(self.weights) != ranks:
            raise ValueError(f"{len(self.weights)} weights for {ranks} ranks")
        elements, total = math.prod(shape), sum(self.weights)
        start, stop = (elements * sum(self.weights[:at]) // total for at in (rank, rank + 1))
        return [Part((start,), (stop - start,))] if start < stop else []


def _slice(shape: Shape, dim: int, rank: int, ranks: int) -> list[Part]:
    size, longer = divmod(shape[dim], ranks)
    start, size = rank * size + min(rank, longer), size + (rank < longer)
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, size
    return [Part(tuple(offsets), tuple(sizes))] if size else []


@dataclass(frozen=True)
class ShardedTensor:
    """One rank's share of a tensor.

    `local` has a tensor for each of `parts`; `shape` is that of the whole. It is no `torch.Tensor`: DCP does not mind.
    """

    shape: Shape
    dtype: torch.dtype
    parts: tuple[Part, ...]
    local: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, whole: torch.Tensor, cut: Cut, *, rank: int | None = None, ranks: int | None = None) -> ShardedTensor:
        """Take this rank's share of a tensor that all ranks have; rank and ranks are those of the job by default."""
        own = (_rank() if rank is None else rank, _ranks() if ranks is None else ranks)
        parts = tuple(cut.parts(tuple(whole.shape), *own))
        local = tuple(_region(whole, part).clone() for part in parts)
        return cls(tuple(whole.shape), whole.dtype, parts, local)

    def whole(self) -> torch.Tensor:
        """Bring all shares together; every rank calls it."""
        shares: list[ShardedTensor] = [self] * _ranks()
        if len(shares) > 1:
            dist.all_gather_object(shares, self)
        found = torch.zeros(self.shape, dtype=self.dtype)
        for share in shares:
            for part, local in zip(share.parts, share.local, strict=True):
                _region(found, part).copy_(local.detach())
        return found


def _region(whole: torch.Tensor, part: Part) -> torch.Tensor:
    """The elements of a part, as a view of a whole, contiguous tensor."""
    seen = whole.view(-1) if len(part.start) != whole.dim() else whole
    return seen[tuple(slice(at, at + size) for at, size in zip(part.start, part.shape, strict=True))]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Add what all ranks have; the gradient goes to each of them as it is."""
    summed: torch.Tensor = _Sum.apply(values)  # type: ignore[no-untyped-call]  # torch has no types here
    return summed


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_context: object, values: torch.Tensor) -> torch.Tensor:
        summed = values.clone()
        if _ranks() > 1:
            dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(_context: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
