"""Layouts of a compiled network, in the forms in which MindSpore hands them around.

In: layouts as `planning.foreign_layouts` reads them; the tuples of a cell's `parameter_layout_dict`; the entries of
`get_strategy_metadata` and of strategy files. Out: `KnownLayout`. Everything is looked at by position, key and
attribute: no framework is imported.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dcp_core.errors import ArgumentError, DcpError, UnsupportedValueError
from dcp_core.planning.foreign_layouts import Holding, cut_holding, read_layout, refuse_partial
from dcp_core.planning.tensor_map import ALL_REPLICAS, TensorMapLayout

_SHOWN_CHARACTERS = 200
_MOST_LAYOUTS = 4096
_FORMS = (
    "a Layout that was called with its axes, its dict, an entry of parameter_layout_dict (7 values), or one of "
    "get_strategy_metadata (layout, dtype, global shape)"
)


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """What a form tells of a tensor.

    Attributes:
        layout: How it lies on devices; without a tensor map a tensor of any shape is whole everywhere.
        global_shape: Its shape as a whole; None where the form does not tell.
    """

    layout: TensorMapLayout
    global_shape: tuple[int, ...] | None = None

    def whole_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape as a whole, given that of what one rank holds.

        >>> KnownLayout(TensorMapLayout((2, 2), (0, -1))).whole_shape((4, 3))
        (8, 3)
        """
        return _whole_shape(self.layout, local_shape) if self.global_shape is None else self.global_shape

    def holding(self, global_shape: Sequence[int], rank: int) -> Holding | None:
        """What a rank holds; None for a rank that the layout does not name.

        Raises:
            UnsupportedValueError: The layout does not fit the shape.
        """
        shape = tuple(global_shape)
        layout = self.layout if self.layout.tensor_map else replace(self.layout, tensor_map=(-1,) * len(shape))
        return cut_holding(layout, shape, rank)


def known_layout(source: Any, rank: int) -> KnownLayout:
    """Read a layout in any form.

    Args:
        source: The layout.
        rank: The rank that asks. A layout that names the ranks 0, 1, 2, ..., as all do when nobody says which, and not
            this one, is for the block of as many ranks that this one lies in: a stage of a pipeline.

    Raises:
        ArgumentError: It is in no form that is known, or its numbers contradict each other.
        UnsupportedValueError: A partial sum, or a way of cutting that gives no boxes.

    >>> known_layout(([2, 2], [-1, 0], [8, 2], 0, True, "", [8, 4]), rank=1).global_shape
    (8, 4)
    """
    try:
        if isinstance(source, (list, tuple)):
            return _of_sequence(source, rank)
        if _entry(source, "dev_matrix") is not None:
            return _of_strategy(source, rank)
        refuse_partial(source)
        return KnownLayout(_around(read_layout(source), rank), _shape_or_none(_entry(source, "global_shape")))
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{error} (the layout: {_shown(source)})") from error
    except DcpError as error:
        raise ArgumentError(f"{error} (the layout: {_shown(source)}); a layout is {_FORMS}") from error
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{error}: no layout (the layout: {_shown(source)}); a layout is {_FORMS}") from error


def _of_sequence(source: Sequence[Any], rank: int) -> KnownLayout:
    if len(source) == 3:
        layout, _, shape = source
        return replace(known_layout(layout, rank), global_shape=_shape(shape))
    if len(source) < 7:
        raise ArgumentError(f"{len(source)} values are no layout")
    matrix, tensor_map, slice_shape, field_size, is_uniform, optimizer_group, full_shape = source[:7]
    if field_size:
        raise UnsupportedValueError(f"a field_size of {field_size} cuts a tensor by fields, which are no boxes")
    if not is_uniform:
        raise UnsupportedValueError("parts of unequal size: where they lie is not told; use annotate_shard()")
    layout, shape = _made(_tuples(matrix), _tuples(tensor_map)), _shape_or_none(full_shape)
    if optimizer_group:
        layout = _made(_tuples(matrix), _tuples(tensor_map), None, _parts_of_slice(layout, shape, slice_shape))
    elif shape is None and slice_shape:
        shape = _whole_shape(layout, _shape(slice_shape))
    return KnownLayout(_around(layout, rank), shape)


