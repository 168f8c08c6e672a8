"""The arena: places that do not meet, memory that is reused, shared, and given back."""

from __future__ import annotations

import logging
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.background.arena import ALIGNMENT, MAX_SEGMENTS, SEGMENT_GRANULE, Arena, Place, SegmentViews
from dcp_core.errors import ArgumentError, CoordinationError, StorageError

_MIB = 1 << 20
_SIZES = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2 * SEGMENT_GRANULE)), max_size=8)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = (_arena_mappings(), _open_descriptors())
    yield
    assert (_arena_mappings(), _open_descriptors()) == before


def _arena_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:dcp-arena")


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _duplicates(arena: Arena, first: int = 0) -> list[tuple[int, int]]:
    """What arrives at the other process."""
    return [(os.dup(descriptor), nbytes) for descriptor, nbytes in arena.descriptors()[first:]]


def _held_nbytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def _fill(arena: Arena, places: Sequence[Place], seed: int) -> list[bytes]:
    """Random bytes for every buffer, put there after all were placed."""
    contents = [np.random.default_rng([seed, row]).bytes(place.nbytes) for row, place in enumerate(places)]
    for place, content in zip(places, contents, strict=True):
        arena.buffer(place)[:] = np.frombuffer(content, np.uint8)
    return contents


def _assert_apart(places: Sequence[Place], arena: Arena) -> None:
    sizes = [nbytes for _, nbytes in arena.descriptors()]
    for place in places:
        assert place.offset % ALIGNMENT == 0
        assert 0 <= place.offset <= place.offset + place.nbytes <= sizes[place.segment]
    ordered = sorted((place.segment, place.offset, place.nbytes) for place in places if place.nbytes)
    for one, other in pairwise(ordered):
        assert one[0] < other[0] or one[1] + one[2] <= other[1]


@settings(deadline=None)
@given(saves=st.lists(_SIZES, min_size=1, max_size=7))
def test_buffers_of_a_save_never_meet_and_the_other_side_reads_them(saves: list[list[int]]) -> None:
    arena, views = Arena(), SegmentViews()
    try:
        for seed, sizes in enumerate(saves):
            before, generation = arena.descriptors(), arena.generation
            places = arena.place(sizes)
            after = arena.descriptors()
            assert [place.nbytes for place in places] == sizes
            _assert_apart(places, arena)
            assert len(after) <= MAX_SEGMENTS
            kept = len(before) if arena.generation == generation else 0
            assert after[:kept] == before[:kept] and len(after) <= kept + 1
            views.replace(_duplicates(arena, kept), first=kept)
            contents = _fill(arena, places, seed)
            assert [views.buffer(place).tobytes() for place in places] == contents
            assert arena.place(sizes) == places
            assert arena.descriptors() == after
    finally:
        arena.close()


def test_a_place_for_each_of_many_small_buffers_is_found_in_one_segment(arena: Arena) -> None:
    sizes = [65_536 + row % 7 for row in range(20_000)]
    places = arena.place(sizes)
    _assert_apart(places, arena)
    assert len(arena.descriptors()) == 1
    assert arena.nbytes < sum(sizes) + len(sizes) * ALIGNMENT + SEGMENT_GRANULE


def test_smaller_buffers_fill_what_larger_ones_left(arena: Arena) -> None:
    arena.place([4 * _MIB])
    arena.place([8 * _MIB, 3 * _MIB])
    assert [nbytes for _, nbytes in arena.descriptors()] == [4 * _MIB, 12 * _MIB]
    arena.place([10 * _MIB, 4 * _MIB, 2 * _MIB])
    assert [nbytes for _, nbytes in arena.descriptors()] == [4 * _MIB, 12 * _MIB]


def test_a_save_that_fits_no_more_adds_one_segment_and_the_fifth_replaces_all(arena: Arena) -> None:
    held = []
    for number in range(1, MAX_SEGMENTS + 1):
        arena.place([2 * _MIB] * number)
        held.append((len(arena.descriptors()), arena.generation))
    assert held == [(number, 0) for number in range(1, MAX_SEGMENTS + 1)]
    arena.place([2 * _MIB] * (MAX_SEGMENTS + 1))
    assert (len(arena.descriptors()), arena.generation) == (1, 1)
    assert arena.nbytes == 2 * _MIB * (MAX_SEGMENTS + 1)


