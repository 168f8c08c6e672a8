"""Asks a planner for bits and bytes, and checks that they are what was planned.

Goes in: regions and objects of a plan, and whoever gives their bits. Comes out: what that gave, none of its memory
touched, or an error that names the value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from dcp_core.dtype import BY_CODE
from dcp_core.errors import DTypeMismatchError, PlanningError, ShapeMismatchError, UnsupportedValueError
from dcp_core.execution.interfaces import WriteSource
from dcp_core.metadata import Int64, UInt8
from dcp_core.planning.bulk import tuples_of
from dcp_core.planning.items import WriteItem
from dcp_core.planning.leaves import DeviceBits
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.planning.write_columns import PlannedChunk

Bits: TypeAlias = npt.NDArray[Any] | DeviceBits


class RegionBits:
    """The bits of some regions of a plan. Calls the planner, so it belongs to the thread that called the library.

    Args:
        spans: The regions.
        dtype: `DType.code` of each. Shape (N,).
        ndim: Number of dimensions of each. Shape (N,).
        sizes: Extent of each, padded. Shape (N, D), elements.
        source: Gives their bits.
        rank: This process, for errors.
    """

    def __init__(
        self, spans: Sequence[PlannedChunk], dtype: UInt8, ndim: UInt8, sizes: Int64, source: WriteSource, rank: int
    ) -> None:
        self._spans = spans
        self._source = source
        self._rank = rank
        self.dtypes = [BY_CODE[code].bits for code in dtype.tolist()]
        self.shapes = tuples_of(sizes, ndim)

    def ask(self, first: int, stop: int) -> tuple[Sequence[Any], bool]:
        """Ask for some neighbouring regions.

        Returns:
            Their bits, and whether all of them are arrays.

        Raises:
            PlanningError: The planner gives something else than was planned.
        """
        get_batch: Callable[..., Sequence[Bits]] | None = getattr(self._source, "get_batch", None)
        spans = self._spans[first:stop]
        chunks: Any = get_batch(spans) if get_batch else [self._source.get_data(span.item) for span in spans]
        return chunks, self._checked(chunks, spans, first)

    def _checked(self, chunks: Sequence[Any], spans: Sequence[PlannedChunk], first: int) -> bool:
        """Whether all chunks are arrays; refuses what is not the region that was planned."""
        stop = first + len(spans)
        if len(chunks) != len(spans):
            raise PlanningError(
                f"the planner's get_batch on rank {self._rank} gives {len(chunks)} arrays for {len(spans)} regions; "
                "give one for each, in order"
            )
        kinds = {type(chunk) for chunk in chunks}
        is_known = kinds == {np.ndarray} or all(isinstance(chunk, (np.ndarray, DeviceBits)) for chunk in chunks)
        if (
            not is_known
            or [chunk.dtype for chunk in chunks] != self.dtypes[first:stop]
            or [chunk.shape for chunk in chunks] != self.shapes[first:stop]
        ):
            self._refuse(chunks, spans)
        return DeviceBits not in kinds

    def _refuse(self, chunks: Sequence[Any], spans: Sequence[PlannedChunk]) -> NoReturn:
        """Say which chunk is not as it was planned."""
        for bits, span in zip(chunks, spans, strict=True):
            gives = f"{span.item.index.fqn} on rank {self._rank}: {self._giver(span.item)} gives"
            if not isinstance(bits, (np.ndarray, DeviceBits)):
                raise UnsupportedValueError(f"{gives} {type(bits).__name__}, expected a numpy array")
            name, expected = span.dtype.name, span.dtype.bits
            if bits.dtype != expected:
                raise DTypeMismatchError(f"{gives} {bits.dtype}, expected the bits of {name} as {expected}")
            if bits.shape != span.item.sizes:
                raise ShapeMismatchError(f"{gives} the shape {bits.shape}, expected {span.item.sizes}")
        raise AssertionError("every chunk is as it was planned")

    def _giver(self, item: WriteItem) -> str:
        """Who gave the bits: a planner of the library's passes on what an adapter or a describer says of a tensor."""
        source, names = self._source, ("get_data", "get_batch")
        tensor = source.state.tensors[item.leaf] if isinstance(source, StandardSavePlanner) else None
        if tensor is None:
            return "the planner's get_data"
        access = f"host_array of the {type(tensor.access).__qualname__} that describes it"
        is_own = all(getattr(type(source), name) is getattr(StandardSavePlanner, name) for name in names)
        return access if is_own else f"the planner's get_data, or {access},"


def object_bytes(source: WriteSource, item: WriteItem, rank: int) -> bytes:
    """Ask for an object's bytes.

    Raises:
        UnsupportedValueError: The planner gives something else.
    """
    value = source.get_data(item)
    if not isinstance(value, bytes):
        raise UnsupportedValueError(
            f"{item.index.fqn} on rank {rank}: the planner's get_data gives {type(value).__name__}, expected bytes"
        )
    return value
