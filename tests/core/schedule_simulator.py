"""Loads with shared reads, simulated: all ranks' schedules are made, then carried out in random orders of events.

A layout says what each rank wants. Planning is the real one, the bytes of offers and answers included. Execution is a
random choice, again and again, among what can happen next: a rank reads its next region, a rank starts its next
operation, a group's oldest operation ends because all members have started it. When nothing can happen any more, all
must be done: whatever else is a deadlock. Elements carry their place in the stored tensor, so that lost, repeated and
misplaced ones show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from dcp_core.box import Box
from dcp_core.dtype import BY_CODE, BY_NAME, DType
from dcp_core.metadata import EVERY_RANK, ChunkColumns, StoredTensor
from dcp_core.planning import balance, buffer_parts
from dcp_core.planning.load_plan import LoadPlan, Wanted
from dcp_core.planning.own_reads import OwnReads, plan_own_reads
from dcp_core.planning.read_sources import SharingOptions, assign_sources
from dcp_core.planning.regions import intersect_chunks
from dcp_core.planning.schedule import Broadcast, Schedule, ScheduleLimits, make_schedule
from dcp_core.planning.shared_offers import Offer, encode_offer, find_buffers
from dcp_core.planning.source_answers import SharedBuffers, decode_sources
from dcp_core.state_path import key_path
from tests.core.layouts import at, deal, random_cut

Ids = npt.NDArray[np.int64]
Want = tuple[StoredTensor, Box, str, str | None]
"""A stored tensor, the box of it, the target's element type, and its communicator."""


@dataclass(frozen=True)
class Layout:
    """Who wants what."""

    ranks: tuple[int, ...]
    wants: tuple[tuple[Want, ...], ...]
    limits: ScheduleLimits
    smallest_piece: int = 1
    alignment: int = 8
    tiny: int = 4


@dataclass(frozen=True)
class RankPlans:
    """All that one rank plans."""

    rank: int
    plan: LoadPlan
    offer: Offer
    shared: SharedBuffers
    schedule: Schedule
    reads: OwnReads


def stored_tensor(name: str, shape: Sequence[int], dtype: str, chunks: Sequence[Box], number: int = 0) -> StoredTensor:
    """A stored tensor whose chunks lie in files `number` and on."""
    ordered = sorted(chunks)
    columns = ChunkColumns(
        np.array([box.offsets for box in ordered], np.int64).reshape(len(ordered), len(shape)),
        np.array([box.sizes for box in ordered], np.int64).reshape(len(ordered), len(shape)),
        np.array([(number + index) % 3 for index in range(len(ordered))], np.int32),
        np.array([(number << 20) + 1000 * index for index in range(len(ordered))], np.int64),
    )
    return StoredTensor(name, key_path(name), EVERY_RANK, BY_NAME[dtype], tuple(shape), columns)


def plan_of(wants: Sequence[Want]) -> LoadPlan:
    """One rank's load plan."""
    boxes = [
        Wanted(f"t.{index}", index, 0, box, BY_NAME[dtype], stored)
        for index, (stored, box, dtype, _) in enumerate(wants)
    ]
    return LoadPlan(boxes, (), intersect_chunks(boxes, lambda chunks: np.zeros(len(chunks), dtype=bool)))


def offer_of(rank: int, wants: Sequence[Want], **more: Any) -> tuple[LoadPlan, Offer]:
    """One rank's load plan, and what it offers."""
    plan = plan_of(wants)
    buffers, alone = find_buffers(plan, [kind for *_, kind in wants])
    return plan, Offer(rank, f"host{rank // 2}", buffers, alone, **more)


