"""Tensors that lie in a checkpoint, as leaves of a state: their bytes are read when they are written elsewhere.

Goes in: an open source. Comes out: leaves that describe themselves to a save, and `DeviceTransfers` that fetch pieces
of them while others are hashed and written, as from a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event, Thread
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_core import __version__
from dcp_core.adapter import ProcessGroup
from dcp_core.box import Box
from dcp_core.convert.progress import Advance
from dcp_core.dtype import DType
from dcp_core.errors import ArgumentError, UnsupportedValueError
from dcp_core.metadata import StoredTensor
from dcp_core.planning.leaves import DeviceBits, LocalTensor, whole_shape, whole_tensor
from dcp_core.recipes.stored_source import PieceRequest, StoredSource, place_of

BATCH_PIECES = 512
"""Pieces that are read at once, at most."""

_READ_ONLY = "tensors of a checkpoint that is converted are only read"


@dataclass(slots=True, eq=False)
class _Order:
    """A request on its way through the reading thread."""

    request: PieceRequest
    is_done: Event
    error: BaseException | None = None

    def wait(self) -> None:
        self.is_done.wait()
        if self.error is not None:
            raise self.error


class ReadAhead:
    """Reads pieces on a thread of its own, all that were asked for meanwhile at once; a context manager.

    Implements `planning.leaves.DeviceTransfers` as far as writing needs it.

    Args:
        source: Where from.
        advance: Told the bytes of pieces that are in.
    """

    def __init__(self, source: StoredSource, advance: Advance) -> None:
        self._source = source
        self._advance = advance
        self._orders: deque[_Order] = deque()
        self._is_closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="dcp-convert-read", daemon=True)

    def host_memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Ordinary memory."""
        return np.empty(nbytes, np.uint8)

    def register_memory(self, memory: npt.NDArray[np.uint8]) -> None:
        """None: nothing needs registering."""

    def start_copy_out(self, view: LazyView, target: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Order a piece; what is returned waits for it, and raises what reading it raised."""
        order = _Order(PieceRequest(view.tensor.stored, view.box, view.tensor.dtype, target), Event())
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the source of a conversion is closed")
            self._orders.append(order)
            self._changed.notify()
        return order.wait

    def start_copy_in(self, view: LazyView, bits: npt.NDArray[Any], source_dtype: DType) -> Callable[[], None]:
        """Refuse: the source is not changed."""
        raise UnsupportedValueError(_READ_ONLY)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._orders and not self._is_closed:
                    self._changed.wait()
                if not self._orders:
                    return
                orders = [self._orders.popleft() for _ in range(min(len(self._orders), BATCH_PIECES))]
            self._carry_out(orders)
            del orders  # buffers are others' memory

    def _carry_out(self, orders: list[_Order]) -> None:
        error: BaseException | None = None
        try:
            self._source.fill([order.request for order in orders])
            self._advance(sum(order.request.target.nbytes for order in orders))
        except BaseException as caught:
            error = caught
        for order in orders:
            order.error = error
            order.is_done.set()


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """A leaf of a state: a whole tensor of an open checkpoint.

    Attributes:
        stored: The tensor.
        dtype: Element type that its readers see.
        transfers: What reads it.
    """

    stored: StoredTensor
    dtype: DType
    transfers: ReadAhead

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, as its readers see them."""
        return Box.whole(self.stored.shape).numel * self.dtype.itemsize

    @property
    def bits(self) -> DeviceBits:
        """All its bits, not read yet. It must have elements."""
        shape = self.stored.shape
        return DeviceBits(LazyView(self, Box.whole(shape)), LazyAccess(), shape, self.dtype.bits)


@dataclass(frozen=True, slots=True)
class LazyView:
    """A part of a `LazyTensor`; `box` is global."""

    tensor: LazyTensor
    box: Box


class LazyAccess:
    """Reaches the elements of `LazyView`s (a `planning.leaves.TensorAccess`)."""

    def host_array(self, view: LazyView) -> None:
        """None: no host memory holds the elements."""

    def read_out(self, view: LazyView) -> npt.NDArray[Any]:
        """Read the view's raw bits."""
        target = np.empty(view.box.numel * view.tensor.dtype.itemsize, np.uint8)
        view.tensor.transfers.start_copy_out(view, target)()
        bits: npt.NDArray[Any] = target.view(view.tensor.dtype.bits).reshape(view.box.sizes)
        return bits

    def copy_into(self, view: LazyView, bits: npt.NDArray[Any], source_dtype: DType) -> None:
        """Refuse: the source is not changed."""
        raise UnsupportedValueError(_READ_ONLY)

    def narrow(self, view: LazyView, box: Box) -> LazyView:
        """The part of the view that `box` selects, relative to the view."""
        offsets = tuple(start + at for start, at in zip(view.box.offsets, box.offsets, strict=True))
        return LazyView(view.tensor, Box(offsets, box.sizes))

    def writable_problem(self, view: LazyView) -> str:
        """Why nothing can be loaded into it."""
        return _READ_ONLY

    def transfers(self, view: LazyView) -> ReadAhead:
        """What reads it."""
        return view.tensor.transfers


class ConversionAdapter(LazyAccess):
    """The adapter (`adapter.Adapter`) of a process that converts: it is alone, whatever job it belongs to."""

    name = "convert"
    version = __version__

    def describe(self, value: Any) -> LocalTensor | None:
        """Describe a `LazyTensor`; None for everything else."""
        if not isinstance(value, LazyTensor):
            return None
        view, storage = LazyView(value, Box.whole(value.stored.shape)), (place_of(value.stored.chunks), value.dtype)
        return whole_tensor(whole_shape(value.stored.shape), value.dtype, view, self, "file", storage)

    def process_group(self, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
        """A group of one.

        Raises:
            ArgumentError: A group was passed.
        """
        if group is not None:
            raise ArgumentError(f"conversions run in one process: got the group {group!r}")
        return ProcessGroup()


class AloneAdapter:
    """Another adapter in a process that is alone, whatever job it belongs to.

    Args:
        adapter: The adapter.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.process_group = partial(_alone, adapter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


def _alone(adapter: Any, group: Any = None, *, with_channel: bool = True) -> ProcessGroup:
    return ProcessGroup()
