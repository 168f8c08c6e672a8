"""Read one tensor or a region of it into a fresh numpy array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.arrays import ArrayAccess
from dcp_core.box import Box, contains
from dcp_core.errors import ArgumentError, MissingKeysError
from dcp_core.execution.filesystem import FileSystemReader
from dcp_core.execution.interfaces import CheckpointId, ReadContext
from dcp_core.metadata import Metadata, StoredTensor
from dcp_core.planning.items import ReadItem
from dcp_core.planning.load_plan import LoadPlan, Wanted
from dcp_core.planning.regions import intersect_chunks
from dcp_core.plugins import open_storage


def read_tensor(
    checkpoint_id: CheckpointId, key: str, box: Box | None, storage_options: Mapping[str, Any] | None = None
) -> npt.NDArray[Any]:
    """Plan and read the region like a load of one rank.

    Raises:
        MissingKeysError: There is no such tensor.
        ArgumentError: The region leaves the tensor.
    """
    if not isinstance(key, str):
        raise ArgumentError(f"key must be the name of a tensor, found {key!r}")
    if box is not None and not isinstance(box, Box):
        raise ArgumentError(f"box must be a Box(offsets, sizes), found {box!r}")
    reader = FileSystemReader(open_url=open_storage, storage_options=storage_options)
    reader.initialize_reader(checkpoint_id)
    metadata = reader.load_metadata()
    stored = _stored_tensor(metadata, key)
    region = Box.whole(stored.shape) if box is None else box
    if region.ndim != len(stored.shape) or not (region.is_empty or contains(Box.whole(stored.shape), region)):
        raise ArgumentError(f"{key!r} has shape {stored.shape}, which does not hold {region}")
    array = np.zeros(region.sizes, dtype=stored.dtype.bits)
    if region.is_empty:
        return array
    wanted = [Wanted(key, 0, 0, region, stored.dtype, stored)]
    plan = LoadPlan(wanted, (), intersect_chunks(wanted, lambda chunks: np.zeros(len(chunks), dtype=bool)))
    reader.configure_reader(metadata, ReadContext(0, 1))
    reader.check_files(plan)
    reader.execute_read(plan, _IntoArray(array, ArrayAccess(stored.dtype)))
    return array


class _IntoArray:
    """A read target that is one array."""

    def __init__(self, array: npt.NDArray[Any], access: ArrayAccess) -> None:
        self._array = array
        self._access = access

    def acquire_tensor(self, item: ReadItem) -> npt.NDArray[Any]:
        return self._access.narrow(self._array, Box(item.dest_offsets, item.lengths))

    def access(self, item: ReadItem) -> ArrayAccess:
        return self._access

    def apply_tensor(self, item: ReadItem, view: npt.NDArray[Any]) -> None:
        """The elements are in the array already."""


def _stored_tensor(metadata: Metadata, key: str) -> StoredTensor:
    found = metadata.source.tensors(key)
    if found:
        return found[0]
    names = metadata.source.names()
    kind = "a plain value under" if metadata.source.objects(key) else "nothing under"
    raise MissingKeysError(f"the checkpoint has {kind} {key!r}; it has {len(names)} keys, such as {list(names[:5])}")
