"""What the conformance kit, and a save, say of a plugin that is wrong: what is wrong, where, and once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_core import api
from dcp_core.arrays import ArrayAccess
from dcp_core.box import Box
from dcp_core.dtype import BY_NAME
from dcp_core.errors import DTypeMismatchError, PlanningError, ShapeMismatchError, StorageError
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.testing.conformance.comparing import check_same, difference
from dcp_core.testing.conformance.described import Case, Held, tiling_problem
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray
from dcp_core.testing.ranks import RankContext, RankProcessError, run_ranks

_ROOT = Path(__file__).parents[2]


# -- bits -------------------------------------------------------------------------------------------------------------


def test_a_difference_is_told_by_element_and_byte() -> None:
    expected = np.arange(12, dtype=np.float32).reshape(3, 4).view(np.uint32)
    found = expected.copy()
    found[1, 2] ^= 0x0100
    found[2, 3] = 0
    assert difference(expected, expected) is None
    assert difference(found, expected) == (
        "the first difference is at element (1, 2), byte 25 of 48: found 0x40c00100, expected 0x40c00000; "
        "2 of 12 elements differ"
    )
    assert difference(found[:2], expected) == "found 32 bytes, expected 48"
    assert difference(np.array(1, np.uint8), np.array(2, np.uint8)) == (
        "the first difference is at element (), byte 0 of 1: found 0x01, expected 0x02; 1 of 1 elements differs"
    )


def test_a_failed_comparison_tells_where_and_the_usual_cause() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^the key 'w': found 1 bytes, .* \(the usual cause: a copy\)$"):
        check_same(b"x", np.zeros(3, np.uint8), "the key 'w'", "a copy")


# -- boxes ------------------------------------------------------------------------------------------------------------


def _case(*ranks: tuple[Box, ...]) -> Case:
    return Case("rows", (4, 2), "float32", tuple(Held(True, (4, 2), "float32", boxes) for boxes in ranks))


def _rows(first: int, count: int) -> Box:
    return Box((first, 0), (count, 2))


@pytest.mark.parametrize(
    "ranks", [((_rows(0, 1),), (_rows(2, 2),)), ((_rows(0, 3),), (_rows(2, 2),), (_rows(2, 2),)), ((), ())]
)
def test_the_kit_tells_of_boxes_what_a_save_would(ranks: tuple[tuple[Box, ...], ...]) -> None:
    problem = tiling_problem(_case(*ranks))
    assert problem is not None
    (message,) = set(run_ranks(_save_boxes, len(ranks), ranks))
    for part in problem.removeprefix("'float32' of global shape (4, 2): ").split("; "):
        assert part.replace("ranks 1-2", "rank 1, 2") in message


def _save_boxes(context: RankContext, ranks: tuple[tuple[Box, ...], ...]) -> str:
    value = ShardedArray.cut(np.zeros((4, 2), np.float32), ranks[context.rank], "float32")
    try:
        api.save({"w": value}, checkpoint_id=context.channel_directory / "save", adapter=NumpyRankAdapter())
    except PlanningError as error:
        return str(error)
    return ""


def test_boxes_that_are_right_are_no_problem() -> None:
    assert tiling_problem(_case((_rows(0, 3),), (_rows(3, 1),), (_rows(0, 3),))) is None


# -- ranks ------------------------------------------------------------------------------------------------------------


def _raise(context: RankContext) -> None:
    if context.rank == 2:
        raise StorageError("the disk is full")
    assert context.rank != 3
    raise ValueError(f"no such layout, at {hex(4096 + context.rank)}")


def test_ranks_with_one_error_tell_it_once() -> None:
    with pytest.raises(RankProcessError) as caught:
        run_ranks(_raise, 5)
    text = str(caught.value)
    assert text.count("no such layout") == 2  # the line of code, and what it says
    assert [line.partition(":")[0] for line in text.splitlines() if "Traceback" in line] == [
        "ranks 0-1, 4", "rank 2", "rank 3"
    ]  # fmt: skip


# -- suites -----------------------------------------------------------------------------------------------------------

_MODULE = """
from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from dcp_core.arrays import NumpyAdapter
from dcp_core.box import Box
from dcp_core.testing.conformance.adapter import AdapterConformance
from dcp_core.testing.conformance.describer import DescriberConformance
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray, even_boxes


class Suite(DescriberConformance):
    worlds = (1, 2)

    def in_rank(self, context):
        return nullcontext(NumpyRankAdapter())

    def make_describer(self):
        return NumpyRankAdapter()

    def make_value(self, layout, whole, dtype, rank, world_size):
        if layout == "diagonal":
            raise ValueError("nobody cuts diagonally")
        return ShardedArray.cut(whole, even_boxes(whole.shape, world_size, rank), dtype.name)


class TestNoLayouts(Suite):
    pass


class TestOneName(Suite):
    layouts = ("rows")


class TestShapes(Suite):
    layouts = ("rows",)
    shape = (4, 3, 2)


class TestRaises(Suite):
    layouts = ("rows", "diagonal")


class TestNoGroup(Suite):
    layouts = ("rows",)

    def in_rank(self, context):
        return nullcontext(NumpyAdapter())


class TestDtypes(Suite):
    layouts = ("rows",)
    dtypes = ("bf16",)


class WrongDescriber(NumpyRankAdapter):
    def describe(self, value):
        found = super().describe(value)
        return found and replace(found, dtype="float32")


class TestWrongField(Suite):
    layouts = ("rows",)

    def make_describer(self):
        return WrongDescriber()


