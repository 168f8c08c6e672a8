"""What the coordinator warns of when it has planned: values that differ between ranks, and values that need pickle.

In: the global plan. Out: lines in the log, each key named once in a process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcp_core.planning.global_plan import GlobalPlan
from dcp_core.planning.local_table import PICKLED, TENSOR
from dcp_core.recipes.job import logger

_KEYS_SHOWN = 100
_named_keys: set[str] = set()


def warn_of_divergence(plan: GlobalPlan, *, tensors: bool = True) -> None:
    """Name the keys whose values differ between ranks, and those that need pickle; each key once in a process.

    Args:
        plan: The global plan.
        tensors: Whether tensors are named too; False where a save with tensors that differ ends with an error.
    """
    held = plan.table.holdings
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    kept = plan.divergence.entry & ((plan.table.kind != TENSOR) | tensors)
    for entry in np.flatnonzero(kept).tolist():
        ranks = tuple(held.rank[held.entry == entry].tolist())
        by_ranks.setdefault(ranks, []).append(plan.table.names[entry])
    for ranks, names in by_ranks.items():
        shown = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
        text = "the values of %s differ between ranks %s: each rank's own is kept, as with PerRank; "
        _warn_once(names, text + "synchronise them or wrap them in PerRank", shown)
    pickled = np.unique(held.entry[(held.flags & PICKLED) != 0])
    text = "the values of %s have no exact encoding and are pickled%s: a load must allow their classes (allow_pickled)"
    compared = ", and compared between ranks by type only" if len(plan.table.ranks) > 1 else ""
    _warn_once([plan.table.names[entry] for entry in pickled.tolist()], text, compared)


def _warn_once(names: Sequence[str], text: str, more: str) -> None:
    """Warn of keys that no warning of this process has named yet."""
    fresh = [name for name in names if name not in _named_keys]
    if fresh:
        _named_keys.update(fresh)
        rest = f" and {len(fresh) - _KEYS_SHOWN} more" if len(fresh) > _KEYS_SHOWN else ""
        logger.warning(text, ", ".join(map(repr, fresh[:_KEYS_SHOWN])) + rest, more)