def test_nothing_needs_no_memory_and_an_empty_buffer_has_a_place(arena: Arena) -> None:
    assert arena.place([]) == []
    assert arena.nbytes == 0
    (place,) = arena.place([0])
    assert arena.buffer(place).shape == (0,)


def test_from_the_second_save_on_no_page_is_fresh(arena: Arena) -> None:
    sizes = [3 * _MIB, 5 * _MIB, 100, 24 * _MIB]
    source = np.ones(max(sizes), np.uint8)

    def save() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for place in arena.place(sizes):
            arena.buffer(place)[:] = source[: place.nbytes]
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    first = save()
    held = [_held_nbytes(descriptor) for descriptor, _ in arena.descriptors()]
    assert held == [arena.nbytes] or sum(held) >= sum(sizes)
    later = [save() for _ in range(3)]
    assert [_held_nbytes(descriptor) for descriptor, _ in arena.descriptors()] == held
    assert first > 7_000 or first > 10 * max(later)  # pages of 4 KiB, or huge ones
    assert max(later) < 500


def test_segments_that_are_replaced_give_back_their_memory_though_the_other_side_maps_them(arena: Arena) -> None:
    views = SegmentViews()
    for number in range(1, MAX_SEGMENTS + 1):
        _fill(arena, arena.place([2 * _MIB] * number), number)
    views.replace(_duplicates(arena))
    kept = [descriptor for descriptor, _ in _duplicates(arena)]
    assert [_held_nbytes(descriptor) for descriptor in kept] == [2 * _MIB] * MAX_SEGMENTS
    arena.place([2 * _MIB] * (MAX_SEGMENTS + 1))
    assert [_held_nbytes(descriptor) for descriptor in kept] == [0] * MAX_SEGMENTS
    for descriptor in kept:
        os.close(descriptor)


def test_a_save_in_hand_keeps_what_it_maps_when_the_arena_is_closed(arena: Arena) -> None:
    views = SegmentViews()
    places = arena.place([5, 70_000])
    views.replace(_duplicates(arena))
    contents = _fill(arena, places, 1)
    arena.close()
    assert arena.nbytes == 0 and arena.generation == 1
    assert [views.buffer(place).tobytes() for place in places] == contents


def test_an_array_outlives_the_arena(arena: Arena) -> None:
    (place,) = arena.place([100])
    array = arena.buffer(place)
    array[:] = 7
    arena.close()
    assert array.tolist() == [7] * 100
    assert _arena_mappings() == 1
    del array


@pytest.mark.parametrize("sizes", [[5, -1], [1 << 62, 1 << 62, 1 << 62, 1 << 62], [-(1 << 62)]])
def test_sizes_that_cannot_be_are_refused(arena: Arena, sizes: list[int]) -> None:
    arena.place([10])
    with pytest.raises(ArgumentError, match="cannot be placed"):
        arena.place(sizes)
    assert len(arena.descriptors()) == 1


def test_memory_that_is_not_there_is_an_error_that_leaves_nothing_open(arena: Arena) -> None:
    arena.place([10])
    before = _open_descriptors()
    with pytest.raises(StorageError, match="no shared memory of .* bytes for staging .* use save"):
        arena.place([1 << 50])
    assert _open_descriptors() == before
    assert arena.buffer(arena.place([10])[0]).shape == (10,)


# --- memory that a device knows ----------------------------------------------------------------------


class _Device:
    """Remembers what it knows, and sees whether memory was still there when it was to forget it."""

    def __init__(self, *, knows: bool = True, forgets: bool = True) -> None:
        self.known: list[int] = []
        self.asked = 0
        self._knows = knows
        self._forgets = forgets

    def register(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None] | None:
        self.asked += 1
        if not self._knows:
            return None
        self.known.append(len(memory))

        def forget() -> None:
            memory[:] = 0  # a segmentation fault if it was unmapped before
            self.known.remove(len(memory))
            if not self._forgets:
                raise RuntimeError("the device is lost")

        return forget


def test_a_device_knows_every_segment_once_until_it_is_dropped(arena: Arena) -> None:
    device = _Device()
    arena.place([2 * _MIB])
    arena.pinned_by(device.register)
    assert device.known == [2 * _MIB]
    arena.place([2 * _MIB, 4 * _MIB])
    arena.pinned_by(device.register)
    assert (device.known, device.asked) == ([2 * _MIB, 4 * _MIB], 2)
    for number in range(3, MAX_SEGMENTS + 2):
        arena.place([2 * _MIB, *[4 * _MIB] * (number - 1)])
    assert device.known == [arena.nbytes]
    arena.close()
    assert device.known == []


