"""Compares, before anything is written, what ranks hold of what the save takes for copies.

In: what this rank holds, and whoever gives its bits. Out: nothing, or the one error of all ranks. Three exchanges, of
which healthy replicas need one or two: 32 bytes a rank; the checksums of every group of ranks that these 32 bytes tell
apart; and, where checksums differ, what the regions are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dcp_core.coordination.exchange import Exchange
from dcp_core.coordination.frames import pack, unpack
from dcp_core.errors import ReplicasDifferError
from dcp_core.execution.interfaces import WriteSource
from dcp_core.execution.region_checksums import region_checksums
from dcp_core.log import stage
from dcp_core.metadata import UInt64
from dcp_core.planning.plans import SavePlan
from dcp_core.planning.replica_digests import (
    DIFFERENCES_NAMED,
    ReplicaDigests,
    describe_differences,
    differing_keys,
    in_order,
    region_keys,
    speakers,
    told_of,
)
from dcp_core.recipes.job import attempt

FIRST_STAGE = "save/replicas"
"""The exchange that a rank with nothing to compare hands its error into."""

_REMEDY = (
    "Nothing was written. Find out whether a synchronisation was forgotten or a device computes wrongly, and load the "
    "last checkpoint. Values that are each rank's own belong in PerRank; check_replicas=False saves one of the copies"
)


@dataclass(slots=True)
class ReplicaCheck:
    """The comparison of one save, on one rank.

    Args:
        exchange: Among the ranks that save.
        rank: This one, in the group.
        source: Gives the bits.
    """

    exchange: Exchange
    rank: int
    source: WriteSource
    _keys: UInt64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    _held: ReplicaDigests | None = None

    def run(self, prepare: Callable[[], None], held: Callable[[], SavePlan]) -> None:
        """Compare.

        Args:
            prepare: Called before; what it raises is raised on all ranks.
            held: Gives what this rank holds.

        Raises:
            ReplicasDifferError: Copies differ; it names them, and the ranks.
            DcpError: The same on all ranks.
        """
        plans: list[SavePlan] = []

        def summary() -> bytes:
            prepare()
            with stage("check_replicas"):
                plans.append(held())
                self._keys = region_keys(plans[0])
                self._held = in_order(self._keys, region_checksums(plans[0], self.source, self.rank))
            return self._held.summary()

        payload, error = attempt(summary)
        answer = self.exchange.run(FIRST_STAGE, payload or b"", error=error, compute=_who_speaks)
        if answer:
            self._compare(plans[0], int(answer) == self.rank)

    def _compare(self, plan: SavePlan, speaks: bool) -> None:
        held = self._held
        assert held is not None, "it has been summarised"
        found = self.exchange.run(
            "save/replicas/checksums", held.to_bytes() if speaks else b"", compute=_which_differ
        )  # fmt: skip
        if not found:
            return
        total, asked = unpack(found)
        said = told_of(plan, self._keys, held, np.frombuffer(asked, "<u8").astype(np.uint64))

        def refuse(payloads: Sequence[bytes]) -> bytes:
            text = describe_differences(payloads, int(total))
            if text:
                raise ReplicasDifferError(f"replicas differ: {text}. {_REMEDY}")
            return b""  # two regions whose keys are equal by chance

        self.exchange.run("save/replicas/names", said, compute=refuse)


def _who_speaks(payloads: Sequence[bytes]) -> bytes | Sequence[bytes]:
    """Tell each rank who speaks for it; nothing where all ranks hold the same."""
    chosen = speakers(payloads)
    return [str(rank).encode() for rank in chosen] if any(chosen) else b""


def _which_differ(payloads: Sequence[bytes]) -> bytes:
    """The number of keys that differ, and some of them; nothing where none does."""
    keys = differing_keys(ReplicaDigests.from_bytes(payload) for payload in payloads)
    if not len(keys):
        return b""
    return pack(str(len(keys)).encode(), keys[:DIFFERENCES_NAMED].astype("<u8").tobytes())
