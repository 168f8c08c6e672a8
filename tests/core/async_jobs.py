"""What the tests of background saves on numpy ranks share: modes, the call, changes, looks at a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.adapter import ProcessGroup
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray
from tests.background_processes import check_none_left, mark
from tests.core.fault_jobs import Outcome, Seat, memory_directory, outcome_of, poison_of, whole_tag
from tests.core.random_states import poisoned

Path_ = str | os.PathLike[str]

RESULT_SECONDS = 60.0
"""A deadline for results that no test reaches."""

HIT = "Hit final plan and metadata cache."


class ChannellessAdapter(NumpyRankAdapter):
    """Ranks that know who they are and cannot talk to each other."""

    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        return replace(super().process_group(group), channel=None)


@dataclass(frozen=True)
class Mode:
    """A way for ranks to agree.

    Attributes:
        save: Arguments of a save.
        load: Arguments of a load of what it saved.
    """

    save: Mapping[str, Any]
    load: Mapping[str, Any]


MODES = {
    "mailbox": Mode({}, {}),
    "no channel": Mode({"adapter": ChannellessAdapter()}, {}),
    "alone": Mode({"use_collectives": False}, {"use_collectives": False}),
}


def async_save(seat: Seat, state: Mapping[str, Any], directory: Path_ | None, **options: Any) -> api.AsyncSaveResponse:
    """Begin a save on all ranks of the job."""
    given: dict[str, Any] = {"durable": False, "checkpoint_id": directory}
    return seat.async_save(state, **given | options)


def async_outcome(seat: Seat, state: Mapping[str, Any], directory: Path_ | None, **options: Any) -> Outcome:
    """Save in the background, wait, and report, wherever it raises."""
    return outcome_of(lambda: async_save(seat, state, directory, **options).get_result(RESULT_SECONDS))


def outcome_of_response(response: api.AsyncSaveResponse) -> Outcome:
    """Wait for a save that has begun, and report."""
    return outcome_of(response.get_result, RESULT_SECONDS)


def tag_in(seat: Seat, directory: Path_, mode: Mode = MODES["mailbox"]) -> int:
    """Load on all ranks of the job into poisoned targets, in the layout of the save, and say which save it was."""
    target = poison_of(seat.rank, seat.world)
    seat.load(target, checkpoint_id=directory, **mode.load)
    return whole_tag(target, seat.rank, seat.world)


def spoil(state: Any) -> None:
    """Change everything in a state that can be changed: invert arrays, empty lists and dicts."""
    if isinstance(state, ShardedArray):
        for array in state.arrays:
            spoil(array)
    elif isinstance(state, np.ndarray):
        state[...] = poisoned(state)
    elif isinstance(state, dict):
        for value in state.values():
            spoil(value)
        state.clear()
        state["spoilt"] = True
    elif isinstance(state, list):
        for value in state:
            spoil(value)
        state[:] = ["spoilt"]


def staged_nbytes(call: Callable[[], object]) -> int:
    """How many bytes of the arena the saves use that begin in a call."""
    from dcp_core.background.arena import Arena

    used, place = [], Arena.place_columns

    def counted(self: Arena, sizes: Any) -> Any:
        used.append(int(sum(sizes)))
        return place(self, sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "place_columns", counted)
        call()
    return sum(used)


@contextmanager
def heard_lines() -> Iterator[list[str]]:
    """Collect what the library logs from here on, from INFO up."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    ear, logger = Ear(logging.INFO), logging.getLogger("dcp")
    before = logger.level
    logger.addHandler(ear)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(ear)
        logger.setLevel(before)


def was_hit(call: Callable[[], object]) -> bool:
    """Whether the save that a call makes used a known plan."""
    with heard_lines() as lines:
        call()
    return HIT in lines


@contextmanager
def checkpoint_directory() -> Iterator[Path]:
    """Where a test's checkpoint goes; afterwards no background process of this test run is left."""
    mark()
    with memory_directory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCP_BACKGROUND_LOG_DIR", str(path))  # those of killed processes stay
        yield path / "checkpoint"
        check_none_left()
