"""A device without hardware: numpy memory out of the host's reach, and copies that are done when the device likes.

Engines that move parts of device tensors are tested with it. What a real device would turn into rare wrong bytes is
certain here, or an error: the target of a copy holds poison until the copy is done, and host memory is compared between
the start of a copy and its end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from dcp_core.arrays import ArrayAccess
from dcp_core.box import Box, slices
from dcp_core.dtype import DType, dtype_named, numpy_dtype
from dcp_core.errors import UnsupportedValueError
from dcp_core.testing.streams import Pace, WorkStream

POISON = 0xA5
"""Every byte of a copy's target until the copy is done."""

_AddressRange = tuple[int, int]


class DeviceMisuseError(AssertionError):
    """Code broke a rule of `DeviceTransfers`."""


class DeviceArray:
    """An array on a `SimulatedDevice`. Its elements can only be reached through the device.

    Attributes:
        device: Where it lies.
        dtype: Element type.
        memory: The device's memory as raw bits (`DType.bits`), any strides; for the device alone.
    """

    __slots__ = ("device", "dtype", "memory")

    def __init__(self, device: SimulatedDevice, dtype: DType, memory: npt.NDArray[Any]) -> None:
        self.device = device
        self.dtype = dtype
        self.memory = memory

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extent in elements."""
        return self.memory.shape

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.memory.nbytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        """Refuse: numpy would go around the device."""
        raise DeviceMisuseError(f"the host cannot read an array on {self.device.name}; copy it out")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an array on {self.device.name} cannot be pickled")

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype.name}{list(self.shape)} on {self.device.name})"


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy between its start and its await.

    Attributes:
        number: Which one, from 0.
        host: Host memory that it uses.
        addresses: Where that lies.
        digest: Of the host memory as the copy found or left it; None before that.
    """

    number: int
    host: npt.NDArray[Any]
    addresses: _AddressRange
    digest: int | None = None


