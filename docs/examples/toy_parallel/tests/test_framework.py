"""The framework by itself: cuts tile a tensor, and the network computes the same on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from toy_parallel import Average, Columns, Cut, Experts, Mlp, Ragged, Rows, ShardedTensor

CUTS: list[Cut] = [Rows(), Columns(), Experts(), Ragged((1, 0, 3))]


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: type(cut).__name__)
@pytest.mark.parametrize("shape", [(7, 5, 2), (2, 2), (3, 1, 4)])
def test_the_shares_of_all_ranks_are_the_tensor(cut: Cut, shape: tuple[int, ...]) -> None:
    whole = torch.rand(shape)
    seen = torch.zeros(shape)
    for rank in range(3):
        share = ShardedTensor.of(whole, cut, rank=rank, ranks=3)
        for part, local in zip(share.parts, share.local, strict=True):
            region = seen.view(-1) if len(part.start) == 1 else seen
            region[tuple(slice(at, at + size) for at, size in zip(part.start, part.shape, strict=True))] += local
    assert torch.equal(seen, whole)


def train(rank: int, ranks: int) -> list[float]:
    network, rows = Mlp(seed=3), torch.rand(12, 6, generator=torch.Generator().manual_seed(1))
    average = Average(network.down, tuple(range(1, ranks + 1)))
    losses = []
    for _ in range(4):
        losses.append(network.step(rows, rows.flip(1)))
        average.update(network.down)
    assert average.value.whole().shape == network.down.shape
    return losses


def test_the_network_trains_alike_on_any_number_of_ranks() -> None:
    (alone,) = on_ranks(1, train)
    assert alone[-1] < alone[0]
    for losses in on_ranks(3, train):
        assert losses == pytest.approx(alone)