def plan_all(layout: Layout, rng: Random) -> list[RankPlans]:
    """Plan as all ranks and their coordinator do; offers come in a random order."""
    with small_constants(layout):
        offered = [offer_of(rank, wants) for rank, wants in zip(layout.ranks, layout.wants, strict=True)]
        order = rng.sample(range(len(offered)), len(offered))
        options = SharingOptions(layout.limits.batch_bytes, smallest_piece=layout.smallest_piece)
        sources = assign_sources([encode_offer(offered[index][1]) for index in order], options)
        answers = dict(zip(order, sources.answers, strict=True))
        found = []
        for index, (plan, offer) in enumerate(offered):
            shared = decode_sources(answers[index], offer)
            made = make_schedule(plan, shared, layout.limits)
            found.append(RankPlans(offer.rank, plan, offer, shared, made, plan_own_reads(plan, made, offer.rank)))
        return found


@contextmanager
def small_constants(layout: Layout) -> Iterator[None]:
    """Let what is meant for mebibytes happen to a few elements."""
    with (
        patch.object(buffer_parts, "ALIGNMENT", layout.alignment),
        patch.object(balance, "TINY_NBYTES", layout.tiny),
    ):
        yield


# -- what an operation is, whoever looks ------------------------------------------------------------------------------

Content = tuple[int, int, int, tuple[tuple[str, Box, int, int], ...]]


def content_of(plans: RankPlans, operation: Broadcast) -> Content:
    """What all members of the group must say of an operation."""
    boxes, parts = plans.plan.wanted, plans.schedule.parts
    rows = []
    for part in operation.parts:
        row = int(parts.row[part])
        rows.append((boxes.stored_names[row], boxes.boxes[row], int(parts.first[part]), int(parts.last[part])))
    return operation.source, operation.nbytes, operation.dtype, tuple(rows)


# -- carrying the schedules out ---------------------------------------------------------------------------------------


class FaultError(AssertionError):
    """What a simulation found."""


@dataclass
class _Rank:
    """One rank at work."""

    plans: RankPlans
    targets: list[Ids]
    waits: list[tuple[int, int]]
    """Of each operation: how many before it are done, and how many regions are in, before it starts."""
    regions: int
    read: int = 0
    started: int = 0
    done: set[int] = field(default_factory=set)
    first_open: int = 0

    @classmethod
    def of(cls, plans: RankPlans) -> _Rank:
        ready = plans.reads.ready.tolist()
        waits = [
            (operation.after, max(ready[part] for part in operation.parts) if operation.source == plans.rank else 0)
            for operation in plans.schedule.operations
        ]
        return cls(plans, [_empty(box) for box in plans.plan.wanted.boxes], waits, len(plans.reads.spans))

    @property
    def finished(self) -> bool:
        return self.read == self.regions and self.first_open == len(self.waits)

    @property
    def may_start(self) -> bool:
        if self.started == len(self.waits):
            return False
        after, regions = self.waits[self.started]
        return self.first_open >= after and self.read >= regions


