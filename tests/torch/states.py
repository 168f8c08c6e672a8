"""What the tests of whole saves and loads share: values, shards of them, poison, and comparison by bits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from dcp_core.errors import DcpError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def values(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """A host tensor of random bits, NaNs of all kinds among them; the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape))


def shard(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a tensor, cut by torch, in memory of its own; needs no other rank."""
    return distribute_tensor(whole.clone().to(mesh.device_type), mesh, placements, src_data_rank=None)


def local_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor or of a shard."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def bits_of(tensor: Tensor) -> bytes:
    """The elements in logical order, as bytes."""
    return local_of(tensor).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def leaves(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a state that is no container, by dotted name."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(state, (list, tuple)) and not isinstance(state, torch.Size):
        for index, value in enumerate(state):
            yield from leaves(value, f"{prefix}.{index}")
    else:
        yield prefix, state


def tensors(state: Any) -> Iterator[Tensor]:
    """The tensors of a state."""
    return (value for _, value in leaves(state) if isinstance(value, Tensor))


def poison(state: Any) -> None:
    """Invert every bit of every tensor and array, in place: not one element keeps its value."""
    for _, value in leaves(state):
        if isinstance(value, np.ndarray):
            np.bitwise_not(value.view(f"u{value.itemsize}"), out=value.view(f"u{value.itemsize}"))
        elif isinstance(value, Tensor):
            _invert(local_of(value))


def _invert(memory: Tensor) -> None:
    if memory.dtype is torch.bool:
        memory.logical_not_()
    elif memory.dtype.is_complex:
        real = torch.view_as_real(memory)
        real.view(_BITS[real.itemsize]).bitwise_not_()
    else:
        memory.view(_BITS[memory.itemsize]).bitwise_not_()


def assert_same(found: Any, expected: Any) -> None:
    """Two states have the same leaves: tensors by type, shape and bits, everything else by type and value."""
    there, wanted = dict(leaves(found)), dict(leaves(expected))
    assert there.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_same_leaf(name, there[name], value)


def assert_same_leaf(name: str, found: Any, expected: Any) -> None:
    """One leaf equals another; a shard is compared with a shard of the same layout."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), name
        assert (found.dtype, tuple(found.shape)) == (expected.dtype, tuple(expected.shape)), name
        assert local_of(found).shape == local_of(expected).shape, name
        assert bits_of(found) == bits_of(expected), name
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), name
    else:
        assert type(found) is type(expected), name
        assert found == expected, name


def whole(state: Any) -> dict[str, Any]:
    """Every leaf by name, shards put together from all ranks; every rank of their meshes calls."""
    return {name: _whole_leaf(value) for name, value in leaves(state)}


def _whole_leaf(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().cpu()
    return value.detach().clone().cpu() if isinstance(value, Tensor) else value


def raised(call: Callable[[], object]) -> tuple[str, str]:
    """Class name and text of the error that a call raises."""
    try:
        call()
    except DcpError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def same_on_all(found: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """What `raised` returned on every rank."""
    assert len(set(found)) == 1, found
    return found[0]


class LogLines(logging.Handler):
    """Collects what the library logs in this process, from its creation on."""

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        logger = logging.getLogger("dcp")
        logger.addHandler(self)
        logger.setLevel(min(level, logger.level or level))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def with_words(self, *words: str) -> list[str]:
        """The lines that hold all of some words."""
        return [line for line in self.lines if all(word in line for word in words)]
