"""Whether a read is worth sharing: the decision behind `broadcast_replicated_tensors="auto"`.

One pure function, from what is known of the groups and of the machines to which of them share their reads, and why.

Alone, every member reads all bytes of its group's buffers, as fast as storage gives what all read. Shared, each member
reads its part, as fast as storage gives what nobody else reads, and then all bytes are broadcast. The two rates tell a
page cache, which gives what others have read already at the speed of memory, from storage that limits every reader.
Where they are not known, a host is taken for one reader: so on one host there is nothing to gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dcp_core.metadata import Int64
from dcp_core.planning.buffer_parts import BLOCK_BYTES

GIB = 1 << 30
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Communicator:
    """What a communicator costs.

    Attributes:
        rate: Bytes a second that every member of a large broadcast receives.
        operation_seconds: What one broadcast between two ranks costs, however small.
        group_seconds: What a new group costs its members.
    """

    rate: float
    operation_seconds: float
    group_seconds: float


COMMUNICATORS: Mapping[str, Communicator] = {
    "gloo": Communicator(1.6 * GIB, 2e-4, 0.01),
    "mccl": Communicator(GIB / 32, 1e-3, 0.1),
}
"""gloo: loses with 2 replicas on as many hosts and wins with 4, as published; a group costs about 10 ms. MindSpore's on
the CPU: 10 to 60 MB/s."""

ACCELERATOR = Communicator(16.0 * GIB, 1.5e-4, 0.5)
"""Any other: that of an accelerator. 145 microseconds a broadcast were measured on four cards."""

STORAGE_RATE = 1.0 * GIB
"""Bytes a second that one host reads while all do."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupWork:
    """What each group could share, one row a group.

    Attributes:
        members: Number of ranks. Shape (G,).
        hosts: On how many hosts they are. Shape (G,).
        nbytes: Bytes of its buffers together. Shape (G,).
        buffers: How many buffers. Shape (G,).
        exists: Whether the group need not be made. Shape (G,).
        kind: Its communicator. Length G.
    """

    members: Int64
    hosts: Int64
    nbytes: Int64
    buffers: Int64
    exists: Mask
    kind: Sequence[str]


@dataclass(frozen=True, slots=True)
class Measured:
    """What storage was seen to do, just now; 0 where nothing is known.

    Attributes:
        same_rate: Bytes a second that each rank read where all read the same.
        own_rate: Bytes a second that each rank read where all read something else.
    """

    same_rate: float = 0.0
    own_rate: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there is anything to go by."""
        return self.same_rate > 0 and self.own_rate > 0


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """The outcome.

    Attributes:
        shared: Which groups share. Shape (G,).
        reason: Why, in one line for the log.
    """

    shared: Mask = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    reason: str = ""


def worth_sharing(work: GroupWork, measured: Measured, batch_bytes: int) -> Verdict:
    """Decide which groups share their reads.

    A group shares where reading its parts, broadcasting all of it, and making the group take less time than reading
    everything on every rank.

    Args:
        work: The groups.
        measured: Rates that were seen; they replace what is assumed.
        batch_bytes: Smaller buffers are sent together.
    """
    if not len(work.members):
        return Verdict(np.zeros(0, dtype=np.bool_), "nothing is wanted by more than one rank")
    costs = [COMMUNICATORS.get(kind, ACCELERATOR) for kind in work.kind]
    rate = np.array([cost.rate for cost in costs])
    operation = np.array([cost.operation_seconds for cost in costs])
    making = np.where(work.exists, 0.0, np.array([cost.group_seconds for cost in costs]))
    batches = np.minimum(work.nbytes / max(batch_bytes, 1) + work.members, work.buffers)  # each member has its own
    blocks = work.nbytes / BLOCK_BYTES + work.buffers
    broadcasts = np.where(work.nbytes < batch_bytes * work.buffers, batches, blocks)
    sending = work.nbytes / rate + broadcasts * np.ceil(np.log2(work.members)) * operation
    if measured.is_known:
        alone, parts = work.nbytes / measured.same_rate, work.nbytes / work.members / measured.own_rate
        apart = np.ones(len(alone), dtype=np.bool_)
    else:
        alone, apart = work.nbytes / STORAGE_RATE, work.hosts > 1
        parts = alone / work.hosts
    together = parts + sending
    shared = apart & (together + making < alone)
    not_made = apart & ~shared & (together < alone)
    reasons = [
        ("on one host, whose page cache reads once", ~apart),
        ("where making the group costs more than it saves", not_made),
        ("where broadcasting takes longer than reading", apart & ~shared & ~not_made),
    ]
    lost = [f"{int(mask.sum())} {text} ({_gib(work.nbytes[mask])})" for text, mask in reasons if mask.any()]
    known = f"reading at {STORAGE_RATE / GIB:.2f} GiB/s (assumed)"
    if measured.is_known:
        same, own = measured.same_rate / GIB, measured.own_rate / GIB
        known = f"reading the same at {same:.2f} GiB/s, parts at {own:.2f} GiB/s"
    done = f"{int(shared.sum())} of {len(shared)} groups of ranks share reads ({_gib(work.nbytes[shared])})"
    return Verdict(shared, "; ".join([done, *lost, f"{known}, broadcasting at {_rates(rate)} GiB/s (assumed)"]))


def _gib(nbytes: Int64) -> str:
    return f"{int(nbytes.sum()) / GIB:.2f} GiB"


def _rates(rate: npt.NDArray[np.float64]) -> str:
    low, high = float(rate.min()) / GIB, float(rate.max()) / GIB
    return f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