def test_a_device_that_cannot_know_memory_is_not_asked_again(arena: Arena) -> None:
    device = _Device(knows=False)
    arena.pinned_by(device.register)
    arena.place([10])
    arena.place([10])
    arena.pinned_by(device.register)
    assert device.asked == 1


def test_a_device_that_is_lost_does_not_keep_the_memory(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    device = _Device(forgets=False)
    arena.pinned_by(device.register)
    arena.place([10])
    with caplog.at_level(logging.WARNING, "dcp.background"):
        arena.close()
    assert "could not be unregistered" in caplog.text and "the device is lost" in caplog.text
    assert _arena_mappings() == 0


# --- the other side ----------------------------------------------------------------------------------


def test_views_are_read_only_and_see_what_is_written_later(arena: Arena) -> None:
    views = SegmentViews()
    (place,) = arena.place([4])
    for descriptor, nbytes in _duplicates(arena):
        views.add(descriptor, nbytes)
    view = views.buffer(place)
    arena.buffer(place)[:] = [1, 2, 3, 4]
    assert view.tolist() == [1, 2, 3, 4]
    assert not view.flags.writeable


@pytest.mark.parametrize(
    "place", [Place(1, 0, 1), Place(-1, 0, 1), Place(0, 2 * _MIB - 1, 2), Place(0, -1, 1), Place(0, 5, -1)]
)
def test_a_place_that_is_not_there_is_an_error(arena: Arena, place: Place) -> None:
    views = SegmentViews()
    arena.place([2 * _MIB])
    views.replace(_duplicates(arena))
    assert views.buffer(Place(0, 2 * _MIB - 1, 1)).shape == (1,)
    with pytest.raises(CoordinationError, match="no segment|lies outside"):
        views.buffer(place)


def test_segments_after_those_that_stay_are_replaced(arena: Arena) -> None:
    views = SegmentViews()
    arena.place([2 * _MIB])
    arena.place([2 * _MIB, 4 * _MIB])
    for first in (0, 1, 2, 0):
        views.replace(_duplicates(arena)[:2], first=first)
        assert len(views) == first + 2
    _fill(arena, [Place(1, 0, 3)], 1)
    assert views.buffer(Place(1, 0, 3)).tobytes() == arena.buffer(Place(1, 0, 3)).tobytes()


@pytest.mark.parametrize(("first", "factor"), [(3, 1), (-1, 1), (0, 2), (1, 1 << 40), (0, -1)])
def test_segments_that_cannot_be_mapped_are_closed_and_change_nothing(arena: Arena, first: int, factor: int) -> None:
    views = SegmentViews()
    arena.place([2 * _MIB])
    views.replace(_duplicates(arena))
    arena.place([2 * _MIB, 4 * _MIB])
    before = _open_descriptors(), _arena_mappings()
    wrong = [(descriptor, nbytes * factor) for descriptor, nbytes in _duplicates(arena)]
    with pytest.raises(CoordinationError, match="do not follow|shared memory of"):
        views.replace(wrong, first=first)
    assert (_open_descriptors(), _arena_mappings()) == before
    assert len(views) == 1


# --- forks -------------------------------------------------------------------------------------------

_FORKING = """
import os, sys
import numpy as np
from dcp_core.background.arena import Arena

arena = Arena()
arena.pinned_by(lambda memory: lambda: print("unregistered", os.getpid() == owner))
owner = os.getpid()
(place,) = arena.place([1000])
arena.buffer(place)[:] = 5
forked = os.fork()
if not forked:
    maps = open("/proc/self/maps").read().count("dcp-arena")
    files = sum("dcp-arena" in os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")[:-1])
    (own,) = arena.place([10])
    arena.buffer(own)[:] = 9
    print("forked", maps, files, len(arena.descriptors()), arena.generation, flush=True)
    os._exit(0)
os.waitpid(forked, 0)
print("owner", set(arena.buffer(place).tolist()), arena.generation)
arena.close()
"""


def test_a_forked_process_keeps_nothing_of_the_arena_and_may_use_it_anew() -> None:
    result = subprocess.run([sys.executable, "-c", _FORKING], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines() == ["forked 0 0 1 1", "owner {5} 0", "unregistered True"], result.stderr
    assert not re.search("error|warning", result.stderr, re.IGNORECASE)