class TestRefuses(Suite):
    layouts = ("rows",)

    def refused_values(self, rank, world_size):
        return [np.zeros(3)]


class TestArrays(AdapterConformance):
    def make_adapter(self):
        return NumpyRankAdapter()

    def make_tensor(self, bits, dtype):
        return ShardedArray(bits.shape, [Box.whole(bits.shape)], [bits], dtype.name)

    def bits_of(self, tensor):
        return np.array(tensor.arrays[0])

    def view_of(self, tensor, view):
        part = view(tensor.arrays[0])
        return ShardedArray(part.shape, [Box.whole(part.shape)], [part], tensor.dtype_name)
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("suites")
    (directory / "test_suites.py").write_text(_MODULE)
    (directory / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_suites.py"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(_ROOT)
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120).stdout


def _failures(output: str, suite: str) -> dict[str, str]:
    """What pytest tells of each failed test of a suite."""
    parts = [part.partition(" _") for part in output.split(f"_ {suite}.")[1:]]
    return {name: text.partition("\n_____")[0] for name, _, text in parts}


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ("TestNoLayouts", "TestNoLayouts.layouts is (); it must be a tuple of at least one"),
        ("TestOneName", "TestOneName.layouts is 'rows'; it must be a tuple of at least one"),
        ("TestShapes", "small_shape (3, 6) must have as many dimensions as shape (4, 3, 2); say both"),
    ],
)
def test_a_suite_that_declares_too_little_is_told_so(suite: str, message: str, output: str) -> None:
    failures = _failures(output, suite)
    assert "test_every_value_is_described" in failures
    assert "test_what_is_saved_in_a_layout_is_loaded_in_any_other" in failures
    assert "IndexError" not in output
    assert all(message in text for name, text in failures.items() if "asked" not in name), failures


def test_an_error_in_ranks_is_told_by_one_test_and_the_others_name_it(output: str) -> None:
    failures = _failures(output, "TestRaises")
    told = "describing values on 1 rank failed, as the first test has told: ValueError: nobody cuts diagonally"
    assert [told in text for name, text in failures.items() if "_on_" not in name].count(True) >= 9
    described = {name: text for name, text in failures.items() if "Traceback" in text}
    assert len(described) <= 3, list(described)  # one that described, one that registered, one that saved


@pytest.mark.parametrize(
    ("suite", "test", "message"),
    [
        ("TestNoGroup", "test_every_value_is_described", "in_rank's group has 1 rank with this as rank 0, and 2 ranks"),
        ("TestDtypes", "test_every_value_is_described", "TestDtypes.dtypes names ['bf16'], which are no element types"),
        ("TestWrongField", "test_every_value_is_described", "rank 0: describe told the dtype 'float32': it must be a"),
        (
            "TestRefuses",
            "test_what_cannot_be_stored_is_refused",
            "0 of type ndarray was described; describe must raise",
        ),
        (
            "TestArrays",
            "test_values_of_others_are_left_to_others",
            "describe must return None for what is no tensor of",
        ),
    ],
)
def test_a_wrong_suite_or_class_is_told_in_a_sentence(suite: str, test: str, message: str, output: str) -> None:
    failures = _failures(output, suite)
    assert message in failures[test], failures[test]
    if suite == "TestArrays":
        assert list(failures) == [test]


# -- a save -----------------------------------------------------------------------------------------------------------


class _Wide(ArrayAccess):
    """Tells too wide an array, or one of another shape, of what a view holds."""

    def __init__(self, dtype: Any, *, on_device: bool, shape: tuple[int, ...]) -> None:
        super().__init__(dtype)
        self.on_device = on_device
        self.shape = shape

    def host_array(self, view: Any) -> Any:
        return None if self.on_device else self.read_out(view)

    def read_out(self, view: Any) -> Any:
        return view.astype(np.float64) if self.shape == view.shape else view.reshape(self.shape)


class _WrongAdapter(NumpyRankAdapter):
    def __init__(self, **options: Any) -> None:
        self.options = options

    def describe(self, value: Any) -> Any:
        found = super().describe(value)
        access = _Wide(BY_NAME["float32"], **self.options)
        return found if found is None or not isinstance(value, ShardedArray) else replace(found, access=access)


class _Planner(StandardSavePlanner):
    def get_data(self, item: Any) -> Any:
        return super().get_data(item)


@pytest.mark.parametrize(
    ("on_device", "shape", "planner", "error", "message"),
    [
        (False, (2, 3), None, DTypeMismatchError, "w on rank 0: host_array of the _Wide that describes it gives"),
        (False, (3, 2), None, ShapeMismatchError, "host_array of the _Wide that describes it gives the shape (3, 2)"),
        (False, (3, 2), _Planner(), ShapeMismatchError, "the planner's get_data, or host_array of the _Wide that"),
        (True, (2, 3), None, DTypeMismatchError, "read_out of _Wide gives float64 of shape (2, 3), expected the raw"),
        (True, (6,), None, ShapeMismatchError, "read_out of _Wide gives float32 of shape (6,), expected the raw"),
    ],
)  # fmt: skip
def test_a_save_names_who_gave_wrong_bits(
    on_device: bool, shape: tuple[int, ...], planner: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    value = ShardedArray.cut(np.zeros((2, 3), np.float32), [Box.whole((2, 3))])
    adapter = _WrongAdapter(on_device=on_device, shape=shape)
    with pytest.raises(error) as caught:
        api.save({"w": value}, checkpoint_id=tmp_path / "save", adapter=adapter, planner=planner)
    assert message in str(caught.value)
