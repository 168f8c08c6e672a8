"""Tensors that a state cuts otherwise than the files do: joined, stacked, narrowed, selected. Pure.

Goes in: an expression over the names of stored tensors. Comes out: the layout of the tensor that it stands for, whose
pieces lie where the stored tensors lie. No tensor is put together in memory, neither here nor when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dcp_core.errors import ArgumentError, DTypeMismatchError, PlanningError, ShapeMismatchError
from dcp_core.formats.stored_layout import Layout, joined, stacked

LayoutOf = Callable[[str], Layout]
"""Finds a stored tensor by its name."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors one after the other along a dimension, as `torch.cat` puts them.

    Attributes:
        parts: Names of stored tensors, or cuts of them.
        dim: The dimension; negative ones count from the end.
    """

    parts: Sequence[Cut]
    dim: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _parts_of(self.parts, "Joined"))
        _check_int(self.dim, "dim")


@dataclass(frozen=True, slots=True)
class Stacked:
    """Tensors of one shape side by side along a new dimension, as `torch.stack` puts them.

    Attributes:
        parts: Names of stored tensors, or cuts of them.
        dim: The new dimension; negative ones count from the end.
    """

    parts: Sequence[Cut]
    dim: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _parts_of(self.parts, "Stacked"))
        _check_int(self.dim, "dim")


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A part of a tensor along a dimension, as `torch.narrow` gives it.

    Attributes:
        of: Name of a stored tensor, or a cut.
        dim: The dimension; negative ones count from the end.
        start: Where the part starts, elements.
        length: How long it is, elements.
    """

    of: Cut
    dim: int
    start: int
    length: int

    def __post_init__(self) -> None:
        _parts_of((self.of,), "Narrowed")
        for name in ("dim", "start", "length"):
            _check_int(getattr(self, name), name)

    @classmethod
    def split(cls, of: Cut, sizes: Sequence[int], dim: int = 0) -> tuple[Narrowed, ...]:
        """All parts of a tensor that is cut into several, as `torch.split` gives them.

        >>> [(part.start, part.length) for part in Narrowed.split("qkv_proj.weight", [512, 128, 128])]
        [(0, 512), (512, 128), (640, 128)]
        """
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return tuple(cls(of, dim, start, length) for start, length in zip(starts, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Selected:
    """The part of a tensor at one index of a dimension, without that dimension, as `torch.select` gives it.

    Attributes:
        of: Name of a stored tensor, or a cut.
        index: Which part, from 0 on.
        dim: The dimension; negative ones count from the end. The last one only of a vector.
    """

    of: Cut
    index: int
    dim: int = 0

    def __post_init__(self) -> None:
        _parts_of((self.of,), "Selected")
        for name in ("index", "dim"):
            _check_int(getattr(self, name), name)

    @classmethod
    def unstack(cls, of: Cut, count: int, dim: int = 0) -> tuple[Selected, ...]:
        """All parts of a stack, as `torch.unbind` gives them.

        >>> [part.index for part in Selected.unstack("experts.down_proj", 3)]
        [0, 1, 2]
        """
        return tuple(cls(of, index, dim) for index in range(count))


Cut: TypeAlias = str | Joined | Stacked | Narrowed | Selected
"""The name of a stored tensor, or what is cut out of or put together from stored tensors."""


def lay_out(cut: Cut, key: str, layout_of: LayoutOf) -> Layout:
    """Find where the elements lie of a tensor that is cut otherwise than it is stored.

    Args:
        cut: How it is made of stored tensors.
        key: The name of the tensor, for errors.
        layout_of: Finds a stored tensor; what it raises goes through.

    Raises:
        ShapeMismatchError: Shapes do not go together, or a part lies outside of its tensor.
        DTypeMismatchError: Parts have different element types.
    """
    if isinstance(cut, str):
        return layout_of(cut)
    if isinstance(cut, Narrowed):
        return _narrowed(cut, key, lay_out(cut.of, key, layout_of))
    if isinstance(cut, Selected):
        return _selected(cut, key, lay_out(cut.of, key, layout_of))
    parts = [lay_out(part, key, layout_of) for part in cut.parts]
    _check_dtypes(cut.parts, parts, key)
    return _joined(cut, key, parts) if isinstance(cut, Joined) else _stacked(cut, key, parts)


def _narrowed(cut: Narrowed, key: str, whole: Layout) -> Layout:
    dim = _dim(cut.dim, whole.ndim, key, cut)
    if not 0 <= cut.start <= cut.start + cut.length <= whole.shape[dim]:
        raise ShapeMismatchError(
            f"{key!r} is cut out of {_shown(cut.of)} of shape {whole.shape}: elements {cut.start} to "
            f"{cut.start + cut.length} of dimension {dim} are not all there; correct the cut"
        )
    return whole.narrowed(dim, cut.start, cut.length)


def _selected(cut: Selected, key: str, whole: Layout) -> Layout:
    dim = _dim(cut.dim, whole.ndim, key, cut)
    if not 0 <= cut.index < whole.shape[dim]:
        raise ShapeMismatchError(
            f"{key!r} is cut out of {_shown(cut.of)} of shape {whole.shape}: dimension {dim} has no index {cut.index}; "
            "correct the cut"
        )
    if dim == whole.ndim - 1 and whole.ndim > 1:
        raise PlanningError(
            f"{key!r} is selected from the last dimension of {_shown(cut.of)} of shape {whole.shape}: its elements lie "
            "apart from each other, one by one. Load that tensor, and select from it in memory"
        )
    return whole.selected(dim, cut.index)


def _joined(cut: Joined, key: str, parts: Sequence[Layout]) -> Layout:
    dim = _dim(cut.dim, parts[0].ndim, key, cut)
    rest = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts]
    for name, part, other in zip(cut.parts, parts, rest, strict=True):
        if part.ndim != parts[0].ndim or other != rest[0]:
            raise ShapeMismatchError(
                f"{key!r} is joined along dimension {dim} from {_shown(cut.parts[0])} of shape {parts[0].shape} and "
                f"{_shown(name)} of shape {part.shape}, which differ elsewhere too; correct the cut"
            )
    return joined(parts, dim)


def _stacked(cut: Stacked, key: str, parts: Sequence[Layout]) -> Layout:
    dim = _dim(cut.dim, parts[0].ndim + 1, key, cut)
    for name, part in zip(cut.parts, parts, strict=True):
        if part.shape != parts[0].shape:
            raise ShapeMismatchError(
                f"{key!r} is stacked from {_shown(cut.parts[0])} of shape {parts[0].shape} and {_shown(name)} of shape "
                f"{part.shape}; correct the cut"
            )
    return stacked(parts, dim)


def _check_dtypes(names: Sequence[Cut], parts: Sequence[Layout], key: str) -> None:
    for name, part in zip(names, parts, strict=True):
        if part.dtype != parts[0].dtype:
            raise DTypeMismatchError(
                f"{key!r} is put together from {_shown(names[0])} of {parts[0].dtype.name} and {_shown(name)} of "
                f"{part.dtype.name}; load them as two tensors"
            )


def _dim(dim: int, ndim: int, key: str, cut: Cut) -> int:
    if not -ndim <= dim < ndim:
        raise ShapeMismatchError(f"{key!r}: {type(cut).__name__} names dimension {dim} of {ndim}; correct the cut")
    return dim % ndim


def _parts_of(parts: object, what: str) -> tuple[Cut, ...]:
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        raise ArgumentError(f"{what} takes a list of names of stored tensors, or of cuts, found {parts!r}")
    for part in parts:
        if not isinstance(part, (str, Joined, Stacked, Narrowed, Selected)):
            raise ArgumentError(f"{what} takes names of stored tensors and cuts, found {part!r}")
    return tuple(parts)


def _check_int(value: object, name: str) -> None:
    if type(value) is not int:
        raise ArgumentError(f"{name} must be an integer, found {value!r}")


def _shown(cut: Cut) -> str:
    text = repr(cut)
    return text if len(text) <= 200 else text[:197] + "..."


def checked_cuts(cuts: Mapping[str, Cut] | None) -> dict[str, Cut]:
    """See that what a caller gives as cuts are such; None: no cuts.

    Raises:
        ArgumentError: It is no mapping from names to cuts.
    """
    if cuts is None:
        return {}
    if not isinstance(cuts, Mapping):
        raise ArgumentError(f"cuts must be a mapping from names of the state to cuts, found {cuts!r}")
    for key, cut in cuts.items():
        if not isinstance(key, str) or not isinstance(cut, (str, Joined, Stacked, Narrowed, Selected)):
            raise ArgumentError(
                f"cuts has {cut!r} for {key!r}; expected a name in the files, or Joined, Stacked, Narrowed or Selected"
            )
    return dict(cuts)