def _of_strategy(source: Any, rank: int) -> KnownLayout:
    """An entry of a strategy: `dev_matrix`, `tensor_map`, and how a parallel optimizer cuts."""
    if _entry(source, "field"):
        raise UnsupportedValueError(f"a field of {_entry(source, 'field')} cuts a tensor by fields, which are no boxes")
    ranks, size = _entry(source, "rank_list"), _entry(source, "opt_weight_shard_size")
    layout = _made(
        _tuples(_entry(source, "dev_matrix")), _tuples(_entry(source, "tensor_map") or ()),
        _tuples(ranks) if ranks else None, size or 1,
    )  # fmt: skip
    return KnownLayout(_around(layout, rank), _shape_or_none(_entry(source, "tensor_shape")))


@lru_cache(_MOST_LAYOUTS)
def _made(matrix: Any, tensor_map: Any, ranks: Any = None, optimizer_parts: int = 1) -> TensorMapLayout:
    return TensorMapLayout(matrix, tensor_map, ranks, optimizer_parts=optimizer_parts)


def _tuples(values: Any) -> Any:
    """Tuples in place of lists and the like, so that equal layouts are made once."""
    return values if isinstance(values, (int, str)) else tuple(map(_tuples, values))


@lru_cache(_MOST_LAYOUTS)
def _around(layout: TensorMapLayout, rank: int) -> TensorMapLayout:
    """The same layout for the block of ranks that a rank lies in, where the layout names none in particular."""
    devices = len(layout.ranks)
    if rank in layout.ranks or layout.ranks != tuple(range(devices)):
        return layout
    first = rank - rank % devices
    return replace(layout, rank_list=tuple(range(first, first + devices)))


def _parts_of_slice(layout: TensorMapLayout, shape: tuple[int, ...] | None, slice_shape: Any) -> int:
    """Into how many parts a parallel optimizer cuts, told by the shape of what is left."""
    if not shape or not slice_shape or not layout.tensor_map:
        return ALL_REPLICAS
    rows, own = shape[0] // _cut_parts(layout, layout.tensor_map[0]), _shape(slice_shape)[0]
    if own < 1 or rows % own:
        raise ArgumentError(f"a slice_shape of {tuple(slice_shape)} is no equal part of {rows} rows of {shape}")
    return rows // own


def _whole_shape(layout: TensorMapLayout, local_shape: Sequence[int]) -> tuple[int, ...]:
    local = tuple(local_shape)
    if not layout.tensor_map:
        return local
    if len(local) != len(layout.tensor_map):
        raise UnsupportedValueError(
            f"a tensor of shape {local} has another number of dimensions than its tensor_map {layout.tensor_map}"
        )
    held = layout.device_matrix[-1] if layout.interleaved else 1
    found = []
    for dim, (size, axes) in enumerate(zip(local, layout.tensor_map, strict=True)):
        parts = _cut_parts(layout, axes) // (held if layout.interleaved and 0 in axes else 1)
        found.append(size * parts * (layout.optimizer_parts if dim == 0 else 1))
    return tuple(found)


def _cut_parts(layout: TensorMapLayout, axes: Sequence[int]) -> int:
    matrix = layout.device_matrix
    return math.prod(matrix[len(matrix) - 1 - axis] for axis in axes)


def _entry(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _shape(shape: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(size) for size in shape)
    except TypeError as error:
        raise ArgumentError(f"a shape must be a sequence of whole numbers, found {shape!r}") from error


def _shape_or_none(shape: Any) -> tuple[int, ...] | None:
    return _shape(shape) if shape is not None and len(shape) else None


def _shown(source: Any) -> str:
    text = repr(source)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def layouts_of_rank(layouts: Any, rank: int) -> Mapping[str, Any]:
    """The layouts that concern a rank, by name.

    Args:
        layouts: By name; or by rank and then by name, as `get_strategy_metadata` gives them. A single rank 0 stands
            for the rank that asks, as in what `get_current_strategy_metadata` gives.
        rank: The rank.

    Raises:
        ArgumentError: No mapping, keys that are no names, or this rank is missing.
    """
    if not isinstance(layouts, Mapping):
        raise ArgumentError(f"layouts must map names of parameters to layouts, found {type(layouts).__name__}")
    if layouts and all(isinstance(key, int) and isinstance(entry, Mapping) for key, entry in layouts.items()):
        found = layouts.get(rank, layouts[0] if list(layouts) == [0] else None)
        if found is None:
            raise ArgumentError(f"layouts are given for the ranks {sorted(layouts)[:16]}, and not for rank {rank}")
        layouts = found
    strange = [key for key in layouts if not isinstance(key, str)]
    if strange:
        raise ArgumentError(f"layouts must map names of parameters to layouts, found the key {strange[0]!r}")
    named: Mapping[str, Any] = layouts
    return named
