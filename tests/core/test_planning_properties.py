"""The global save plan and the load plan, against marking every element of small tensors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.box import Box, contains, intersect
from dcp_core.dtype import BY_NAME
from dcp_core.errors import (
    CoordinationError,
    CoverageError,
    DTypeMismatchError,
    OverlapError,
    PlanningError,
    ShapeMismatchError,
)
from dcp_core.formats.metadata_file import MetadataColumns, encode_body
from dcp_core.metadata import EVERY_RANK, ChunkColumns, Nesting, StoredTensor, box_of
from dcp_core.planning import balance
from dcp_core.planning.balance import TINY_NBYTES
from dcp_core.planning.global_plan import (
    GlobalPlan,
    PlanOptions,
    describe_objects,
    describe_tensors,
    number_files,
    plan_globally,
)
from dcp_core.planning.global_table import merge_tables
from dcp_core.planning.items import ItemType, ReadItem
from dcp_core.planning.load_plan import LoadPlan, Wanted
from dcp_core.planning.local_table import TENSOR, LocalTable, decode_table, encode_table
from dcp_core.planning.matching import find_entries
from dcp_core.planning.plans import ChunkSpan, SavePlan
from dcp_core.planning.regions import intersect_chunks
from dcp_core.planning.standard_save import ReceivedPlans, settle_plans
from dcp_core.planning.write_items import name_chunks
from dcp_core.planning.write_list import decode_answer, encode_answers
from dcp_core.state_path import PerRank, encode_path, key_path, plain_name
from dcp_core.testing.numpy_ranks import even_boxes
from tests.core.layouts import at, deal, random_cut, random_shape
from tests.core.simulated_saves import (
    Held,
    Ids,
    Keys,
    Simulation,
    World,
    add_sharded,
    describe,
    is_equal,
    local_plans,
    make_world,
    path_of,
    simulate,
)

SEEDS = st.integers(0, 2**32)
MEBI = 1 << 20


@st.composite
def worlds(draw: st.DrawFn, *, differing: bool = True, least_entries: int = 0) -> World:
    ranks, entries = draw(st.integers(1, 12)), draw(st.integers(least_entries, 12))
    return make_world(Random(draw(SEEDS)), ranks, entries, differing=differing)


# -- what is written, element by element ------------------------------------------------------------------------------


def check_tensors(sim: Simulation, *, every_holder: bool = False) -> None:
    """The place that the metadata names for an element holds that element, and each is stored as often as it should."""
    written = sim.written()
    stored = {(tensor.path, tensor.rank): tensor for tensor in sim.stored_tensors()}
    expected = dict(_expected_tensors(sim.world))
    assert set(stored) == set(expected)
    for index, tensor in stored.items():
        content, holders = expected[index]
        assert (tensor.shape, tensor.dtype) == (holders[0].shape, holders[0].dtype)
        counts = np.zeros(tensor.shape, dtype=np.int64)
        for row, place in enumerate(sim.places(tensor.chunks)):
            box = box_of(tensor.chunks, row)
            np.testing.assert_array_equal(written[place], content[at(box)])
            counts[at(box)] += 1
        if every_holder and index[1] == EVERY_RANK:
            sharing = [_copies(list(held.values())) for held in _sharing_memory(sim.world, holders)]
            assert any(np.array_equal(counts, copies) for copies in sharing)
        else:
            assert (counts == 1).all()


def _expected_tensors(world: World) -> Iterator[tuple[tuple[Any, int], tuple[Ids, list[Held]]]]:
    """For each (path, rank) that should be stored: its elements and its holders."""
    for keys in world.paths:
        held = world.held(keys)
        if not held:
            continue
        if keys in world.content:
            yield (path_of(keys), EVERY_RANK), (world.content[keys], list(held.values()))
            continue
        parts = {rank: value.ids[0] if value.ids else np.zeros(value.shape, np.int64) for rank, value in held.items()}
        first = next(iter(parts.values()))
        if all(np.array_equal(ids, first) for ids in parts.values()):
            yield (path_of(keys), EVERY_RANK), (first, list(held.values()))
        else:
            yield from (((path_of(keys), rank), (ids, [held[rank]])) for rank, ids in parts.items())


def _sharing_memory(world: World, holders: Sequence[Held]) -> list[dict[int, Held]]:
    """The tensors, this one included, that are the same memory as this one somewhere."""
    memory = {held.storage for held in holders}
    tensors = [world.held(keys) for keys in world.paths]
    return [held for held in tensors if memory & {value.storage for value in held.values()}]


def _copies(holders: Sequence[Held]) -> npt.NDArray[np.int64]:
    counts = np.zeros(holders[0].shape, dtype=np.int64)
    for held in holders:
        for box in held.boxes:
            counts[at(box)] += 1
    return counts


def check_objects(sim: Simulation) -> None:
    """The place that the metadata names for an object is written by a rank that holds that value."""
    files = sim.metadata.source.files
    stored = {(entry.path, entry.rank): entry for entry in sim.stored_objects()}
    expected = dict(_expected_objects(sim.world))
    assert set(stored) == set(expected)
    places = set()
    for index, entry in stored.items():
        rank, keys = expected[index]
        assert int(files.rank[entry.file]) == rank
        item = sim.plans[rank].objects()[entry.ordinal]
        assert sim.planners[rank].state.leaves[item.leaf].path == path_of(keys)
        assert entry.per_rank == isinstance(sim.world.ranks[rank][keys], PerRank)
        places.add((entry.file, entry.ordinal))
    assert len(places) == len(stored) == sum(len(plan.objects()) for plan in sim.plans)


def _expected_objects(world: World) -> Iterator[tuple[tuple[Any, int], tuple[int, Keys]]]:
    """For each (path, rank) that should be stored: who writes it."""
    for keys in world.paths:
        holders = world.holders(keys)
        if world.held(keys):
            continue
        values = [world.ranks[rank][keys] for rank in holders]
        alone = isinstance(values[0], PerRank) or not all(is_equal(values[0], value) for value in values)
        if alone:
            yield from (((path_of(keys), rank), (rank, keys)) for rank in holders)
        else:
            yield (path_of(keys), EVERY_RANK), (min(holders), keys)


@settings(max_examples=300)
@given(worlds())
def test_every_element_is_stored_once_by_a_rank_that_holds_it(world: World) -> None:
    sim = simulate(world)
    check_tensors(sim)
    check_objects(sim)


@given(worlds(), st.sampled_from([8, 64]))
def test_where_replica_sets_are_cut_into_pieces_every_element_is_stored_once(world: World, least: int) -> None:
    """Pieces of a few bytes instead of many kilobytes, so that small tensors are cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "TINY_NBYTES", least)
        sim = simulate(world)
        check_tensors(sim)
        check_objects(sim)


