"""A checkpoint of any format, opened to be read piece by piece.

Goes in: a storage reader. Comes out: what it holds, and regions of its tensors in memory that the caller gives. Names
stay those of the checkpoint; nothing is held but what is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core.arrays import ArrayAccess
from dcp_core.box import Box
from dcp_core.dtype import DType
from dcp_core.errors import UnsupportedValueError
from dcp_core.execution.interfaces import ReadContext, StorageReader, Verify
from dcp_core.formats.huggingface_source import HuggingFaceSource
from dcp_core.metadata import ChunkColumns, Metadata, StoredObject, StoredTensor
from dcp_core.planning.items import ReadItem
from dcp_core.planning.load_plan import LoadPlan, Wanted
from dcp_core.planning.regions import intersect_chunks

_LOG = logging.getLogger("dcp.convert")
_NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True, eq=False)
class PieceRequest:
    """A piece of a tensor that somebody wants.

    Attributes:
        stored: The tensor.
        box: Which elements, global.
        dtype: As what.
        target: Where to: contiguous bytes, as many as the piece has as `dtype`.
    """

    stored: StoredTensor
    box: Box
    dtype: DType
    target: npt.NDArray[np.uint8]

    @property
    def array(self) -> npt.NDArray[Any]:
        """The target as raw bits of the piece's shape."""
        return self.target.view(self.dtype.bits).reshape(self.box.sizes)


class StoredSource:
    """An open checkpoint. One thread reads at a time.

    Args:
        reader: Where it is; the source initialises and configures it.
        verify: What to check of checksums, where the format has any.
        metadata: Its description, where the reader has been initialised and has read one; None: the source does that.

    Attributes:
        metadata: Its description.

    Raises:
        DcpError: There is no such checkpoint, or its description is damaged.
    """

    def __init__(self, reader: StorageReader, verify: Verify = "full", metadata: Metadata | None = None) -> None:
        self._reader = reader
        if metadata is None:
            reader.initialize_reader()
            metadata = reader.load_metadata()
        self.metadata: Metadata = metadata
        reader.configure_reader(self.metadata, ReadContext(0, 1, verify))

    def tensors(self) -> list[StoredTensor]:
        """All tensors in the order of names; of those that every rank has for itself the lowest rank's.

        Raises:
            UnsupportedValueError: A file has tensors that cannot be read, and would be lost.
        """
        source = self.metadata.source
        if isinstance(source, HuggingFaceSource) and source.unusable:
            raise UnsupportedValueError(
                f"{len(source.unusable)} tensors have types that cannot be converted: "
                f"{', '.join(source.unusable[:_NAMES_SHOWN])}; a key_map that gives None for them leaves them out"
            )
        found = [source.tensors(name) for name in source.names()]
        self._warn_of_ranks([same[0].name for same in found if len(same) > 1])
        return [same[0] for same in found if same]

    def objects(self) -> list[StoredObject]:
        """All objects in the order of names; of those that every rank has for itself the lowest rank's."""
        source = self.metadata.source
        found = [source.objects(name) for name in source.names()]
        self._warn_of_ranks([same[0].name for same in found if len(same) > 1])
        return [same[0] for same in found if same]

    def read_object(self, stored: StoredObject) -> bytes:
        """Read an object's bytes, as `formats.objects` encodes it."""
        return self._reader.read_object(stored)

    def check(self, tensors: Sequence[StoredTensor]) -> None:
        """See that all of some tensors is there, and that the files have their sizes, before anything is written.

        Raises:
            CoverageError, OverlapError: The chunks of a tensor do not tile it.
            IncompleteError: A file is missing, or of another size.
        """
        wanted = [_wanted(number, stored, Box.whole(stored.shape), stored.dtype) for number, stored in _filled(tensors)]
        self._reader.check_files(_plan(wanted))

    def fill(self, requests: Sequence[PieceRequest]) -> None:
        """Read pieces to their targets.

        Raises:
            DcpError: What the reader says.
        """
        wanted = [
            _wanted(number, request.stored, request.box, request.dtype)
            for number, request in enumerate(requests)
            if not request.box.is_empty
        ]
        if wanted:
            self._reader.execute_read(self._reader.optimize_local_plan(_plan(wanted)), _IntoTargets(requests))

    def _warn_of_ranks(self, names: list[str]) -> None:
        if names:
            shown = names[:_NAMES_SHOWN]
            _LOG.warning("%d keys have a value for every rank; the lowest rank's is taken: %s", len(names), shown)


def place_of(chunks: ChunkColumns) -> bytes:
    """Where a tensor's chunks lie: equal for two tensors of one checkpoint exactly when they are the same bytes."""
    columns = [chunks.offsets, chunks.sizes, chunks.file, chunks.byte_offset]
    if chunks.arrays is not None:
        columns += [chunks.arrays.offsets, chunks.arrays.sizes]
    return b"".join(np.ascontiguousarray(column).tobytes() for column in columns)


def _filled(tensors: Sequence[StoredTensor]) -> list[tuple[int, StoredTensor]]:
    return [(number, stored) for number, stored in enumerate(tensors) if 0 not in stored.shape]


def _wanted(number: int, stored: StoredTensor, box: Box, dtype: DType) -> Wanted:
    return Wanted(stored.name, number, number, box, dtype, stored)


def _plan(wanted: Sequence[Wanted]) -> LoadPlan:
    return LoadPlan(wanted, (), intersect_chunks(wanted, lambda chunks: np.zeros(len(chunks), dtype=np.bool_)))


class _IntoTargets:
    """A read target (`execution.interfaces.ReadTarget`) that is the targets of requests."""

    def __init__(self, requests: Sequence[PieceRequest]) -> None:
        self._requests = requests

    def acquire_tensor(self, item: ReadItem) -> npt.NDArray[Any]:
        request = self._request(item)
        return ArrayAccess(request.dtype).narrow(request.array, Box(item.dest_offsets, item.lengths))

    def access(self, item: ReadItem) -> ArrayAccess:
        return ArrayAccess(self._request(item).dtype)

    def apply_tensor(self, item: ReadItem, view: npt.NDArray[Any]) -> None:
        """The elements are in the target already."""

    def _request(self, item: ReadItem) -> PieceRequest:
        number = item.dest_index.index
        assert number is not None, "every wanted box has a number"
        return self._requests[number]
