"""MindSpore's communication library, as far as it can be relied on.

Who is in a group, one exchange of small objects, and broadcasts of bytes.

On CPU a collective that fails breaks the link: later ones deliver garbage, and no error. Booleans, 16-bit integers,
complex numbers and empty tensors fail there; what is received into a view is lost. So all that goes into a collective
from here is a whole, contiguous tensor of at least one byte, of type uint8.
"""

from __future__ import annotations

from typing import Any

import mindspore
import mindspore.mint.distributed as mint_distributed
import numpy as np
from mindspore.communication import GlobalComm, management

from dcp_core.errors import ArgumentError, CoordinationError


def is_initialized() -> bool:
    """Whether this process has called `mindspore.communication.init()` or the like."""
    return bool(GlobalComm.INITED)


def world_group() -> str:
    """The name of the group of all ranks."""
    return str(GlobalComm.WORLD_COMM_GROUP)


def backend() -> str:
    """The communication library: "mccl" on CPU, "hccl" on Ascend, "nccl"."""
    return str(GlobalComm.BACKEND).rpartition(".")[2].lower()


def global_rank() -> int:
    """This process in the job."""
    return int(management.get_rank(world_group()))


def ranks_of(name: str) -> tuple[int, ...]:
    """Numbers in the job of the members of a group, in its order.

    Raises:
        ArgumentError: There is no such group in this process.
    """
    try:
        ranks = tuple(int(rank) for rank in management.get_process_group_ranks(name))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ArgumentError(f"there is no communication group {name!r} in this process: {_reason(error)}") from error
    if not ranks:
        raise ArgumentError(f"there is no communication group {name!r} in this process; pass one that it is in")
    return ranks


def gather_objects(name: str, ranks: tuple[int, ...], value: Any) -> list[Any]:
    """Every member's value, by its place in the group; on the host, whatever the group is for.

    Args:
        name: Of the group; all its members call.
        ranks: Its members.
        value: Lists, strings and numbers.

    Raises:
        CoordinationError: The library failed.
    """
    found: list[Any] = [None] * len(ranks)
    try:
        carrier = name if backend() == "mccl" else mint_distributed.new_group(list(ranks), backend="mccl")
        if not carrier:
            raise RuntimeError("no mccl group could be made")
        _learn_group(carrier)
        mint_distributed.all_gather_object(found, value, group=carrier)
    except (RuntimeError, TypeError, ValueError) as error:
        raise CoordinationError(
            f"the members of the group {name!r} could not exchange addresses: {_reason(error)}; hand in a TCPStore by "
            "dcp_mindspore.use_store() before the first save or load"
        ) from error
    return found


def byte_tensor(wire: Any) -> Any:
    """The tensor that carries bytes through a collective, sharing their memory.

    Args:
        wire: A contiguous, writable array of bytes in host memory, or a whole tensor of bytes on a device.

    Raises:
        CoordinationError: It is anything else, which would break the link.
    """
    if isinstance(wire, np.ndarray):
        is_bytes = wire.dtype == np.uint8 and wire.ndim == 1 and wire.flags.c_contiguous and wire.flags.writeable
        if is_bytes and wire.nbytes:
            return mindspore.Tensor.from_numpy(wire)
        found = f"an array of {wire.dtype} and shape {wire.shape}, contiguous {wire.flags.c_contiguous}"
    else:
        is_bytes = str(wire.dtype) == "UInt8" and len(wire.shape) == 1 and wire.is_contiguous()
        if is_bytes and wire.nbytes and wire.storage_offset() == 0:
            return wire
        found = f"a tensor of {wire.dtype} and shape {tuple(wire.shape)}"
    raise CoordinationError(f"only whole tensors of bytes, at least one, are broadcast; found {found}")


def start_broadcast(wire: Any, source: int, name: str) -> tuple[Any, Any]:
    """Start a broadcast of bytes within a group.

    Args:
        wire: See `byte_tensor`.
        source: Number in the job of the member that sends.
        name: Of the group.

    Returns:
        The tensor, whose `asnumpy` waits for the bytes, and MindSpore's handle.

    Raises:
        CoordinationError: The wire would break the link; nothing was sent.
        RuntimeError: The library failed.
    """
    tensor = byte_tensor(wire)
    _learn_group(name)
    return tensor, mint_distributed.broadcast(tensor, src=source, group=name, async_op=True)


def _learn_group(name: str) -> None:
    """Enter the world where calls without a group look: their default was bound before there was one."""
    internals: Any = mint_distributed.distributed
    for group in ("hccl_world_group", name):
        known = name if group == name else world_group()
        internals._GROUP_RANK_CACHE.setdefault(group, management.get_rank(known))
        internals._GROUP_SIZE_CACHE.setdefault(group, management.get_group_size(known))


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
