"""A MindSpore rank that is stopped or dies, in saves, loads, and saves in the background."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.async_jobs import checkpoint_directory
from tests.core.background_fault_table import check_background_processes_in_trouble
from tests.core.firing import DIES, STOPPED
from tests.core.rank_fault_table import (
    Point,
    check_ranks_in_trouble,
)
from tests.mindspore.ms_seats import MindSporeSeat, StoreSeat

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

_BOUND_SECONDS = 30.0
"""As long as a call to a store takes that nobody hosts any more, and more, on a machine that does much else."""

CALLS = [
    Point("save", "agreeing", "wait save/agree", 2, 3, faults=(STOPPED, DIES)),
    Point("save", "writing", "pwritev data", 1, 2, faults=(STOPPED, DIES)),
    Point("save", "writing", "pwritev data", 0, 2, doubtful=True, faults=(DIES,)),
    Point("load", "planning", "put load/plan", 1, 2, faults=(STOPPED, DIES)),
    Point("load", "broadcasting", "wait broadcast", 2, 3, faults=(STOPPED, DIES)),
]
"""The first rank hosts the store of the job: while it is stopped, calls to the store get no answer."""

TRAINERS = [
    Point("async_save", "copying", "get data", 1, 2, faults=(STOPPED, DIES)),
    Point("async_save", "handing over", "hand over", 1, 3, faults=(DIES,)),
]
BACKGROUND = [
    Point("async_save", "writing", "pwritev data", 1, 2, faults=(STOPPED,)),
    Point("async_save", "committing", "commit", 0, 2, doubtful=True, faults=(DIES,)),
]


@pytest.fixture
def root() -> Iterator[Path]:
    with checkpoint_directory() as path:
        path.mkdir()
        yield path


def test_the_others_name_a_mindspore_rank_in_trouble_in_time_and_the_next_call_works(root: Path) -> None:
    check_ranks_in_trouble(root, CALLS, MindSporeSeat, _BOUND_SECONDS)


def test_a_mindspore_trainer_in_trouble_is_named_by_the_results_of_the_others(root: Path) -> None:
    check_ranks_in_trouble(root, TRAINERS, MindSporeSeat)


@pytest.mark.parametrize("kind", [MindSporeSeat, StoreSeat])
def test_a_background_process_of_a_mindspore_rank_in_trouble_is_named_and_ended(
    root: Path, kind: type[MindSporeSeat]
) -> None:
    check_background_processes_in_trouble(root, BACKGROUND, kind)