@given(worlds())
def test_without_dedup_every_holder_stores_what_it_holds(world: World) -> None:
    check_tensors(simulate(world, options=PlanOptions(remove_redundancy=False)), every_holder=True)


@given(worlds(), st.booleans())
def test_files_hold_nothing_that_the_metadata_does_not_name(world: World, remove_redundancy: bool) -> None:
    sim = simulate(world, options=PlanOptions(remove_redundancy=remove_redundancy))
    named = {place for tensor in sim.stored_tensors() for place in sim.places(tensor.chunks)}
    assert named == set(sim.written())


@given(worlds())
def test_names_that_share_memory_on_every_rank_are_stored_once(world: World) -> None:
    sim = simulate(world)
    stored = {tensor.path: tensor for tensor in sim.stored_tensors() if tensor.rank == EVERY_RANK}
    tensors = [keys for keys in world.paths if world.held(keys) and path_of(keys) in stored]
    memory = {keys: _memory_of(world.held(keys)) for keys in tensors}
    for one, other in combinations(tensors, 2):
        places = [_places(stored[path_of(keys)]) for keys in (one, other)]
        if not _ids_of(world.held(one)) & _ids_of(world.held(other)):
            assert not places[0] & places[1]
        elif memory[one] == memory[other] and len(_sharing_memory(world, list(world.held(one).values()))) == 2:
            assert places[0] == places[1]


def _ids_of(held: dict[int, Held]) -> set[int]:
    return {number for value in held.values() for ids in value.ids for number in ids.reshape(-1).tolist()}


def _memory_of(held: dict[int, Held]) -> dict[int, Any]:
    """By rank: which memory, and which boxes of it; ranks without boxes left out."""
    return {rank: (value.storage, value.boxes) for rank, value in held.items() if value.boxes}


def _places(tensor: StoredTensor) -> set[tuple[int, int]]:
    return set(zip(tensor.chunks.file.tolist(), tensor.chunks.byte_offset.tolist(), strict=True))


@given(worlds(), st.booleans())
def test_chunks_lie_back_to_back_in_name_order_with_the_unaligned_ones_last(world: World, dedup: bool) -> None:
    for spans in simulate(world, options=PlanOptions(remove_redundancy=dedup)).spans():
        end = 0
        for span in spans:
            assert span.byte_offset == end
            assert span.nbytes == int(np.prod(span.item.sizes, dtype=np.int64)) * span.dtype.itemsize > 0
            end += span.nbytes
        aligned = [span.nbytes % 8 == 0 for span in spans]
        assert aligned == sorted(aligned, reverse=True)
        for part in (True, False):
            order = [_walk_key(span) for span, is_aligned in zip(spans, aligned, strict=True) if is_aligned is part]
            assert order == sorted(order)


def _walk_key(span: ChunkSpan) -> tuple[bytes, tuple[int, ...]]:
    return span.item.index.fqn.encode(), span.item.index.offset or ()


@given(worlds())
def test_keys_in_a_file_are_unique_and_plain_where_a_tensor_has_one_chunk_there(world: World) -> None:
    for spans in simulate(world).spans():
        keys = [span.key for span in spans]
        assert len(set(keys)) == len(keys)
        assert "__metadata__" not in keys
        names = [span.item.index.fqn for span in spans]
        for key, name, span in zip(keys, names, spans, strict=True):
            offsets = ",".join(map(str, span.item.index.offset or ()))
            assert key == (name if names.count(name) == 1 else f"{name}@{offsets}")


@given(worlds())
def test_loads_find_every_leaf_by_its_typed_path_whatever_its_name(world: World) -> None:
    metadata = simulate(world).metadata
    names = metadata.source.names()
    assert len(set(names)) == len(names)
    assert list(names) == sorted(names, key=str.encode)
    for keys in world.paths:
        tensors, objects = find_entries(metadata, path_of(keys))
        assert {*(tensor.path for tensor in tensors), *(entry.path for entry in objects)} == {path_of(keys)}
        assert bool(tensors) == bool(world.held(keys))


