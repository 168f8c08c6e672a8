"""Process groups that DTensors brought along: those of the meshes that they lie on.

Goes in: leaves of a state. Comes out: the groups of each dimension of their meshes, and of meshes that were made by
flattening several dimensions, that this process is a member of.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def groups_of_meshes(values: Iterable[Any]) -> dict[tuple[int, ...], str]:
    """Names of the groups, by ascending global ranks.

    Args:
        values: Anything; what is no DTensor is passed over.
    """
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if dtensor is None:
        return {}
    meshes = {id(mesh): mesh for mesh in (value.device_mesh for value in values if isinstance(value, dtensor))}
    seen: set[int] = set()
    found: dict[tuple[int, ...], str] = {}
    for mesh in meshes.values():
        for group in _groups_of(mesh):
            if id(group) in seen:
                continue
            seen.add(id(group))
            ranks = _members(group)
            if len(ranks) > 1:
                found[ranks] = min(str(group.group_name), found.get(ranks, str(group.group_name)))
    return found


def group_named(name: str) -> Any:
    """The group of this name.

    Raises:
        RuntimeError: There is none.
    """
    internals: Any = distributed_c10d
    return internals._resolve_process_group(name)


def _groups_of(mesh: Any) -> Iterator[Any]:
    for dim in range(mesh.ndim):
        yield from _group_of(mesh, dim)
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    for flat in getattr(root, "_flatten_mapping", {}).values():
        yield from _group_of(flat, 0)


def _group_of(mesh: Any, dim: int) -> Iterator[Any]:
    """The group of one dimension, where this process has it."""
    if mesh.get_coordinate() is None:
        return
    try:
        group = mesh.get_group(dim)
    except RuntimeError:  # a mesh without groups
        return
    if isinstance(group, dist.ProcessGroup):
        yield group


def _members(group: Any) -> tuple[int, ...]:
    """Ascending; none if the group was destroyed."""
    try:
        return tuple(sorted(dist.get_process_group_ranks(group)))
    except (KeyError, ValueError):
        return ()
