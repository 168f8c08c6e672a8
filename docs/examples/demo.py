"""Save a training job on 4 ranks, go on in other layouts: `python docs/examples/demo.py`.

A small transformer trains with AdamW on 4 processes, FSDP2 x tensor parallelism on a 2 x 2 mesh. It is saved, the last
time in the background: it trains on while that checkpoint is written. Fresh jobs then load it under the same layout and
under others, and go on from it: on 2 ranks with FSDP, on 4 ranks with tensor parallelism, in one process without any.
What has to hold is checked, and the exit status says whether it does:

- straight after a load, weights, optimizer state and all other values have the bits that were saved;
- in the layout that was saved, the losses that follow have the same bits, too;
- in another layout they agree to `TOLERANCE`: there, sums run over other parts in another order (rows of a batch over
  FSDP ranks, columns of a matrix over tensor-parallel ranks), and floating-point addition is not associative.

`TrainingRun` is the part to copy. All processes run on this machine and talk over its loopback interface.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as torch's own examples call it
from demo_model import Layout, ModelSizes, Transformer, parallelize
from demo_report import JobResult, RankResult, failures, print_checkpoint, print_resumed
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

import dcp_torch as dcp

SAVED = Layout("FSDP 2 x TP 2", fsdp=2, tp=2)
RESUMED = (
    SAVED,
    Layout("FSDP 2", fsdp=2, tp=1),
    Layout("TP 4", fsdp=1, tp=4),
    Layout("one process", fsdp=1, tp=1),
)
STEPS, MORE_STEPS = 5, 5
TOLERANCE = 1e-5  # relative, for the losses of another layout
LOOPBACK, ANY_PORT = "127.0.0.1", 0
BATCH = 8
ALPHABET, STRIDE = 512, 7  # what there is to learn: each token is below the one, and the one before it plus the other


# -- the training job -------------------------------------------------------------------------------------------------


class TrainingRun:
    """A model in training and all that is needed to go on with it.

    It has `state_dict` and `load_state_dict`, so `dcp.save({"run": run})` and `dcp.load({"run": run})` take it as it
    is. Neither mentions the layout: the sharded tensors know it.
    """

    def __init__(self, layout: Layout, seed: int) -> None:
        torch.manual_seed(seed)
        self.sizes = ModelSizes()
        self.model = Transformer(self.sizes)
        self.mesh = parallelize(self.model, layout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=100)
        self.step = 0
        self.losses = [float("nan")]  # losses[n] is that of step n; there is none before the first
        self.config = {
            "seed": seed,
            "model": asdict(self.sizes),
            "batch": {"rows": BATCH, "tokens": (ALPHABET, STRIDE)},
        }

    def state_dict(self) -> dict[str, Any]:
        # For a fresh optimizer, get_state_dict makes the moments that a checkpoint is loaded into.
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
            "losses": self.losses,
            "rng": torch.get_rng_state(),  # the same on all ranks here; dcp.PerRank(...) where each has its own
            "config": self.config,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(dict(state["scheduler"]))
        self.step = state["step"]
        self.losses = list(state["losses"])
        self.config = dict(state["config"])
        torch.set_rng_state(state["rng"])

    def train(self, steps: int) -> None:
        for _ in range(steps):
            tokens = self._my_rows(_global_batch(self.sizes))
            self.optimizer.zero_grad()
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            self.losses.append(self._mean_over_fsdp(loss.detach()).item())

    def _my_rows(self, batch: Tensor) -> Tensor:
        if self.mesh is None:
            return batch
        return batch.chunk(self.mesh["fsdp"].size())[self.mesh["fsdp"].get_local_rank()]

    def _mean_over_fsdp(self, loss: Tensor) -> Tensor:
        if self.mesh is None:
            return loss
        dist.all_reduce(loss, group=self.mesh["fsdp"].get_group())
        return loss / self.mesh["fsdp"].size()


def _global_batch(sizes: ModelSizes) -> Tensor:
    """The whole batch of a step, drawn on every rank from the one random state that the checkpoint carries."""
    starts = torch.randint(ALPHABET, (BATCH, 1))
    return (starts + STRIDE * torch.arange(sizes.context + 1)) % ALPHABET


# -- what each rank does ----------------------------------------------------------------------------------------------


def train_and_save(layout: Layout, directory: Path) -> RankResult:
    run = TrainingRun(layout, seed=0)
    run.train(STEPS - 4)
    seconds = {}
    for call in ("first save", "second save"):
        run.train(1)
        seconds[call] = _seconds(lambda: dcp.save({"run": run}, checkpoint_id=_place(run, directory)))
    for call in ("first async_save", "second async_save"):
        run.train(1)
        dcp.wait_all()  # the next save would wait for the one before, within the measured time
        started, committed = time.perf_counter(), Future[float]()
        response = dcp.async_save(
            {"run": run},
            checkpoint_id=_place(run, directory),
            callback=partial(_set_to_now, committed),
        )
        seconds[call] = time.perf_counter() - started
    result = _go_on(run, seconds)  # changes every tensor while the last checkpoint is written
    response.get_result()
    return replace(result, seconds={**seconds, "commit": committed.result() - started})


def _place(run: TrainingRun, directory: Path) -> Path:
    return directory / f"step_{run.step}"


def _set_to_now(moment: Future[float]) -> None:
    moment.set_result(time.perf_counter())


def load_and_resume(layout: Layout, directory: Path) -> RankResult:
    run = TrainingRun(layout, seed=1234)  # other weights, another random state: all of it must come from the checkpoint
    seconds = _seconds(lambda: dcp.load({"run": run}, checkpoint_id=directory / f"step_{STEPS}"))
    return _go_on(run, {"load": seconds})


def _go_on(run: TrainingRun, seconds: dict[str, float]) -> RankResult:
    state = run.state_dict()
    digest = _digest(state)
    whole = {part: sum(tensor.nbytes for tensor in _tensors(state[part])) for part in ("model", "optimizer")}
    held = sum(_local(tensor).nbytes for tensor in _tensors(state))
    run.train(MORE_STEPS)
    return RankResult(dist.get_rank() if dist.is_initialized() else 0, seconds, digest, whole, held, run.losses)


def _seconds(action: Callable[[], object]) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _digest(state: Mapping[str, Any]) -> str:
    """A digest over all values of a state; every tensor is put together from all its shards."""
    digest = hashlib.sha256()
    for name, value in _leaves(state):
        if isinstance(value, Tensor):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(f"{name} {full.dtype} {tuple(full.shape)}\n".encode())
            digest.update(full.detach().contiguous().numpy().data)
        else:
            digest.update(f"{name} {value!r}\n".encode())
    return digest.hexdigest()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(state: Mapping[str, Any]) -> list[Tensor]:
    return [value for _, value in _leaves(state) if isinstance(value, Tensor)]


def _leaves(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in sorted(state.items()):
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# -- the demo ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, in which layout, on which checkpoints; its ranks meet at `port` of the loopback interface."""

    function: Callable[[Layout, Path], RankResult]
    layout: Layout
    directory: Path
    port: int


