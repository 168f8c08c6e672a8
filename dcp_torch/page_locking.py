"""Memory that others made, page-locked so that an accelerator copies to it at full speed and in the background.

Goes in: a device's module (`torch.cuda`, or what another accelerator has in its place), and memory. Comes out: what
undoes it. The module must have the functions that CUDA and ROCm have for it; others have none that Python can call.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_LOG = logging.getLogger("dcp.torch")
_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable


def page_lock(module: Any, device: torch.device, memory: npt.NDArray[np.uint8]) -> Callable[[], None] | None:
    """Page-lock memory.

    Args:
        module: Of the device.
        device: Which one asks.
        memory: Contiguous.

    Returns:
        What undoes it; None where that cannot be had.
    """
    if not hasattr(module, "cudart") or not memory.nbytes:
        return None
    address = memory.__array_interface__["data"][0]
    try:
        runtime = module.cudart()
        status = int(runtime.cudaHostRegister(address, memory.nbytes, _FOR_ALL_DEVICES))
    except (RuntimeError, AssertionError, AttributeError) as error:
        _warn_once(f"{type(error).__name__}: {error}")
        return None
    if status:
        _take_error(runtime, device)
        _warn_once(f"error {status} for {memory.nbytes} bytes; a limit of locked memory (ulimit -l) may be too low")
        return None
    return functools.partial(_unlock, runtime, device, address)


def _unlock(runtime: Any, device: torch.device, address: int) -> None:
    status = int(runtime.cudaHostUnregister(address))
    if status:
        _take_error(runtime, device)
        raise RuntimeError(f"memory at {address:#x} stays page-locked: error {status}")


def _take_error(runtime: Any, device: torch.device) -> None:
    """Take away the error that the runtime keeps, and that would fail the next operation of this thread."""
    if hasattr(runtime, "cudaGetLastError"):
        runtime.cudaGetLastError()
        return
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


@functools.cache
def _warn_once(reason: str) -> None:
    _LOG.warning("memory for staging could not be page-locked, so copies from devices are slower: %s", reason)
