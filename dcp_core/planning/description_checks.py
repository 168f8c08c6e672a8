"""Checks what an adapter or a describer said of a value, before planning relies on it.

In: whatever a `describe` returned. Out: what is wrong with it, in words. Nearly all descriptions are whole tensors of a
shape that was seen before, and pass by a few comparisons: this runs once a tensor at every save and load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dcp_core.box import Box
from dcp_core.dtype import DType
from dcp_core.planning.leaves import LocalTensor, TensorAccess, known_whole_shape

_sound_accesses: set[type] = set()
_METHODS_OF_ACCESS = tuple(name for name in vars(TensorAccess) if not name.startswith("_"))


def description_problem(found: Any) -> str | None:
    """What is wrong with a description.

    Args:
        found: What `describe` returned, unless None.

    Returns:
        A sentence's end, after "Name.describe "; None where nothing is wrong.

    >>> description_problem(5)
    'returned a int: it must be a LocalTensor, or None'
    """
    if type(found) is not LocalTensor and not isinstance(found, LocalTensor):
        return f"returned a {type(found).__qualname__}: it must be a LocalTensor, or None"
    shape, boxes, access = found.global_shape, found.boxes, found.access
    if type(found.dtype) is not DType:
        return f"told the dtype {found.dtype!r}: it must be a DType, as dcp_core.dtype.dtype_named('float32') is one"
    if type(access) not in _sound_accesses:
        problem = _access_problem(access)
        if problem is not None:
            return problem
        _sound_accesses.add(type(access))
    if type(shape) is not tuple and not isinstance(shape, tuple):
        return f"told the global_shape {shape!r}: it must be a tuple of whole numbers, none of them negative"
    known = known_whole_shape(shape)
    if known is None or known.shape is not shape or known.boxes is not boxes:
        problem = _geometry_problem(shape, boxes, found.plain)
        if problem is not None:
            return problem
    if len(found.views) != len(boxes):
        return f"gave {len(boxes)} boxes and {len(found.views)} views: one a box"
    try:
        hash(found.storage)
    except TypeError:
        return f"told the storage {found.storage!r}, which cannot be hashed: make it a tuple, say, or None"
    return None


def _access_problem(access: object) -> str | None:
    if isinstance(access, type):
        return f"gave the class {access.__qualname__} as access: it must be an object; write {access.__qualname__}(...)"
    missing = [name for name in _METHODS_OF_ACCESS if not callable(getattr(access, name, None))]
    if not missing:
        return None
    remedy = "it must be an adapter, or another TensorAccess"
    return f"gave {access!r} as access, which lacks {', '.join(missing)}: {remedy}"


def _geometry_problem(shape: tuple[Any, ...], boxes: Any, plain: object) -> str | None:
    if not _are_counts(shape):
        return f"told the global_shape {shape}: it must be a tuple of whole numbers, none of them negative"
    if type(boxes) is not tuple:
        return f"gave a {type(boxes).__qualname__} as boxes: it must be a tuple of dcp_core.box.Box"
    held = 0
    for box in boxes:
        if type(box) is not Box:
            return f"gave {box!r} among its boxes: each must be a dcp_core.box.Box"
        if len(box.sizes) != len(shape):
            return (
                f"gave {box} of a tensor of shape {shape}: a box has as many dimensions as its tensor; a part keeps "
                "them all, say by local[at : at + 1] instead of local[at]"
            )
        for start, size, extent in zip(box.offsets, box.sizes, shape, strict=True):
            if start + size > extent:
                return f"gave {box} of a tensor of shape {shape}: the box leaves the tensor"
        held += math.prod(box.sizes)
    if plain and held != math.prod(shape):
        return (
            f"said plain=True of {held} of the {math.prod(shape)} elements of a tensor of shape {shape}: plain is for "
            "a value that every rank has whole; leave it out for a shard"
        )
    return None


def _are_counts(numbers: Iterable[Any]) -> bool:
    """Whether these are integers, also those of numpy, none of them negative."""
    for number in numbers:
        if type(number) is not int and (isinstance(number, bool) or not hasattr(number, "__index__")):
            return False
        if number < 0:
            return False
    return True
