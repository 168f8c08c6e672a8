"""A rank that is slow, stalls, is stopped, or dies, in each phase of a save and of a load.

The others end with an error that names it within the deadline, the checkpoint that was there stays, and the next call
works: with that rank, where it is alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.fault_jobs import memory_directory
from tests.core.firing import DIES, SLOW, STALLS, STOPPED
from tests.core.rank_fault_table import Point, check_ranks_in_trouble, points_in

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

_ANYBODY_SAVES = {
    "planning": ["state_dict", "plan"],
    "agreeing": ["put save/agree", "wait save/agree"],
    "exchanging plans": ["put save/plan", "wait save/plan"],
    "staging": ["get data"],
    "writing": ["create data", "pwritev data", "fsync objects"],
    "handing in": ["put save/commit"],
}
_COORDINATOR_SAVES = {
    "planning": ["plan"],
    "agreeing": ["wait save/agree"],
    "announcing": ["decide save/agree", "create intent", "rename intent"],
    "exchanging plans": ["decide save/plan", "put save/plan"],
}
_COORDINATOR_WRITES = {"writing": ["pwritev data"], "gathering": ["wait save/commit"]}
_COORDINATOR_COMMITS = {
    "committing": ["create description", "rename description"],
    "cleaning": ["unlink data", "put save/commit"],
}
_ANYBODY_LOADS = {
    "finding the description": ["put load/metadata", "wait load/metadata"],
    "planning": ["plan", "put load/plan", "wait load/plan"],
    "reading": ["preadv data"],
    "broadcasting": ["start broadcast", "wait broadcast"],
    "ending": ["put load/done", "wait load/done"],
    "load_state_dict": ["load_state_dict", "put load/stateful"],
}
_COORDINATOR_LOADS = {
    "finding the description": ["wait load/metadata", "preadv description", "put load/metadata"],
    "planning": ["plan", "decide load/plan", "preadv objects", "put load/plan"],
    "reading": ["preadv data"],
    "broadcasting": ["start broadcast", "wait broadcast"],
    "ending": ["wait load/done", "put load/done"],
    "load_state_dict": ["load_state_dict", "wait load/stateful", "put load/stateful"],
}
_FOUR_RANKS = [
    Point("save", "planning", "plan", 3, 4, faults=(STOPPED, DIES)),
    Point("save", "agreeing", "wait save/agree", 0, 4, faults=(STALLS, DIES)),
    Point("save", "exchanging plans", "put save/plan", 1, 4, faults=(SLOW, DIES)),
    Point("save", "writing", "fsync objects", 3, 4, faults=(STALLS, DIES)),
    Point("save", "committing", "create description", 0, 4, doubtful=True, may_be_new=True, faults=(STOPPED, DIES)),
    Point("load", "finding the description", "put load/metadata", 0, 4, faults=(STALLS, DIES)),
    Point("load", "planning", "wait load/plan", 3, 4, faults=(SLOW, DIES)),
    Point("load", "broadcasting", "start broadcast", 1, 4, faults=(STOPPED, DIES)),
    Point("load", "broadcasting", "wait broadcast", 0, 4, faults=(SLOW, DIES)),
    Point("load", "ending", "put load/done", 3, 4, faults=(STALLS, DIES)),
]
"""The coordinator, the first of the others, and the last, in turn; the kinds of trouble rotate, too."""

POINTS = {
    "saves": [
        *points_in(_ANYBODY_SAVES, "save", 2, 3),
        Point("save", "hearing of the commit", "wait save/commit", 1, 2, harmless=True, may_be_new=True),
        *points_in(_COORDINATOR_SAVES, "save", 0, 2),
        *points_in(_COORDINATOR_WRITES, "save", 0, 2, doubtful=True),
        *points_in(_COORDINATOR_COMMITS, "save", 0, 2, doubtful=True, may_be_new=True),
    ],
    "loads": [
        *points_in(_ANYBODY_LOADS, "load", 1, 3),
        Point("load", "ending", "wait load/stateful", 1, 2, harmless=True),
        *points_in(_COORDINATOR_LOADS, "load", 0, 2),
    ],
    "four ranks": _FOUR_RANKS,
}


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.mark.parametrize("group", POINTS)
def test_the_others_name_a_rank_in_trouble_in_time_and_the_next_call_works(root: Path, group: str) -> None:
    check_ranks_in_trouble(root, POINTS[group])
