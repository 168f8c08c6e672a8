"""Random loads one after the other in one job: other boxes, groups, batches and delays every time."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torch.gloo_ranks import TorchRank, run_gloo
from tests.torch.shared_reads import CountedOperations, Layout, Part, load, poisoned, reader_on, save_whole, wrong_in
from tests.torch.states import poison, values

RANKS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.complex64)
WHOLE = {
    f"t{number:02}": Part((8 + 9 * (number % 7), 4 + number % 5), DTYPES[number % 4]) for number in range(30)
} | {"large": Part((3000, 300)), "scalar": Part(())}  # fmt: skip


class DelayingOperations(CountedOperations):
    """Some reads take a while.

    Args:
        rng: Says which and how long.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def preadv(self, descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
        if self._rng.random() < 0.3:
            time.sleep(self._rng.random() * 0.01)
        return super().preadv(descriptor, buffers, offset)


def random_layouts(rng: random.Random) -> list[Layout]:
    """Each tensor whole or cut, on ranks of any choice, by boxes that several of them have in common."""
    layouts: list[dict[str, Part]] = [{} for _ in range(RANKS)]
    for name, whole in WHOLE.items():
        if rng.random() < 0.3:
            continue
        holders = rng.sample(range(RANKS), rng.choice((1, 2, 2, 3, 4, 8, 8)))
        parts = rng.choice((1, 1, 2, 3)) if whole.shape and rng.random() < 0.8 else 1
        dim = rng.randrange(len(whole.shape)) if whole.shape else 0
        for rank in holders:
            if parts == 1:
                layouts[rank][name] = whole
                continue
            part, extent = rng.randrange(parts), whole.shape[dim]
            bounds = extent * part // parts, extent * (part + 1) // parts
            layouts[rank][name] = Part(whole.shape, whole.dtype, dim, bounds)
    return list(layouts)


def load_at_random(rank: TorchRank, directory: Path, seed: int, rounds: int) -> list[str]:
    held = {tuple(range(RANKS)): dist.group.WORLD, (0, 1): dist.new_group([0, 1]), (2, 5): dist.new_group([2, 5])}
    own = {ranks: group for ranks, group in held.items() if rank.rank in ranks}
    for number in range(rounds):
        rng = random.Random(1000 * seed + number)
        layout = random_layouts(rng)[rank.rank]
        options: dict[str, Any] = {
            "broadcast_batch_bytes": rng.choice((0, 100, 2000, 6 << 20)),
            "broadcast_replicated_tensors": rng.choice((True, True, True, True, False, "auto")),
            "verify": rng.choice((True, "full", False)),
        }
        if options["broadcast_replicated_tensors"] and rng.random() < 0.5:
            options["broadcast_groups"] = own
        delays = random.Random(100_000 * seed + RANKS * number + rank.rank)
        time.sleep(delays.random() * 0.02)
        state = poisoned(layout)
        load(state, None, storage_reader=reader_on(directory, DelayingOperations(delays)), **options)
        wrong = wrong_in(state, layout)
        if wrong:
            return [f"round {number}: {wrong}, {options}"]
    return []


def run_rounds(directory: Path, rounds: int, seconds: float) -> None:
    save_whole(directory, WHOLE)
    found = run_gloo(load_at_random, RANKS, directory, 1, rounds, timeout_seconds=seconds)
    assert found == [[]] * RANKS


@pytest.mark.timeout(150)
def test_twenty_random_loads_are_right(tmp_path: Path) -> None:
    run_rounds(tmp_path / "c", 20, 120.0)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_hundred_random_loads_are_right(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "soak" not in request.config.option.markexpr:
        pytest.skip("takes minutes: run it with -m soak")
    run_rounds(tmp_path / "c", 200, 850.0)


def test_the_comparison_sees_one_wrong_element() -> None:
    layout: Layout = {"t": Part((9, 4)), "u": Part((5,))}
    state = poisoned(layout)
    assert wrong_in(state, layout) == ["t", "u"]
    poison(state)
    assert wrong_in(state, layout) == []
    state["t"][8, 3] = values((1,), seed=99)[0]
    assert wrong_in(state, layout) == ["t"]