class Simulation:
    """All ranks at work.

    Args:
        plans: What each planned.
        rng: Chooses what happens next.
        in_order: Whether a rank's operations end in the order in which they started, whatever their groups: as on a
            device with one stream.
    """

    def __init__(self, plans: Sequence[RankPlans], rng: Random, *, in_order: bool) -> None:
        self._ranks = {own.rank: _Rank.of(own) for own in plans}
        self._rng = rng
        self._in_order = in_order
        self._speed = {rank: rng.choice([1, 1, 5, 50]) for rank in self._ranks}
        self._queues: dict[Any, dict[int, deque[int]]] = {}
        for own in plans:
            for group in own.schedule.groups:
                self._queues.setdefault(group.key, {rank: deque() for rank in group.key.ranks})

    def run(self) -> dict[int, list[Ids]]:
        """Carry everything out; return each rank's targets.

        Raises:
            FaultError: A deadlock, a mismatch, an element that was sent before it was there or that came twice.
        """
        while actions := list(self._possible()):
            weights = [self._speed[rank] for _, rank, _ in actions]
            kind, rank, key = self._rng.choices(actions, weights)[0]
            if kind == "read":
                self._read(self._ranks[rank])
            elif kind == "start":
                self._start(self._ranks[rank])
            else:
                self._end(key)
        stuck = {rank: own.started for rank, own in self._ranks.items() if not own.finished}
        if stuck:
            raise FaultError(f"deadlock: ranks that are not done, and what they have started: {stuck}")
        return {rank: own.targets for rank, own in self._ranks.items()}

    def _possible(self) -> Iterator[tuple[str, int, Any]]:
        for rank, own in self._ranks.items():
            if own.read < own.regions:
                yield "read", rank, None
            if own.may_start:
                yield "start", rank, None
        for key, queues in self._queues.items():
            if all(queues.values()) and self._may_end(queues):
                yield "end", key.ranks[0], key

    def _may_end(self, queues: dict[int, deque[int]]) -> bool:
        return not self._in_order or all(self._ranks[rank].first_open == queue[0] for rank, queue in queues.items())

    def _read(self, own: _Rank) -> None:
        span = own.plans.reads.spans[own.read]
        row = int(own.plans.reads.spans.wanted[own.read])
        own.read += 1
        item = span.item
        box = Box(item.dest_offsets, item.lengths)
        start = [a + b for a, b in zip(item.storage_index.offset or (), item.storage_offsets, strict=True)]
        boxes = own.plans.plan.wanted
        stored = Box(tuple(start), item.lengths)
        _put(own, row, at(box), ids_of(boxes.stored(row), stored, BY_CODE[int(boxes.dtype[row])]))

    def _start(self, own: _Rank) -> None:
        operation = own.plans.schedule.operations[own.started]
        if operation.source == own.plans.rank:
            for part in operation.parts:
                if (_run_of(own, part) < 0).any():
                    raise FaultError(f"rank {own.plans.rank} sends what it has not read")
        key = own.plans.schedule.groups[operation.group].key
        self._queues[key][own.plans.rank].append(own.started)
        own.started += 1

    def _end(self, key: Any) -> None:
        heads = {rank: queue.popleft() for rank, queue in self._queues[key].items()}
        members = {rank: self._ranks[rank] for rank in heads}
        operations = {rank: own.plans.schedule.operations[heads[rank]] for rank, own in members.items()}
        contents = {content_of(own.plans, operations[rank]) for rank, own in members.items()}
        if len(contents) != 1:
            raise FaultError(f"group {key.ranks}: members disagree on what they send: {contents}")
        source = next(iter(operations.values())).source
        sent = [_run_of(members[source], part).copy() for part in operations[source].parts]
        for rank, own in members.items():
            if rank != source:
                for part, values in zip(operations[rank].parts, sent, strict=True):
                    runs = own.plans.schedule.parts
                    _put(own, int(runs.row[part]), slice(int(runs.first[part]), int(runs.last[part])), values)
            own.done.add(heads[rank])
            while own.first_open in own.done:
                own.first_open += 1


def _empty(box: Box) -> Ids:
    return np.full(box.sizes, -1, dtype=np.int64)


def _put(own: _Rank, row: int, where: Any, values: Ids) -> None:
    target = own.targets[row].reshape(-1) if isinstance(where, slice) else own.targets[row]
    if (target[where] >= 0).any():
        raise FaultError(f"rank {own.plans.rank}: elements of box {row} come twice")
    target[where] = values


def _run_of(own: _Rank, part: int) -> Ids:
    runs = own.plans.schedule.parts
    return own.targets[int(runs.row[part])].reshape(-1)[int(runs.first[part]) : int(runs.last[part])]


def ids_of(stored: StoredTensor, box: Box, dtype: DType) -> Ids:
    """What the elements of a box are: their place in the stored tensor, and the type they were converted to."""
    place = np.arange(int(np.prod(stored.shape)), dtype=np.int64).reshape(stored.shape)[at(box)]
    ids: Ids = (place * 1000 + int(stored.chunks.byte_offset[0] >> 20)) * 100 + dtype.code
    return ids


# -- random layouts ---------------------------------------------------------------------------------------------------

_DTYPES = ("uint8", "bfloat16", "float32", "complex128")


