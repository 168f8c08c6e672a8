"""Parts of tensors on an accelerator, on their way to and from host memory while the host does something else.

Goes in: views of device tensors, and numpy arrays of page-locked memory. Comes out: copies that are under way, each
with a function that waits for it. Generic: any device whose module (`torch.get_device_module`) has streams and events,
such as CUDA, ROCm, Ascend, XPU and MTIA; nothing here names one. Elements move by `copy_` alone, never through a
storage, whose format may be the device's own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dcp_core.dtype import DType
from dcp_torch.elements import tensor_of_bits, torch_dtype_of
from dcp_torch.page_locking import page_lock

_LOG = logging.getLogger("dcp.torch")
Register = Callable[[npt.NDArray[np.uint8]], Callable[[], None] | None]
_PLAIN_BYTES = frozenset({torch.bool, torch.uint8, torch.int8})


class CopyStream(Protocol):
    """Where copies run, one after the other. Any thread may queue and wait."""

    def follow(self) -> None:
        """Let what is queued from now on wait for what the calling thread has queued on the device so far."""
        ...

    def queue(self, work: Callable[[], None], view: torch.Tensor) -> Callable[[], None]:
        """Queue torch operations.

        Args:
            work: Issues them.
            view: The device memory that they use.

        Returns:
            Waits until they are done.
        """
        ...


class DeviceStream:
    """A stream of an accelerator beside the one that computes."""

    def __init__(self, module: Any, device: torch.device) -> None:
        """Make a stream.

        Args:
            module: `torch.cuda`, or what another accelerator has in its place.
            device: Which one, with its number.
        """
        self._module = module
        self._device = device
        self._side = module.Stream(device=device)

    def follow(self) -> None:
        """Let what is queued from now on wait for what the calling thread has queued on the device so far."""
        self._side.wait_stream(self._module.current_stream(self._device))

    def queue(self, work: Callable[[], None], view: torch.Tensor) -> Callable[[], None]:
        """Queue torch operations.

        The stream is entered by the module's own context manager: that of `torch.Stream` keeps its state in the stream,
        which threads share. Whoever waits holds `work`, and so the memory that it uses, to the end. If nobody waits,
        torch keeps the memory until the stream is done with it.
        """
        with self._module.stream(self._side):
            work()
            with suppress(NotImplementedError):  # of a device whose memory torch does not keep for reuse
                view.record_stream(self._side)
            event = self._side.record_event()
        return functools.partial(_synchronize, event, work)


def _synchronize(event: Any, work: Callable[[], None]) -> None:
    event.synchronize()


class TorchTransfers:
    """Copies between one device and the host (`dcp_core.planning.leaves.DeviceTransfers`)."""

    def __init__(self, stream: CopyStream, register: Register = lambda memory: None) -> None:
        """Make transfers.

        Args:
            stream: Where copies run.
            register: What `register_memory` does.
        """
        self._stream = stream
        self._register = register

    def follow(self) -> None:
        """Let later copies see what the calling thread has queued on the device so far."""
        self._stream.follow()

    def host_memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Page-locked memory, or where that cannot be had plain memory, to and from which copies may block."""
        with torch.inference_mode(False):  # the memory outlives the mode of its first use
            try:
                memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                _warn_once(str(error))
                memory = torch.empty(nbytes, dtype=torch.uint8)
            array: npt.NDArray[np.uint8] = memory.numpy()
        return array

    def register_memory(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None] | None:
        """Page-lock memory that others made; returns what undoes it, None where that cannot be had."""
        return self._register(memory)

    def start_copy_out(self, view: torch.Tensor, target: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Start copying a view's raw bits, in row-major order, to host memory.

        A view that is not contiguous is made so on the device: a second copy of it lies there for a while.

        Args:
            view: On the device, any strides.
            target: As many bytes, contiguous.

        Returns:
            Waits until they are there.
        """

        def copy() -> None:
            with _mode_of(view):
                source = _as_moved(view.detach()).contiguous().view(-1)
                pinned = _pinned_part(target, source.dtype)
                if pinned is None:
                    torch.from_numpy(target).copy_(source.view(torch.uint8), non_blocking=True)
                else:
                    pinned.copy_(source, non_blocking=True)

        return self._stream.queue(copy, view)

    def start_copy_in(self, view: torch.Tensor, bits: npt.NDArray[Any], source_dtype: DType) -> Callable[[], None]:
        """Start writing elements into a view; torch converts them on the device.

        Where the type differs, or the view is not contiguous, the elements as they are lie on the device for a while.

        Args:
            view: On the device, any strides.
            bits: Raw bits of the view's shape.
            source_dtype: What they mean.

        Returns:
            Waits until the elements are there.
        """

        def copy() -> None:
            with _mode_of(view):
                target, wanted = view.detach(), torch_dtype_of(source_dtype)
                if target.dtype == wanted:
                    target = _as_moved(target)
                    wanted = target.dtype
                pinned = _pinned_part(bits, wanted)
                source = tensor_of_bits(bits, source_dtype).view(wanted) if pinned is None else pinned.view(bits.shape)
                is_lasting = pinned is not None  # a source that is made here is gone when this returns
                if target.dtype == wanted and target.is_contiguous():
                    target.copy_(source, non_blocking=is_lasting)
                    return
                staged = torch.empty(bits.shape, dtype=wanted, device=target.device)
                staged.copy_(source, non_blocking=is_lasting)
                target.copy_(staged)

        return self._stream.queue(copy, view)


def transfers_of(view: torch.Tensor) -> TorchTransfers | None:
    """How parts of a tensor travel; the copies wait for what the calling thread has queued on the device so far.

    Returns:
        None for a tensor in host memory, one without memory, one that is conjugated or negated lazily, and on a device
        that has blocking copies only.
    """
    if view.device.type == "cpu" or view.is_conj() or view.is_neg():
        return None
    found = _transfers_on(view.device)
    if found is not None:
        found.follow()
    return found


@functools.cache
def _transfers_on(device: torch.device) -> TorchTransfers | None:
    """The transfers of one device, made once a process."""
    try:
        module = torch.get_device_module(device)
    except RuntimeError:  # a kind of device without a module: no accelerator
        return None
    if not all(hasattr(module, name) for name in ("Stream", "current_stream", "stream")):
        return None
    return TorchTransfers(DeviceStream(module, device), functools.partial(page_lock, module, device))


def _mode_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Inference tensors can only be written to in their own mode. Autograd does not see what is detached."""
    is_inference = tensor.is_inference()
    return nullcontext() if is_inference == torch.is_inference_mode_enabled() else torch.inference_mode(is_inference)


@functools.cache
def _warn_once(reason: str) -> None:
    _LOG.warning("no page-locked memory, so copies to and from devices may block: %s", reason)


def _as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a type that every device copies in any strides: 8-bit and 4-bit floats are moved as bytes."""
    if tensor.dtype.itemsize > 1 or tensor.dtype in _PLAIN_BYTES:
        return tensor
    return tensor.view(torch.uint8)


def _pinned_part(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor | None:
    """The part of a tensor of `host_memory` that an array is, flat.

    A tensor of the page-locked storage itself, so that torch knows it as page-locked, and does not give the memory to
    others while a copy uses it.

    Returns:
        None where the array is no such part, or where elements are not aligned in it.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(owner, torch.Tensor) or not array.flags.c_contiguous:
        return None
    start = array.__array_interface__["data"][0] - owner.data_ptr() if array.nbytes else 0
    if start % dtype.itemsize:
        return None
    return owner[start : start + array.nbytes].view(dtype)
