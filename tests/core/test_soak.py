"""Hundreds of saves and loads with faults, by real ranks: every value is right, and what the job uses stays flat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_core.testing.ranks import RankContext
from tests.core.fault_jobs import Seat
from tests.core.soak_numpy import NumpyStage
from tests.core.soak_runs import Found, check_deck, check_long, soak_directory, soak_on


def _soak(context: RankContext, root: Path, seed: int, count: int, looks: tuple[int, ...]) -> Found:
    return soak_on(Seat.of(context), lambda seat, place: NumpyStage(seat, place, seed), root, seed, count, looks)


@pytest.fixture
def root() -> Iterator[Path]:
    with soak_directory() as path:
        yield path


@pytest.mark.faults
@pytest.mark.timeout(150)
def test_a_deck_of_all_faults_leaves_every_value_right_and_nothing_behind(root: Path) -> None:
    check_deck(_soak, root, 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_saves_and_loads_with_faults_are_right_and_leave_everything_flat(
    root: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    check_long(_soak, root, 240, 40, request, capsys)
