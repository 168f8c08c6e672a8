"""Stand-ins for HyperParallel: its DTensor and its Layout by their public surface, and nothing else.

`LaidOutTensor` is a torch tensor whose memory is the local one, as HyperParallel's is on torch; `LaidOutHolder` is no
tensor at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Layout:
    """`mesh_shape`, `tensor_map`, `rank_list`, `alias_name`, and what is not reduced along which axis."""

    def __init__(
        self,
        mesh_shape: Sequence[int],
        tensor_map: Sequence[Any] | None,
        rank_list: Sequence[int] | None = None,
        alias_name: Sequence[str] = (),
        partial: Sequence[str | None] = (),
        **more: Any,
    ) -> None:
        self.mesh_shape = tuple(mesh_shape)
        self.tensor_map = tensor_map
        self.rank_list = tuple(range(math.prod(mesh_shape)) if rank_list is None else rank_list)
        self.alias_name = tuple(alias_name)
        self.partial = list(partial)
        for name, value in more.items():
            setattr(self, name, value)


class OlderLayout(Layout):
    """The name that MindSpore gives the mesh."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.device_matrix = self.mesh_shape
        del self.mesh_shape


class LaidOutTensor(Tensor):
    """A torch tensor by its memory, with the global shape and a layout."""

    _local: Tensor
    _layout: Any
    _global_shape: tuple[int, ...]

    @staticmethod
    def __new__(cls, local: Tensor, layout: Any, shape: Sequence[int]) -> LaidOutTensor:
        made = Tensor._make_subclass(cls, local, local.requires_grad)
        made._local, made._layout, made._global_shape = local, layout, tuple(shape)
        return made

    @property
    def layout(self) -> Any:  # type: ignore[override]  # as HyperParallel has it
        return self._layout

    @property
    def shape(self) -> Any:  # type: ignore[override]  # as HyperParallel has it
        return self._global_shape

    def to_local(self) -> Tensor:
        return self._local

    def detach(self) -> LaidOutTensor:
        return LaidOutTensor(self._local.detach(), self._layout, self._global_shape)


class LaidOutHolder:
    """No tensor, but something that holds one."""

    def __init__(self, local: Any, layout: Any, shape: Sequence[int]) -> None:
        self.local, self.layout, self.shape = local, layout, tuple(shape)

    def to_local(self) -> Any:
        return self.local


def indices_held(layout: Any, shape: Sequence[int], position: int) -> list[list[int]]:
    """Which indices of each dimension a device holds: each dimension is spelled in the mixed base of its axes.

    Args:
        layout: A stand-in, without uneven cuts.
        shape: Global shape.
        position: Which device, row by row.
    """
    matrix = getattr(layout, "mesh_shape", None) or layout.device_matrix
    real = matrix[:-1] if "interleaved_parallel" in layout.alias_name else matrix
    coordinate = list(itertools.product(*map(range, real)))[position]
    found = []
    for size, entry in zip(shape, layout.tensor_map, strict=True):
        axes = [len(matrix) - 1 - a for a in (entry if isinstance(entry, (tuple, list)) else [entry]) if a != -1]
        held = []
        for index in range(size):
            place, fits = index * math.prod(matrix[axis] for axis in axes) // size, True
            for axis in reversed(axes):
                place, digit = divmod(place, matrix[axis])
                fits &= axis >= len(real) or digit == coordinate[axis]
            if fits:
                held.append(index)
        found.append(held)
    return found


def local_of(whole: Tensor, layout: Any) -> Tensor:
    """What this rank holds of a tensor, in memory of its own; nothing on a rank outside."""
    rank = dist.get_rank()
    if rank not in layout.rank_list:
        return whole.new_empty((0,) * whole.ndim)
    local = whole
    for dim, held in enumerate(indices_held(layout, whole.shape, layout.rank_list.index(rank))):
        local = local.index_select(dim, torch.tensor(held, dtype=torch.int64))
    return local.clone()


def laid_out(whole: Tensor, layout: Any, kind: type[Any] = LaidOutTensor) -> Any:
    """This rank's part of a tensor."""
    return kind(local_of(whole, layout), layout, whole.shape)
