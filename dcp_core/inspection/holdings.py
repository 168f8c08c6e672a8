"""Who holds what of one tensor, folded into rectangles that can be drawn.

In: a stored tensor, and who wrote each file. Out: panels. Two dimensions are the axes of every panel: those that are
cut most, or the last ones where fewer are cut. Each further dimension that is cut makes a panel of every piece of it;
dimensions that nobody cuts fold away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.errors import ArgumentError, MissingKeysError
from dcp_core.inspection.census import names_of_files, sum_by
from dcp_core.inspection.names import like_names
from dcp_core.metadata import EVERY_RANK, Int64, Metadata, StoredTensor


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """The boxes of one tensor, each with who holds it.

    Attributes:
        name: The tensor's name.
        dtype: Element type.
        shape: Global shape, elements.
        offsets: Start of each box. Shape (N, D), elements.
        sizes: Extent of each box. Shape (N, D), elements.
        holder: Position in `holders` of who wrote the box. Shape (N,).
        holders: "rank 3", or the file's name where nobody knows who wrote it; in the order of ranks.
        itemsize: Bytes an element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: Int64
    sizes: Int64
    holder: Int64
    holders: tuple[str, ...]
    itemsize: int

    def all_held(self) -> tuple[Int64, Int64]:
        """How many boxes, and how many bytes, each holder has. Each of shape (len(holders),)."""
        count = len(self.holders)
        nbytes = sum_by(self.holder, np.prod(self.sizes, axis=1, dtype=np.int64), count) * self.itemsize
        return np.bincount(self.holder, minlength=count).astype(np.int64), nbytes

    def to_values(self) -> dict[str, Any]:
        """As plain values for JSON."""
        rows = zip(self.offsets.tolist(), self.sizes.tolist(), self.holder.tolist(), strict=True)
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "boxes": [
                {"offsets": offsets, "sizes": sizes, "holder": self.holders[holder]} for offsets, sizes, holder in rows
            ],
        }


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the panels.

    Attributes:
        dim: Which dimension of the tensor; None where there is none: the axis has one step.
        edges: Where pieces start and end along it, elements; each once, ascending.
        shown: Numbers of the pieces that are drawn, ascending; -1 stands for some that are left out.
    """

    dim: int | None
    edges: tuple[int, ...]
    shown: tuple[int, ...]

    @property
    def pieces(self) -> int:
        """Into how many pieces the dimension is cut."""
        return len(self.edges) - 1

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the pieces that are drawn start, and where the last one ends, elements; one more than `shown`."""
        if -1 not in self.shown:
            return self.edges
        gap, left_out = self.shown.index(-1), self.pieces - (len(self.shown) - 1)
        return (*self.edges[: gap + 1], *self.edges[gap + left_out :])


