"""Hundreds of saves and loads with faults, by real ranks: every value is right, and what the job uses stays flat."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from dcp_core.dtype import dtype_named
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.async_jobs import checkpoint_directory, spoil
from tests.core.fault_jobs import PATIENT_SECONDS, Seat
from tests.core.random_states import Target, Tensor, Value, build, random_bits, random_tree, saved_state, wanted_state
from tests.core.soak import KEEP, KEEP_EVERY, Soak, number_in
from tests.core.soak_events import DECK, QUIET, Event, chosen_count, chosen_seed, events
from tests.core.soak_faults import Fateful
from tests.core.soak_vitals import Vitals, check_flat, table_of

WORLD = 4


class NumpyStage:
    """States of numpy: what each event saves follows from its number, so all that is expected is known.

    Args:
        seat: Which rank.
        root: The directory of checkpoints.
        seed: Of the soak.
    """

    def __init__(self, seat: Seat, root: Path, seed: int) -> None:
        self._seat, self._seed = seat, seed
        self._structures: dict[int, int] = {}
        self.manager = Fateful(
            root,
            keep=KEEP,
            keep_every=KEEP_EVERY,
            durable=False,
            timeout_seconds=PATIENT_SECONDS,
            adapter=NumpyRankAdapter(),
        )

    def tree(self, number: int) -> dict[str, Any]:
        """All that an event saves, as whole arrays."""
        structure = self._structures[number]
        rng = Random(f"{self._seed} {number}")
        big = np.frombuffer(rng.randbytes((900 + 100 * structure) * 512 * 4), np.float32).reshape(-1, 512)
        tree = {
            "event": Tensor(np.array(number), dtype_named("int64"), False),
            "big": Tensor(big, dtype_named("float32"), True),
            "count": Value([number, "x" * number]),
            "tree": random_tree(Random(f"{self._seed} structure {structure}")),
        }

        def renewed(place: Any, leaf: Tensor | Value) -> Tensor | Value:
            if isinstance(leaf, Value) or place[0][1] in ("event", "big"):
                return leaf
            return Tensor(random_bits(rng, leaf.bits.shape, leaf.dtype), leaf.dtype, leaf.is_sharded)

        made: dict[str, Any] = build(tree, renewed)
        return made

    def state(self, event: Event) -> dict[Any, Any]:
        self._structures[event.number] = event.structure
        return saved_state(self.tree(event.number), Random(event.layout), self._seat.world, self._seat.rank)

    def spoil(self, state: dict[Any, Any]) -> None:
        spoil(state)

    def target(self, number: int, salt: str) -> Target:
        alike = Random(salt).choice((1, 1, 2, 4))  # so many ranks want the same
        return wanted_state(self.tree(number), Random(f"{salt} {self._seat.rank // alike}"))

    def load(self, state: Mapping[Any, Any], **arguments: Any) -> None:
        self._seat.load(state, **arguments)

    def number_in(self, path: str) -> int:
        return number_in(path)


def _soak(
    context: RankContext, root: Path, seed: int, count: int, looks: tuple[int, ...]
) -> tuple[list[Vitals], dict[str, int]]:
    os.environ["TMPDIR"] = tempfile.tempdir = str(root.with_name("temporary"))
    seat = Seat.of(context)
    soak = Soak(seat, NumpyStage(seat, root, seed), root)
    soak.run(events(seed, count, seat.world), lambda number: number in looks)
    return soak.vitals, soak.counts


@pytest.fixture
def root() -> Iterator[Path]:
    with checkpoint_directory() as path:
        path.with_name("temporary").mkdir()
        yield path


def _run(root: Path, seed: int, count: int, looks: tuple[int, ...], seconds: float) -> str:
    sys.stdout.write(f"DCP_SOAK_SEED={seed} DCP_SOAK_EVENTS={count} does the same again\n")
    found = run_ranks(_soak, WORLD, root, seed, count, looks, timeout_seconds=seconds)
    check_flat([vitals for vitals, _ in found])
    text = table_of([vitals for vitals, _ in found])
    sys.stdout.write("".join(f"{number:4} {name}\n" for name, number in sorted(found[0][1].items())))
    sys.stdout.write(text + "\n")
    return text


@pytest.mark.timeout(150)
def test_a_deck_of_all_faults_leaves_every_value_right_and_nothing_behind(root: Path) -> None:
    count = len(QUIET) + len(DECK)
    _run(root, chosen_seed(1), count, (count // 2, count), 120)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_saves_and_loads_with_faults_are_right_and_leave_everything_flat(
    root: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if "soak" not in request.config.option.markexpr:
        pytest.skip("takes minutes; `nox -s soak` runs it")
    count = chosen_count(240)
    looks = tuple(range(40, count, 40)) + (count,)
    with capsys.disabled():
        _run(root, chosen_seed(Random().randrange(10**6)), count, looks, 3000)