@given(worlds())
def test_of_paths_that_share_a_printed_name_the_shallowest_keeps_it(world: World) -> None:
    metadata = simulate(world).metadata
    printed: dict[str, list[Keys]] = {}
    for keys in world.paths:
        printed.setdefault(plain_name(path_of(keys)), []).append(keys)
    for name, sharing in printed.items():
        tensors, objects = metadata.source.tensors(name), metadata.source.objects(name)
        if len(sharing) > 1 and (tensors or objects):
            keeper = min(sharing, key=lambda keys: (len(keys), encode_path(path_of(keys))))
            assert {*(tensor.path for tensor in tensors), *(entry.path for entry in objects)} == {path_of(keeper)}


@given(worlds())
def test_a_table_survives_travelling(world: World) -> None:
    for plan in local_plans(world)[1]:
        table = plan.table
        again = decode_table(encode_table(table).payload)
        assert again.paths == table.paths
        for name in ("kind", "dtype", "ndim", "flags", "boxes", "alias", "shape", "offsets", "sizes", "values"):
            np.testing.assert_array_equal(getattr(again, name), getattr(table, name))
            assert getattr(again, name).dtype == getattr(table, name).dtype


# -- who writes -------------------------------------------------------------------------------------------------------


@given(worlds())
def test_with_save_to_minimum_rank_the_lowest_holder_writes_each_box_whole(world: World) -> None:
    sim = simulate(world, options=PlanOptions(save_to_minimum_rank=True))
    check_tensors(sim)
    rank_of = sim.metadata.source.files.rank
    for tensor in sim.stored_tensors():
        if tensor.rank != EVERY_RANK:
            continue
        held = world.held(tuple(key.value for key in tensor.path))
        for row in range(len(tensor.chunks)):
            box = box_of(tensor.chunks, row)
            assert int(rank_of[tensor.chunks.file[row]]) in _lowest_holders(world, held, box)


def _lowest_holders(world: World, held: dict[int, Held], box: Box) -> set[int]:
    """The lowest rank that holds a box; where several names share the memory, that of each of them."""
    sharing = _sharing_memory(world, list(held.values()))
    return {min(rank for rank, value in found.items() if box in value.boxes) for found in sharing}


def big_table(boxes: Sequence[tuple[str, tuple[int, ...], Box]], dtype: str = "float32") -> LocalTable:
    """The table of a rank that holds one box of each of some large tensors; names ascending."""
    width = max((len(shape) for _, shape, _ in boxes), default=0)
    count = len(boxes)

    def padded(rows: Sequence[tuple[int, ...]], fill: int) -> npt.NDArray[np.int64]:
        wide = [row + (fill,) * (width - len(row)) for row in rows]
        return np.array(wide, dtype=np.int64).reshape(count, width)

    ones = np.ones(count, dtype=np.uint8)
    return LocalTable(
        tuple(encode_path(key_path(name)) for name, _, _ in boxes), ones * np.uint8(TENSOR),
        ones * np.uint8(BY_NAME[dtype].code), np.array([len(shape) for _, shape, _ in boxes], dtype=np.uint8),
        np.zeros_like(ones), ones.astype(np.int32), np.arange(count, dtype=np.int32),
        padded([shape for _, shape, _ in boxes], 1), padded([box.offsets for *_, box in boxes], 0),
        padded([box.sizes for *_, box in boxes], 1), np.zeros((count, 2), dtype=np.uint64),
    )  # fmt: skip


Holding = tuple[str, tuple[int, ...], Box, tuple[int, ...]]


def plan_boxes(holdings: Sequence[Holding], ranks: int, options: PlanOptions | None = None) -> GlobalPlan:
    """Plan large tensors that have no memory: (name, shape, box, holders)."""
    tables = []
    for rank in range(ranks):
        own = sorted((name, shape, box) for name, shape, box, holders in holdings if rank in holders)
        tables.append(encode_table(big_table(own)).payload)
    return plan_globally(merge_tables(tables), options or PlanOptions())


def booked(plan: GlobalPlan, ranks: int) -> npt.NDArray[np.float64]:
    return np.bincount(plan.position, weights=plan.nbytes, minlength=ranks).astype(np.float64)


def best_possible(holdings: Sequence[Holding], ranks: int) -> float:
    """What the busiest rank writes in the best split of bytes: some ranks must take all that only they hold."""
    best = 0.0
    for size in range(1, ranks + 1):
        for subset in combinations(range(ranks), size):
            forced = sum(_nbytes(box) for _, _, box, holders in holdings if set(holders) <= set(subset))
            best = max(best, forced / size)
    return best


def _nbytes(box: Box) -> int:
    return box.numel * 4


def _tiny_to_the_lowest(holdings: Sequence[Holding]) -> list[Holding]:
    return [
        (name, shape, box, holders[:1] if _nbytes(box) < TINY_NBYTES else holders)
        for name, shape, box, holders in holdings
    ]


