"""What the global save plan costs the coordinator, in one process, for thousands of simulated ranks.

    python -m benchmarks.plan_scale --ranks 64 512 2048 8192 --json plan_scale.json
    python -m benchmarks.plan_scale --ranks 64 512 --torch-ranks 64 512 --repeats 3     # beside torch DCP's planner

Each case runs in a process of its own, so that peak memory is the case's. Stages: decode and merge the ranks' tables,
plan (replica sets, coverage, balance, layout), write lists, `.metadata`; then for one rank a ranged, checked open of
all names, and its load plan under another layout. Where shards are replicated, the readers of a load that shares them:
once where the ranks of a replica set want the same (`read_sources`), once where every rank has one buffer of its own
besides, so that no two lists are equal (`read_sources_distinct`).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.counters import resident_peak
from benchmarks.machine import write_json
from benchmarks.workloads import MIB
from dcp_core.planning.local_table import LocalTable, encode_table
from dcp_core.state_path import encode_path, key_path

TENSORS = 300
REPLICAS = 8
CUTS = ("tall", "wide", "cube")
SAVE_ID = "0123456789abcdef" * 2


@dataclass
class Case:
    """One measured case: what it was, seconds a stage, and sizes."""

    ranks: int
    cut: str
    replicas: int
    planner: str
    seconds: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        began = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began


def grid_of(cut: str, shards: int) -> tuple[int, int, int]:
    """Into how many pieces each dimension is cut."""
    if cut == "tall":
        return shards, 1, 1
    if cut == "wide":
        return 1, shards, 1
    bits = shards.bit_length() - 1
    first, second = (bits + 2) // 3, (bits + 1) // 3
    return 1 << first, 1 << second, 1 << (bits - first - second)


def shape_of(cut: str, tensor: int) -> tuple[int, int, int]:
    """Global shape of a tensor: sizes vary from tensor to tensor, all cuts are even."""
    factor = 1 + tensor % 5
    if cut == "tall":
        return 8192 * 4 * factor, 8192, 1
    if cut == "wide":
        return 8192, 8192 * 4 * factor, 1
    return 32 * 8 * factor, 32 * 32, 32 * 32


def rank_table(cut: str, ranks: int, replicas: int, rank: int) -> LocalTable:
    """What one rank holds: its shard of every tensor."""
    shards = ranks // replicas
    grid = np.array(grid_of(cut, shards))
    shapes = np.array([shape_of(cut, tensor) for tensor in range(TENSORS)], dtype=np.int64)
    cell = np.array(np.unravel_index(rank // replicas, grid))
    sizes = shapes // grid
    paths = tuple(encode_path(key_path("model", f"layers.{tensor:03d}.weight")) for tensor in range(TENSORS))
    zeros, dtype, ndim = (np.full(TENSORS, value, dtype=np.uint8) for value in (0, 11, 3))
    return LocalTable(
        paths, zeros, dtype, ndim, zeros, np.ones(TENSORS, dtype=np.int32),
        np.arange(TENSORS, dtype=np.int32), shapes, sizes * cell, sizes, np.zeros((TENSORS, 2), dtype=np.uint64),
    )  # fmt: skip


def measure_ours(ranks: int, cut: str, replicas: int) -> Case:
    """Run all stages of ours."""
    from dcp_core.formats.metadata_file import open_metadata
    from dcp_core.metadata import Metadata
    from dcp_core.planning.global_plan import PlanOptions, plan_globally
    from dcp_core.planning.global_table import merge_tables
    from dcp_core.planning.write_list import encode_answers

    case = Case(ranks, cut, replicas, "ours")
    payloads = [encode_table(rank_table(cut, ranks, replicas, rank)).payload for rank in range(ranks)]
    case.sizes["plan_bytes_a_rank"] = statistics.fmean(len(payload) for payload in payloads)
    before = resident_peak()
    with case.timed("decode"):
        table = merge_tables(payloads)
    with case.timed("plan"):
        plan = plan_globally(table, PlanOptions())
    with case.timed("write_lists"):
        answers = encode_answers(plan)
    case.seconds["total_plan"] = sum(case.seconds.values())
    case.sizes["peak_mib"] = resident_peak() / MIB
    case.sizes["peak_above_tables_mib"] = case.sizes["peak_mib"] - before / MIB
    case.sizes["answer_bytes_a_rank"] = statistics.fmean(map(len, answers))
    written = np.bincount(plan.position, weights=plan.nbytes, minlength=ranks)
    case.sizes["balance"] = float(written.max() / written.mean())
    with case.timed("metadata"):
        body = body_of(plan)
    blob = metadata_of(plan, body, ranks)
    case.sizes["metadata_mb"] = len(blob) / 1e6
    _measure_load(case, blob, open_metadata, Metadata)
    if replicas > 1:
        _measure_read_sources(case)
    return case


def body_of(plan: Any) -> Any:
    """The part of a plan's `.metadata` that is the same for every save."""
    from dcp_core.formats.metadata_file import MetadataColumns, encode_body
    from dcp_core.metadata import Nesting
    from dcp_core.planning.global_plan import describe_objects, describe_tensors, number_files

    files = number_files(plan)
    tensors, chunks = describe_tensors(plan, files)
    return encode_body(MetadataColumns(tensors, chunks, describe_objects(plan, files), Nesting()))


