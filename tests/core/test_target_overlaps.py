"""Targets that overlap in memory are refused, by name, before any is touched; against the addresses of all elements."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dcp_core import api
from dcp_core.arrays import NumpyAdapter
from dcp_core.box import Box
from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.leaves import MemoryRange
from dcp_core.planning.standard_load import StandardLoadPlanner
from dcp_core.planning.target_overlaps import Targets, check_apart
from dcp_core.testing.numpy_ranks import NumpyRankAdapter, ShardedArray
from dcp_core.testing.ranks import RankContext, run_ranks

Array = npt.NDArray[Any]


class OnADevice(NumpyAdapter):
    """Arrays that are on a device: no host array, but a range of memory."""

    def host_array(self, view: Array) -> None:
        return None


class Untold(NumpyAdapter):
    """An adapter that lacks `memory_range`, as third parties' may."""

    memory_range: Any = None


class CountingHostArrays(NumpyAdapter):
    """Counts what the check asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.host_arrays = 0
        self.ranges = 0

    def host_array(self, view: Array) -> Array | None:
        self.host_arrays += 1
        return super().host_array(view)

    def memory_range(self, view: Array) -> MemoryRange:
        self.ranges += 1
        return super().memory_range(view)


def bytes_of(array: Array) -> frozenset[int]:
    """The addresses of all bytes of an array's elements."""
    places = [array.__array_interface__["data"][0]]
    for size, stride in zip(array.shape, array.strides, strict=True):
        places = [place + index * stride for place in places for index in range(size)]
    return frozenset(place + byte for place in places for byte in range(array.itemsize))


def targets_of(arrays: list[Array], access: Any, *, leaves: list[int] | None = None) -> Targets:
    count = len(arrays)
    names = [f"k{number}" for number in range(count)]
    return Targets(names, leaves or list(range(count)), arrays, [access] * count, [None] * count)


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("access", [NumpyAdapter(), Untold()], ids=["told", "untold"])
def test_two_targets_are_refused_exactly_where_some_of_their_bytes_are_the_same_and_not_all(
    seed: int, access: NumpyAdapter
) -> None:
    rng = Random(seed)
    memory = np.zeros((12, 12), rng.choice([np.uint8, np.float32, np.float64]))
    arrays: list[Array] = []
    for _ in range(rng.randint(2, 4)):
        row, column = rng.randrange(11), rng.randrange(11)
        part = memory[row : row + rng.randint(1, 3), column : column + rng.randint(1, 4)]
        part = part[:: rng.choice([1, 1, -1]), :: rng.choice([1, 2])]
        arrays.append(rng.choice([part, part, memory[row : row + 2], memory.reshape(-1)[row * 12 : row * 12 + 24]]))
    held = [bytes_of(array) for array in arrays]
    refused = [
        (f"k{one}", f"k{two}")
        for one, two in combinations(range(len(arrays)), 2)
        if held[one] & held[two] and held[one] != held[two]
    ]
    same_with_gaps = any(
        held[one] == held[two] and arrays[one].strides != arrays[two].strides and not arrays[one].flags.c_contiguous
        for one, two in combinations(range(len(arrays)), 2)
    )
    if same_with_gaps and not refused:
        return  # another look at memory with gaps may be taken for an overlap
    if not refused:
        check_apart(targets_of(arrays, access))
        return
    with pytest.raises(UnsupportedValueError, match="their memory overlaps") as raised:
        check_apart(targets_of(arrays, access))
    if not same_with_gaps:
        assert any(f"{one!r} and {two!r}" in str(raised.value) for one, two in refused)


def test_what_has_no_gaps_is_found_on_a_device_and_the_rest_passes() -> None:
    memory = np.zeros((6, 6), np.float32)
    device = OnADevice()
    with pytest.raises(UnsupportedValueError, match="'k0' and 'k1'"):
        check_apart(targets_of([memory[:3], memory[2:4]], device))
    assert check_apart(targets_of([memory[:, :3], memory[:, 2:]], device)).meet, "what cannot be told passes"
    assert not check_apart(targets_of([memory[:3], memory[3:]], device)).meet


def test_the_same_address_in_another_space_is_another_place() -> None:
    class Elsewhere(NumpyAdapter):
        def memory_range(self, view: Array) -> MemoryRange:
            return ("elsewhere", *super().memory_range(view)[1:])

    memory = np.zeros(8)
    both = Targets(["a", "b"], [0, 1], [memory[:5], memory[3:]], [NumpyAdapter(), Elsewhere()], [None, None])
    assert not check_apart(both).meet


def test_two_parts_of_one_key_may_not_overlap_even_where_they_are_the_same_memory() -> None:
    memory = np.zeros(8)
    for parts in ([memory[:5], memory[3:]], [memory, memory]):
        with pytest.raises(UnsupportedValueError, match="'k0' cannot be loaded into: two of its parts overlap"):
            check_apart(targets_of(parts, NumpyAdapter(), leaves=[0, 0]))


def test_the_same_memory_in_another_shape_or_dtype_is_told_of() -> None:
    memory = np.zeros((4, 6), np.float32)
    for other in (memory.reshape(-1), memory.T, memory.view(np.int32)):
        assert check_apart(targets_of([memory, other], NumpyAdapter())).other_looks
    assert not check_apart(targets_of([memory[:2], memory[2:]], NumpyAdapter())).other_looks


def test_targets_that_are_apart_are_asked_for_their_place_once_and_for_nothing_else() -> None:
    access = CountingHostArrays()
    memory = np.zeros((500, 8))
    assert not check_apart(targets_of(list(memory), access)).meet
    assert (access.ranges, access.host_arrays) == (500, 0)


