"""Save a MindSpore job on 4 workers, go on with other layouts: `python docs/examples/demo_mindspore.py`.

A network of two layers trains with Adam on 4 processes, data parallel x tensor parallel on a 2 x 2 mesh. It is saved,
the last time in the background: it trains on while that checkpoint is written. Fresh jobs then load it, under the same
layout and under others: on 2 workers with tensor parallelism, on 2 with data parallelism, in one process. Each goes on,
and the losses that follow have to be those of the job that was saved, *bit for bit*; the exit status says whether they
are.

That they can be has a reason: floating-point sums depend on their order, so this job always adds up the same pieces in
the same order, whoever computed them: `BLOCKS` parts of the hidden layer, `MICRO_BATCHES` parts of the batch.

`Training.state` and the two calls of `dcp` are the part to copy. MindSpore compiles sharded networks on Ascend and GPU
only; here the shards are cut by hand, and `layouts=` says how, as it does for a compiled network. All processes run on
this machine and talk over its loopback interface.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")  # MindSpore says what is routine, otherwise

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore.mint.distributed import TCPStore
from mindspore.parallel import Layout

import dcp_mindspore as dcp

INPUTS, HIDDEN, OUTPUTS, ROWS = 32, 128, 16, 64
BLOCKS, MICRO_BATCHES = 4, 4
STEPS, MORE_STEPS = 5, 5
LOOPBACK = "127.0.0.1"
JOB_SECONDS = 300.0


@dataclass(frozen=True)
class Mesh:
    """How many processes there are, and how they share the work; they are numbered row by row."""

    dp: int
    tp: int

    @property
    def workers(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"DP {self.dp} x TP {self.tp}"


SAVED = Mesh(2, 2)
RESUMED = (SAVED, Mesh(1, 2), Mesh(2, 1), Mesh(1, 4), Mesh(1, 1))


# -- the training job -------------------------------------------------------------------------------------------------


class Network(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    """What one worker holds: rows of the first layer, and the columns of the second that belong to them."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        shape = HIDDEN // mesh.tp
        self.up = Parameter(Tensor(random.standard_normal((shape, INPUTS), np.float32) / 8), name="up")
        self.down = Parameter(Tensor(random.standard_normal((OUTPUTS, shape), np.float32) / 8), name="down")


