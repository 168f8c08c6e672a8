"""Import what MindSpore itself saved: a safetensors file a rank, and the strategy that cut the parameters.

In: a directory with `rank_0`, `rank_1`, ... and a strategy. Out: a checkpoint of ours, which any layout loads. One
process does it; the files are mapped, and their bytes go from there into the new files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dcp_core import api
from dcp_core.adapter import StateRules
from dcp_core.arguments import check_callable, check_path, check_place
from dcp_core.arrays import ArrayAccess
from dcp_core.box import Box
from dcp_core.dtype import DTYPES, DType
from dcp_core.errors import ArgumentError, DcpError, DTypeMismatchError, NotFoundError, ShapeMismatchError
from dcp_core.formats.safetensors_parser import StoredArray, header_nbytes, parse_header
from dcp_core.metadata import Metadata
from dcp_core.planning.leaves import LocalTensor, whole_shape, whole_tensor
from dcp_core.planning.placed_shards import place_by_layout
from dcp_core.planning.strategy_layouts import known_layout
from dcp_core.recipes.places import dcp_writer
from dcp_mindspore.strategy_files import read_strategy

_RANK_DIRECTORY = "rank_"
_SUFFIX = ".safetensors"
_OF_FILE = {dtype.file_dtype: dtype for dtype in reversed(DTYPES) if not dtype.file_tail}
_SHOWN = 5


def import_checkpoint(
    source: str | os.PathLike[str],
    *,
    checkpoint_id: str | os.PathLike[str],
    strategy: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    file_suffix: str = "",
    rename: Callable[[str], str] | None = None,
    durable: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Metadata:
    """Make a checkpoint of what `mindspore.save_checkpoint(..., format="safetensors")` wrote on each rank.

    Args:
        source: The directory that holds `rank_0`, `rank_1`, and so on, each with one safetensors file.
        checkpoint_id: The directory of the new checkpoint.
        strategy: The strategy file of the job that saved (JSON or protobuf), or layouts by parameter name in any form
            that `layouts=` takes. A parameter without one is whole on every rank; the lowest rank's is taken. None:
            all are.
        file_suffix: What the name of the wanted file ends with, where a rank's directory holds several: "-10_100" for
            `...-10_100.safetensors`.
        rename: Gives the key in the new checkpoint for a parameter's name: `"model.{}".format` for what is loaded as
            `{"model": net}`. By default the name.
        durable: Whether data reaches the disk before this returns.
        storage_options: What fsspec gets beside the URL of the new checkpoint.

    Returns:
        The new checkpoint's description.

    Raises:
        NotFoundError: No rank's directory or file is there, or no strategy file.
        ArgumentError: A directory holds several files that could be meant; or an argument that makes no sense.
        FormatError: A file is damaged.
        PlanningError: The files and the strategy contradict each other, or pieces are missing.
    """
    check_path(source, "source")
    check_place(checkpoint_id, None)
    check_callable(rename, "rename", "a parameter's name")
    if not isinstance(file_suffix, str):
        raise ArgumentError(f"file_suffix must be what the wanted file's name ends with, found {file_suffix!r}")
    layouts = _layouts_of(strategy)
    found = _Pieces(layouts)
    for rank, file in _files_of_ranks(Path(source), file_suffix):
        found.add(rank, file)
    tensors = found.tensors()
    state = {_renamed(rename, name): None for name in tensors}
    if len(state) != len(tensors):
        raise ArgumentError(f"rename= gives {len(tensors)} parameters only {len(state)} different keys")
    rules = _Imported(tuple(tensors.values()))
    place = os.fspath(checkpoint_id)
    return api.save(
        state, checkpoint_id=place, storage_writer=dcp_writer(storage_options), rules=rules, durable=durable
    )


def _layouts_of(strategy: object) -> dict[str, Any]:
    if isinstance(strategy, (str, os.PathLike)):
        return read_strategy(strategy)
    if strategy is not None and not isinstance(strategy, Mapping):
        raise ArgumentError(f"strategy must be a strategy file's path, or layouts by name, found {strategy!r}")
    others = [name for name in strategy or () if not isinstance(name, str)]
    if others:
        raise ArgumentError(f"strategy maps names of parameters to layouts, found {others[0]!r} among the names")
    return dict(strategy or {})


def _renamed(rename: Callable[[str], str] | None, name: str) -> str:
    try:
        found = name if rename is None else rename(name)
    except Exception as error:
        raise ArgumentError(f"rename failed for {name!r}: {type(error).__name__}: {error}") from error
    if not isinstance(found, str):
        raise ArgumentError(f"rename gives {found!r} for {name!r}; expected a name")
    return found


class _Imported(StateRules):
    """Puts the imported tensors in the place of a state that only has their names, in the same order."""

    def __init__(self, tensors: Sequence[LocalTensor]) -> None:
        self._tensors = tensors

    def place(
        self, names: Sequence[str], values: Sequence[Any], tensors: Sequence[LocalTensor | None]
    ) -> Sequence[LocalTensor | None]:
        """The imported tensors."""
        return self._tensors


@dataclass(slots=True)
class _Collected:
    """The pieces of one parameter that were found so far."""

    shape: tuple[int, ...]
    dtype: DType
    rank: int
    views: dict[Box, Any]


class _Pieces:
    """Collects each piece of each parameter once."""

    def __init__(self, layouts: Mapping[str, Any]) -> None:
        self._layouts = layouts
        self._found: dict[str, _Collected] = {}

    def add(self, rank: int, file: Path) -> None:
        """Take what a rank's file has."""
        data, arrays = _mapped(file)
        for array in arrays:
            try:
                self._add(rank, array, data)
            except DcpError as error:
                raise type(error)(f"{array.key!r} of rank {rank}: {error}") from error

    def _add(self, rank: int, array: StoredArray, data: Any) -> None:
        dtype = _OF_FILE[array.file_dtype]
        raw = data[array.byte_offset : array.byte_offset + array.nbytes]
        local = (
            np.frombuffer(raw, dtype.bits).reshape(array.shape) if array.nbytes else np.empty(array.shape, dtype.bits)
        )
        piece = whole_tensor(whole_shape(array.shape), dtype, local, ArrayAccess(dtype), "cpu", None)
        layout = self._layout(array.key, rank)
        if layout is not None:
            piece = place_by_layout(piece, layout, rank)
        known = self._found.setdefault(array.key, _Collected(piece.global_shape, dtype, rank, {}))
        if known.shape != piece.global_shape:
            raise ShapeMismatchError(
                f"by its layout and its part of shape {array.shape} the whole has the shape {piece.global_shape}; by "
                f"rank {known.rank}'s it is {known.shape}"
            )
        if known.dtype != dtype:
            raise DTypeMismatchError(f"its elements are {dtype.name}, and {known.dtype.name} on rank {known.rank}")
        for box, view in zip(piece.boxes, piece.views, strict=True):
            known.views.setdefault(box, view)

    def _layout(self, name: str, rank: int) -> Any:
        """The layout of a parameter; in the merged strategy of a pipeline, that of the rank's stage."""
        if name in self._layouts:
            return known_layout(self._layouts[name], rank)
        for key, source in self._layouts.items():
            stage, _, rest = key.partition("-")
            if rest == name and stage.isdecimal():
                known = known_layout(source, rank)
                if rank // len(known.layout.ranks) == int(stage):
                    return known
        return None

    def tensors(self) -> dict[str, LocalTensor]:
        """The parameters by name, each as all its pieces."""
        return {name: _assembled(self._found[name]) for name in sorted(self._found)}