@dataclass(frozen=True, slots=True)
class Cell:
    """A rectangle of a panel: one box, or several equal ones.

    Attributes:
        rows: First piece of the vertical axis, as a position in `Axis.shown`, and one past the last.
        columns: The same of the horizontal axis.
        holders: Who holds it, ascending positions in `Holdings.holders`; several hold copies.
        offsets: Where the box starts in the tensor, elements.
        sizes: Its extent.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    holders: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One slice of the tensor.

    Attributes:
        slices: For each dimension that was folded into panels: which, and from where to where; elements.
        cells: What is in it; where there is none, nobody holds anything.
    """

    slices: tuple[tuple[int, int, int], ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Folding:
    """A tensor as panels.

    Attributes:
        rows: The vertical axis.
        columns: The horizontal one.
        panels: The panels that are drawn.
        more_panels: How many are left out.
        whole_dims: Dimensions that nobody cuts and that are no axis.
    """

    rows: Axis
    columns: Axis
    panels: tuple[Panel, ...]
    more_panels: int
    whole_dims: tuple[int, ...]


def holdings_of(metadata: Metadata, name: str, rank: int | None = None) -> Holdings:
    """Find out who holds what of a tensor.

    Args:
        metadata: The checkpoint's description.
        name: Name of the tensor.
        rank: Whose own value, where each rank has one; None: the lowest rank's.

    Raises:
        MissingKeysError: There is no such tensor.
        ArgumentError: That rank has none of its own.
    """
    stored = _stored(metadata, name, rank)
    files = metadata.source.files
    names = names_of_files(metadata.source)
    rows = stored.chunks.file
    ranks = files.rank[rows]
    if len(rows) and int(ranks.min()) < 0:
        used, holder = np.unique(rows, return_inverse=True)
        labels = tuple(names[row] for row in used.tolist())
    else:
        used, holder = np.unique(ranks, return_inverse=True)
        labels = tuple(f"rank {number}" for number in used.tolist())
    return Holdings(
        name, stored.dtype.name, stored.shape, stored.chunks.offsets, stored.chunks.sizes,
        holder.reshape(-1).astype(np.int64), labels, stored.dtype.itemsize,
    )  # fmt: skip


def _stored(metadata: Metadata, name: str, rank: int | None) -> StoredTensor:
    found = metadata.source.tensors(name)
    if not found:
        names = metadata.source.names()
        kind = "a value, not a tensor, under" if metadata.source.objects(name) else "nothing under"
        like = like_names(name, names)
        some = f"did you mean {', '.join(map(repr, like))}?" if like else f"such as {', '.join(map(repr, names[:5]))}"
        raise MissingKeysError(f"the checkpoint has {kind} {name!r}; it has {len(names)} keys; {some}")
    if rank is None or found[0].rank == EVERY_RANK:
        return found[0]
    own = [stored for stored in found if stored.rank == rank]
    if not own:
        raise ArgumentError(f"{name!r} has no value of rank {rank}, but of {[stored.rank for stored in found]}")
    return own[0]


def fold(holdings: Holdings, *, max_rows: int, max_columns: int, max_panels: int) -> Folding:
    """Fold a tensor into panels.

    Args:
        holdings: The tensor.
        max_rows: Pieces of the vertical axis that are drawn at most; at least 3.
        max_columns: Pieces of the horizontal axis.
        max_panels: Panels that are drawn at most.
    """
    edges = [_edges(holdings, dim) for dim in range(len(holdings.shape))]
    vertical, horizontal = _axes([len(each) - 1 for each in edges])
    rows, columns = _axis(vertical, edges, max_rows), _axis(horizontal, edges, max_columns)
    folded = [dim for dim, each in enumerate(edges) if dim not in (vertical, horizontal) and len(each) > 2]
    count = prod(len(edges[dim]) - 1 for dim in folded)
    panels = tuple(
        Panel(slices, tuple(_cells(holdings, slices, rows, columns)))
        for slices in islice(_slices(folded, edges), max_panels)
    )
    whole = tuple(dim for dim in range(len(edges)) if dim not in (vertical, horizontal, *folded))
    return Folding(rows, columns, panels, count - len(panels), whole)


def has_hole(panel: Panel, folding: Folding) -> bool:
    """Whether some of what a panel shows is held by nobody."""
    is_held = np.zeros((len(folding.rows.shown), len(folding.columns.shown)), np.bool_)
    for cell in panel.cells:
        is_held[slice(*cell.rows), slice(*cell.columns)] = True
    is_shown = np.outer(np.array(folding.rows.shown) >= 0, np.array(folding.columns.shown) >= 0)
    return bool((is_shown & ~is_held).any())


def _edges(holdings: Holdings, dim: int) -> tuple[int, ...]:
    start, size = holdings.offsets[:, dim], holdings.sizes[:, dim]
    found = np.unique(np.concatenate([[0, holdings.shape[dim]], start, start + size]))
    return tuple(found.tolist()) if len(found) > 1 else (0, 0)


def _axes(pieces: Sequence[int]) -> tuple[int | None, int | None]:
    """Choose the vertical and the horizontal axis: what is cut most, then what comes last; in the tensor's order."""
    if not pieces:
        return None, None
    ranked = sorted(range(len(pieces)), key=lambda dim: (-pieces[dim], -dim))
    if len(pieces) == 1:
        return None, 0
    first, second = sorted(ranked[:2])
    return first, second


def _axis(dim: int | None, edges: Sequence[tuple[int, ...]], most: int) -> Axis:
    if dim is None:
        return Axis(None, (0, 1), (0,))
    count = len(edges[dim]) - 1
    if count <= most:
        return Axis(dim, edges[dim], tuple(range(count)))
    head = (most - 1) - (most - 1) // 2
    tail = (most - 1) // 2
    return Axis(dim, edges[dim], (*range(head), -1, *range(count - tail, count)))


def _slices(folded: Sequence[int], edges: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, int, int], ...]]:
    along = [[(dim, start, stop) for start, stop in zip(edges[dim], edges[dim][1:], strict=False)] for dim in folded]
    yield from product(*along)


def _cells(
    holdings: Holdings, slices: tuple[tuple[int, int, int], ...], rows: Axis, columns: Axis
) -> Iterator[Cell]:  # fmt: skip
    """The boxes that a panel shows, equal ones together, in the order of their offsets."""
    inside: npt.NDArray[np.bool_] = np.ones(len(holdings.holder), np.bool_)
    for dim, start, stop in slices:
        first = holdings.offsets[:, dim]
        inside &= (first < stop) & (first + holdings.sizes[:, dim] > start)
    vertical, horizontal = _spans(holdings, rows), _spans(holdings, columns)
    inside &= (vertical[0] < vertical[1]) & (horizontal[0] < horizontal[1])
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, set[int]]] = {}
    for row in np.flatnonzero(inside).tolist():
        box = (tuple(holdings.offsets[row].tolist()), tuple(holdings.sizes[row].tolist()))
        groups.setdefault(box, (row, set()))[1].add(int(holdings.holder[row]))
    for (offsets, sizes), (row, holders) in groups.items():
        yield Cell(
            (int(vertical[0][row]), int(vertical[1][row])), (int(horizontal[0][row]), int(horizontal[1][row])),
            tuple(sorted(holders)), offsets, sizes,
        )  # fmt: skip


def _spans(holdings: Holdings, axis: Axis) -> tuple[Int64, Int64]:
    """For each box, which of the pieces that are drawn it covers: the first, and one past the last."""
    count = len(holdings.holder)
    if axis.dim is None:
        return np.zeros(count, np.int64), np.ones(count, np.int64)
    edges = np.array(axis.edges)
    start = np.searchsorted(edges, holdings.offsets[:, axis.dim])
    stop = np.searchsorted(edges, holdings.offsets[:, axis.dim] + holdings.sizes[:, axis.dim])
    if -1 not in axis.shown:
        return start.astype(np.int64), stop.astype(np.int64)
    gap = axis.shown.index(-1)
    left_out = axis.pieces - (len(axis.shown) - 1)
    return _moved(start, gap, left_out, is_stop=False), _moved(stop, gap, left_out, is_stop=True)


def _moved(edge: npt.NDArray[np.intp], gap: int, left_out: int, *, is_stop: bool) -> Int64:
    """Positions among the pieces that are drawn; an edge inside the gap goes to that side of it where nothing is."""
    inside = gap if is_stop else gap + 1
    behind = edge - left_out + 1
    if is_stop:
        return np.where(edge <= gap, edge, np.where(edge >= gap + left_out, behind, inside)).astype(np.int64)
    return np.where(edge < gap, edge, np.where(edge >= gap + left_out, behind, inside)).astype(np.int64)
