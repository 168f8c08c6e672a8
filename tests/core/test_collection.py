"""Python's automatic garbage collection rests while a call runs, and works again afterwards, whatever happens."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core.api import load, save
from dcp_core.errors import ArgumentError, DcpError
from dcp_core.planning.leaves import LocalTensor
from dcp_core.planning.load_plan import LoadPlan
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.recipes.job import paused_collection


@pytest.fixture(autouse=True)
def collection_is_on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_collection_rests_in_the_block_and_goes_on_after_it() -> None:
    with paused_collection():
        assert not gc.isenabled()
        with paused_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_collection_goes_on_after_an_error(error: type[BaseException]) -> None:
    with pytest.raises(error), paused_collection():
        raise error
    assert gc.isenabled()


def test_where_the_user_has_switched_it_off_it_stays_off() -> None:
    gc.disable()
    with paused_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_of_two_threads_the_last_one_leaves_it_on() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with paused_collection():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with paused_collection():
        thread.start()
        assert entered.wait(30)
    leave.set()
    thread.join(30)
    assert gc.isenabled()


class WatchingSave(StandardSavePlanner):
    """Notes whether collection is on; fails where it is told to."""

    def __init__(self, seen: list[bool], error: Exception | None = None) -> None:
        super().__init__()
        self.seen = seen
        self.error = error

    def build_local_plan(self) -> SavePlan:
        self.seen.append(gc.isenabled())
        if self.error is not None:
            raise self.error
        return super().build_local_plan()


class WatchingLoad(StandardLoadPlanner):
    """Notes whether collection is on."""

    def __init__(self, seen: list[bool]) -> None:
        super().__init__()
        self.seen = seen

    def build_local_plan(self) -> LoadPlan:
        self.seen.append(gc.isenabled())
        return super().build_local_plan()


def test_collection_rests_while_a_call_plans(tmp_path: Path) -> None:
    seen: list[bool] = []
    save({"a": np.ones(3)}, checkpoint_id=tmp_path, planner=WatchingSave(seen))
    assert gc.isenabled()
    load({"a": np.zeros(3)}, checkpoint_id=tmp_path, planner=WatchingLoad(seen))
    assert gc.isenabled()
    assert seen == [False, False]


def test_collection_goes_on_after_a_call_that_fails(tmp_path: Path) -> None:
    with pytest.raises(DcpError):
        save({"a": 1}, checkpoint_id=tmp_path, planner=WatchingSave([], ValueError("no")))
    assert gc.isenabled()
    with pytest.raises(ArgumentError):
        load([], checkpoint_id=tmp_path)  # type: ignore[arg-type]  # the point of the test
    assert gc.isenabled()


def test_what_a_call_makes_is_gone_at_its_end_without_a_collection(tmp_path: Path) -> None:
    def described() -> list[Any]:
        return [value for value in gc.get_objects() if type(value) is LocalTensor]

    state = {"m": {f"w{i}": np.full(3, i) for i in range(20)}, "l": [np.ones(2), {"x": 1}], "n": 5}
    gc.collect()
    gc.disable()
    before = len(described())
    save(state, checkpoint_id=tmp_path)
    assert len(described()) == before
    load(state, checkpoint_id=tmp_path)
    assert len(described()) == before
