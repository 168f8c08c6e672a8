"""Save after save in the background: memory, threads, descriptors and processes stay as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core.api import wait_all
from dcp_core.testing.numpy_ranks import ShardedArray, even_boxes
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.background_processes import children_of
from tests.core.async_jobs import MODES, Mode, async_outcome, async_save, checkpoint_directory
from tests.core.async_writers import CountingWriter, objects_here
from tests.core.fault_jobs import Seat, checkpoint_names, names_in, same
from tests.core.process_use import Use, give_memory_back, settled_use

WORLD = 2
_WARM_UP = 5
_SETTLING = 3
_COUNTED = 8
_ROWS = 2048  # of 1,024 float32: 4 MiB a rank
_MOST_GROWTH_NBYTES = 6 << 20


@pytest.fixture
def directory() -> Iterator[Path]:
    with checkpoint_directory() as path:
        yield path


def _state(seat: Seat, tag: int) -> dict[str, Any]:
    shape = (_ROWS, 1024)
    whole = np.full(shape, tag, np.float32)
    return {
        "w": ShardedArray.cut(whole, even_boxes(shape, seat.world, seat.rank)),
        "many": {f"p{number}": np.full(50, tag + number) for number in range(100)},
        "history": list(range(tag)),
        "text": "x" * tag,
    }


def _small_state(seat: Seat) -> dict[str, Any]:
    return {"w": ShardedArray.cut(np.ones((8, 8)), even_boxes((8, 8), seat.world, seat.rank)), "step": 1}


def _check(seat: Seat, tag: int, directory: Path, mode: Mode) -> None:
    target = _state(seat, tag)
    target["w"].arrays[0][...] = np.nan
    for value in target["many"].values():
        value[...] = -1
    target |= {"history": [-1] * tag, "text": ""}
    seat.load(target, checkpoint_id=directory, **mode.load)
    assert same(target, _state(seat, tag)), tag


def _save_often(
    context: RankContext, directory: Path, mode_name: str, count: int, every: int
) -> list[tuple[tuple[int, ...], Use, Use]]:
    """Save over one checkpoint; what the trainer and its background process use after the warm-up and at the end."""
    seat, mode = Seat.of(context), MODES[mode_name]
    uses = []
    for number in range(1, count + 1):
        tag = 1 + number % 7
        async_save(seat, _state(seat, tag), directory, **mode.save)
        if number % every == 0 or number in (_WARM_UP, count):
            wait_all()
            seat.share()
            _check(seat, tag, directory, mode)
            seat.share()
        if number in (_WARM_UP, count):
            give_memory_back()
            pids = children_of(os.getpid())
            uses.append((tuple(pids), settled_use(os.getpid()), settled_use(pids[0])))
    if mode_name != "alone":
        assert names_in(directory) == checkpoint_names(directory)
    return uses


def _check_flat(uses: list[tuple[tuple[int, ...], Use, Use]]) -> None:
    (first_pids, *first), (last_pids, *last) = uses
    assert first_pids == last_pids and len(last_pids) == 1, uses
    for before, after in zip(first, last, strict=True):
        assert after.threads <= before.threads, uses
        assert after.descriptors <= before.descriptors, uses
        assert after.resident_nbytes <= before.resident_nbytes + _MOST_GROWTH_NBYTES, uses


@pytest.mark.timeout(150)
@pytest.mark.parametrize("mode", MODES)
def test_twenty_saves_leave_memory_threads_descriptors_and_processes_flat(directory: Path, mode: str) -> None:
    for uses in run_ranks(_save_often, WORLD, directory, mode, 20, 10, timeout_seconds=120):
        _check_flat(uses)


def _count_objects(context: RankContext, directory: Path, mode_name: str) -> list[list[int]]:
    """Fail and save, again and again; how many objects there are in the trainer and in its background process."""
    seat, mode, here = Seat.of(context), MODES[mode_name], []
    for _ in range(_SETTLING + _COUNTED):
        failing = CountingWriter(fails=seat.rank == 1)
        failed = async_outcome(seat, _small_state(seat), directory, storage_writer=failing, **mode.save)
        assert bool(failed.kind) == (mode_name != "alone" or seat.rank == 1), failed
        saved = async_outcome(seat, _small_state(seat), directory, storage_writer=CountingWriter(), **mode.save)
        assert saved.kind == "", saved
        here.append(objects_here())
    there = Path(f"{directory}.objects-{seat.rank}").read_text().split()
    return [here[_SETTLING:], list(map(int, there))[-_COUNTED:]]


@pytest.mark.faults
@pytest.mark.parametrize("mode", MODES)
def test_no_object_is_kept_of_a_save(directory: Path, mode: str) -> None:
    """Not even one each: memory would show that only after thousands of saves."""
    for counts in run_ranks(_count_objects, WORLD, directory, mode):
        for found in counts:
            assert len(found) == _COUNTED
            half = _COUNTED // 2
            assert min(found[half:]) < min(found[:half]) + half // 2, counts


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_saves_each_of_them_checked_leave_everything_flat(
    directory: Path, mode: str, request: pytest.FixtureRequest
) -> None:
    if "soak" not in request.config.getoption("markexpr"):
        pytest.skip("takes long; `nox -s soak` runs it")
    for uses in run_ranks(_save_often, WORLD, directory, mode, 100, 1, timeout_seconds=800):
        _check_flat(uses)
