"""A trainer or a background process that is slow, stalls, is stopped, or dies, in each phase of an asynchronous save.

The result fails on all ranks in bounded time and names the rank; a background process that hangs is ended; the
checkpoint that was there stays, and the next save works.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_core import api
from tests.background_processes import is_running, wait_until
from tests.core.async_jobs import checkpoint_directory
from tests.core.background_fault_table import check_background_processes_in_trouble
from tests.core.rank_fault_table import (
    Point,
    check_ranks_in_trouble,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

CHILD_POINTS = [
    *[Point("async_save", phase, where, 1, 2) for phase, where in [
        ("exchanging", "put message"), ("exchanging", "wait message"), ("writing", "configure"),
        ("writing", "create data"), ("writing", "pwritev data"), ("syncing", "fsync data"),
    ]],
    *[Point("async_save", phase, where, 0, 2) for phase, where in [
        ("announcing", "create intent"), ("exchanging", "wait message"),
    ]],
    *[Point("async_save", phase, where, 0, 3, doubtful=True) for phase, where in [
        ("writing", "pwritev data"), ("committing", "commit"), ("committing", "fsync description"),
    ]],
    *[Point("async_save", phase, where, 0, 2, doubtful=True, may_be_new=True) for phase, where in [
        ("committing", "rename description"), ("cleaning", "unlink data"),
    ]],
]  # fmt: skip
"""Of background processes. A process whose work hangs is given up by its trainer."""

TRAINER_POINTS = [
    Point("async_save", "planning", "plan", 1, 2),
    Point("async_save", "agreeing", "put save/agree", 1, 2),
    Point("async_save", "agreeing", "decide save/agree", 0, 2),
    Point("async_save", "copying", "get data", 1, 2),
    Point("async_save", "copying", "get data", 0, 2),
    Point("async_save", "handing over", "hand over", 1, 3),
    Point("async_save", "handing over", "hand over", 0, 2),
]
"""Of trainers. One that goes on, goes on with its save."""


@pytest.fixture
def root() -> Iterator[Path]:
    with checkpoint_directory() as path:
        path.mkdir()
        yield path


def test_a_background_process_in_trouble_is_named_and_ended_and_the_next_save_works(root: Path) -> None:
    check_background_processes_in_trouble(root, CHILD_POINTS)


def test_a_trainer_in_trouble_is_named_by_the_results_of_the_others_and_the_next_save_works(root: Path) -> None:
    check_ranks_in_trouble(root, TRAINER_POINTS)


# -- a script whose background process hangs --------------------------------------------------------------------------

_SCRIPT = """
import os, signal, sys
import numpy as np
from dcp_core import api
from dcp_core.background import carriers
from dcp_core.background.service import service
carriers.GRACE_SECONDS = 0.5
api.async_save({"w": np.ones(3)}, checkpoint_id=sys.argv[1], durable=False).get_result(60)
process = service().process("light")
print(process.pid, flush=True)
os.kill(process.pid, signal.SIGSTOP)
api.async_save({"w": np.zeros(3)}, checkpoint_id=sys.argv[1], durable=False, timeout_seconds=2.0)
"""


def test_a_script_ends_although_its_background_process_is_stopped(root: Path) -> None:
    """It has no peers, whose deadlines would end this."""
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(root / "step")], timeout=100, capture_output=True, text=True, check=False
    )
    pid = int(ended.stdout)
    assert "no answer within 2 s" in ended.stderr, ended
    wait_until(lambda: not is_running(pid), "the end of the background process")
    assert api.read(root / "step", "w").tolist() == [1.0] * 3
