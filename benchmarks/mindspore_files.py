"""One process, MindSpore: save, load and `async_save` beside `save_checkpoint`, `load_checkpoint` and a plain copy.

`load_checkpoint` of a safetensors file maps it and reads nothing, and `load_param_into_net` puts the mapping in the
place of a parameter's memory. So there are three rows for it: that alone; that and one look at every cache line, as the
first step of training takes; and its values copied into the parameters that are there, which is what we do.

    python -m benchmarks.mindspore_files --mib 1024 --directory /dev/shm
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import nn

import dcp_mindspore

_TENSORS = 16
_ROUNDS = 5


class _Net(nn.Cell):  # type: ignore[misc]  # MindSpore carries no types
    """Parameters of given values, in touched memory."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        for name, value in values.items():
            self.insert_param_to_cell(name, mindspore.Parameter(mindspore.Tensor(value), name=name))


class _Contest:
    """The operations that are timed, on one directory."""

    def __init__(self, mib: int, directory: str) -> None:
        shape = (mib * (1 << 18) // _TENSORS // 1024, 1024)
        rng = np.random.default_rng(0)
        self.net = _Net({f"w{number}": rng.random(shape, np.float32) for number in range(_TENSORS)})
        self.target = _Net({f"w{number}": np.ones(shape, np.float32) for number in range(_TENSORS)})
        self.mapped = _Net({f"w{number}": np.ones(shape, np.float32) for number in range(_TENSORS)})
        self.copies = {name: np.ones(shape, np.float32) for name in self.net.parameters_dict()}
        self.directory = directory
        self.peer = f"{directory}/peer.safetensors"
        self.number = 0

    def operations(self) -> dict[str, Callable[[], object]]:
        """By what they are called; in the order in which they run, over and over."""
        return {
            "save: mindspore": self._peer_save,
            "save: ours, durable=False": lambda: self._save(durable=False),
            "save: ours": lambda: self._save(durable=True),
            "load: mindspore, mapped": self._map,
            "load: mindspore, mapped and looked at": self._map_and_look,
            "load: mindspore, in place": self._peer_load_in_place,
            "load: ours": self._load,
            "copy: numpy": self._copy,
            "async_save: ours, the call": self._async_save,
        }

    def _peer_save(self) -> None:
        rows = [{"name": name, "data": value} for name, value in self.net.parameters_dict().items()]
        mindspore.save_checkpoint(rows, self.peer, format="safetensors")

    def _save(self, *, durable: bool) -> None:
        dcp_mindspore.save(self.net.parameters_dict(), checkpoint_id=f"{self.directory}/ours", durable=durable)

    def _map(self) -> None:
        mindspore.load_param_into_net(self.mapped, mindspore.load_checkpoint(self.peer, format="safetensors"))

    def _map_and_look(self) -> None:
        self._map()
        for value in self.mapped.get_parameters():
            value.asnumpy().reshape(-1)[::16].max()

    def _peer_load_in_place(self) -> None:
        target = self.target.parameters_dict()
        for name, value in mindspore.load_checkpoint(self.peer, format="safetensors").items():
            np.copyto(target[name].asnumpy(), value.asnumpy())

    def _load(self) -> None:
        dcp_mindspore.load(self.target.parameters_dict(), checkpoint_id=f"{self.directory}/ours")

    def _copy(self) -> None:
        for name, value in self.net.parameters_dict().items():
            np.copyto(self.copies[name], value.asnumpy())

    def _async_save(self) -> None:
        dcp_mindspore.async_save(self.net.parameters_dict(), checkpoint_id=f"{self.directory}/background")

    def settle(self) -> None:
        """What an operation left to do, outside of its time."""
        dcp_mindspore.wait_all()


def measure(mib: int, rounds: int, directory: str) -> dict[str, tuple[float, float]]:
    """Time all operations in turn; the first round is not counted.

    Returns:
        For each the medians of its seconds, and of its seconds of processor time in this process.
    """
    place = tempfile.mkdtemp(prefix="mindspore-", dir=directory)
    try:
        contest = _Contest(mib, place)
        found: dict[str, list[tuple[float, float]]] = {}
        for number in range(rounds + 1):
            for name, operation in contest.operations().items():
                began = time.perf_counter(), time.process_time()
                operation()
                ended = time.perf_counter(), time.process_time()
                contest.settle()
                if number:
                    found.setdefault(name, []).append((ended[0] - began[0], ended[1] - began[1]))
        return {
            name: (statistics.median(wall for wall, _ in times), statistics.median(busy for _, busy in times))
            for name, times in found.items()
        }
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="how often each is timed")
    parser.add_argument("--directory", default=None, help="where to write; by default with temporary files")
    options = parser.parse_args(arguments)
    mindspore.set_device("CPU")
    print(f"{options.mib} MiB in {_TENSORS} tensors; medians of {options.rounds}\n")
    print("| operation | seconds | processor seconds |\n|---|---|---|")
    for name, (wall, busy) in measure(options.mib, options.rounds, options.directory).items():
        print(f"| {name} | {wall:.3f} | {busy:.3f} |")


if __name__ == "__main__":
    main()
