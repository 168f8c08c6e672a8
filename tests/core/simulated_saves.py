"""Saves of many ranks in one process, without files: random states, planned like real ones.

Every element of every tensor is an id of its own. What a rank would write is kept as ids by (rank, part, byte offset),
so a test can ask whether the place that the metadata names holds the elements that belong there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, DType
from dcp_core.execution.filesystem import file_columns
from dcp_core.execution.interfaces import FileRecord, WriteResult
from dcp_core.formats.metadata_file import MetadataColumns, assemble, encode_body, open_bytes
from dcp_core.metadata import ChunkColumns, Metadata, Nesting, SaveRecord, StoredObject, StoredTensor, WriterRecord
from dcp_core.planning.global_plan import (
    GlobalPlan,
    PlanOptions,
    describe_objects,
    describe_tensors,
    number_files,
    plan_globally,
)
from dcp_core.planning.global_table import merge_tables
from dcp_core.planning.leaves import DeviceBits, LocalTensor
from dcp_core.planning.local_table import LocalTable, encode_table
from dcp_core.planning.planners import PlannerContext
from dcp_core.planning.plans import ChunkSpan, SavePlan
from dcp_core.planning.standard_save import StandardSavePlanner
from dcp_core.planning.write_list import decode_answer, encode_answers
from dcp_core.recipes.job import ObjectEncoding
from dcp_core.state_path import PerRank, StatePath, key_path
from tests.core.layouts import at, deal, random_cut, random_shape

Ids = npt.NDArray[np.int64]
Keys: TypeAlias = tuple[Any, ...]
FlatRank: TypeAlias = dict[Keys, Any]
Place: TypeAlias = tuple[int, int, int]
"""Rank, part, byte offset."""
Answer = Callable[[Sequence[SavePlan], Sequence[bytes]], tuple[GlobalPlan, Sequence[bytes]]]

DATA_START = 64
DTYPES = tuple(
    BY_NAME[name]
    for name in ("bool", "float8_e5m2", "bfloat16", "complex32", "float32", "int64", "complex128", "float4_e2m1fn_x2")
)
PATHS: tuple[Keys, ...] = (
    ("model", "w"), ("model.w",), ("model", "layers.0", "w"), ("model", "layers", "0", "w"),
    ("model", "layers", 0, "w"), ("x",), ("x@0",), ("x@0,0",), ('$["x"]',), ("__metadata__",), ("",), ("ключ/ 1",),
    ("\ud800",), (True,), (2,), ("2",), (None,), ("True",), ("k" * 200,), ("x@3",), (("a", 1),), ("z", "y", "x"),
)  # fmt: skip
"""Paths whose names collide in every way, none inside another."""
VALUES: tuple[Any, ...] = (None, 0, 1, True, 1.0, "text", b"\x00", [1, 2], (1, 2), {1, 2}, [[3], "a"], -0.0, 0.0)


class IdAccess:
    """Reaches the ids of a simulated tensor."""

    def host_array(self, view: Any) -> Ids | None:
        return None

    def read_out(self, view: Any) -> Ids:
        ids: Ids = view
        return ids

    def transfers(self, view: Any) -> None:
        """Host memory."""

    def writable_problem(self, view: Any) -> str | None:
        return None

    def copy_into(self, view: Any, bits: npt.NDArray[Any], source_dtype: DType) -> None:
        raise AssertionError("a save fills no tensor")

    def narrow(self, view: Any, box: Box) -> Ids:
        ids: Ids = view[at(box)]
        return ids


@dataclass(frozen=True, eq=False)
class Held:
    """A simulated tensor of one rank: boxes and the ids of their elements."""

    shape: tuple[int, ...]
    dtype: DType
    boxes: tuple[Box, ...]
    ids: tuple[Ids, ...]
    storage: Any
    plain: bool = False
    ragged: bool = False

    def describe(self) -> LocalTensor:
        storage = self.storage if self.boxes else None
        return LocalTensor(
            self.shape, self.dtype, self.boxes, self.ids, IdAccess(), storage=storage, plain=self.plain,
            ragged=self.ragged,
        )  # fmt: skip


def describe(value: Any) -> LocalTensor | None:
    return value.describe() if isinstance(value, Held) else None


class World:
    """The states of all ranks, flat; and for tensors that are the same on all ranks, their elements."""

    def __init__(self, ranks: list[FlatRank]) -> None:
        self.ranks = ranks
        self.content: dict[Keys, Ids] = {}
        self._next = 1

    def __repr__(self) -> str:
        text = "; ".join(
            f"{rank}: " + ", ".join(f"{keys}: {self._shown(value)}" for keys, value in flat.items())
            for rank, flat in enumerate(self.ranks)
        )
        return f"World({text if len(text) < 3000 else text[:3000] + '...'})"

    @staticmethod
    def _shown(value: Any) -> str:
        if not isinstance(value, Held):
            return repr(value)[:40]
        boxes = " ".join(f"{box.offsets}+{box.sizes}" for box in value.boxes)
        return f"<{value.shape} {value.dtype.name} memory {value.storage}{' plain' * value.plain}: {boxes}>"

    def fresh(self, shape: Sequence[int]) -> Ids:
        """Ids that nothing else has."""
        count = int(np.prod(shape, dtype=np.int64))
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.int64).reshape(shape)

    def memory(self) -> int:
        """A name for memory that nothing else has."""
        self._next += 1
        return self._next

    def holders(self, keys: Keys) -> list[int]:
        return [rank for rank, flat in enumerate(self.ranks) if keys in flat]

    def held(self, keys: Keys) -> dict[int, Held]:
        """The tensors under one path by rank; empty for an object."""
        found = {rank: self.ranks[rank][keys] for rank in self.holders(keys)}
        return {rank: value for rank, value in found.items() if isinstance(value, Held)}

    @property
    def paths(self) -> list[Keys]:
        return list(dict.fromkeys(keys for flat in self.ranks for keys in flat))


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are the same to the last bit and type."""
    encoding = ObjectEncoding()
    return encoding.digest(one) == encoding.digest(other)


