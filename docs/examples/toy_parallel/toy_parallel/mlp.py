"""A network whose weights are cut over ranks, and the running average of a weight.

`up` is cut by columns and `down` by rows, so that one sum over the ranks ends the layer; `experts` is dealt out. The
average is kept flat and ragged, as optimizers that are cut without regard for shapes keep theirs.
"""

from __future__ import annotations

import torch

from toy_parallel.sharded import Columns, Cut, Experts, Ragged, Rows, ShardedTensor, sum_over_ranks


class Mlp:
    """Two layers, and experts that a row of the input chooses by its number."""

    def __init__(self, width: int = 6, hidden: int = 10, experts: int = 5, *, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def weight(cut: Cut, *shape: int) -> ShardedTensor:
            made = ShardedTensor.of(torch.rand(shape, generator=random) - 0.5, cut)
            for local in made.local:
                local.requires_grad_()
            return made

        self.up = weight(Columns(), width, hidden)
        self.down = weight(Rows(), hidden, width)
        self.experts = weight(Experts(), experts, width, width)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The output for some rows, the same on all ranks."""
        found = torch.zeros_like(rows)
        for up, down in zip(self.up.local, self.down.local, strict=True):
            found = found + (rows @ up).relu() @ down
        experts = self.experts.shape[0]
        for part, weight in zip(self.experts.parts, self.experts.local, strict=True):
            mine = (torch.arange(len(rows)) % experts == part.start[0]).unsqueeze(1)
            found = found + torch.where(mine, rows @ weight[0], 0.0)
        return sum_over_ranks(found)

    def state(self) -> dict[str, ShardedTensor]:
        """The weights by name."""
        return {"up": self.up, "down": self.down, "experts": self.experts}

    def step(self, rows: torch.Tensor, targets: torch.Tensor, rate: float = 0.05) -> float:
        """Go one step down the gradient; returns the loss before it."""
        loss = (self(rows) - targets).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        with torch.no_grad():
            for weight in self.state().values():
                for local in weight.local:
                    if local.grad is not None:
                        local -= rate * local.grad
                        local.grad = None
        return float(loss)


class Average:
    """The running average of a weight, flat and ragged."""

    def __init__(self, weight: ShardedTensor, weights_of_ranks: tuple[int, ...], keep: float = 0.5) -> None:
        self._cut = Ragged(weights_of_ranks)
        self._keep = keep
        self.value = ShardedTensor.of(weight.whole(), self._cut)

    def update(self, weight: ShardedTensor) -> None:
        """Take a new value in; every rank calls it."""
        for local, new in zip(self.value.local, ShardedTensor.of(weight.whole(), self._cut).local, strict=True):
            local.mul_(self._keep).add_(new, alpha=1 - self._keep)
