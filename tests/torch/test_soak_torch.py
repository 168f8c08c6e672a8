"""A training job of torch ranks that saves and loads with faults: every value is right, and what it uses stays flat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import dcp_torch as dcp
from dcp_core.testing.ranks import RankContext
from tests.core.fault_jobs import PATIENT_SECONDS, Seat
from tests.core.soak import KEEP, KEEP_EVERY
from tests.core.soak_events import Event
from tests.core.soak_faults import Fateful
from tests.core.soak_numpy import number_in
from tests.core.soak_runs import WORLD, Found, check_deck, check_long, soak_directory, soak_on
from tests.torch.gloo_ranks import torch_rank
from tests.torch.states import assert_same_leaf, poison, shard, values, whole

REMEMBERED = 40
"""So many saves back the values are known: no older checkpoint is ever looked at."""


class TorchFateful(Fateful, dcp.CheckpointManager):
    """A manager of torch whose saves have a fate."""


@dataclass
class ShardedTarget:
    """Shards of whole tensors in some layout, with other bits, and what they must become."""

    state: dict[str, Any]
    expected: dict[str, Any]

    def check(self) -> None:
        for name, value in self.expected.items():
            assert_same_leaf(name, self.state[name], value)


class TorchStage:
    """A model under FSDP2 that trains on between saves; what was saved is kept as whole tensors.

    Args:
        seat: Which rank.
        root: The directory of checkpoints.
    """

    def __init__(self, seat: Seat, root: Path) -> None:
        self._saved: dict[int, dict[str, Any]] = {}
        self._meshes = [
            init_device_mesh("cpu", (WORLD,)),
            init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicas", "shards")),
        ]
        torch.manual_seed(3)
        self._model = nn.Sequential(nn.Linear(60, 250), nn.GELU(), nn.Linear(250, 60), nn.LayerNorm(60))
        for layer in self._model:
            fully_shard(layer, mesh=self._meshes[1])
        fully_shard(self._model, mesh=self._meshes[1])
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._seat = seat
        self.manager = TorchFateful(
            root, keep=KEEP, keep_every=KEEP_EVERY, durable=False, timeout_seconds=PATIENT_SECONDS
        )

    def state(self, event: Event) -> dict[Any, Any]:
        torch.manual_seed(10 * event.number + self._seat.rank)
        self._optimizer.zero_grad()
        self._model(torch.randn(5, 60)).square().mean().backward()
        self._optimizer.step()
        model, optimizer = get_state_dict(self._model, self._optimizer)
        rng = Random(event.number)
        extra = {
            f"extra {number}": self._cut(values((7 + number, 9), dtype, seed=event.number), rng)
            for number, dtype in enumerate((torch.bfloat16, torch.uint8, torch.complex64)[: event.layout + 1])
        }
        state = {"event": torch.tensor(event.number), "model": model, "optimizer": optimizer, "extra": extra}
        copy: dict[Any, Any] = _copied(state)
        tensors = {name: value for name, value in whole(copy).items() if isinstance(value, Tensor)}
        self._saved[event.number] = {name: value.clone() for name, value in tensors.items()}
        for number in list(self._saved)[:-REMEMBERED]:
            del self._saved[number]
        return copy

    def _cut(self, tensor: Tensor, rng: Random) -> DTensor:
        mesh = rng.choice(self._meshes)
        choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.ndim))]
        return shard(tensor, mesh, [rng.choice(choices) for _ in range(mesh.ndim)])

    def spoil(self, state: dict[Any, Any]) -> None:
        poison(state)

    def target(self, number: int, salt: str) -> ShardedTarget:
        expected: dict[str, Any] = {}
        for place, (name, value) in enumerate(self._saved[number].items()):
            rng = Random(f"{salt} {place}")
            if rng.random() < 0.9:
                expected[name] = self._cut(value, rng) if rng.random() < 0.8 else value.clone()
        state = _copied(expected)
        poison(state)
        return ShardedTarget(state, expected)

    def load(self, state: Mapping[Any, Any], **arguments: Any) -> None:
        dcp.load(state, **{"timeout_seconds": PATIENT_SECONDS} | arguments)

    def number_in(self, path: str) -> int:
        return number_in(path)


def _copied(value: Any) -> Any:
    """The same containers with copies of the tensors."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return value.detach().clone() if isinstance(value, Tensor) else value


def _soak(context: RankContext, root: Path, seed: int, count: int, looks: tuple[int, ...]) -> Found:
    with torch_rank(context, str(root.with_name("store"))):
        return soak_on(Seat.of(context), TorchStage, root, seed, count, looks)


@pytest.fixture
def root() -> Iterator[Path]:
    with soak_directory() as path:
        yield path


@pytest.mark.faults
@pytest.mark.timeout(150)
def test_a_deck_of_faults_leaves_every_value_of_a_training_right_and_nothing_behind(root: Path) -> None:
    check_deck(_soak, root, 2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_training_that_saves_and_loads_two_hundred_times_with_faults_goes_on_right(
    root: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    check_long(_soak, root, 200, 80, request, capsys)