def random_holdings(rng: Random, ranks: int, groups: Sequence[Sequence[int]]) -> list[Holding]:
    """Tensors from bytes to many MiB, each cut by rows into pieces, each piece held by one of the groups."""
    found: list[Holding] = []
    for number in range(rng.randint(1, 25)):
        shape = rng.choice([(1,), (), (3, 1)]) if rng.random() < 0.2 else (rng.randint(1, 3000), rng.randint(1, 3000))
        cuts = sorted(rng.sample(range(1, shape[0]), min(rng.randint(0, 2), shape[0] - 1))) if shape else []
        bounds = [0, *cuts, shape[0]] if shape else [0, 1]
        # Several boxes of a tensor are tensors of their own here: one box a table row keeps `big_table` simple.
        for part, (start, stop) in enumerate(pairwise(bounds)):
            own = (stop - start, *shape[1:]) if shape else ()
            holders = tuple(sorted(rng.choice(groups)))
            found.append((f"t{number:02d}.{part}", own, Box.whole(own), holders))
    return found


@settings(max_examples=150)
@given(SEEDS, st.integers(1, 6))
def test_where_replica_groups_are_apart_the_busiest_rank_writes_little_more_than_it_must(seed: int, ranks: int) -> None:
    rng = Random(seed)
    order = rng.sample(range(ranks), ranks)
    cuts = [0, *sorted(rng.sample(range(1, ranks), rng.randint(0, ranks - 1))), ranks]
    holdings = random_holdings(rng, ranks, [order[a:b] for a, b in pairwise(cuts)])
    plan = plan_boxes(holdings, ranks)
    load = booked(plan, ranks)
    total = sum(_nbytes(box) for _, _, box, _ in holdings)
    assert load.sum() == total
    row = max(_nbytes(box) // max(box.sizes[:1] or (1,)) for _, _, box, _ in holdings)
    must = max(best_possible(_tiny_to_the_lowest(holdings), ranks), 1.02 * total / ranks)
    assert load.max() <= must + max(row, 2 * TINY_NBYTES)


@given(SEEDS, st.integers(2, 12))
def test_replica_sets_too_small_to_be_cut_are_spread_evenly(seed: int, ranks: int) -> None:
    rng = Random(seed)
    holdings: list[Holding] = []
    for number in range(rng.randint(1, 60)):
        shape = (rng.randint(TINY_NBYTES // 4, TINY_NBYTES // 2 - 1),)
        holdings.append((f"t{number:02d}", shape, Box.whole(shape), tuple(range(ranks))))
    load = booked(plan_boxes(holdings, ranks), ranks)
    assert load.max() - load.min() <= max(_nbytes(box) for _, _, box, _ in holdings)


@settings(max_examples=150)
@given(SEEDS, st.integers(2, 6))
def test_where_replica_groups_overlap_the_busiest_rank_stays_within_the_bound_of_greedy(seed: int, ranks: int) -> None:
    rng = Random(seed)
    groups = [rng.sample(range(ranks), rng.randint(1, ranks)) for _ in range(4)]
    holdings = random_holdings(rng, ranks, groups)
    load = booked(plan_boxes(holdings, ranks), ranks)
    largest = max(_nbytes(box) for _, _, box, _ in holdings)
    assert load.max() <= 2 * best_possible(_tiny_to_the_lowest(holdings), ranks) + min(largest, 2 * TINY_NBYTES)


def _transformer(layers: int, width: int, vocabulary: int) -> list[tuple[str, tuple[int, int]]]:
    found = [("embed.weight", (vocabulary, width)), ("head.weight", (vocabulary, width))]
    for layer in range(layers):
        found += [(f"layers.{layer}.{name}", (width, width)) for name in ("q", "k", "v", "o")]
        found += [(f"layers.{layer}.up", (4 * width, width)), (f"layers.{layer}.down", (width, 4 * width))]
        found += [(f"layers.{layer}.norm", (width, 1))]
    return found


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("layers", "width", "vocabulary"),
    [pytest.param(8, 512, 8_000, id="even"), pytest.param(2, 256, 200_000, id="embedding-heavy")],
)
def test_dp4_tp2_states_are_shared_out_to_five_percent(layers: int, width: int, vocabulary: int, dim: int) -> None:
    """Rank = 2 * dp + tp; matrices are cut in two by rows or by columns, norms are replicated on all ranks."""
    holdings: list[Holding] = []
    for name, shape in _transformer(layers, width, vocabulary):
        if shape[1] == 1:
            holdings.append((name, shape, Box.whole(shape), tuple(range(8))))
            continue
        for tp in range(2):
            holders = tuple(2 * dp + tp for dp in range(4))
            holdings.append((name, shape, even_boxes(shape, 2, tp, dim)[0], holders))
    plan = plan_boxes(holdings, 8)
    load = booked(plan, 8)
    assert load.sum() == sum(4 * a * b for _, (a, b) in _transformer(layers, width, vocabulary))
    assert load.max() <= 1.05 * load.mean()
    files = number_files(plan)
    encode_body(MetadataColumns(*describe_tensors(plan, files), describe_objects(plan, files), Nesting()))


def test_a_tiny_replicated_value_goes_to_its_lowest_holder() -> None:
    shape = (1024, 1024)
    holdings: list[Holding] = [(f"big{i}", shape, Box.whole(shape), (0, 1, 2)) for i in range(3)]
    holdings += [(f"tiny{i}", (4,), Box.whole((4,)), (0, 1, 2) if i % 2 else (1, 2)) for i in range(6)]
    plan = plan_boxes(holdings, 3)
    entry = plan.table.entry[plan.regions.held]
    writers = {plan.table.names[e]: int(p) for e, p in zip(entry, plan.position, strict=True)}
    assert [writers[f"tiny{i}"] for i in range(6)] == [1, 0, 1, 0, 1, 0]


@settings(max_examples=50)
@given(SEEDS, st.integers(1, 6))
def test_pieces_of_a_large_replica_set_tile_it_and_are_written_by_its_holders(seed: int, ranks: int) -> None:
    rng = Random(seed)
    groups = [rng.sample(range(ranks), rng.randint(1, ranks)) for _ in range(3)]
    holdings = random_holdings(rng, ranks, groups)
    plan = plan_boxes(holdings, ranks)
    holders_of = {name: holders for name, _, _, holders in holdings}
    rows: dict[str, list[tuple[Box, int]]] = {}
    for region, (held, position) in enumerate(zip(plan.regions.held, plan.position, strict=True)):
        name = plan.table.names[plan.table.entry[held]]
        ndim = int(plan.table.ndim[plan.table.entry[held]])
        offsets, sizes = plan.regions.offsets[region, :ndim].tolist(), plan.regions.sizes[region, :ndim].tolist()
        rows.setdefault(name, []).append((Box(tuple(offsets), tuple(sizes)), int(position)))
    assert set(rows) == set(holders_of)
    for name, shape, box, holders in holdings:
        assert {position for _, position in rows[name]} <= set(holders)
        assert sum(piece.numel for piece, _ in rows[name]) == box.numel
        assert all(contains(Box.whole(shape), piece) for piece, _ in rows[name])
        assert not any(intersect(a, b) for (a, _), (b, _) in combinations(rows[name], 2))


# -- plans that somebody else made ------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(worlds(differing=False), SEEDS)
def test_plans_that_a_planner_filters_are_stored_as_filtered(world: World, seed: int) -> None:
    rng = Random(seed)

    def filtered(plans: Sequence[SavePlan], payloads: Sequence[bytes]) -> tuple[GlobalPlan, Sequence[bytes]]:
        chosen = [[item for item in plan.items if item.type is ItemType.BYTES] for plan in plans]
        holders: dict[tuple[str, Any, Any], list[tuple[int, Any]]] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                if item.type is ItemType.TENSOR:
                    path = plan.table.paths[item.leaf]
                    holders.setdefault((path.hex(), item.index.offset, item.sizes), []).append((rank, item))
        for found in holders.values():
            rank, item = rng.choice(found)
            chosen[rank].append(item)
        received = ReceivedPlans(payloads)
        own = [received[rank] for rank in range(len(plans))]
        return settle_plans([plan.with_items(items) for plan, items in zip(own, chosen, strict=True)], received)

    sim = simulate(world, answer=filtered)
    stored = {tensor.path: tensor for tensor in sim.stored_tensors()}
    written = sim.written()
    for keys, content in world.content.items():
        if not any(held.boxes for held in world.held(keys).values()):
            continue
        tensor = stored[path_of(keys)]
        counts = np.zeros(tensor.shape, dtype=np.int64)
        for row, place in enumerate(sim.places(tensor.chunks)):
            box = box_of(tensor.chunks, row)
            np.testing.assert_array_equal(written[place], content[at(box)])
            counts[at(box)] += 1
        assert (counts == 1).all()


# -- the same plan every time -----------------------------------------------------------------------------------------


@given(worlds(), SEEDS)
def test_the_order_in_which_dicts_were_filled_changes_no_byte_of_the_plan(world: World, seed: int) -> None:
    one, other = simulate(world), simulate(world, Random(seed))
    assert one.payloads == other.payloads
    assert list(one.answers) == list(other.answers)
    assert one.metadata_bytes == other.metadata_bytes
    assert one.plan.digest == other.plan.digest


PLAN_IN_A_PROCESS = """
import sys
from hashlib import sha256
from random import Random
from tests.core.simulated_saves import make_world, simulate
hasher = sha256()
for seed in range(30):
    sim = simulate(make_world(Random(seed), 1 + seed % 12, 12))
    for blob in (*sim.payloads, *sim.answers, sim.metadata_bytes, sim.plan.digest):
        hasher.update(blob)
print(hasher.hexdigest())
"""


def test_two_processes_with_other_hash_seeds_make_the_same_plan_byte_for_byte() -> None:
    results = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PLAN_IN_A_PROCESS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        results.append(done.stdout.strip())
    assert results[0] == results[1] != ""


@given(worlds(least_entries=1), SEEDS)
def test_states_that_are_stored_differently_have_plans_of_other_digests(world: World, seed: int) -> None:
    """A plan that a rank has cached must not pass for another one."""
    rng = Random(seed)
    before = simulate(world)
    keys = rng.choice(world.paths)
    rank = rng.choice(world.holders(keys))
    change = rng.choice(["path", "drop"])
    value = world.ranks[rank].pop(keys)
    if change == "path":
        moved: Keys = ("moved", *keys)
        world.ranks[rank][moved] = value
    try:
        after = simulate(world)
    except PlanningError:
        return
    if before.metadata_bytes != after.metadata_bytes:
        assert before.plan.digest != after.plan.digest


@pytest.mark.parametrize("value", [np.arange(3), 5])
def test_states_with_equal_names_and_other_paths_have_plans_of_other_digests(value: Any) -> None:
    digests = []
    for keys in (("a", "b"), ("a.b",), ("a", 0), ("a", "0"), ("a.0",)):
        world = World([{}])
        held = Held((3,), BY_NAME["int64"], (Box.whole((3,)),), (np.arange(3),), 1)
        world.ranks[0][keys] = held if isinstance(value, np.ndarray) else value
        digests.append(simulate(world).plan.digest)
    assert len(set(digests)) == len(digests)


# -- what cannot be saved ---------------------------------------------------------------------------------------------


def sharded_world(rng: Random, ranks: int) -> tuple[World, Keys]:
    """A sound world with at least one tensor that has elements; its path."""
    world = make_world(rng, ranks, rng.randint(0, 4), differing=False)
    keys: Keys = ("faulty", rng.randrange(3))
    shape = random_shape(rng)
    add_sharded(rng, world, keys, shape if 0 not in shape else (2, 3))
    return world, keys


def replace_held(world: World, rank: int, keys: Keys, **changes: Any) -> None:
    held: Held = world.ranks[rank][keys]
    fields = {name: getattr(held, name) for name in ("shape", "dtype", "boxes", "ids", "storage", "plain")}
    world.ranks[rank][keys] = Held(**{**fields, **changes})


def raised(world: World, **options: Any) -> PlanningError:
    with pytest.raises(PlanningError) as caught:
        simulate(world, options=PlanOptions(**options))
    return caught.value


@given(SEEDS, st.integers(1, 12))
def test_a_hole_is_named_with_its_key_and_place(seed: int, ranks: int) -> None:
    rng = Random(seed)
    world, keys = sharded_world(rng, ranks)
    held = world.held(keys)
    missing = rng.choice([box for value in held.values() for box in value.boxes])
    for rank, value in held.items():
        left = [i for i, box in enumerate(value.boxes) if box != missing]
        boxes, ids = tuple(value.boxes[i] for i in left), tuple(value.ids[i] for i in left)
        replace_held(world, rank, keys, boxes=boxes, ids=ids)
    error = raised(world)
    assert type(error) is CoverageError
    assert repr(plain_name(path_of(keys))) in str(error)
    assert str(next(iter(held.values())).shape) in str(error)
    assert any(contains(missing, box) for box in boxes_in(str(error)))
    simulate(world, options=PlanOptions(check_coverage=False))


def boxes_in(message: str) -> list[Box]:
    """The boxes that a message names."""
    pairs = re.findall(r"offsets \(([\d, ]*)\) sizes \(([\d, ]*)\)", message)
    return [Box(*(tuple(int(n) for n in text.split(",") if n.strip()) for text in pair)) for pair in pairs]


@given(SEEDS, st.integers(1, 12))
def test_an_overlap_is_named_with_its_key_and_ranks(seed: int, ranks: int) -> None:
    rng = Random(seed)
    world, keys = sharded_world(rng, ranks)
    held = world.held(keys)
    shape = next(iter(held.values())).shape
    known = {box for value in held.values() for box in value.boxes}
    extra = _random_box(rng, shape)
    if extra in known:
        return
    rank = rng.choice(list(held))
    value = held[rank]
    ids = (*value.ids, world.fresh(extra.sizes))
    replace_held(world, rank, keys, boxes=(*value.boxes, extra), ids=ids)
    error = raised(world)
    assert type(error) is OverlapError
    assert repr(plain_name(path_of(keys))) in str(error)
    assert re.search(rf"on rank [\d, ]*\b{rank}\b", str(error))
    assert extra in boxes_in(str(error))


def _random_box(rng: Random, shape: tuple[int, ...]) -> Box:
    offsets = tuple(rng.randrange(size) for size in shape)
    return Box(offsets, tuple(rng.randint(1, size - start) for size, start in zip(shape, offsets, strict=True)))


@given(SEEDS, st.integers(1, 12))
def test_a_box_outside_its_tensor_is_named_with_its_key_and_rank(seed: int, ranks: int) -> None:
    rng = Random(seed)
    world, keys = sharded_world(rng, ranks)
    held = world.held(keys)
    shape = next(iter(held.values())).shape
    if not shape:
        return
    dim, rank = rng.randrange(len(shape)), rng.choice(list(held))
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim] = shape[dim] if rng.random() < 0.5 else shape[dim] - 1
    sizes[dim] = 2
    extra = Box(tuple(offsets), tuple(sizes))
    value = held[rank]
    replace_held(world, rank, keys, boxes=(*value.boxes, extra), ids=(*value.ids, world.fresh(extra.sizes)))
    error = raised(world)
    assert type(error) is PlanningError
    assert repr(plain_name(path_of(keys))) in str(error)
    assert re.search(rf"on rank [\d, ]*\b{rank}\b", str(error))


def test_a_box_just_behind_a_tensor_is_not_taken_for_one_of_the_next_tensor() -> None:
    world = World([{}, {}])
    for keys, rank, box in ((("a",), 0, Box((0,), (6,))), (("a",), 1, Box((6,), (2,))), (("b",), 0, Box((0,), (6,)))):
        world.ranks[rank][keys] = Held((6,), BY_NAME["int64"], (box,), (world.fresh(box.sizes),), world.memory())
    error = raised(world)
    assert type(error) is PlanningError
    assert "'a'" in str(error)
    assert "offsets (6,) sizes (2,) on rank 1" in str(error)


@given(SEEDS, st.integers(2, 12), st.sampled_from(["shape", "ndim", "dtype", "kind"]))
def test_ranks_that_disagree_are_named_with_what_each_has(seed: int, ranks: int, what: str) -> None:
    rng = Random(seed)
    world, keys = sharded_world(rng, ranks)
    holders = world.held(keys)
    if len(holders) < 2:
        return
    rank = rng.choice(list(holders))
    held = holders[rank]
    other = (*held.shape[:-1], held.shape[-1] + 1) if held.shape and what == "shape" else (*held.shape, 1)
    name = repr(plain_name(path_of(keys)))
    if what == "kind":
        world.ranks[rank][keys] = "a value"
        expected, shown = PlanningError, ["a tensor", "a plain value"]
    elif what == "dtype":
        dtype = rng.choice([d for d in BY_NAME.values() if d != held.dtype])
        replace_held(world, rank, keys, dtype=dtype)
        expected, shown = DTypeMismatchError, [held.dtype.name, dtype.name]
    else:
        boxes = tuple(Box((*b.offsets, 0), (*b.sizes, 1)) for b in held.boxes)
        grown = {"shape": other} if len(other) == len(held.shape) else {"shape": other, "boxes": boxes}
        replace_held(world, rank, keys, **grown)
        expected, shown = ShapeMismatchError, [str(held.shape), str(other)]
    error = raised(world)
    assert type(error) is expected
    assert all(text in str(error) for text in (name, *shown))
    named = [int(number) for number in re.findall(r"on rank (\d+)", str(error))]
    assert rank in named
    assert set(named) <= set(holders)
    assert len(set(named)) > 1


# -- load plans -------------------------------------------------------------------------------------------------------


def stored_tensor(rng: Random, shape: tuple[int, ...], ranks: int, *, copies: float = 0.0) -> tuple[StoredTensor, Ids]:
    """A stored tensor, chunks possibly several times (saved without dedup), and its elements, their ids from 1."""
    hands = deal(rng, random_cut(rng, shape), ranks, copies)
    rows = sorted((box.offsets, box.sizes, rank) for rank, hand in enumerate(hands) for box in hand)
    ndim, count = len(shape), len(rows)
    chunks = ChunkColumns(
        np.array([row[0] for row in rows], np.int64).reshape(count, ndim),
        np.array([row[1] for row in rows], np.int64).reshape(count, ndim),
        np.array([row[2] for row in rows], np.int32),
        np.array([rng.randrange(10**6) for _ in rows], np.int64),
    )
    content = np.arange(1, 1 + int(np.prod(shape, dtype=np.int64))).reshape(shape)
    return StoredTensor("t", key_path("t"), EVERY_RANK, BY_NAME["float32"], shape, chunks), content


def wanted_boxes(rng: Random, shape: tuple[int, ...], tensor: StoredTensor, leaf: int) -> list[Wanted]:
    """Some boxes of a tensor as one rank wants them; they may overlap."""
    boxes = random_cut(rng, shape)
    chosen = rng.sample(boxes, rng.randint(0, len(boxes)))
    if 0 not in shape and rng.random() < 0.5:
        chosen.append(_random_box(rng, shape))
    return [Wanted(f"t{leaf}", leaf, i, box, tensor.dtype, tensor) for i, box in enumerate(chosen)]


def fill(wanted: Sequence[Wanted], contents: Sequence[Ids], items: Sequence[ReadItem]) -> dict[tuple[str, int], Ids]:
    """Carry a load plan out on ids: every element of a target must be written exactly once."""
    targets = {(want.name, want.ordinal): np.zeros(want.box.sizes, dtype=np.int64) for want in wanted}
    leaf_of = {want.name: want.leaf for want in wanted}
    for item in items:
        name, ordinal = item.dest_index.fqn, item.dest_index.index or 0
        place = targets[name, ordinal][at(Box(item.dest_offsets, item.lengths))]
        assert not place.any()
        assert item.storage_index.offset is not None
        start = tuple(a + b for a, b in zip(item.storage_index.offset, item.storage_offsets, strict=True))
        place[...] = contents[leaf_of[name]][at(Box(start, item.lengths))]
    return targets


@settings(max_examples=300)
@given(SEEDS, st.integers(1, 6), st.integers(0, 4))
def test_a_load_plan_fills_every_element_that_is_wanted_once(seed: int, ranks: int, tensors: int) -> None:
    rng = Random(seed)
    wanted: list[Wanted] = []
    contents: list[Ids] = []
    for leaf in range(tensors):
        shape = random_shape(rng)
        stored, content = stored_tensor(rng, shape, ranks, copies=rng.choice([0.0, 0.5]))
        contents.append(content)
        wanted += wanted_boxes(rng, shape, stored, leaf)
    rank = rng.randrange(ranks)
    plan = LoadPlan(wanted, (), intersect_chunks(wanted, lambda chunks: chunks.file == rank))
    targets = fill(wanted, contents, plan.items)
    for want in wanted:
        np.testing.assert_array_equal(targets[want.name, want.ordinal], contents[want.leaf][at(want.box)])
    check_spans(plan, rank)
    again = LoadPlan(wanted, (), plan.with_items(plan.items).reads)
    assert list(again.items) == list(plan.items)


def check_spans(plan: LoadPlan, rank: int) -> None:
    """Regions lie in their chunks, own copies win, and the order is that of the files' bytes."""
    spans = plan.spans()
    assert len(spans) == len(plan.items)
    assert [(span.file, span.byte_offset) for span in spans] == sorted((s.file, s.byte_offset) for s in spans)
    stored_of = {want.name: want.stored for want in plan.wanted}
    for span in spans:
        assert contains(Box.whole(span.chunk_sizes), Box(span.item.storage_offsets, span.item.lengths))
        chunks = stored_of[span.item.dest_index.fqn].chunks
        offset = np.array(span.item.storage_index.offset)
        same = (chunks.offsets == offset).all(axis=1) & (chunks.sizes == np.array(span.chunk_sizes)).all(axis=1)
        rows = np.flatnonzero(same)
        assert (span.file, span.byte_offset) in zip(chunks.file[rows], chunks.byte_offset[rows], strict=True)
        assert span.file == (rank if rank in chunks.file[rows] else chunks.file[rows].min())


@given(SEEDS, st.integers(1, 6))
def test_a_hole_in_the_checkpoint_is_an_error_exactly_where_it_is_wanted(seed: int, ranks: int) -> None:
    rng = Random(seed)
    shape = random_shape(rng)
    stored, _ = stored_tensor(rng, shape, ranks)
    if not len(stored.chunks):
        return
    gone = rng.randrange(len(stored.chunks))
    hole = box_of(stored.chunks, gone)
    left = stored.chunks.part(np.arange(len(stored.chunks)) != gone)
    holed = StoredTensor(stored.name, stored.path, stored.rank, stored.dtype, stored.shape, left)
    wanted = wanted_boxes(rng, shape, holed, 0)
    if not any(intersect(want.box, hole) for want in wanted):
        intersect_chunks(wanted, lambda chunks: chunks.file < 0)
        return
    with pytest.raises(CoverageError) as caught:
        intersect_chunks(wanted, lambda chunks: chunks.file < 0)
    assert "'t0'" in str(caught.value)
    assert all(contains(hole, box) for box in boxes_in(str(caught.value)))


@given(SEEDS, st.integers(1, 6))
def test_chunks_that_overlap_where_they_are_wanted_are_an_error(seed: int, ranks: int) -> None:
    rng = Random(seed)
    shape = random_shape(rng)
    stored, _ = stored_tensor(rng, shape, ranks)
    if not len(stored.chunks):
        return
    extra = _random_box(rng, shape)
    boxes = [box_of(stored.chunks, row) for row in range(len(stored.chunks))]
    if extra in boxes:
        return
    rows = sorted([(box.offsets, box.sizes) for box in [*boxes, extra]])
    count, ndim = len(rows), len(shape)
    chunks = ChunkColumns(
        np.array([row[0] for row in rows], np.int64).reshape(count, ndim),
        np.array([row[1] for row in rows], np.int64).reshape(count, ndim),
        np.zeros(count, np.int32), np.arange(count, dtype=np.int64),
    )  # fmt: skip
    faulty = StoredTensor("t", stored.path, stored.rank, stored.dtype, shape, chunks)
    wanted = [Wanted("t", 0, 0, Box.whole(shape), faulty.dtype, faulty)]
    with pytest.raises(OverlapError, match="'t'"):
        intersect_chunks(wanted, lambda found: found.file < 0)


# -- names in one file ------------------------------------------------------------------------------------------------


def test_chunk_names_never_meet_whatever_the_tensors_are_called() -> None:
    """`x` in two chunks beside tensors that are called like its chunks."""
    world = World([{}])
    rng = Random(0)
    for keys in (("x",), ("x@0",), ("x@3",), ("x@0,0",), ('$["x"]',)):
        content = world.content[keys] = world.fresh((6,))
        boxes = (Box((0,), (3,)), Box((3,), (3,)))
        ids = tuple(content[at(box)] for box in boxes)
        world.ranks[0][keys] = Held((6,), BY_NAME["float64"], boxes, ids, world.memory())
    sim = simulate(world, rng)
    check_tensors(sim)
    spans = sim.spans()[0]
    keys_in_file = [span.key for span in spans]
    assert len(set(keys_in_file)) == len(keys_in_file) == 10
    offsets = np.array([span.item.index.offset for span in spans], dtype=np.int64)
    ndim = np.full(len(spans), offsets.shape[1], dtype=np.uint8)
    assert name_chunks([span.item.index.fqn for span in spans], offsets, ndim) == keys_in_file


def test_an_answer_that_is_cut_short_is_refused() -> None:
    world = make_world(Random(3), 2, 6)
    sim = simulate(world)
    table = local_plans(world)[1][0].table
    assert describe(object()) is None
    for length in range(0, len(sim.answers[0]), 7):
        with pytest.raises(CoordinationError):
            decode_answer(sim.answers[0][:length], table)
    assert encode_answers(sim.plan)[0] == sim.answers[0]