def metadata_of(plan: Any, body: Any, ranks: int) -> bytes:
    """The `.metadata` of a plan, as if its files had been written."""
    from dcp_core.formats.metadata_file import assemble
    from dcp_core.metadata import FileColumns, SaveRecord, WriterRecord

    parts, ends = plan.layout.parts, np.append(0, np.cumsum(plan.nbytes[plan.layout.order]))
    count = int(parts.sum())
    file_rank = np.repeat(np.arange(ranks, dtype=np.int32), parts)
    part = (np.arange(count) - plan.layout.first_file[file_rank]).astype(np.int32)
    start = np.full(count, 65536, dtype=np.int64)
    digests = np.random.default_rng(0).integers(1, 1 << 63, (count, 2), dtype=np.uint64)
    columns = FileColumns(
        file_rank, part, np.zeros(count, np.uint8), start + np.diff(ends[plan.layout.starts]),
        start, np.full(count, 128, np.int64), np.full(count, 4096, np.int64), digests,
    )  # fmt: skip
    return assemble(body, columns, SaveRecord(SAVE_ID, ""), WriterRecord("bench", "none", "0", ranks))


def _measure_read_sources(case: Case) -> None:
    """The coordinator's part of a load in which each replicated shard is read once."""
    from dcp_core.planning.read_sources import SharingOptions, assign_sources
    from dcp_core.planning.shared_offers import Offer, encode_offer

    for stage, is_distinct in (("read_sources", False), ("read_sources_distinct", True)):
        offers = [
            encode_offer(Offer(rank, f"host{rank // 8}", buffers_of(case, rank, is_distinct), 0, groups_of(case, rank)))
            for rank in range(case.ranks)
        ]
        before = resident_peak()
        with case.timed(stage):
            sources = assign_sources(offers, SharingOptions(6 * MIB))
        case.sizes[f"{stage}_offer_bytes"] = max(map(len, offers))
        case.sizes[f"{stage}_answer_bytes"] = max(map(len, sources.answers))
        case.sizes[f"{stage}_mib"] = (resident_peak() - before) / MIB


def buffers_of(case: Case, rank: int, is_distinct: bool) -> Any:
    """What one rank would share: its shard of every tensor."""
    import xxhash

    from dcp_core.planning.buffer_parts import slabs_of
    from dcp_core.planning.shared_offers import Buffers

    table = rank_table(case.cut, case.ranks, case.replicas, rank)
    places = np.concatenate([np.arange(TENSORS)[:, None], table.offsets, table.sizes], axis=1)
    if is_distinct:
        places[-1, 0] += 1 + rank
    digests = b"".join(xxhash.xxh3_128_digest(row.tobytes()) for row in places)
    slabs, _ = slabs_of(table.sizes, np.full(TENSORS, 2))
    return Buffers(
        np.arange(TENSORS), np.frombuffer(digests, np.uint64).reshape(TENSORS, 2), table.sizes.prod(axis=1) * 2, slabs,
        np.zeros(TENSORS, np.uint8), ("gloo",),
    )  # fmt: skip


def groups_of(case: Case, rank: int) -> Any:
    """The groups that exist on one rank: of its replicas, and of its shards."""
    from dcp_core.planning.rank_groups import GroupKey
    from dcp_core.planning.shared_offers import HeldGroup

    first, place = rank // case.replicas * case.replicas, rank % case.replicas
    replicas, shards = range(first, first + case.replicas), range(place, case.ranks, case.replicas)
    return HeldGroup(GroupKey(tuple(replicas), "gloo"), "replicas"), HeldGroup(
        GroupKey(tuple(shards), "gloo"), "shards"
    )