def random_layout(rng: Random) -> Layout:
    """Who wants what, at random: stages, replicas and shards as jobs have them, or without any pattern."""
    ranks, wants = _meshed(rng) if rng.random() < 0.5 else _scattered(rng)
    for own_wants in wants:
        if rng.random() < 0.3:
            rng.shuffle(own_wants)
    return Layout(
        ranks, tuple(map(tuple, wants)), _random_limits(rng), rng.choice([1, 4, 16]), rng.choice([4, 8, 64]),
        rng.choice([1, 4, 64]),
    )  # fmt: skip


def _meshed(rng: Random) -> tuple[tuple[int, ...], list[list[Want]]]:
    """Stages of replicas of shards; parameters that every stage has, or the first and the last one; lonely stages."""
    stages, replicas, shards = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 2)
    count = stages * replicas * shards
    wants: list[list[Want]] = [[] for _ in range(count)]
    dtype = rng.choice(_DTYPES)
    lonely = {stage for stage in range(stages) if rng.random() < 0.15}
    for number in range(rng.randint(2, 24)):
        sizes = (shards * rng.choice([1, 2, 3, 16]), rng.choice([1, 2, 5]))
        stored = stored_tensor(f"{rng.choice('abc')}.{number}", sizes, dtype, random_cut(rng, sizes, 3), number)
        where = rng.choice([{rng.randrange(stages)}] * 6 + [{0, stages - 1}, set(range(stages))])
        is_sharded, target = rng.random() < 0.5, dtype if rng.random() < 0.9 else rng.choice(_DTYPES)
        for index in range(count):
            stage, replica, shard = index // (replicas * shards), index // shards % replicas, index % shards
            if stage in where and not (stage in lonely and replica):
                rows = sizes[0] // shards if is_sharded else sizes[0]
                box = Box((shard * rows if is_sharded else 0, 0), (rows, sizes[1]))
                wants[index].append((stored, box, target, "gloo"))
    return tuple(range(count)), wants


def _scattered(rng: Random) -> tuple[tuple[int, ...], list[list[Want]]]:
    """Any ranks, any boxes, any element types, any communicators; now and then one buffer twice."""
    count = rng.randint(1, 9)
    ranks = tuple(range(count)) if rng.random() < 0.8 else tuple(rng.sample(range(40), count))
    wants: list[list[Want]] = [[] for _ in ranks]
    devices = [rng.choice(["gloo"] * 8 + ["nccl", None]) for _ in ranks]
    usual = rng.choice(_DTYPES)
    for number in range(rng.randint(1, 12)):
        shape = [rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.randint(0, 3))]
        if shape and rng.random() < 0.1:
            shape[0] *= 16
        chunks = random_cut(rng, shape, 4)
        stored = stored_tensor(f"{rng.choice('abc')}.{number}", shape, rng.choice(_DTYPES), chunks, number)
        dtype = usual if rng.random() < 0.8 else rng.choice(_DTYPES)
        mine = [index for index in range(count) if rng.random() < 0.9]
        for index, boxes in _dealt(rng, stored, mine):
            kind = rng.choice(["gloo", "nccl", None]) if rng.random() < 0.05 else devices[index]
            own = rng.choice(_DTYPES) if rng.random() < 0.05 else dtype
            copies = 2 if rng.random() < 0.05 else 1
            wants[index].extend((stored, box, own, kind) for box in boxes for _ in range(copies))
    return ranks, wants


def _dealt(rng: Random, stored: StoredTensor, mine: Sequence[int]) -> list[tuple[int, list[Box]]]:
    """Which boxes of a tensor some ranks want."""
    if not mine:
        return []
    kind, whole = rng.randrange(4), Box.whole(stored.shape)
    if kind == 0:
        return [(index, [whole]) for index in mine]
    if kind == 1 and stored.shape:
        shards = rng.randint(1, min(3, stored.shape[0]))
        size = stored.shape[0] // shards
        boxes = [Box((i * size, *whole.offsets[1:]), (size, *whole.sizes[1:])) for i in range(shards)]
        return [(index, [boxes[place % shards]]) for place, index in enumerate(mine)]
    if kind == 2:
        return [(index, [whole]) for index in mine if rng.random() < 0.7]
    hands = deal(rng, random_cut(rng, stored.shape, 5), len(mine), copies=0.7)
    return list(zip(mine, hands, strict=True))