def make_world(rng: Random, ranks: int, entries: int, *, differing: bool = True) -> World:
    """Random states of several ranks."""
    world = World([{} for _ in range(ranks)])
    kinds = ["sharded"] * 5 + ["plain"] * 2 + ["tied"] * 2 + ["object"] * 2
    kinds += ["differing", "differing object", "per rank"] * differing
    for keys in rng.sample(PATHS, min(entries, len(PATHS))):
        kind = rng.choice(kinds)
        {
            "sharded": add_sharded,
            "plain": _add_plain,
            "tied": _add_tied,
            "object": _add_object,
            "differing": _add_differing,
            "differing object": _add_differing_object,
            "per rank": _add_per_rank,
        }[kind](rng, world, keys)
    return world


def add_sharded(rng: Random, world: World, keys: Keys, shape: tuple[int, ...] | None = None) -> None:
    shape = random_shape(rng) if shape is None else shape
    ranks = len(world.ranks)
    content = world.content[keys] = world.fresh(shape)
    dtype = rng.choice(DTYPES)
    hands = deal(rng, random_cut(rng, shape), ranks)
    keepers = [rank for rank, hand in enumerate(hands) if hand or rng.random() < 0.4] or [rng.randrange(ranks)]
    for rank in keepers:
        boxes = tuple(hands[rank])
        ids = tuple(content[at(box)] for box in boxes)
        world.ranks[rank][keys] = Held(shape, dtype, boxes, ids, world.memory())


def _members(rng: Random, world: World) -> list[int]:
    ranks = range(len(world.ranks))
    return list(ranks) if rng.random() < 0.5 else sorted(rng.sample(ranks, rng.randint(1, len(ranks))))