def _measure_load(case: Case, blob: bytes, open_metadata: Callable[..., Any], metadata_type: type[Any]) -> None:
    """One rank of a job of half the size, cut the other way, opens the metadata and plans its load."""
    from dcp_core.box import Box
    from dcp_core.dtype import BY_NAME
    from dcp_core.planning.load_plan import Wanted
    from dcp_core.planning.regions import intersect_chunks

    reads = [0]

    def read(offset: int, nbytes: int) -> bytes:
        reads[0] += nbytes
        return blob[offset : offset + nbytes]

    with case.timed("open_one_rank"):
        metadata = metadata_type(open_metadata(read, len(blob)))
        stored = [metadata.source.tensors(name)[0] for name in metadata.source.names()]
    case.sizes["read_mb"] = reads[0] / 1e6
    other = {"tall": "wide", "wide": "tall", "cube": "tall"}[case.cut]
    with case.timed("load_plan_one_rank"):
        wanted = []
        for position, tensor in enumerate(stored):
            pieces = 64 if other == "tall" else min(64, tensor.shape[1])
            axis = 0 if other == "tall" else 1
            sizes = list(tensor.shape)
            sizes[axis] //= pieces
            offsets = [0, 0, 0]
            offsets[axis] = sizes[axis] * (pieces // 2)
            box = Box(tuple(offsets), tuple(sizes))
            wanted.append(Wanted(tensor.name, position, 0, box, BY_NAME["bfloat16"], tensor))
        plan = intersect_chunks(wanted, lambda chunks: np.zeros(len(chunks), dtype=bool))
    case.sizes["regions_one_rank"] = len(plan.wanted)


def measure_torch(ranks: int, cut: str, replicas: int) -> Case:
    """Run torch DCP's planner on the same shards, as its coordinator does."""
    import pickle

    import torch
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.default_planner import (
        DefaultSavePlanner,
        _validate_global_plan,
        create_default_global_save_plan,
    )
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    case = Case(ranks, cut, replicas, "torch")
    del DefaultSavePlanner

    def plan_of(rank: int) -> SavePlan:
        table = rank_table(cut, ranks, replicas, rank)
        items = []
        for tensor in range(TENSORS):
            offsets, sizes = torch.Size(table.offsets[tensor].tolist()), torch.Size(table.sizes[tensor].tolist())
            write = TensorWriteData(
                ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=torch.bfloat16),
                torch.Size(table.shape[tensor].tolist()),
            )  # fmt: skip
            index = MetadataIndex(f"model.layers.{tensor:03d}.weight", offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=write))
        return SavePlan(items)

    payloads = [pickle.dumps(plan_of(rank)) for rank in range(ranks)]
    with case.timed("decode"):
        plans = [pickle.loads(payload) for payload in payloads]  # the peer's own transport
    with case.timed("plan"):
        plans = dedup_save_plans(plans)
        plans, metadata = create_default_global_save_plan(plans)
        _validate_global_plan(plans, metadata)
    case.seconds["total_plan"] = sum(case.seconds.values())
    case.sizes["peak_mib"] = resident_peak() / MIB
    with case.timed("metadata"):
        case.sizes["metadata_mb"] = len(pickle.dumps(metadata)) / 1e6
    return case


def _run(pipe: Any, measure: Callable[..., Case], *args: Any) -> None:
    pipe.send(asdict(measure(*args)))


def run_apart(measure: Callable[..., Case], *args: Any) -> dict[str, Any]:
    """Measure in a fresh process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, measure, *args))
    process.start()
    theirs.close()
    result: dict[str, Any] = ours.recv()
    process.join()
    return result


def median_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result whose every figure is the median of several."""
    middle = dict(results[0])
    for part in ("seconds", "sizes"):
        middle[part] = {name: statistics.median(result[part][name] for result in results) for name in results[0][part]}
    return middle


def main() -> None:
    """Measure the cases that were asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 2048, 8192])
    parser.add_argument("--cuts", nargs="+", default=list(CUTS), choices=CUTS)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, REPLICAS])
    parser.add_argument("--torch-ranks", type=int, nargs="*", default=[], help="also run torch DCP's planner on these")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, taken in turn; medians are shown")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    results = []
    for ranks, cut, replicas in itertools.product(options.ranks, options.cuts, options.replicas):
        measures = [measure_ours] + ([measure_torch] if ranks in options.torch_ranks else [])
        runs = [[run_apart(measure, ranks, cut, replicas) for measure in measures] for _ in range(options.repeats)]
        medians = [median_of([run[peer] for run in runs]) for peer in range(len(measures))]
        results.extend(medians)
        for result in medians:
            print(_line(result), flush=True)
        if len(medians) > 1:
            ours, theirs = (result["seconds"]["total_plan"] for result in medians)
            print(f"      ratio of total_plan, torch / ours: {theirs / ours:.1f}", flush=True)
    if options.json:
        write_json(options.json, cases=results)


def _line(result: dict[str, Any]) -> str:
    seconds = "  ".join(f"{stage} {value:.2f} s" for stage, value in result["seconds"].items())
    sizes = "  ".join(f"{name} {value:.5g}" for name, value in result["sizes"].items())
    return f"{result['planner']:5} R={result['ranks']:<5} {result['cut']:4} x{result['replicas']}  {seconds}  {sizes}"


if __name__ == "__main__":
    main()
