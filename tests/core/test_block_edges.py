"""Cuts in boxes and the edges of checksum blocks, against a map of every element."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from dcp_core.box import Box
from dcp_core.planning import buffer_parts
from dcp_core.planning.block_edges import BlockEdges, ChunkRuns
from dcp_core.planning.slabs import find_slabs
from tests.core.schedule_simulator import plan_of, stored_tensor

ITEMSIZE = 4


def places(shape: tuple[int, ...], chunks: list[Box]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each element of a tensor its chunk, and its first byte there."""
    chunk, byte = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for number, box in enumerate(chunks):
        inside = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
        chunk[inside] = number
        byte[inside] = np.arange(int(np.prod(box.sizes))).reshape(box.sizes) * ITEMSIZE
    return chunk, byte


def cut_at(shape: tuple[int, ...], dim: int, rng: Random) -> list[Box]:
    """Cut a tensor along one dimension."""
    bounds = [0, *sorted(rng.sample(range(1, shape[dim]), min(rng.randint(0, 3), shape[dim] - 1))), shape[dim]]
    found = []
    for first, last in pairwise(bounds):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = first, last - first
        found.append(Box(tuple(offsets), tuple(sizes)))
    return found


@pytest.mark.parametrize("seed", range(200))
def test_a_cut_is_on_an_edge_where_no_block_holds_elements_of_both_sides(seed: int) -> None:
    rng = Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
    chunks = cut_at(shape, rng.randrange(len(shape)) if rng.random() < 0.3 else 0, rng)
    sizes = tuple(rng.randint(1, size) for size in shape) if rng.random() < 0.5 else shape
    box = Box(tuple(rng.randint(0, size - own) for size, own in zip(shape, sizes, strict=True)), sizes)
    alignment = rng.choice([4, 8, 12, 16, 40])
    inside = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
    chunk, byte = (column[inside].reshape(-1) for column in places(shape, chunks))
    with patch.object(buffer_parts, "ALIGNMENT", alignment):
        plan = plan_of([(stored_tensor("w", shape, "float32", chunks), box, "float32", "gloo")])
        cuts = np.arange(1, len(chunk))
        found = BlockEdges(plan).are_edges(0, cuts)
    block = chunk * 10_000 + byte // alignment
    runs = [np.flatnonzero(chunk == number) for number in np.unique(chunk)]
    is_plain = all((np.diff(run) == 1).all() and (np.diff(byte[run]) == ITEMSIZE).all() for run in runs)
    if is_plain:
        assert found.tolist() == (block[cuts] != block[cuts - 1]).tolist()
    else:
        torn = found & (block[cuts] == block[cuts - 1])
        assert not torn.any()


@pytest.mark.parametrize("seed", range(100))
def test_cuts_between_rows_tear_no_block_and_are_as_many_as_there_can_be(seed: int) -> None:
    rng = Random(seed)
    shape, alignment = (rng.randint(2, 30), rng.randint(1, 6)), rng.choice([4, 8, 16, 24])
    chunks = cut_at(shape, 0, rng)
    start = rng.randrange(shape[0] - 1)
    box = Box((start, 0), (rng.randint(2, shape[0] - start), shape[1]))
    chunk, byte = (column[start : start + box.sizes[0]].reshape(-1) for column in places(shape, chunks))
    with patch.object(buffer_parts, "ALIGNMENT", alignment):
        plan = plan_of([(stored_tensor("w", shape, "float32", chunks), box, "float32", "gloo")])
        found = BlockEdges(plan).cuts(0, shape[1]).tolist()
        slabs = find_slabs(plan, np.array([0]))
    block = chunk * 10_000 + byte // alignment
    possible = [row * shape[1] for row in range(1, box.sizes[0])]
    possible = [cut for cut in possible if block[cut] != block[cut - 1]]
    assert set(found) <= set(possible)
    half = alignment // 2 // ITEMSIZE
    for cut in possible:  # what is left out is close to another cut, or to an end
        assert any(abs(cut - other) <= max(half, 1) for other in [0, box.numel, *found]) or cut in found
    ends = slabs.ends(np.zeros(int(slabs.count[0]), np.int64), np.arange(1, int(slabs.count[0]) + 1)).tolist()
    assert ends[-1] == box.numel and sorted(set(ends)) == ends
    for block_numel in (1, 5, 12):
        starts = slabs.blocks(0, 0, box.numel, box.sizes, block_numel).tolist()
        assert starts[0] == 0 and sorted(set(starts)) == starts
        assert all(last - first <= block_numel for first, last in pairwise([*starts, box.numel]))


def test_buffers_whose_rows_meet_no_edges_are_cut_between_rows() -> None:
    odd = stored_tensor("w", (3000, 1001), "float32", [Box((0, 0), (3000, 1001))])
    even = stored_tensor("w", (3000, 1024), "float32", [Box((0, 0), (100, 1024)), Box((100, 0), (2900, 1024))])
    plan = plan_of([(stored, Box.whole(stored.shape), "float32", "gloo") for stored in (odd, even)])
    slabs = find_slabs(plan, np.arange(2))
    assert slabs.count.tolist() == [3000, 11]
    rows = [0, *[100 + 256 * block for block in range(1, 11)], 3000]  # what is shorter than half a block stays together
    assert slabs.bounds[1].tolist() == [1024 * row for row in rows]


def test_a_region_is_a_range_of_its_chunk_with_or_without_gaps() -> None:
    chunks = [Box((0, 0), (6, 4))]
    boxes = [Box((0, 0), (6, 4)), Box((2, 0), (3, 4)), Box((1, 1), (2, 2)), Box((5, 1), (1, 3))]
    stored = stored_tensor("w", (6, 4), "float32", chunks)
    with patch.object(buffer_parts, "ALIGNMENT", 32):
        plan = plan_of([(stored, box, "float32", "gloo") for box in boxes])
        runs = ChunkRuns.of(plan, plan.reads)
        assert runs.start.tolist() == [0, 32, 20, 84]
        assert runs.stop.tolist() == [96, 80, 44, 96]
        assert runs.is_run.tolist() == [True, True, False, True]
        assert runs.chunk_nbytes.tolist() == [96] * 4
        assert runs.starts_on_edge.tolist() == [True, True, False, False]
        assert runs.stops_on_edge.tolist() == [True, False, False, True]