def _assembled(found: _Collected) -> LocalTensor:
    return LocalTensor(
        found.shape, found.dtype, tuple(found.views), tuple(found.views.values()), ArrayAccess(found.dtype)
    )


def _mapped(file: Path) -> tuple[Any, Iterable[StoredArray]]:
    """A file's data section, mapped, and what lies in it."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(8)
        start = header_nbytes(prefix, size, str(file))
        arrays, _ = parse_header(prefix + opened.read(start - 8), size, str(file))
    data = np.memmap(file, np.uint8, "r")[start:] if size > start else np.empty(0, np.uint8)
    return data, arrays


def _files_of_ranks(source: Path, suffix: str) -> list[tuple[int, Path]]:
    """Each rank and its file, lowest rank first."""
    if not source.is_dir():
        raise NotFoundError(f"there is no directory {str(source)!r}")
    ranks = {
        int(entry.name.removeprefix(_RANK_DIRECTORY)): entry
        for entry in source.glob(f"{_RANK_DIRECTORY}*")
        if entry.is_dir() and entry.name.removeprefix(_RANK_DIRECTORY).isdecimal()
    }
    if not ranks:
        raise NotFoundError(f"{str(source)!r} holds no directory rank_0, rank_1, ... with the files of a rank")
    missing = sorted(set(range(max(ranks))) - set(ranks))
    if missing:
        raise NotFoundError(f"{str(source)!r} holds rank_{max(ranks)} and no directory of the ranks {missing[:_SHOWN]}")
    return [(rank, _only_file(ranks[rank], suffix)) for rank in sorted(ranks)]


def _only_file(directory: Path, suffix: str) -> Path:
    found = sorted(entry for entry in directory.glob(f"*{_SUFFIX}") if entry.name.endswith(f"{suffix}{_SUFFIX}"))
    if not found:
        raise NotFoundError(f"{str(directory)!r} holds no file *{suffix}{_SUFFIX}")
    if len(found) > 1:
        names = ", ".join(entry.name for entry in found[:_SHOWN])
        raise ArgumentError(f"{str(directory)!r} holds {len(found)} files ({names}): pass file_suffix= to pick one")
    return found[0]
