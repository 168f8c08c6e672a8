from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.formats.grid import expand_grids, find_grids
from dcp_core.metadata import Int64
from tests.core.metadata_samples import Cells, Tensor, cut_shapes, grid_cells, tensor_columns


def is_grid(shape: tuple[int, ...], boxes: Cells) -> bool:
    """Brute force: rebuild the cells from the distinct offsets and compare."""
    if not boxes:
        return False
    cuts = [sorted({box[0][dimension] for box in boxes} - {0}) for dimension in range(len(shape))]
    copies, rest = divmod(len(boxes), len(grid_cells(shape, cuts)))
    return rest == 0 and boxes == grid_cells(shape, cuts, copies)


def arrays_of(shapes: list[tuple[tuple[int, ...], Cells]]) -> tuple[Int64, Int64, Int64, Int64]:
    tensors = [Tensor(str(row), shape, boxes) for row, (shape, boxes) in enumerate(shapes)]
    described, chunks = tensor_columns(tensors)
    return np.diff(described.row), chunks.offsets, chunks.sizes, described.shape


@given(st.lists(cut_shapes(), max_size=6))
def test_exactly_the_regular_grids_are_found_and_rebuilt(shapes: list[tuple[tuple[int, ...], Cells]]) -> None:
    counts, offsets, sizes, extents = arrays_of(shapes)
    grids = find_grids(counts, offsets, sizes, extents)
    assert grids.is_grid.tolist() == [is_grid(shape, boxes) for shape, boxes in shapes]
    chosen = grids.is_grid
    rebuilt = expand_grids(counts[chosen], grids.cells[chosen], grids.extents, extents[chosen])
    assert rebuilt is not None
    rows = np.repeat(chosen, counts)
    np.testing.assert_array_equal(rebuilt[0], offsets[rows])
    np.testing.assert_array_equal(rebuilt[1], sizes[rows])


def test_a_grid_is_told_from_one_with_two_cells_swapped_or_stretched() -> None:
    cells = grid_cells((4, 4), [[2], [2]])
    swapped = [cells[0], cells[2], cells[1], cells[3]]
    stretched = [((0, 0), (2, 3)), *cells[1:]]
    shifted: Cells = [((0, 1), (2, 1)), ((0, 2), (2, 2)), ((2, 1), (2, 1)), ((2, 2), (2, 2))]
    cases: list[tuple[Cells, bool]] = [
        (cells, True),
        (swapped, False),
        (stretched, False),
        (shifted, False),
        (cells[:2], False),
    ]
    for boxes, expected in cases:
        assert find_grids(*arrays_of([((4, 4), boxes)])).is_grid.tolist() == [expected]


def test_cells_that_do_not_fit_the_shape_are_no_boxes() -> None:
    one = np.array([2])
    for extents in ([4], [9], [2**62]):
        assert expand_grids(one, np.array([[2]]), np.array(extents), np.array([[4]])) is None
    assert expand_grids(np.array([3]), np.array([[3]]), np.array([2**61, 2**62 - 1]), np.array([[4]])) is None
    assert expand_grids(np.array([1]), np.array([[1]]), np.empty(0, dtype=np.int64), np.array([[0]])) is None


def test_many_tensors_of_one_whole_chunk_are_grids_without_stored_cells() -> None:
    shapes = np.random.default_rng(0).integers(1, 50, (5000, 3))
    ones = np.ones(5000, dtype=np.int64)
    grids = find_grids(ones, np.zeros_like(shapes), shapes, shapes)
    assert grids.is_grid.all()
    assert len(grids.extents) == 0
