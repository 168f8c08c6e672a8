"""Saves and loads over a real S3 server on loopback, beside torch DCP with its fsspec writer and reader.

    python -m benchmarks.object_store --mib 256 --json object_store.json
    python -m benchmarks.object_store --quick

The server has a process of its own and keeps objects in memory (`benchmarks.s3_server`). Every contestant runs in a
fresh process on one rank; the first save and load there are not counted, since they import the client and connect.
Contestants take turns. Ours writes checksums and verifies them. Clients leave out checksums of their own, for both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.machine import write_json
from benchmarks.s3_server import S3Server
from benchmarks.workloads import MIB

TENSOR_BYTES = 16 * MIB
SMALL_BYTES = 4096
BUCKET = "benchmarks"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "loopback",
    "AWS_SECRET_ACCESS_KEY": "loopback",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
}


@dataclass
class Outcome:
    """What one contestant took.

    Attributes:
        contestant: Who.
        measure: "save" or "load".
        seconds: One number a round.
    """

    contestant: str
    measure: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)


def _serve(connection: Connection) -> None:
    """Run the server until the other end closes."""
    server = S3Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    connection.send(server.url)
    connection.poll(None)
    server.shutdown()


@contextmanager
def running_server() -> Iterator[str]:
    """An S3 server with an empty bucket; gives its address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()  # so that the server sees when this end is closed
    try:
        if not here.poll(60):
            raise TimeoutError("the S3 server did not start")
        yield here.recv()
    finally:
        here.close()
        process.join(10)
        if process.is_alive():
            process.kill()


def make_state(mib: int, *, empty: bool) -> dict[str, Any]:
    """Large tensors, and as many small ones."""
    import torch

    count = max(1, mib * MIB // TENSOR_BYTES)
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {}
    for number in range(count):
        for name, nbytes in (("weight", min(TENSOR_BYTES, mib * MIB)), ("norm", SMALL_BYTES)):
            values = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=generator)
            state[f"layers.{number}.{name}"] = torch.zeros_like(values) if empty else values
    return state


def ours_save(state: dict[str, Any], url: str) -> None:
    import dcp_torch

    dcp_torch.save(state, checkpoint_id=url)


def ours_load(state: dict[str, Any], url: str) -> None:
    import dcp_torch

    dcp_torch.load(state, checkpoint_id=url)


def torch_save(state: dict[str, Any], url: str) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state, storage_writer=FsspecWriter(url), no_dist=True)


def torch_load(state: dict[str, Any], url: str) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, storage_reader=FsspecReader(url), no_dist=True)


Call = Callable[[dict[str, Any], str], None]
CONTESTANTS: dict[str, tuple[Call, Call]] = {"ours": (ours_save, ours_load), "torch-dcp": (torch_save, torch_load)}


def run_once(contestant: str, endpoint: str, mib: int, label: str) -> tuple[float, float]:
    """Seconds of a save and a load, in this process."""
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=endpoint)
    save, load = CONTESTANTS[contestant]
    tiny, state, target = make_state(1, empty=False), make_state(mib, empty=False), make_state(mib, empty=True)
    save(tiny, f"s3://{BUCKET}/{label}/tiny")
    load(tiny, f"s3://{BUCKET}/{label}/tiny")
    started = time.perf_counter()
    save(state, f"s3://{BUCKET}/{label}/step")
    saved = time.perf_counter()
    load(target, f"s3://{BUCKET}/{label}/step")
    loaded = time.perf_counter()
    if any((target[name] != state[name]).any() for name in state):
        raise AssertionError(f"{contestant} loaded something else than it saved")
    return saved - started, loaded - saved


def measure(names: Sequence[str], mib: int, rounds: int, seed: int) -> list[Outcome]:
    """Let contestants take turns, on a new server each round."""
    outcomes = {(name, kind): Outcome(name, kind) for name in names for kind in ("save", "load")}
    order, context = random.Random(seed), multiprocessing.get_context("spawn")
    for number in range(rounds):
        for name in order.sample(list(names), len(names)):
            with running_server() as endpoint, context.Pool(1) as pool:
                seconds = pool.apply(run_once, (name, endpoint, mib, f"{number}-{name}"))
            for kind, taken in zip(("save", "load"), seconds, strict=True):
                outcomes[name, kind].seconds.append(taken)
    return list(outcomes.values())


def table(outcomes: Sequence[Outcome], mib: int) -> str:
    """The figures as Markdown."""
    lines = ["| contestant | measure | median s | MiB/s |", "|---|---|---|---|"]
    lines += [f"| `{o.contestant}` | {o.measure} | {o.median:.2f} | {mib / o.median:.0f} |" for o in outcomes]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.object_store", description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tiny state, one round")
    parser.add_argument("--json", help="where to write all figures")
    options = parser.parse_args(arguments)
    mib, rounds = (2, 1) if options.quick else (options.mib, options.rounds)
    outcomes = measure(tuple(CONTESTANTS), mib, rounds, options.seed)
    sys.stdout.write(table(outcomes, mib) + "\n")
    if options.json:
        write_json(options.json, ("s3fs",), mib=mib, outcomes=[asdict(outcome) for outcome in outcomes])


if __name__ == "__main__":
    main()
