"""Plans that can be used again.

A save is a hit only when every rank offers the digest of the *same global plan* for its present structure: a rank that
has merely seen its own structure before may hold half of another plan. Each rank keeps several plans per structure,
the most recent first, so that model and optimizer, or structures that alternate, all hit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from dcp_core.planning.write_list import WriteList

Body = TypeVar("Body")

STRUCTURES_KEPT = 16
PLANS_PER_STRUCTURE = 4


@dataclass(frozen=True, slots=True)
class CachedPlan(Generic[Body]):
    """One rank's part of a global plan.

    Attributes:
        plan_digest: Digest of the global plan.
        writes: What this rank writes.
        body: The encoded metadata columns, on the coordinator; elsewhere None.
        file_nbytes: Bytes of tensors in each file of each rank, on the coordinator; elsewhere empty.
    """

    plan_digest: bytes
    writes: WriteList
    body: Body | None = None
    file_nbytes: tuple[tuple[int, ...], ...] = ()


class PlanCache(Generic[Body]):
    """Plans by the digest of a rank's structure; bounded, safe for threads."""

    def __init__(self) -> None:
        self._plans: OrderedDict[bytes, list[CachedPlan[Body]]] = OrderedDict()
        self._lock = threading.Lock()

    def offers(self, structure: bytes) -> tuple[CachedPlan[Body], ...]:
        """The plans known for a structure, the most recent first."""
        with self._lock:
            found = self._plans.get(structure)
            if found is None:
                return ()
            self._plans.move_to_end(structure)
            return tuple(found)

    def keep(self, structure: bytes, plan: CachedPlan[Body]) -> None:
        """Remember a plan, once its checkpoint is committed."""
        with self._lock:
            known = [other for other in self._plans.get(structure, ()) if other.plan_digest != plan.plan_digest]
            self._plans[structure] = [plan, *known][:PLANS_PER_STRUCTURE]
            self._plans.move_to_end(structure)
            while len(self._plans) > STRUCTURES_KEPT:
                self._plans.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)
