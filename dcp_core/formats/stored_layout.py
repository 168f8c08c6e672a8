"""Where the elements of one tensor lie in files, when they lie in several places: the algebra behind cuts. Pure.

A layout is a tensor made of pieces. Each piece is a box of the tensor, and a region of the same extents of an array
that a file holds. Cutting, joining and stacking move pieces about; no element is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from dcp_core.dtype import DType

Extent = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and the array that holds its elements. All in elements.

    Attributes:
        offsets: Where the box starts in the tensor.
        sizes: Its extent.
        file: Row of the file.
        byte_offset: Where the array starts in the file's data section.
        array_offsets: Where the box starts in the array.
        array_sizes: Extent of the array; it is stored in row-major order.
    """

    offsets: Extent
    sizes: Extent
    file: int
    byte_offset: int
    array_offsets: Extent
    array_sizes: Extent

    def settled(self, itemsize: int) -> Piece:
        """The same piece; as an array by itself where its elements lie in one run.

        >>> Piece((0, 0), (2, 8), 0, 100, (3, 0), (9, 8)).settled(4)
        Piece(offsets=(0, 0), sizes=(2, 8), file=0, byte_offset=196, array_offsets=(0, 0), array_sizes=(2, 8))
        """
        if self.array_sizes == self.sizes:
            return self
        outer = next((dim for dim, size in enumerate(self.sizes) if size != 1), len(self.sizes))
        if self.sizes[outer + 1 :] != self.array_sizes[outer + 1 :]:
            return self
        strides = [prod(self.array_sizes[dim + 1 :]) for dim in range(len(self.sizes))]
        first = sum(offset * stride for offset, stride in zip(self.array_offsets, strides, strict=True))
        origin = (0,) * len(self.sizes)
        return Piece(self.offsets, self.sizes, self.file, self.byte_offset + first * itemsize, origin, self.sizes)


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor in pieces.

    Attributes:
        dtype: Element type.
        shape: Its shape.
        pieces: The pieces; together they are the tensor.
    """

    dtype: DType
    shape: Extent
    pieces: tuple[Piece, ...]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def narrowed(self, dim: int, start: int, length: int) -> Layout:
        """The part from `start` on along one dimension; the arguments fit."""
        return Layout(self.dtype, _with(self.shape, dim, length), tuple(self._narrow_pieces(dim, start, length)))

    def _narrow_pieces(self, dim: int, start: int, length: int) -> Iterator[Piece]:
        for piece in self.pieces:
            low = max(piece.offsets[dim], start)
            high = min(piece.offsets[dim] + piece.sizes[dim], start + length)
            if low < high:
                inner = piece.array_offsets[dim] + low - piece.offsets[dim]
                yield Piece(
                    _with(piece.offsets, dim, low - start),
                    _with(piece.sizes, dim, high - low),
                    piece.file,
                    piece.byte_offset,
                    _with(piece.array_offsets, dim, inner),
                    piece.array_sizes,
                )

    def selected(self, dim: int, index: int) -> Layout:
        """The part at one index of a dimension, without that dimension; it is the last one only of a vector."""
        narrow = self.narrowed(dim, index, 1)
        pieces = tuple(_without(piece, dim, self.dtype.itemsize) for piece in narrow.pieces)
        return Layout(self.dtype, _drop(self.shape, dim), pieces)

    def with_dim(self, dim: int, index: int, length: int) -> Layout:
        """This tensor as the part at one index of a new dimension; the rest of it is missing."""
        pieces = tuple(
            Piece(
                _insert(piece.offsets, dim, index), _insert(piece.sizes, dim, 1), piece.file, piece.byte_offset,
                _insert(piece.array_offsets, dim, 0), _insert(piece.array_sizes, dim, 1),
            )
            for piece in self.pieces
        )  # fmt: skip
        return Layout(self.dtype, _insert(self.shape, dim, length), pieces)


def joined(parts: Sequence[Layout], dim: int) -> Layout:
    """Put tensors one after the other along a dimension; they have one dtype, and fit."""
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.shape[dim])
    pieces = tuple(
        Piece(
            _with(piece.offsets, dim, piece.offsets[dim] + start), piece.sizes, piece.file, piece.byte_offset,
            piece.array_offsets, piece.array_sizes,
        )
        for part, (start, _) in zip(parts, pairwise(ends), strict=True)
        for piece in part.pieces
    )  # fmt: skip
    return Layout(parts[0].dtype, _with(parts[0].shape, dim, ends[-1]), pieces)


def stacked(parts: Sequence[Layout], dim: int) -> Layout:
    """Put tensors of one dtype and shape side by side along a new dimension."""
    made = [part.with_dim(dim, index, len(parts)) for index, part in enumerate(parts)]
    return Layout(parts[0].dtype, made[0].shape, tuple(piece for layout in made for piece in layout.pieces))


def _without(piece: Piece, dim: int, itemsize: int) -> Piece:
    """Drop a dimension of size 1 of the box; in the array it is one with the dimension after it."""
    offsets, sizes, start, extent = piece.offsets, piece.sizes, list(piece.array_offsets), list(piece.array_sizes)
    byte_offset = piece.byte_offset
    if len(extent) == 1:
        byte_offset += start[0] * itemsize
    else:
        start[dim + 1] += start[dim] * extent[dim + 1]
        extent[dim + 1] *= extent[dim]
    return Piece(
        _drop(offsets, dim), _drop(sizes, dim), piece.file, byte_offset, _drop(tuple(start), dim),
        _drop(tuple(extent), dim),
    )  # fmt: skip


def _with(values: Extent, dim: int, value: int) -> Extent:
    return (*values[:dim], value, *values[dim + 1 :])


def _drop(values: Extent, dim: int) -> Extent:
    return (*values[:dim], *values[dim + 1 :])


def _insert(values: Extent, dim: int, value: int) -> Extent:
    return (*values[:dim], value, *values[dim:])