def _random_limits(rng: Random) -> ScheduleLimits:
    return ScheduleLimits(
        batch_bytes=rng.choice([0, 16, 60, 200, 600, 600, 2000, 1 << 20]),
        block_bytes=rng.choice([16, 100, 400, 400, 1000, 1 << 20]),
        in_flight=rng.choice([1, 2, 8]),
        in_flight_bytes=rng.choice([1, 200, 1000, 1 << 26]),
        one_group_at_a_time=rng.random() < 0.4,
    )


# -- laws -------------------------------------------------------------------------------------------------------------


def check_layout(layout: Layout, rng: Random) -> None:
    """Plan, carry out, and check every law that schedules are meant to keep.

    Raises:
        AssertionError: One that does not hold.
    """
    plans = plan_all(layout, rng)
    for own in plans:
        check_bounds(own, layout.limits)
    check_read_once(plans)
    targets = Simulation(plans, rng, in_order=rng.random() < 0.5).run()
    for own in plans:
        for row, found in enumerate(targets[own.rank]):
            boxes = own.plan.wanted
            expected = ids_of(boxes.stored(row), boxes.boxes[row], BY_CODE[int(boxes.dtype[row])])
            np.testing.assert_array_equal(found, expected, err_msg=f"rank {own.rank} box {row}")


def check_bounds(own: RankPlans, limits: ScheduleLimits) -> None:
    """What is under way at one time, the size of each operation, and whose turn it is."""
    operations = own.schedule.operations
    assert [group.key for group in own.schedule.groups] == sorted({group.key for group in own.schedule.groups})
    for number, operation in enumerate(operations):
        under_way = operations[operation.after : number + 1]
        assert 1 <= len(under_way) <= limits.in_flight
        nbytes = sum(other.nbytes for other in under_way)
        assert nbytes <= limits.in_flight_bytes or len(under_way) == 1
        assert not limits.one_group_at_a_time or {other.group for other in under_way} == {operation.group}
        largest = max(limits.block_bytes, limits.batch_bytes)
        assert 0 < operation.nbytes <= (limits.batch_bytes if len(operation.parts) > 1 else largest)
        assert operation.source in own.schedule.groups[operation.group].key.ranks
        parts, dtype = own.schedule.parts, own.plan.wanted.dtype
        assert {int(dtype[parts.row[part]]) for part in operation.parts} == {operation.dtype}
        numel = sum(int(parts.last[part] - parts.first[part]) for part in operation.parts)
        assert operation.nbytes == numel * BY_CODE[operation.dtype].itemsize


def check_read_once(plans: Sequence[RankPlans]) -> None:
    """Of what a group shares every element is read by one member, the one that the plan names."""
    for own in plans:
        reads, parts = own.reads.plan.reads, own.schedule.parts
        shared = set(own.shared.row.tolist())
        for row, source in zip(reads.wanted.tolist(), reads.source.tolist(), strict=True):
            assert (source >= 0) == (row in shared)
        numel = np.prod(reads.sizes, axis=1)
        for rank in set(reads.source.tolist()) - {-1}:
            named = parts.source == rank
            assert numel[reads.source == rank].sum() == (parts.last - parts.first)[named].sum()
        kept = (reads.source < 0) | (reads.source == own.rank)
        assert len(own.reads.own.reads) == len(own.reads.spans) == kept.sum()
        assert own.reads.shared == (reads.source == own.rank).sum()


def with_operations(plans: RankPlans, operations: Sequence[Broadcast]) -> RankPlans:
    """The same rank with other operations, for tests of the simulation itself."""
    return replace(plans, schedule=replace(plans.schedule, operations=tuple(operations)))
