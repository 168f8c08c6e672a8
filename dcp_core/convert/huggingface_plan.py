"""Which tensors of a checkpoint go into which files of a Hugging Face directory, and under which names.

In: stored tensors and objects, as the metadata has them. Out: a plan, with what is left out and why. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dcp_core.convert.huggingface_files import check_names, file_type
from dcp_core.convert.recut import recut
from dcp_core.convert.shard_sizes import share_out
from dcp_core.dtype import BY_NAME, DType, Kind, conversion
from dcp_core.errors import ArgumentError, DTypeMismatchError
from dcp_core.formats.cuts import Cut
from dcp_core.formats.key_map import KeyMap, map_keys
from dcp_core.metadata import StoredTensor
from dcp_core.recipes.stored_source import place_of

_INPUT_SIDE = ("embed", "wte", "shared")
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that is not converted.

    Attributes:
        name: Its name in the checkpoint.
        reason: Why.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTensor:
    """A tensor of a directory.

    Attributes:
        name: Its name there.
        dtype: Its type there.
        shape: Its shape.
        stored: The tensor of the checkpoint that it is made of.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    stored: StoredTensor

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class HuggingFacePlan:
    """What will be in a directory.

    Attributes:
        tensors: All tensors, in order.
        files: Positions of the tensors of each file.
        skipped: What is left out of the checkpoint.
    """

    tensors: tuple[PlannedTensor, ...]
    files: tuple[tuple[int, ...], ...]
    skipped: tuple[Skipped, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_huggingface(
    tensors: Sequence[StoredTensor],
    objects: Sequence[str],
    *,
    max_shard_nbytes: int,
    prefix: str = "",
    dtype: DType | None = None,
    key_map: KeyMap | None = None,
    cuts: Mapping[str, Cut] | None = None,
) -> HuggingFacePlan:
    """Plan a directory.

    Args:
        tensors: The checkpoint's.
        objects: Names of its other values, which no such directory can hold.
        max_shard_nbytes: How many bytes of tensors share a file.
        prefix: Only names that begin with it and a dot are converted, without it; "": all.
        dtype: What tensors of floating-point numbers become; None: they stay.
        key_map: From names without the prefix to names there.
        cuts: For tensors there that are cut otherwise, how they are made of those of the checkpoint, by their names
            without the prefix. What they are made of is not converted by itself.

    Raises:
        ArgumentError: Two tensors get one name; nothing has the prefix; a name is no text.
        PlanningError: A cut does not fit.
        UnsupportedValueError: A type that the file format cannot hold.
    """
    start = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    inside = {stored.name[len(start) :]: stored for stored in tensors if stored.name.startswith(start)}
    if prefix and not inside and tensors:
        some = sorted({stored.name.partition(".")[0] for stored in tensors})[:8]
        raise ArgumentError(f"no tensor's name begins with {start!r}; names here begin with {some}")
    made, used = recut(inside, cuts or {})
    names = map_keys(key_map, [name for name in inside if name not in used])
    chosen = [_planned(new, inside[old], dtype) for new, old in names.items()]
    chosen += [_planned(new, stored, dtype) for new, stored in made.items()]
    check_names([tensor.name for tensor in chosen])
    kept, tied = _without_ties(sorted(chosen, key=lambda tensor: natural_key(tensor.name)))
    skipped = [Skipped(name, "not a tensor") for name in objects]
    skipped += [Skipped(stored.name, f"not under {start!r}") for stored in tensors if not stored.name.startswith(start)]
    left = inside.keys() - used - set(names.values())
    skipped += [Skipped(inside[name].name, "left out by key_map") for name in left]
    files = tuple(tuple(positions) for positions in share_out([tensor.nbytes for tensor in kept], max_shard_nbytes))
    ordered = sorted((*skipped, *tied), key=lambda entry: natural_key(entry.name))
    return HuggingFacePlan(tuple(kept), files, tuple(ordered))


def _planned(name: str, stored: StoredTensor, dtype: DType | None) -> PlannedTensor:
    return PlannedTensor(name, _dtype_of(stored, dtype), stored.shape, stored)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which numbers in names count as numbers: `layers.2` before `layers.10`.

    >>> sorted(["a.10", "a.2", "a.b"], key=natural_key)
    ['a.2', 'a.10', 'a.b']
    """
    parts = _DIGITS.split(name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts if part]


def choose_tied(names: Sequence[str]) -> str:
    """Which of several names of one tensor stays: the input embedding's, as transformers has it, else the first."""
    for mark in _INPUT_SIDE:
        for name in names:
            if mark in name:
                return name
    return names[0]


def _dtype_of(stored: StoredTensor, wanted: DType | None) -> DType:
    is_converted = wanted is not None and stored.dtype.kind is Kind.FLOAT
    dtype = wanted if wanted is not None and is_converted else stored.dtype
    if is_converted and conversion(stored.dtype, dtype) == "refused":
        raise DTypeMismatchError(f"{stored.name!r}: {stored.dtype.name} cannot be converted to {dtype.name}")
    file_type(stored.name, dtype, stored.shape)
    return dtype


def floating_dtype(name: str) -> DType:
    """Find a type of floating-point numbers.

    Raises:
        ArgumentError: There is no such type.
    """
    found = BY_NAME.get(name) if isinstance(name, str) else None
    if found is None or found.kind is not Kind.FLOAT:
        known = ", ".join(dtype.name for dtype in BY_NAME.values() if dtype.kind is Kind.FLOAT)
        raise ArgumentError(f"dtype={name!r}: expected one of {known}")
    return found


def _without_ties(tensors: Sequence[PlannedTensor]) -> tuple[list[PlannedTensor], list[Skipped]]:
    """Keep one of the names of tensors that are the same bytes of the checkpoint."""
    same: dict[tuple[bytes, DType, tuple[int, ...]], list[PlannedTensor]] = {}
    for tensor in tensors:
        key = (place_of(tensor.stored.chunks) if tensor.nbytes else tensor.name.encode(), tensor.dtype, tensor.shape)
        same.setdefault(key, []).append(tensor)
    kept, skipped = set(), []
    for group in same.values():
        name = choose_tied([tensor.name for tensor in group])
        kept.add(name)
        reason = f"tied: the same tensor as {name!r}, which holds it"
        skipped += [Skipped(tensor.stored.name, reason) for tensor in group if tensor.name != name]
    return [tensor for tensor in tensors if tensor.name in kept], skipped
