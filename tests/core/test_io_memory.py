"""Host memory above the state: saves and loads of half a gibibyte stay within 128 MiB, however the bytes lie.

Each case runs in a process of its own, forked from a server that has imported everything; files lie in memory, which
does not count. Targets and sources are touched before the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.box import Box
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.testing.numpy_ranks import ShardedArray
from dcp_core.testing.ranks import RankContext, run_ranks
from tests.core.fault_jobs import memory_directory
from tests.core.peak_memory import MEBIBYTE, need_peak_counter, peak_rise
from tests.core.rank_jobs import load, save

pytestmark = pytest.mark.timeout(120)

LIMIT_MIB = 128.0
SHAPE = (16384, 8192)
TOTAL_MIB = 512
MANY = 2048


def row_values() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(SHAPE[1], dtype=np.float32)


def large(dtype: str = "float32") -> np.ndarray[Any, Any]:
    """Half a gibibyte of float32; every row starts with its number."""
    array = np.empty(SHAPE, dtype)
    array[...] = row_values()
    array[:, 0] = np.arange(SHAPE[0])
    return array


class CopyingSavePlanner(StandardSavePlanner):
    """Makes the bytes of every item afresh."""

    def get_data(self, item: Any) -> Any:
        found = super().get_data(item)
        return found if isinstance(found, bytes) else np.array(found)


class StagingLoadPlanner(StandardLoadPlanner):
    """Has every region put into memory of its own, and copies it to its place."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, Any] = {}

    def acquire_tensor(self, item: Any) -> Any:
        place = super().acquire_tensor(item)
        staged = np.empty(place.shape, place.dtype)
        self._places[id(staged)] = place
        return staged

    def apply_tensor(self, item: Any, tensor: Any) -> None:
        self._places.pop(id(tensor))[...] = tensor


# --- saves -------------------------------------------------------------------------------------------


def many_tensors() -> dict[str, Any]:
    side = TOTAL_MIB * MEBIBYTE // MANY // 4
    return {f"layer.{number}": np.full(side, float(number), np.float32) for number in range(MANY)}


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "one tensor": lambda: {"large": large()},
    "many tensors": many_tensors,
    "transposed": lambda: {"large": np.asfortranarray(large())},
    "every second column": lambda: {"large": np.ones((SHAPE[0], 2 * SHAPE[1]), np.float32)[:, ::2]},
    "many windows": lambda: {f"layer.{n}": np.ones((512, 1024), np.float32)[:, 256:768] for n in range(MANY // 4)},
    "big-endian": lambda: {"large": large(">f4")},
}


def rise_of_save(context: RankContext, directory: str, case: str, copies: bool) -> float:
    state = STATES[case]()
    planner = CopyingSavePlanner() if copies else StandardSavePlanner()
    save({"warm": np.ones(3)}, directory + " warm")
    return peak_rise(lambda: save(state, directory, planner=planner))


@pytest.mark.parametrize(
    ("case", "copies"), [*((case, False) for case in STATES), ("many tensors", True), ("many windows", True)]
)
def test_a_save_needs_little_memory_beside_the_state(case: str, copies: bool) -> None:
    need_peak_counter()
    with memory_directory() as directory:
        (rise,) = run_ranks(rise_of_save, 1, str(directory / "step"), case, copies)
        written = sum(path.stat().st_size for path in directory.glob("step/*.safetensors"))
    assert written >= TOTAL_MIB * MEBIBYTE
    assert rise <= LIMIT_MIB


# --- loads -------------------------------------------------------------------------------------------


def save_templates(context: RankContext, directory: str) -> None:
    save({"large": large()}, directory + "/one")
    save(many_tensors(), directory + "/many")


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """Two checkpoints of half a gibibyte each."""
    need_peak_counter()
    with memory_directory() as path:
        run_ranks(save_templates, 1, str(path))
        yield path


def columns(start: int, stop: int, make: Callable[[tuple[int, ...]], Any], name: str | None = None) -> dict[str, Any]:
    box = Box((0, start), (SHAPE[0], stop - start))
    return {"large": ShardedArray(SHAPE, [box], [make(box.sizes)], name)}


def whole(make: Callable[[tuple[int, ...]], Any], name: str | None = None) -> dict[str, Any]:
    return columns(0, SHAPE[1], make, name)


TARGETS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "one tensor": ("one", lambda: {"large": np.ones(SHAPE, np.float32)}),
    "transposed": ("one", lambda: {"large": np.ones(SHAPE[::-1], np.float32).T}),
    "every second column": ("one", lambda: {"large": np.ones((SHAPE[0], 2 * SHAPE[1]), np.float32)[:, ::2]}),
    "to bfloat16": ("one", lambda: whole(lambda sizes: np.ones(sizes, "<u2"), "bfloat16")),
    "to float64": ("one", lambda: whole(lambda sizes: np.ones(sizes, "<f8"))),
    "big-endian": ("one", lambda: {"large": np.ones(SHAPE, ">f4")}),
    "columns": ("one", lambda: columns(2000, 6096, lambda sizes: np.ones(sizes, np.float32))),
    "columns, transposed": ("one", lambda: columns(2000, 6096, lambda sizes: np.ones(sizes[::-1], np.float32).T)),
    "columns to float64": ("one", lambda: columns(2000, 6096, lambda sizes: np.ones(sizes, np.float64))),
    "many tensors": ("many", lambda: {key: np.ones_like(value) for key, value in many_tensors().items()}),
}


