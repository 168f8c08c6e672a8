"""Numpy states of a soak: what each save holds follows from its number, so all that is expected is known."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from dcp_core import api
from dcp_core.dtype import dtype_named
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from tests.core.async_jobs import spoil
from tests.core.fault_jobs import PATIENT_SECONDS, Seat
from tests.core.random_states import Target, Tensor, Value, build, random_bits, random_tree, saved_state, wanted_state
from tests.core.soak import KEEP, KEEP_EVERY
from tests.core.soak_events import Event
from tests.core.soak_faults import Fateful

STRUCTURES = 4


def tree_of(seed: int, number: int) -> dict[str, Any]:
    """All that a save holds, as whole arrays: other bits for each number, in one of a few structures."""
    rng = Random(f"{seed} {number}")
    structure = rng.randrange(STRUCTURES)
    big = np.frombuffer(rng.randbytes((900 + 100 * structure) * 512 * 4), np.float32).reshape(-1, 512)
    tree = {
        "event": Tensor(np.array(number), dtype_named("int64"), False),
        "big": Tensor(big, dtype_named("float32"), True),
        "count": Value([number, "x" * (number % 100)]),
        "tree": random_tree(Random(f"{seed} structure {structure}")),
    }

    def renewed(place: Any, leaf: Tensor | Value) -> Tensor | Value:
        if isinstance(leaf, Value):
            return Value(deepcopy(leaf.value))  # whoever saves may change it
        if place[0][1] in ("event", "big"):
            return leaf
        return Tensor(random_bits(rng, leaf.bits.shape, leaf.dtype), leaf.dtype, leaf.is_sharded)

    made: dict[str, Any] = build(tree, renewed)
    return made


def state_of(seed: int, number: int, layout: int, seat: Seat) -> dict[Any, Any]:
    """What a rank saves, cut as `layout` says."""
    return saved_state(tree_of(seed, number), Random(layout), seat.world, seat.rank)


def target_of(seed: int, number: int, salt: str, seat: Seat) -> Target:
    """What a rank loads, cut as `salt` says; several ranks may want the same."""
    alike = Random(salt).choice((1, 1, 2, 4))
    return wanted_state(tree_of(seed, number), Random(f"{salt} {seat.rank // alike}"))


def number_in(path: str | Path) -> int:
    """Which save a checkpoint is: it is one of its tensors."""
    return int(api.read(path, "event"))


class NumpyStage:
    """States of numpy: what each event saves follows from its number, so all that is expected is known.

    Args:
        seat: Which rank.
        root: The directory of checkpoints.
        seed: Of the soak.
    """

    def __init__(self, seat: Seat, root: Path, seed: int) -> None:
        self._seat, self._seed = seat, seed
        self.manager = Fateful(
            root,
            keep=KEEP,
            keep_every=KEEP_EVERY,
            durable=False,
            timeout_seconds=PATIENT_SECONDS,
            adapter=NumpyRankAdapter(),
        )

    def state(self, event: Event) -> dict[Any, Any]:
        return state_of(self._seed, event.number, event.layout, self._seat)

    def spoil(self, state: dict[Any, Any]) -> None:
        spoil(state)

    def target(self, number: int, salt: str) -> Target:
        return target_of(self._seed, number, salt, self._seat)

    def load(self, state: Mapping[Any, Any], **arguments: Any) -> None:
        self._seat.load(state, **arguments)

    def number_in(self, path: str) -> int:
        return number_in(path)
