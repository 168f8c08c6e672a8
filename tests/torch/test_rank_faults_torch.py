"""A torch rank that is slow, stalls, is stopped, or dies, in saves, loads and saves in the background.

Above all where ranks wait for each other in gloo: the broadcasts of a load, and the store through which background
processes talk with `use_gloo=True`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.async_jobs import checkpoint_directory
from tests.core.background_fault_table import check_background_processes_in_trouble
from tests.core.firing import DIES, SLOW, STALLS, STOPPED
from tests.core.rank_fault_table import (
    Point,
    check_ranks_in_trouble,
)
from tests.torch.torch_seats import HostedSeat, LaunchedSeat, TorchSeat, launcher

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

_SLOW, _STALLS, _STOPPED = (SLOW, DIES), (STALLS, DIES), (STOPPED, DIES)
_BOUND_SECONDS = 20.0
"""Twice the deadline, in a load that shares reads, and time in which gloo connects, on a busy machine."""

CALLS = [
    Point("save", "exchanging plans", "wait save/plan", 3, 4, faults=_STALLS),
    Point("save", "writing", "pwritev data", 0, 2, doubtful=True, faults=_STOPPED),
    Point("load", "planning", "put load/plan", 0, 2, faults=_STALLS),
    Point("load", "broadcasting", "open broadcast", 1, 3, faults=_STOPPED),
    Point("load", "broadcasting", "connect broadcast", 2, 3, faults=_STALLS),
    Point("load", "broadcasting", "connect broadcast", 0, 2, faults=_STOPPED),
    Point("load", "broadcasting", "start broadcast", 0, 3, faults=_STALLS),
    Point("load", "broadcasting", "start broadcast", 2, 4, faults=_STOPPED),
    Point("load", "broadcasting", "wait broadcast", 1, 3, faults=_STALLS),
    Point("load", "broadcasting", "wait broadcast", 0, 4, faults=_STOPPED),
    Point("load", "ending", "wait load/done", 1, 2, faults=_SLOW),
    Point("async_save", "planning", "plan", 2, 3, faults=_STOPPED),
    Point("async_save", "copying", "get data", 0, 2, faults=_SLOW),
]
HOST_CALLS = [
    Point("save", "exchanging plans", "put save/plan", 0, 2, faults=_SLOW),
    Point("save", "writing", "pwritev data", 0, 3, doubtful=True, faults=(DIES,)),
    Point("load", "broadcasting", "wait broadcast", 0, 3, faults=(DIES,)),
    Point("async_save", "handing over", "hand over", 0, 2, faults=(DIES,)),
]
"""Of the rank that hosts the store of the job. While it is stopped, calls to the store get no answer."""

STORE_TRAINERS = [Point("async_save", "handing over", "hand over", 1, 2, faults=_STALLS)]
STORE_BACKGROUND = [Point("async_save", "committing", "commit", 0, 2, doubtful=True, faults=(DIES, STOPPED))]
"""Background processes that talk through the store of the job, for which they load torch: few, since that is slow."""


@pytest.fixture
def root() -> Iterator[Path]:
    with checkpoint_directory() as path, launcher():
        path.mkdir()
        yield path


def test_the_others_name_a_torch_rank_in_trouble_in_time_and_the_next_call_works(root: Path) -> None:
    check_ranks_in_trouble(root, CALLS, TorchSeat, _BOUND_SECONDS)


def test_the_others_name_the_rank_that_took_the_store_with_it(root: Path) -> None:
    check_ranks_in_trouble(root, HOST_CALLS, HostedSeat)


def test_ranks_whose_background_processes_talk_through_the_store_name_one_in_trouble(root: Path) -> None:
    check_ranks_in_trouble(root, STORE_TRAINERS, LaunchedSeat)
    check_background_processes_in_trouble(root / "background", STORE_BACKGROUND, LaunchedSeat)