class SimulatedDevice:
    """A device of numpy memory: a `TensorAccess` to the arrays on it, and its `DeviceTransfers`. Any thread may use it.

    As a context manager it ends with `close` and, where nothing else failed, `check`.

    Attributes:
        name: What descriptions of its arrays say.
        stream: Does the copies, in order; step it when the pace is "steps".
        misuses: What was done wrong so far.
        copies_out: Copies started from the device.
        copies_in: Copies started to the device.
        scattered_copies: Those whose host memory was not contiguous; a real device is slow at them.
        blocking_nbytes: Bytes that went through `read_out` or `copy_into` instead.
        most_in_flight: The largest number of copies at a time that were started and not awaited.
        host_nbytes: Host memory that is in use.
        registered_nbytes: Memory that others made and registered, right now.
        peak_host_nbytes: The most there ever was.
    """

    def __init__(
        self,
        name: str = "simulated:0",
        *,
        pace: Pace = "late",
        delay_seconds: float = 0.0,
        host_limit_nbytes: int | None = None,
        faults: Mapping[int, Exception] | None = None,
        has_streams: bool = True,
        can_register: bool = True,
    ) -> None:
        """Make a device.

        Args:
            name: Type and number.
            pace: When copies are done, see `WorkStream`.
            delay_seconds: Pause before each copy, for the paces with a thread.
            host_limit_nbytes: More host memory than this at a time is a misuse.
            faults: What fails: numbers of copies from 0 in the order of their starts, and what awaiting them raises.
            has_streams: False for a device with blocking copies only: `transfers` gives None.
            can_register: False for a device that cannot be told of memory that others made.
        """
        self.name = name
        self.stream = WorkStream(pace, delay_seconds)
        self.misuses: list[str] = []
        self.copies_out = self.copies_in = self.scattered_copies = self.blocking_nbytes = 0
        self.most_in_flight = self.host_nbytes = self.peak_host_nbytes = self.registered_nbytes = 0
        self._host_limit_nbytes = host_limit_nbytes
        self._faults = dict(faults or {})
        self._has_streams = has_streams
        self._can_register = can_register
        self._blocks: set[_AddressRange] = set()
        self._in_flight: dict[int, _Copy] = {}
        self._lock = threading.RLock()  # a block of host memory may end in the middle of anything

    # -- the test's own access -----------------------------------------------------------------------------------------

    def put(self, array: npt.NDArray[Any], dtype_name: str | None = None) -> DeviceArray:
        """Copy an array to the device, its order in memory kept.

        Args:
            array: Values, or raw bits where numpy lacks the type.
            dtype_name: The type of raw bits.
        """
        dtype = numpy_dtype(array.dtype) if dtype_name is None else dtype_named(dtype_name)
        if dtype is None or dtype.itemsize != array.itemsize:
            raise UnsupportedValueError(f"an array of {array.dtype} is no tensor that can be stored")
        return DeviceArray(self, dtype, np.array(array.view(dtype.bits), order="K"))

    def get(self, array: DeviceArray) -> npt.NDArray[Any]:
        """A copy of an array's raw bits as they are right now."""
        return self._own(array).memory.copy()

    # -- TensorAccess --------------------------------------------------------------------------------------------------

    def host_array(self, view: DeviceArray) -> npt.NDArray[Any] | None:
        """None: nothing on the host shares the memory."""
        return None

    def read_out(self, view: DeviceArray) -> npt.NDArray[Any]:
        """Copy the raw bits to the host, blocking."""
        self.blocking_nbytes += view.nbytes
        return self.get(view)

    def copy_into(self, view: DeviceArray, bits: npt.NDArray[Any], source_dtype: DType) -> None:
        """Write elements, blocking, converting as numpy arrays are converted."""
        self.blocking_nbytes += bits.nbytes
        ArrayAccess(view.dtype).copy_into(self._own(view).memory, bits, source_dtype)

    def narrow(self, view: DeviceArray, box: Box) -> DeviceArray:
        """The part that `box` selects, sharing its memory."""
        index: Any = (*slices(box), ...)
        return DeviceArray(self, view.dtype, view.memory[index])

    def writable_problem(self, view: DeviceArray) -> str | None:
        """Why an array cannot be filled by a load, or None."""
        return ArrayAccess(view.dtype).writable_problem(view.memory)

    def transfers(self, view: DeviceArray) -> SimulatedDevice | None:
        """The device itself; None when it has blocking copies only."""
        self._own(view)
        return self if self._has_streams else None

    # -- DeviceTransfers -----------------------------------------------------------------------------------------------

    def host_memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory that copies may use, filled with poison."""
        block = np.full(nbytes, POISON, np.uint8)
        addresses = _addresses(block)
        with self._lock:
            self._blocks.add(addresses)
            self.host_nbytes += nbytes
            self.peak_host_nbytes = max(self.peak_host_nbytes, self.host_nbytes)
            weakref.finalize(block, _forget_at, weakref.ref(self), addresses)
            if self._host_limit_nbytes is not None and self.host_nbytes > self._host_limit_nbytes:
                self._misused(f"{self.host_nbytes} bytes of host memory in use, at most {self._host_limit_nbytes} are")
        return block

    def register_memory(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None] | None:
        """Let copies use memory that others made."""
        if not self._can_register:
            return None
        addresses = _addresses(memory)
        with self._lock:
            if any(start < addresses[1] and addresses[0] < stop for start, stop in self._blocks):
                self._misused(f"{memory.nbytes} bytes are registered that are known already")
            self._blocks.add(addresses)
            self.registered_nbytes += memory.nbytes
        return partial(self._unregister, addresses)

    def start_copy_out(self, view: DeviceArray, target: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Start copying raw bits, in row-major order, to host memory."""
        if target.dtype != np.uint8 or target.shape != (self._own(view).nbytes,) or not target.flags.c_contiguous:
            self._misused(f"a copy of {view} to {target.dtype}{list(target.shape)}, expected uint8[{view.nbytes}]")
        copy = self._start("out", target)
        target[...] = POISON
        done = self.stream.queue(partial(self._copy_out, copy, view))
        return partial(self._await, copy, done)

    def start_copy_in(self, view: DeviceArray, bits: npt.NDArray[Any], source_dtype: DType) -> Callable[[], None]:
        """Start writing elements, converting as numpy arrays are converted."""
        if bits.dtype != source_dtype.bits or bits.shape != self._own(view).shape:
            expected = f"{source_dtype.bits}{list(view.shape)}"
            self._misused(f"a copy of {bits.dtype}{list(bits.shape)} to {view}, expected {expected}")
        copy = self._start("in", bits)
        copy.digest = _digest(bits)
        view.memory[...] = np.frombuffer(bytes([POISON] * view.memory.itemsize), view.memory.dtype)[0]
        done = self.stream.queue(partial(self._copy_in, copy, view, source_dtype))
        return partial(self._await, copy, done)

    # -- the end -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See that all was used as it should be.

        Raises:
            DeviceMisuseError: Something was not, or a copy was never awaited.
        """
        with self._lock:
            found = [*self.misuses, *(f"copy {number} was never awaited" for number in self._in_flight)]
        if found:
            raise DeviceMisuseError(f"{self.name}: " + "; ".join(found))

    def close(self) -> None:
        """End the stream."""
        self.stream.close()

    def __enter__(self) -> SimulatedDevice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self.check()

    # -- copies --------------------------------------------------------------------------------------------------------

    def _start(self, direction: Literal["out", "in"], host: npt.NDArray[Any]) -> _Copy:
        start, stop = _addresses(host)
        with self._lock:
            copy = _Copy(self.copies_out + self.copies_in, host, (start, stop))
            if not any(first <= start and stop <= last for first, last in self._blocks):
                self._misused(
                    f"copy {copy.number} uses {stop - start} bytes that are not from host_memory or registered"
                )
            for other in self._in_flight.values():
                if start < other.addresses[1] and other.addresses[0] < stop:
                    self._misused(f"copy {copy.number} uses host memory of copy {other.number}, which was not awaited")
            self.copies_out += direction == "out"
            self.copies_in += direction == "in"
            self.scattered_copies += not host.flags.c_contiguous
            self._in_flight[copy.number] = copy
            self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        return copy

    def _copy_out(self, copy: _Copy, view: DeviceArray) -> None:
        self._raise_fault(copy)
        if (copy.host != POISON).any():
            self._misused(f"the host wrote to the target of copy {copy.number} before it was done")
        copy.host[...] = np.ascontiguousarray(view.memory).reshape(-1).view(np.uint8)
        copy.digest = _digest(copy.host)

    def _copy_in(self, copy: _Copy, view: DeviceArray, source_dtype: DType) -> None:
        self._raise_fault(copy)
        if _digest(copy.host) != copy.digest:
            self._misused(f"the host wrote to the source of copy {copy.number} before it was done")
        ArrayAccess(view.dtype).copy_into(view.memory, copy.host, source_dtype)

    def _await(self, copy: _Copy, done: Callable[[], None]) -> None:
        try:
            done()
        finally:
            with self._lock:
                is_first = self._in_flight.pop(copy.number, None) is not None
        if is_first and _digest(copy.host) != copy.digest:
            self._misused(f"the host wrote to memory of copy {copy.number} before it was awaited")

    def _raise_fault(self, copy: _Copy) -> None:
        if copy.number in self._faults:
            raise self._faults[copy.number]

    def _own(self, view: DeviceArray) -> DeviceArray:
        if not isinstance(view, DeviceArray) or view.device is not self:
            self._misused(f"{view!r} does not lie on {self.name}")
        return view

    def _misused(self, text: str) -> NoReturn:
        with self._lock:
            self.misuses.append(text)
        raise DeviceMisuseError(f"{self.name}: {text}")

    def _unregister(self, addresses: _AddressRange) -> None:
        with self._lock:
            if addresses not in self._blocks:
                self._misused("memory is unregistered that is not registered")
            for copy in self._in_flight.values():
                if copy.addresses[0] < addresses[1] and addresses[0] < copy.addresses[1]:
                    self._misused(f"memory is unregistered that copy {copy.number} uses")
            self._blocks.discard(addresses)
            self.registered_nbytes -= addresses[1] - addresses[0]

    def _forget(self, addresses: _AddressRange) -> None:
        with self._lock:
            self._blocks.discard(addresses)
            self.host_nbytes -= addresses[1] - addresses[0]


def _forget_at(device: weakref.ref[SimulatedDevice], addresses: _AddressRange) -> None:
    """Held for as long as a block lives, so it must not hold the device: errors of its copies hold blocks."""
    alive = device()
    if alive is not None:
        alive._forget(addresses)


def _addresses(array: npt.NDArray[Any]) -> _AddressRange:
    """Where the elements of an array lie: first address, and one past the last."""
    start, stop = np.lib.array_utils.byte_bounds(array) if hasattr(np.lib, "array_utils") else np.byte_bounds(array)
    return int(start), int(stop)


def _digest(array: npt.NDArray[Any]) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
