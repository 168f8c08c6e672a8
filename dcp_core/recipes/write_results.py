"""What the ranks wrote, seen by the coordinator before it commits: compared with the plan, and the slowest named.

In: the results of all ranks. Out: an error, or a line in the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dcp_core.errors import PlanningError
from dcp_core.execution.interfaces import WriteResult
from dcp_core.file_names import TENSOR_FILE
from dcp_core.planning.global_plan import GlobalPlan
from dcp_core.recipes.job import logger

_SLOWEST_NAMED = 3


def file_nbytes(plan: GlobalPlan) -> tuple[tuple[int, ...], ...]:
    """Bytes of regions in each tensor file of each rank."""
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(plan.nbytes[plan.layout.order])])
    sums, first = np.diff(ends[plan.layout.starts]).tolist(), plan.layout.first_file.tolist()
    return tuple(tuple(sums[a:b]) for a, b in pairwise(first))


def check_results(results: Sequence[WriteResult], expected: Sequence[tuple[int, ...]]) -> None:
    """Compare what the ranks wrote with the plan: other regions would make a checkpoint that lies.

    Args:
        results: What each rank wrote.
        expected: Bytes of tensors in each file of each rank.

    Raises:
        PlanningError: A rank wrote something else.
    """
    remedy = "finalize_plan and execute_write must keep the items of the global plan"
    for result, nbytes in zip(results, expected, strict=True):
        files = sorted((file for file in result.files if file.kind == TENSOR_FILE), key=lambda file: file.part)
        written = tuple(file.nbytes - file.data_start for file in files)
        if sum(written) != sum(nbytes):
            raise PlanningError(
                f"rank {result.rank} wrote {sum(written)} bytes of tensors, the plan has {sum(nbytes)}: {remedy}"
            )
        if written != nbytes or [file.part for file in files] != list(range(len(files))):
            raise PlanningError(
                f"rank {result.rank} wrote tensor files of {list(written)} bytes, the plan has files of "
                f"{list(nbytes)} bytes: {remedy}, and write each chunk to the file of its part"
            )


def log_slowest(results: Sequence[WriteResult]) -> None:
    """Say in the log which ranks took longest to write."""
    slowest = sorted(results, key=lambda result: -result.seconds)[:_SLOWEST_NAMED]
    if len(results) > 1:
        text = ", ".join(f"rank {r.rank}: {r.seconds:.2f} s, {r.data_nbytes / 2**20:.1f} MiB" for r in slowest)
        logger.info("slowest ranks to write: %s", text)