def run_job(function: Callable[[Layout, Path], RankResult], layout: Layout, directory: Path) -> JobResult:
    """Run a function on every rank of a layout, each a process of its own; `torchrun` would do as well."""
    meeting_point = dist.TCPStore(LOOPBACK, ANY_PORT, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # re-exported
    results: multiprocessing.SimpleQueue[RankResult] = multiprocessing.get_context("forkserver").SimpleQueue()
    job = Job(function, layout, directory, meeting_point.port)
    start_processes(_run_rank, (job, results), layout.ranks, start_method="forkserver")  # type: ignore[no-untyped-call]
    by_rank = sorted((results.get() for _ in range(layout.ranks)), key=lambda result: result.rank)
    return JobResult(layout, tuple(by_rank))


def _quiet() -> None:
    # Nothing here works in place on the model's output.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # To compare states the demo puts whole tensors together, in more than one step; a checkpoint never does.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def _run_rank(rank: int, job: Job, results: multiprocessing.SimpleQueue[RankResult]) -> None:
    _quiet()
    torch.set_num_threads(1)
    if job.layout.ranks == 1:  # no process group at all
        results.put(job.function(job.layout, job.directory))
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(LOOPBACK, job.port)  # type: ignore[attr-defined]  # re-exported
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.layout.ranks, timeout=timeout)
    results.put(job.function(job.layout, job.directory))
    dist.barrier()
    dist.destroy_process_group()


def demonstrate(directory: Path) -> int:
    """Run all jobs and print what they found; returns how many things do not hold that have to."""
    start = time.perf_counter()
    saved = run_job(train_and_save, SAVED, directory)
    print_checkpoint(saved, directory / f"step_{STEPS}")
    resumed = [run_job(load_and_resume, layout, directory) for layout in RESUMED]
    print_resumed(saved, resumed, at=STEPS)
    failed = failures(saved, resumed, TOLERANCE)
    for line in failed:
        print(f"\nFAILED  {line}")
    if not failed:
        print("\nOK: every layout loaded the bits that were saved. In the same layout the losses that follow have the")
        print(f"same bits; in the others they agree to {TOLERANCE:g} (relative): their sums run in another order.")
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Save a training job on 4 ranks, and go on in other layouts.")
    parser.add_argument("--directory", type=Path, help="keep the checkpoints here; by default they are removed")
    arguments = parser.parse_args()
    # Ranks are forked from a process that has imported all this, and has run nothing.
    multiprocessing.set_forkserver_preload(["__main__", "dcp_torch.api", "torch._dynamo"])
    if arguments.directory is not None:
        return 1 if demonstrate(arguments.directory) else 0
    with tempfile.TemporaryDirectory(prefix="dcp-demo-") as directory:
        return 1 if demonstrate(Path(directory)) else 0


if __name__ == "__main__":
    sys.exit(main())
