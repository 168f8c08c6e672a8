"""Hundreds of saves and loads with faults, by real ranks: every value is right, and what the job uses stays flat."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.async_jobs import checkpoint_directory
from tests.core.fault_jobs import Seat
from tests.core.soak import Soak
from tests.core.soak_events import DECK, QUIET, chosen_count, chosen_seed, events
from tests.core.soak_numpy import NumpyStage
from tests.core.soak_vitals import MOST_GROWTH_NBYTES, Vitals, check_flat, table_of

WORLD = 4
_YOUNG_GROWTH_NBYTES = 32 << 20
"""A short soak is warm-up for the most part."""


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


def _run(root: Path, seed: int, count: int, looks: tuple[int, ...], seconds: float, most_growth_nbytes: int) -> None:
    sys.stdout.write(f"DCP_SOAK_SEED={seed} DCP_SOAK_EVENTS={count} does the same again\n")
    found = run_ranks(_soak, WORLD, root, seed, count, looks, timeout_seconds=seconds)
    sys.stdout.write("".join(f"{number:4} {name}\n" for name, number in sorted(found[0][1].items())))
    sys.stdout.write(table_of([vitals for vitals, _ in found]) + "\n")
    check_flat([vitals for vitals, _ in found], most_growth_nbytes)


@pytest.mark.faults
@pytest.mark.timeout(150)
def test_a_deck_of_all_faults_leaves_every_value_right_and_nothing_behind(root: Path) -> None:
    count = len(QUIET) + len(DECK)
    _run(root, chosen_seed(1), count, (count // 2, count), 120, _YOUNG_GROWTH_NBYTES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_saves_and_loads_with_faults_are_right_and_leave_everything_flat(
    root: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if "soak" not in request.config.option.markexpr:
        pytest.skip("takes minutes; `nox -s soak` runs it")
    count = chosen_count(240)
    looks = (*range(40, count, 40), count)
    with capsys.disabled():
        _run(root, chosen_seed(Random().randrange(10**6)), count, looks, 3000, MOST_GROWTH_NBYTES)
