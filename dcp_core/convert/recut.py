"""Stored tensors joined, stacked, narrowed or selected: tensors of a directory that a checkpoint cuts otherwise. Pure.

In: stored tensors, and expressions over their names. Out: stored tensors that lie where those lie. Nothing is put
together in memory; see `formats.cuts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import numpy as np

from dcp_core.errors import MissingKeysError
from dcp_core.formats.cuts import Cut, lay_out
from dcp_core.formats.stored_layout import Extent, Layout, Piece
from dcp_core.metadata import EVERY_RANK, ArrayColumns, ChunkColumns, Int64, StoredTensor
from dcp_core.state_path import key_path


def recut(
    tensors: Mapping[str, StoredTensor], cuts: Mapping[str, Cut]
) -> tuple[dict[str, StoredTensor], set[str]]:  # fmt: skip
    """Make tensors of others.

    Args:
        tensors: What is stored, by name.
        cuts: What to make of it, by the new name.

    Returns:
        The new tensors by name, and the names of the stored ones that they are made of.

    Raises:
        MissingKeysError: A cut names what is not stored.
        PlanningError: A cut does not fit.
    """
    used: set[str] = set()

    def layout_of(name: str) -> Layout:
        if name not in tensors:
            near = get_close_matches(name, list(tensors), 1)
            raise MissingKeysError(
                f"a cut is made of {name!r}, which is not stored" + f"; there is {near}" * bool(near)
            )
        used.add(name)
        return layout_of_stored(tensors[name])

    made = {key: stored_of_layout(key, lay_out(cut, key, layout_of)) for key, cut in cuts.items()}
    return made, used


def layout_of_stored(stored: StoredTensor) -> Layout:
    """Where the elements of a stored tensor lie."""
    chunks, origin = stored.chunks, (0,) * len(stored.shape)
    boxes = zip(_rows(chunks.offsets), _rows(chunks.sizes), strict=True)
    places = zip(chunks.file.tolist(), chunks.byte_offset.tolist(), strict=True)
    if chunks.arrays is None:
        arrays = [(origin, sizes) for sizes in _rows(chunks.sizes)]
    else:
        arrays = list(zip(_rows(chunks.arrays.offsets), _rows(chunks.arrays.sizes), strict=True))
    pieces = [Piece(*box, *place, *array) for box, place, array in zip(boxes, places, arrays, strict=True)]
    return Layout(stored.dtype, stored.shape, tuple(pieces))


def stored_of_layout(name: str, layout: Layout) -> StoredTensor:
    """The stored tensor that a layout is; its chunks keep their arrays, by which files know their checksums."""
    pieces = sorted(layout.pieces, key=lambda piece: piece.offsets)
    depth = layout.ndim
    chunks = ChunkColumns(
        _column([piece.offsets for piece in pieces], depth),
        _column([piece.sizes for piece in pieces], depth),
        np.array([piece.file for piece in pieces], np.int32),
        np.array([piece.byte_offset for piece in pieces], np.int64),
        ArrayColumns(
            _column([piece.array_offsets for piece in pieces], depth),
            _column([piece.array_sizes for piece in pieces], depth),
        ),
    )
    return StoredTensor(name, key_path(name), EVERY_RANK, layout.dtype, layout.shape, chunks)


def _rows(column: Int64) -> list[Extent]:
    return [tuple(row) for row in column.tolist()]


def _column(rows: Sequence[Extent], depth: int) -> Int64:
    return np.array(rows, np.int64).reshape(len(rows), depth)
