"""One process, MindSpore: save, load and `async_save` beside `save_checkpoint`, `load_checkpoint` and a plain copy.

    python -m benchmarks.mindspore_files --json mindspore.json    # 1 GiB in memory and on disk, in about two minutes
    python -m benchmarks.mindspore_files --quick                  # does it run? a tiny state, one round

All take turns, in a new random order in every round, on the same parameters and the same kind of storage; each save
goes to a new path, each load to a net whose memory has been touched. Without MindSpore it says so and measures nothing.
docs/reference/benchmarks.md says how to read the table.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.budgets import JUDGED_FROM_MIB, Verdict
from benchmarks.cases import PLACES
from benchmarks.command import Preset, interruptible, some_of
from benchmarks.counters import give_back_free_memory
from benchmarks.findings import spelled
from benchmarks.machine import MachineLoad, cpu_times, write_json
from benchmarks.places import Place, missing_room, scratch, sync_tree
from benchmarks.trials import FIRST
from benchmarks.workloads import MIB, total_nbytes, transformer

if TYPE_CHECKING:
    from benchmarks.mindspore_contest import Contest, Operation

QUICK_MIB = 4
"""The size of the state with `--quick`."""

_ABSENT = "mindspore is not installed here, so nothing was measured; `nox -s tests_mindspore` says which one is needed"
_FASTER = (("ours", "mindspore"), ("load-ours", "load-mindspore"))
_AT_LEAST = 2.0
_COPY_AT_MOST = 1.3


@dataclass
class Clocked:
    """What one operation took; the first round, which pays for imports and fresh memory, is kept apart.

    Attributes:
        name: Of the operation.
        about: What it does.
        seconds: On the clock, one a round.
        processor_seconds: Of all threads of this process.
        first_seconds: On the clock, of the first round.
    """

    name: str
    about: str
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    first_seconds: float = 0.0

    @property
    def median(self) -> float:
        """Of the seconds."""
        return statistics.median(self.seconds)

    @property
    def row(self) -> str:
        """A row of the table."""
        busy = statistics.median(self.processor_seconds)
        spread = f"{min(self.seconds):.3f} to {max(self.seconds):.3f}"
        return f"| `{self.name}` | {self.median:.3f} | {spread} | {busy:.3f} | {self.about} |"


def measure(contest: Contest, directory: str, rounds: int, seed: int) -> list[Clocked]:
    """Let all operations take turns; after the first load of each every bit is compared."""
    operations = contest.operations()
    clocked = {name: Clocked(name, operation.about) for name, operation in operations.items()}
    chance = random.Random(seed)
    for number in range(FIRST, rounds):
        for name in chance.sample(list(operations), len(operations)):
            wall, busy = _run(contest, operations[name], os.path.join(directory, f"{name}-{number}"), number)
            if number == FIRST:
                clocked[name].first_seconds = wall
            else:
                clocked[name].seconds.append(wall)
                clocked[name].processor_seconds.append(busy)
    return list(clocked.values())


def _run(contest: Contest, operation: Operation, path: str, number: int) -> tuple[float, float]:
    """Time one operation; what it needs is made before, and what it leaves is removed after."""
    import dcp_mindspore

    give_back_free_memory()
    target: Any = contest.fresh_net() if operation.fills else path
    if not operation.fills:
        os.mkdir(path)
    busy, began = time.process_time(), time.perf_counter()
    operation.run(target)
    wall, busy = time.perf_counter() - began, time.process_time() - busy
    dcp_mindspore.wait_all()
    if operation.fills and number == FIRST and (wrong := contest.first_difference(target)) is not None:
        raise ValueError(f"{operation.about}: other bits than were saved in {wrong}")
    if not operation.fills:
        shutil.rmtree(path)
        sync_tree(os.path.dirname(path))
    return wall, busy


def judge(found: Sequence[Clocked], mib: int) -> Iterator[Verdict]:
    """What is demanded, and what was found; small states show fixed costs, of which nothing is demanded."""
    if mib < JUDGED_FROM_MIB:
        return
    seconds = {each.name: each.median for each in found}
    for ours, theirs in _FASTER:
        ratio = seconds[theirs] / seconds[ours]
        yield Verdict(f"{ours} at least {_AT_LEAST:g}x as fast as {theirs}", ratio, "x", ratio >= _AT_LEAST)
    ratio = seconds["async"] / seconds["copy"]
    yield Verdict(f"async takes at most {_COPY_AT_MOST:g}x copy", ratio, "x", ratio <= _COPY_AT_MOST)


def _measure_place(place: Place, options: argparse.Namespace) -> dict[str, Any]:
    """Measure on one kind of storage, and print what was found."""
    from benchmarks.mindspore_contest import Contest

    contest = Contest(transformer(options.mib), place.directory)
    contest.save_sources()
    gc.freeze()  # what was imported is half a million objects, which no collection from here on has to look at
    before, busy, began = os.getloadavg()[0], cpu_times(), time.perf_counter()
    own = sum(os.times()[:4])
    found = measure(contest, place.directory, options.repeats, options.seed)
    passed, spent = time.perf_counter() - began, cpu_times() - busy
    others = max(0.0, spent.busy - (sum(os.times()[:4]) - own)) / passed
    load = MachineLoad(before, os.getloadavg()[0], others, spent.stolen / passed)
    verdicts = list(judge(found, options.mib))
    size = f"{len(contest.specs):,} parameters of {total_nbytes(contest.specs) / MIB:,.0f} MiB"
    print(f"{place.kind} ({place.label}); {size}; medians of {options.repeats}\n")
    print("| | seconds | least to most | processor seconds | |\n|---|---|---|---|---|")
    print("\n".join([*(each.row for each in found), "", *(f"  {spelled(each)}" for each in verdicts)]))
    print(f"  machine: {load}\n", flush=True)
    return {
        "place": place.kind, "storage": place.label, "mib": options.mib, "machine_load": asdict(load),
        "operations": [asdict(each) for each in found], "budgets": [asdict(each) for each in verdicts],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; give the exit status: 0, or 2 if nothing could start."""
    options = _parser().parse_args(arguments)
    if importlib.util.find_spec("mindspore") is None:
        print(_ABSENT)
        return 0
    parents = {"memory": options.memory_dir, "disk": options.disk_dir}
    nbytes = total_nbytes(transformer(options.mib))
    for kind in options.places:
        if reason := missing_room(parents[kind], 3 * nbytes + nbytes // 16, 4 * nbytes):
            print(f"{kind}: {reason}; choose another directory or a smaller --mib", file=sys.stderr)
            return 2
    os.environ.setdefault("GLOG_v", "3")  # MindSpore's C++ code says what is routine, otherwise
    import mindspore

    mindspore.set_device("CPU")
    results = []
    with interruptible():
        for kind in options.places:
            with scratch(kind, parents[kind]) as place:
                results.append(_measure_place(place, options))
    if options.json:
        write_json(options.json, ("mindspore",), repeats=options.repeats, seed=options.seed, results=results)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mindspore_files", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default: 1024)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds after the first one (default: 5)")
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=PLACES, help=some_of(PLACES))
    parser.add_argument("--memory-dir", default="/dev/shm", help="a directory in memory (default: /dev/shm)")
    parser.add_argument("--disk-dir", default=tempfile.gettempdir(), help="a directory on disk (default: the system's)")
    parser.add_argument("--seed", type=int, default=0, help="of the order within rounds")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    quick = {"mib": QUICK_MIB, "repeats": 1}
    parser.add_argument(
        "--quick", action=Preset, nargs=0, const=quick, help="a tiny state, one round: shows that it runs"
    )
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