class Training:
    """A network in training and all that is needed to go on with it."""

    def __init__(self, mesh: Mesh, workers: Workers, seed: int) -> None:
        self.mesh, self.workers = mesh, workers
        self.dp_rank, self.tp_rank = divmod(workers.rank, mesh.tp)
        self.network = Network(mesh, seed)
        self.optimizer = nn.Adam(self.network.trainable_params(), learning_rate=1e-2)
        self.step = 0
        self.losses: list[float] = []

    @property
    def layouts(self) -> dict[str, Any]:
        """How the parameters are cut. What Adam keeps for them is cut alike, and need not be named."""
        layout = Layout((self.mesh.dp, self.mesh.tp), ("dp", "tp"))
        return {"up": layout("tp", "None"), "down": layout("None", "tp")}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.network, "optimizer": self.optimizer, "step": self.step, "losses": self.losses}

    def load(self, directory: Path) -> None:
        state = self.state
        dcp.load(state, checkpoint_id=directory, layouts=self.layouts)  # fills the Cells in place
        self.step, self.losses = state["step"], state["losses"]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            rows, wanted = _batch(self.step)
            outputs = self._outputs(rows)
            error = outputs - wanted
            self.losses.append(float(np.square(error).mean(dtype=np.float32)))
            self.optimizer(self._gradients(rows, error * np.float32(2 / error.size)))
            self.step += 1

    def _outputs(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The network's outputs for the whole batch: the sum over all blocks of the hidden layer, in order."""
        own = {
            (batch, block): _partial(_piece(rows, batch), up, down).asnumpy()
            for batch in self._batches()
            for block, up, down in self._blocks()
        }
        found = self.workers.share(own)
        return np.concatenate([_sum(found[batch, block] for block in range(BLOCKS)) for batch in range(MICRO_BATCHES)])

    def _gradients(self, rows: np.ndarray[Any, Any], error: np.ndarray[Any, Any]) -> tuple[Any, Any]:
        """Gradients of this worker's parameters: the sum over all parts of the batch, in order."""
        own = {}
        for batch in self._batches():
            for block, up, down in self._blocks():
                by_up, by_down = _GRADIENTS(_piece(rows, batch), up, down, _piece(error, batch))
                own[batch, block] = (by_up.asnumpy(), by_down.asnumpy())
        found = self.workers.share(own)
        summed = [
            [_sum(found[batch, block][side] for batch in range(MICRO_BATCHES)) for block, _, _ in self._blocks()]
            for side in (0, 1)
        ]
        return Tensor(np.concatenate(summed[0])), Tensor(np.concatenate(summed[1], axis=1))

    def _batches(self) -> range:
        """The parts of the batch that this worker computes."""
        count = MICRO_BATCHES // self.mesh.dp
        return range(self.dp_rank * count, (self.dp_rank + 1) * count)

    def _blocks(self) -> Iterator[tuple[int, Any, Any]]:
        """The blocks of the hidden layer that this worker holds."""
        size, count = HIDDEN // BLOCKS, BLOCKS // self.mesh.tp
        up, down = self.network.up.asnumpy(), self.network.down.asnumpy()
        for own in range(count):
            part = slice(own * size, (own + 1) * size)
            columns = np.ascontiguousarray(down[:, part])
            yield self.tp_rank * count + own, Tensor(up[part].copy()), Tensor(columns)


def _partial(rows: Any, up: Any, down: Any) -> Any:
    return mint.matmul(nn.ReLU()(mint.matmul(rows, up.T)), down.T)


_GRADIENTS = ms.grad(lambda rows, up, down, error: (_partial(rows, up, down) * error).sum(), grad_position=(1, 2))


def _batch(step: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The whole batch of a step, and what there is to learn."""
    rows = np.random.default_rng(step).standard_normal((ROWS, INPUTS), np.float32)
    return rows, np.tanh(rows[:, :OUTPUTS])


def _piece(rows: np.ndarray[Any, Any], batch: int) -> Any:
    return Tensor(np.split(rows, MICRO_BATCHES)[batch].copy())


def _sum(parts: Iterator[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Add up in the order given."""
    total = next(parts).copy()
    for part in parts:
        total += part
    return total


# -- the workers ------------------------------------------------------------------------------------------------------


class Workers:
    """The processes of a job. They meet in a TCPStore; on Ascend a job would call `communication.init()`."""

    def __init__(self, rank: int, mesh: Mesh, port: int) -> None:
        self.rank, self.count, self._round = rank, mesh.workers, 0
        if self.count > 1:
            seconds = timedelta(seconds=60)
            self._store = TCPStore(LOOPBACK, port, world_size=self.count, is_master=rank == 0, timeout=seconds)
            dcp.use_store(self._store, rank, self.count)

    def share(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """Put together what all workers computed."""
        if self.count == 1:
            return own
        self._round += 1
        self._store.set(f"{self._round}/{self.rank}", pickle.dumps(own))
        self._store.add(f"{self._round}/count", 1)
        while self._store.add(f"{self._round}/count", 0) < self.count:
            time.sleep(0.0005)
        found: dict[Any, Any] = {}
        for rank in range(self.count):
            found |= pickle.loads(self._store.get(f"{self._round}/{rank}"))
        return found


def train_and_save(rank: int, mesh: Mesh, port: int, directory: Path) -> list[float]:
    training = Training(mesh, workers := Workers(rank, mesh, port), seed=rank % mesh.tp)
    training.train(STEPS - 1)
    dcp.save(training.state, checkpoint_id=directory / f"step_{training.step}", layouts=training.layouts)
    training.train(1)
    place = directory / f"step_{training.step}"
    response = dcp.async_save(training.state, checkpoint_id=place, layouts=training.layouts)
    training.train(MORE_STEPS)  # changes every tensor while the checkpoint is written
    response.get_result()
    workers.share({})  # the first worker hosts the store: it leaves last
    return training.losses


def load_and_resume(rank: int, mesh: Mesh, port: int, directory: Path) -> list[float]:
    training = Training(mesh, workers := Workers(rank, mesh, port), seed=1234)  # other weights: all must be loaded
    training.load(directory / f"step_{STEPS}")
    training.train(MORE_STEPS)
    workers.share({})
    return training.losses


# -- the demo ---------------------------------------------------------------------------------------------------------


def run_job(work: Any, mesh: Mesh, directory: Path) -> list[float]:
    """Run a job of fresh processes; gives the losses, which are the same on all workers."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mindspore", "mindspore.mint.distributed", "dcp_mindspore.api"])
    with context.Pool(mesh.workers) as pool:
        jobs: list[AsyncResult[list[float]]] = [
            pool.apply_async(work, (rank, mesh, port, directory)) for rank in range(mesh.workers)
        ]
        found = [job.get(JOB_SECONDS) for job in jobs]
        pool.close()
        pool.join()
    assert all(losses == found[0] for losses in found)
    return found[0]


def demonstrate(directory: Path) -> int:
    logging.getLogger("dcp").setLevel(logging.ERROR)
    expected = run_job(train_and_save, SAVED, directory)
    print(f"{SAVED}: trained {STEPS} steps, saved, trained on: losses {_shown(expected)}")
    wrong = 0
    for mesh in RESUMED:
        losses = run_job(load_and_resume, mesh, directory)
        same = losses == expected
        wrong += not same
        print(f"  loaded as {mesh}: {'the same bits' if same else f'OTHER LOSSES {_shown(losses)}'}")
    whole = dcp.read(directory / f"step_{STEPS}", "model.up")
    print(f"The checkpoint holds model.up as one tensor of shape {whole.shape}, whoever held its parts.")
    return wrong


def _shown(losses: list[float]) -> str:
    return ", ".join(f"{loss:.6f}" for loss in losses)


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if len(sys.argv) > 1:
        return 1 if demonstrate(Path(sys.argv[1])) else 0
    with tempfile.TemporaryDirectory(prefix="dcp-demo-") as directory:
        return 1 if demonstrate(Path(directory)) else 0


if __name__ == "__main__":
    sys.exit(main())
