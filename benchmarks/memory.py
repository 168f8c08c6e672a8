"""Peak memory of a save and of a load above the state, in a fresh job for each contestant.

The process has saved and loaded a tiny state before. What plans and tables take is measured apart: it is the peak of
the same calls on the same keys, with one element for each tensor and rank.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.cases import Case, Settings
from benchmarks.cold import tiny_tensors
from benchmarks.contestants import make
from benchmarks.counters import MemoryMeter, MemoryUse
from benchmarks.ranks import Rank, run_job
from benchmarks.trials import attempt, check_loaded
from benchmarks.workloads import TensorSpec


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes above the state, of the rank that has the most.

    Attributes:
        contestant: Which one.
        save: A first save of this structure.
        load: A load into touched targets.
        save_tables: The same save with next to no tensor bytes; measured for ours only.
        load_tables: The same load with next to no tensor bytes; measured for ours only.
    """

    contestant: str
    save: MemoryUse
    load: MemoryUse
    save_tables: MemoryUse | None = None
    load_tables: MemoryUse | None = None


def measure_memory(case: Case, settings: Settings, names: Sequence[str], directory: str) -> list[Footprint]:
    """Measure every contestant once."""
    footprints = []
    for name in names:
        save, load = _measure(case, case.tensors, settings, name, directory)
        if name == "ours":
            tables = _measure(case, shrunk(case.tensors, case.world_size), settings, name, directory)
            footprints.append(Footprint(name, save, load, *tables))
        else:
            footprints.append(Footprint(name, save, load))
    return footprints


def shrunk(tensors: Sequence[TensorSpec], world_size: int) -> tuple[TensorSpec, ...]:
    """The same keys and numbers of dimensions, in as few elements as can be cut along any one dimension."""
    return tuple(replace(spec, shape=(world_size,) * len(spec.shape)) for spec in tensors)


def _measure(
    case: Case, tensors: tuple[TensorSpec, ...], settings: Settings, name: str, directory: str
) -> tuple[MemoryUse, MemoryUse]:
    by_rank = run_job(
        save_and_load, case.world_size, case, tensors, settings, name, directory,
        directory=directory, timeout_seconds=settings.timeout_seconds,
    )  # fmt: skip
    return _most([save for save, _ in by_rank]), _most([load for _, load in by_rank])


def _most(uses: Sequence[MemoryUse]) -> MemoryUse:
    return MemoryUse(max(use.peak for use in uses), max(use.kept for use in uses))


# -- in the ranks -----------------------------------------------------------------------------------------------------


def save_and_load(
    rank: Rank, case: Case, tensors: tuple[TensorSpec, ...], settings: Settings, name: str, directory: str
) -> tuple[MemoryUse, MemoryUse]:
    """What this rank needs for a save and for a load."""
    import torch.distributed as dist

    from benchmarks.states import make_state

    contestant = make(name, settings, rank)
    target = os.path.join(directory, name)
    _rehearse(rank, settings, name, target + "-rehearsal")
    state = make_state(tensors, rank)
    meter = MemoryMeter()
    attempt(name, contestant.save, state, target)
    save = meter.use()
    del state
    state = make_state(tensors, rank, case.of.load_cut)
    dist.barrier()
    meter = MemoryMeter()
    attempt(name, contestant.load, state, target)
    load = meter.use()
    check_loaded(name, state)
    dist.barrier()
    if rank.is_first:
        shutil.rmtree(target)
        shutil.rmtree(target + "-rehearsal")
    return save, load


def _rehearse(rank: Rank, settings: Settings, name: str, directory: str) -> None:
    """A save and a load by another instance, so that imports and thread pools are there before."""
    from benchmarks.states import make_state

    contestant = make(name, settings, rank)
    tiny = make_state(tiny_tensors(), rank)
    attempt(name, contestant.save, tiny, directory)
    attempt(name, contestant.load, tiny, directory)