def _whole(shape: tuple[int, ...], dtype: DType, ids: Ids, storage: int) -> Held:
    boxes, views = ((Box.whole(shape),), (ids,)) if ids.size else ((), ())
    return Held(shape, dtype, boxes, views, storage, plain=True)


def _add_plain(rng: Random, world: World, keys: Keys) -> None:
    shape, dtype = random_shape(rng, 2), rng.choice(DTYPES)
    content = world.content[keys] = world.fresh(shape)
    for rank in _members(rng, world):
        world.ranks[rank][keys] = _whole(shape, dtype, content, world.memory())


def _add_differing(rng: Random, world: World, keys: Keys) -> None:
    shape, dtype = random_shape(rng, 2), rng.choice(DTYPES)
    versions = [world.fresh(shape) for _ in range(rng.randint(2, 3))]
    for rank in _members(rng, world):
        world.ranks[rank][keys] = _whole(shape, dtype, rng.choice(versions), world.memory())


def _add_object(rng: Random, world: World, keys: Keys) -> None:
    value = rng.choice(VALUES)
    for rank in _members(rng, world):
        world.ranks[rank][keys] = value


def _add_differing_object(rng: Random, world: World, keys: Keys) -> None:
    values = rng.sample(VALUES, 2)
    for rank in _members(rng, world):
        world.ranks[rank][keys] = rng.choice(values)


def _add_per_rank(rng: Random, world: World, keys: Keys) -> None:
    for rank in _members(rng, world):
        world.ranks[rank][keys] = PerRank(rng.choice(VALUES))


def _add_tied(rng: Random, world: World, keys: Keys) -> None:
    """The same memory as another tensor: on all ranks, or on some of them."""
    tensors = [other for other in world.paths if world.held(other)]
    if not tensors:
        return add_sharded(rng, world, keys)
    source = rng.choice(tensors)
    held = world.held(source)
    sharing = {rank for rank in held if rng.random() < rng.choice([1.0, 0.7])}
    kept = _droppable(rng, held)
    if source not in world.content:
        for rank in kept:
            own = held[rank].ids if rank in sharing else tuple(world.fresh(part.shape) for part in held[rank].ids)
            world.ranks[rank][keys] = _like(held[rank], own, held[rank].storage if rank in sharing else world.memory())
        return None
    content = world.content[keys] = world.fresh(world.content[source].shape)
    for rank in sharing & set(kept):
        for box, ids in zip(held[rank].boxes, held[rank].ids, strict=True):
            content[at(box)] = ids
    for rank in kept:
        own = tuple(content[at(box)] for box in held[rank].boxes)
        world.ranks[rank][keys] = _like(held[rank], own, held[rank].storage if rank in sharing else world.memory())
    return None


def _like(held: Held, ids: tuple[Ids, ...], storage: Any) -> Held:
    return Held(held.shape, held.dtype, held.boxes, ids, storage, held.plain)


def _droppable(rng: Random, held: Mapping[int, Held]) -> list[int]:
    """The ranks that keep the second name: some that hold nothing but replicas leave it out."""
    kept = dict(held)
    for rank in list(held):
        others = {box for other in kept if other != rank for box in kept[other].boxes}
        if len(kept) > 1 and rng.random() < 0.2 and set(kept[rank].boxes) <= others:
            del kept[rank]
    return list(kept)


def nested(flat: Mapping[Keys, Any], rng: Random | None = None) -> dict[Any, Any]:
    """The nested state; with `rng` its dicts are filled in a random order."""
    state: dict[Any, Any] = {}
    items = list(flat.items())
    if rng is not None:
        rng.shuffle(items)
    for keys, value in items:
        place = state
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
    return state


