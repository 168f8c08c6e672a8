"""What each rank of `test_msrun.py` runs: save, save in the background, load in another cut."""

from __future__ import annotations

import sys

import mindspore
import numpy as np
from mindspore import communication

import dcp_mindspore as dcp

mindspore.set_device("CPU")
communication.init()
rank, world_size = communication.get_rank(), communication.get_group_size()
directory = sys.argv[1]
whole = np.arange(64, dtype=np.float32).reshape(8, 8)
rows, columns = 8 // world_size * rank, 8 // world_size

mine = mindspore.Parameter(mindspore.Tensor(whole[rows : rows + columns].copy()), name="w")
state = {"w": dcp.annotate_shard(mine, offsets=(rows, 0), global_shape=(8, 8)), "step": 3}
dcp.save(state, checkpoint_id=f"{directory}/one", timeout_seconds=60)
dcp.async_save(state, checkpoint_id=f"{directory}/two", timeout_seconds=60).get_result(60)

for name in ("one", "two"):
    target = mindspore.Parameter(mindspore.mint.zeros((8, columns)), name="w")
    found = {"w": dcp.annotate_shard(target, offsets=(0, rows), global_shape=(8, 8)), "step": 0}
    dcp.load(found, checkpoint_id=f"{directory}/{name}", timeout_seconds=60)
    assert (target.asnumpy() == whole[:, rows : rows + columns]).all() and found["step"] == 3
    everything = {"w": mindspore.mint.zeros((8, 8))}
    dcp.load(everything, checkpoint_id=f"{directory}/{name}", timeout_seconds=60)  # read once, broadcast
    assert (everything["w"].asnumpy() == whole).all()
print(f"rank {rank} of {world_size} is done", flush=True)  # noqa: T201  # what the test looks for