def rise_of_load(context: RankContext, directory: str, case: str, verify: Any, stages: bool) -> float:
    template, make = TARGETS[case]
    state = make()
    planner = StagingLoadPlanner() if stages else StandardLoadPlanner(cast="any")
    rise = peak_rise(lambda: load(state, f"{directory}/{template}", verify=verify, planner=planner))
    check_loaded(state, template)
    return rise


def check_loaded(state: dict[str, Any], template: str) -> None:
    if template == "many":
        assert all((value == float(key.split(".")[1])).all() for key, value in state.items())
        return
    value = state["large"]
    (box,), (array,) = (value.boxes, value.arrays) if isinstance(value, ShardedArray) else ([Box.whole(SHAPE)], [value])
    if array.dtype == np.uint16:
        array = (array[::512].astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(array[:, 1:], np.broadcast_to(row_values()[1:], array[:, 1:].shape), rtol=1 / 128)
        return
    start, stop = box.offsets[1], box.offsets[1] + box.sizes[1]
    expected = np.broadcast_to(row_values()[start:stop], array[::512].shape).copy()
    if start == 0:
        expected[:, 0] = np.arange(0, SHAPE[0], 512)
    np.testing.assert_array_equal(array[::512], expected)


@pytest.mark.parametrize(
    ("case", "verify", "stages"),
    [*((case, True, False) for case in TARGETS), ("columns", "full", False), ("one tensor", False, False),
     ("many tensors", True, True)],
)  # fmt: skip
def test_a_load_needs_little_memory_beside_the_state(case: str, verify: Any, stages: bool, saved: Path) -> None:
    (rise,) = run_ranks(rise_of_load, 1, str(saved), case, verify, stages)
    assert rise <= LIMIT_MIB


def rise_of_read(context: RankContext, directory: str) -> float:
    found = []
    rise = peak_rise(lambda: found.append(api.read(directory + "/one", "large")))
    assert found[0][5, :3].tolist() == [5.0, 1.0, 2.0]
    return rise


def test_reading_one_tensor_needs_little_memory_beside_it(saved: Path) -> None:
    (rise,) = run_ranks(rise_of_read, 1, str(saved))
    assert TOTAL_MIB - 1 <= rise <= TOTAL_MIB + LIMIT_MIB


def rise_of_nothing(context: RankContext) -> list[float]:
    return [peak_rise(lambda: None), peak_rise(lambda: np.ones((100, MEBIBYTE), np.uint8))]


def test_the_measurement_sees_memory_that_is_gone_again() -> None:
    need_peak_counter()
    (rises,) = run_ranks(rise_of_nothing, 1)
    assert rises[0] < 5
    assert 95 < rises[1] < 105