def test_however_many_ranges_meet_the_looks_are_bounded() -> None:
    access = CountingHostArrays()
    columns = np.zeros((3, 3000))
    check_apart(targets_of([columns[:, at] for at in range(3000)], access))
    assert access.host_arrays <= 4000
    tied = np.zeros(8)
    access = CountingHostArrays()
    check_apart(Targets(["t"] * 3000, range(3000), [tied] * 3000, [access] * 3000, ["one memory"] * 3000))
    assert access.host_arrays == 0


def test_an_overlap_is_found_beside_any_number_of_ranges_that_meet_without_one() -> None:
    memory = np.zeros((4, 3000))
    arrays = [memory[:, at] for at in range(3000)]
    late = np.zeros(64)
    with pytest.raises(UnsupportedValueError, match="'k3000' and 'k3001'"):
        check_apart(targets_of([*arrays, late[:40], late[30:]], NumpyAdapter()))


# -- through a load ---------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tied = np.arange(3000.0)
    state = {"a": np.arange(3000.0) + 1, "b": -np.arange(3000.0), "tied": {"one": tied, "two": tied}}
    api.save(state, checkpoint_id=tmp_path / "c", durable=False)
    return tmp_path / "c"


def test_the_error_names_both_keys_and_the_remedy_and_nothing_is_touched(checkpoint: Path) -> None:
    memory, apart = np.full(4000, 7.0), np.full(3000, 7.0)
    state = {"a": memory[:3000], "b": memory[1000:], "tied": {"one": apart}}
    with pytest.raises(UnsupportedValueError) as raised:
        api.load(state, checkpoint_id=checkpoint)
    text = str(raised.value)
    assert "'a' and 'b' cannot be loaded together: their memory overlaps" in text
    assert "copy" in text
    assert "leave one key out" in text
    assert (memory == 7).all()
    assert (apart == 7).all()


def test_keys_that_are_stored_as_one_are_refused_too_where_their_targets_only_overlap(checkpoint: Path) -> None:
    memory = np.zeros(4000)
    with pytest.raises(UnsupportedValueError, match=r"'tied\.one' and 'tied\.two'"):
        api.load({"tied": {"one": memory[:3000], "two": memory[1000:]}}, checkpoint_id=checkpoint)


def test_tied_targets_are_filled_as_ever(checkpoint: Path) -> None:
    tied = np.zeros(3000)
    api.load({"tied": {"one": tied, "two": tied}}, checkpoint_id=checkpoint)
    assert (tied == np.arange(3000.0)).all()


def test_of_two_keys_that_are_the_same_memory_the_last_one_wins_as_ever(checkpoint: Path) -> None:
    both = np.zeros(3000)
    api.load({"a": both, "b": both}, checkpoint_id=checkpoint)
    assert (both == -np.arange(3000.0)).all()


def test_of_two_looks_at_the_same_memory_the_last_one_wins(tmp_path: Path) -> None:
    api.save({"flat": np.arange(60000.0), "w": -np.arange(60000.0).reshape(300, 200)}, checkpoint_id=tmp_path / "c")
    memory = np.zeros((300, 200))
    api.load({"flat": memory.reshape(-1), "w": memory}, checkpoint_id=tmp_path / "c")
    assert (memory == -np.arange(60000.0).reshape(300, 200)).all()


def test_columns_of_one_matrix_are_filled(checkpoint: Path) -> None:
    memory = np.zeros((3000, 2))
    api.load({"a": memory[:, 0], "b": memory[:, 1]}, checkpoint_id=checkpoint)
    assert (memory == np.stack([np.arange(3000.0) + 1, -np.arange(3000.0)], axis=1)).all()


def test_a_planner_that_acquires_memory_of_its_own_is_not_judged_by_the_state(checkpoint: Path) -> None:
    class Aside(StandardLoadPlanner):
        def __init__(self) -> None:
            super().__init__()
            self.buffers: dict[str, Array] = {}

        def acquire_tensor(self, item: Any) -> Any:
            return self.buffers.setdefault(item.dest_index.fqn, np.zeros(item.lengths))

    memory, planner = np.full(4000, 7.0), Aside()
    api.load({"a": memory[:3000], "b": memory[1000:]}, checkpoint_id=checkpoint, planner=planner)
    assert (planner.buffers["a"] == np.arange(3000.0) + 1).all()
    assert (memory == 7).all()


def load_overlapping_on_rank_1(context: RankContext, directory: str) -> list[str]:
    memory = np.full(40, 7.0)
    parts = [memory[:20], memory[20:]] if context.rank == 0 else [memory[:20], memory[10:30]]
    state = {name: ShardedArray((20,), [Box.whole((20,))], [part]) for name, part in zip("ab", parts, strict=True)}
    with pytest.raises(UnsupportedValueError) as raised:
        api.load(state, checkpoint_id=directory, adapter=NumpyRankAdapter(), timeout_seconds=60)
    return [str(raised.value), str((memory == 7).all())]


@pytest.mark.timeout(60)
def test_an_overlap_on_one_rank_is_one_error_on_all_and_nobody_is_touched(tmp_path: Path) -> None:
    api.save({"a": np.arange(20.0), "b": np.arange(20.0)}, checkpoint_id=tmp_path / "c", durable=False)
    found = run_ranks(load_overlapping_on_rank_1, 2, str(tmp_path / "c"))
    assert found[0] == found[1]
    text, untouched = found[0]
    assert "rank 1: 'a' and 'b' cannot be loaded together" in text
    assert untouched == "True"
