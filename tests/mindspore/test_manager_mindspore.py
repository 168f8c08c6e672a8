"""A manager in MindSpore jobs: replicas are compared, the last checkpoints stay, a run goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.parallel import Layout

import dcp_mindspore as dcp
from tests.mindspore.ms_ranks import MindSporeRank, run_mindspore

pytestmark = pytest.mark.timeout(120)


def network(value: float) -> nn.Dense:
    net = nn.Dense(4, 6)
    for parameter in net.get_parameters():
        parameter.asnumpy()[...] = value
    return net


def _report(manager: dcp.CheckpointManager, step: int, state: dict[str, Any], way: str, **how: Any) -> str:
    try:
        if way == "save":
            manager.save(step, state, **how)
        else:
            manager.async_save(step, state, **how).get_result(60)
    except dcp.ReplicasDifferError as error:
        return str(error)
    return ""


def _replicas(rank: MindSporeRank, root: Path) -> list[str]:
    """A network that all ranks hold; one flipped bit on rank 2; then its weight cut over the ranks, differing."""
    found = []
    with dcp.CheckpointManager(root, keep=1, check_replicas=True, durable=False) as manager:
        for way in ("save", "async"):
            net = network(1.0)
            found.append(_report(manager, 1, {"net": net, "step": 1}, way))
            if rank.rank == 2:
                net.weight.asnumpy().view(np.uint8)[2, 3] ^= 1
            found.append(_report(manager, 2, {"net": net, "step": 2}, way))
        part = {"weight": ms.Parameter(ms.Tensor(np.full((2, 4), rank.rank, np.float32)), name="weight")}
        layouts = {"weight": Layout((rank.world_size,), ("dp",))("dp", "None")}
        found.append(_report(manager, 3, part, "save", layouts=layouts))
    return found


def test_a_flipped_bit_in_a_replica_is_named(tmp_path: Path) -> None:
    results = run_mindspore(_replicas, 3, tmp_path)
    good, bad, good_async, bad_async, cut = results[0]
    assert results == [results[0]] * 3 and good == good_async == cut == ""
    assert "'net.weight' at offsets (0, 0), sizes (6, 4): rank 2 differs from ranks 0, 1, which agree" in bad
    assert bad_async == bad and "bias" not in bad


def _run(rank: MindSporeRank, root: Path, last: int) -> tuple[int | None, float]:
    """ "Train" up to a step: every step adds one to all weights."""
    net = network(0.0)
    with dcp.CheckpointManager(root, keep=2, every=2, durable=False) as manager:
        resumed = manager.resume({"net": net})
        for step in range((resumed or 0) + 1, last + 1):
            for parameter in net.get_parameters():
                parameter.asnumpy()[...] += 1
            if manager.should_save(step):
                manager.async_save(step, {"net": net})
    found = dcp.latest_checkpoint(root)
    assert found == str(root / f"step_{last}") == dcp.survey_checkpoints(root, verify=True).path
    return resumed, float(net.bias.asnumpy()[0])


def test_a_run_goes_on_where_it_stopped_under_another_number_of_ranks(tmp_path: Path) -> None:
    assert run_mindspore(_run, 2, tmp_path, 4) == [(None, 4.0)] * 2
    assert run_mindspore(_run, 3, tmp_path, 8) == [(4, 8.0)] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_6", "step_8"]