@dataclass(frozen=True, eq=False)
class Simulation:
    """A planned save: what each rank would write, and what the metadata says."""

    world: World
    payloads: list[bytes]
    plan: GlobalPlan
    answers: Sequence[bytes]
    plans: list[SavePlan]
    planners: list[StandardSavePlanner]
    metadata_bytes: bytes

    @property
    def metadata(self) -> Metadata:
        return Metadata(open_bytes(self.metadata_bytes))

    def spans(self) -> list[list[ChunkSpan]]:
        return [list(plan.spans()) for plan in self.plans]

    def stored_tensors(self) -> list[StoredTensor]:
        source = self.metadata.source
        return [tensor for name in source.names() for tensor in source.tensors(name)]

    def stored_objects(self) -> list[StoredObject]:
        source = self.metadata.source
        return [entry for name in source.names() for entry in source.objects(name)]

    def places(self, chunks: ChunkColumns) -> list[Place]:
        """Where the metadata says that chunks lie."""
        files = self.metadata.source.files
        columns = files.rank[chunks.file], files.part[chunks.file], chunks.byte_offset
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def written(self) -> dict[Place, Ids]:
        """The ids that each rank writes, by place."""
        found: dict[Place, Ids] = {}
        for rank, spans in enumerate(self.spans()):
            for span in spans:
                bits = self.planners[rank].get_data(span.item)
                assert isinstance(bits, (np.ndarray, DeviceBits))
                ids = np.asarray(bits)
                assert ids.shape == span.item.sizes
                assert (rank, span.part, span.byte_offset) not in found
                found[rank, span.part, span.byte_offset] = ids
        return found


def local_plans(world: World, rng: Random | None = None, **options: Any) -> tuple[list[StandardSavePlanner], list[Any]]:
    """Planners and local plans of all ranks."""
    planners, plans = [], []
    for rank, flat in enumerate(world.ranks):
        planner = StandardSavePlanner(**options)
        context = PlannerContext(describe, ObjectEncoding(), rank, len(world.ranks), rank == 0)
        planner.configure_planner(nested(flat, rng), context)
        planners.append(planner)
        plans.append(planner.build_local_plan())
    return planners, plans


def simulate(
    world: World, rng: Random | None = None, *, options: PlanOptions | None = None, answer: Answer | None = None
) -> Simulation:
    """Plan a save of all ranks.

    Args:
        world: Their states.
        rng: Fills the dicts of the states in a random order.
        options: Of the global plan.
        answer: Makes the global plan and the answers instead, from local plans and payloads.
    """
    planners, plans = local_plans(world, rng)
    tables: list[LocalTable] = [plan.table for plan in plans]
    payloads = [encode_table(table).payload for table in tables]
    if answer is None:
        plan = plan_globally(merge_tables(payloads), options or PlanOptions())
        answers: Sequence[bytes] = encode_answers(plan)
    else:
        plan, answers = answer(plans, payloads)
    final = [SavePlan(table, decode_answer(a, table)) for table, a in zip(tables, answers, strict=True)]
    return Simulation(world, payloads, plan, answers, final, planners, metadata_of(plan, final))


def metadata_of(plan: GlobalPlan, final: Sequence[SavePlan]) -> bytes:
    """The `.metadata` of a plan."""
    rows = number_files(plan)
    tensors, chunks = describe_tensors(plan, rows)
    body = encode_body(MetadataColumns(tensors, chunks, describe_objects(plan, rows), Nesting()))
    results = []
    for rank, own in enumerate(final):
        sizes: dict[tuple[int, int], int] = {(1, 0): 0} if own.objects() else {}
        for span in own.spans():
            sizes[0, span.part] = sizes.get((0, span.part), 0) + span.nbytes
        files = [
            FileRecord(rank, part, kind, DATA_START + nbytes, DATA_START, 8, 8, 0)
            for (kind, part), nbytes in sizes.items()
        ]
        results.append(WriteResult(rank, tuple(files), 0.0, 0))
    save = SaveRecord("0" * 32, "")
    return assemble(body, file_columns(results), save, WriterRecord("test", "ids", "1", len(final)))


def path_of(keys: Keys) -> StatePath:
    return key_path(*keys)
