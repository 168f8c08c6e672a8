"""Schedules of shared buffers: the order that all ranks know, batches, blocks, bounds; and whole loads, simulated."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.box import Box
from dcp_core.dtype import BY_NAME, ITEMSIZE
from dcp_core.errors import ArgumentError
from dcp_core.planning import buffer_parts
from dcp_core.planning.buffer_parts import ALIGNMENT, block_starts, box_of_run, boxes_of, slabs_of
from dcp_core.planning.read_items import ReadColumns
from dcp_core.planning.schedule import Broadcast, ScheduleLimits
from tests.core.schedule_simulator import (
    FaultError,
    Layout,
    RankPlans,
    Simulation,
    Want,
    check_layout,
    content_of,
    plan_all,
    random_layout,
    stored_tensor,
    with_operations,
)

MEBI = 1 << 20
SEEDS = st.integers(0, 2**32)
LIMITS = ScheduleLimits(batch_bytes=100, block_bytes=400)


def whole(name: str, *shape: int, dtype: str = "uint8", number: int = 0, target: str = "", kind: str = "gloo") -> Want:
    stored = stored_tensor(name, shape, dtype, [Box.whole(shape)], number)
    return stored, Box.whole(shape), target or dtype, kind


def planned(wants: Sequence[Sequence[Want]], limits: ScheduleLimits = LIMITS, **more: int) -> list[RankPlans]:
    """What all ranks plan; by default no buffer is cut by rows."""
    layout = Layout(tuple(range(len(wants))), tuple(map(tuple, wants)), limits, **{"smallest_piece": 1 << 40, **more})
    return plan_all(layout, Random(0))


BUSY = whole("busy", MEBI, number=99)


def names_sent(plans: RankPlans) -> list[list[str]]:
    """For each operation the names of what it sends."""
    rows = plans.schedule.parts.row
    return [[plans.plan.wanted.stored_names[rows[part]] for part in op.parts] for op in plans.schedule.operations]


def read_by_rank_0(wants: Sequence[Want], limits: ScheduleLimits = LIMITS) -> list[RankPlans]:
    """What two ranks plan that share some wants, of which the second has enough to read without them."""
    return planned([wants, [*wants, BUSY]], limits)


def run(plans: Sequence[RankPlans], seed: int = 0, *, in_order: bool = True) -> None:
    Simulation(plans, Random(seed), in_order=in_order).run()


# -- whole loads, simulated -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(SEEDS)
def test_every_element_arrives_once_in_any_order_of_events(seed: int) -> None:
    rng = Random(seed)
    check_layout(random_layout(rng), rng)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_every_element_arrives_once_in_ten_thousand_layouts(request: pytest.FixtureRequest) -> None:
    if "soak" not in request.config.option.markexpr:
        pytest.skip("takes minutes: run it with -m soak")
    for seed in range(10_000):
        rng = Random(seed)
        try:
            check_layout(random_layout(rng), rng)
        except Exception as error:
            raise AssertionError(f"layout {seed}: {error}") from error


def test_parameters_tied_between_stages_and_a_stage_with_nothing_to_share() -> None:
    tied = whole("embedding", 60, number=40)
    for first_name in ("a", "z"):  # the stages' own buffers come before the tied ones, or after them
        stages = [
            [whole(f"{first_name}.{stage}.{n}", 30 + n, number=9 * stage + n) for n in range(9)] for stage in range(4)
        ]
        wants = [[*stages[rank // 2], *([tied] if rank in (0, 1, 6, 7) else [])] for rank in range(8)]
        wants[2] = [whole("alone.2", 5, number=41)]
        for seed in range(6):
            for one_group in (False, True):
                limits = replace(LIMITS, one_group_at_a_time=one_group, in_flight=1 + seed % 3)
                check_layout(Layout(tuple(range(8)), tuple(map(tuple, wants)), limits), Random(seed))
        plans = planned(wants)
        assert [group.key.ranks for group in plans[6].schedule.groups] == [(0, 1, 6, 7), (6, 7)]
        assert plans[2].schedule.operations == plans[3].schedule.operations == ()


def test_the_simulation_sees_a_deadlock() -> None:
    """Two groups that two ranks walk in opposite orders, one operation at a time."""
    wants = [[whole("a", 500), whole("b", 500, number=1)]] * 2 + [[whole("a", 500)], [whole("b", 500, number=1)]]
    plans = planned([wants[0], wants[1], wants[2]], replace(LIMITS, in_flight=1, block_bytes=1000))
    run(plans)
    first, second = plans[0].schedule.operations
    swapped = [replace(second, after=0), replace(first, after=1)]
    with pytest.raises(FaultError, match="deadlock"):
        run([with_operations(plans[0], swapped), *plans[1:]])


def test_the_simulation_sees_members_that_disagree() -> None:
    plans = planned([[whole("a", 500), whole("b", 500, number=1)]] * 2)
    first, second, *rest = plans[0].schedule.operations
    mixed = with_operations(plans[0], [second, first, *rest])
    with pytest.raises(FaultError, match="disagree|deadlock"):
        run([mixed, plans[1]])


def test_the_simulation_sees_what_is_sent_before_it_is_read() -> None:
    plans = planned([[whole(name, 500, number=n) for n, name in enumerate("abcd")]] * 2)
    hasty = [replace(own, reads=replace(own.reads, ready=np.zeros_like(own.reads.ready))) for own in plans]
    found = []
    for seed in range(20):
        try:
            run(hasty, seed)
        except FaultError as error:
            found.append(str(error))
    assert found and all("has not read" in text for text in found)


def test_the_simulation_sees_what_comes_twice() -> None:
    plans = planned([[whole("a", 50)]] * 2)
    (only,) = plans[0].schedule.operations
    twice = [with_operations(own, [only, replace(only, after=1)]) for own in plans]
    with pytest.raises(FaultError, match="twice"):
        run(twice)


# -- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_closes_where_the_next_piece_would_not_fit_and_the_rest_at_the_end() -> None:
    sizes = {"a": 40, "b": 50, "c": 11, "d": 500, "e": 89, "f": 1}
    wants = [whole(name, size, number=n) for n, (name, size) in enumerate(sizes.items())]
    plans = read_by_rank_0(wants, replace(LIMITS, block_bytes=1000))
    assert names_sent(plans[0]) == names_sent(plans[1]) == [["a", "b"], ["d"], ["c", "e"], ["f"]]


def test_a_batch_may_be_exactly_full() -> None:
    wants = [whole(name, size, number=n) for n, (name, size) in enumerate([("a", 60), ("b", 40), ("c", 99), ("d", 1)])]
    plans = read_by_rank_0(wants)
    assert names_sent(plans[0]) == [["a", "b"], ["c", "d"]]


def test_batches_close_by_their_own_content_whatever_else_a_rank_shares() -> None:
    """Ranks 0 and 1 share much besides, with rank 2; what they send to each other only is batched as without it."""
    pair = [whole(f"p.{n}", 30, number=n) for n in range(8)]
    others = [whole(f"{'opq'[n % 3]}.{n}.x", 7 + 13 * n % 60, number=20 + n) for n in range(30)]
    crowded = planned([[*pair, *others], [*pair, *others[::2], BUSY], others])
    expected = names_sent(read_by_rank_0(pair)[0])
    assert expected == [["p.0", "p.1", "p.2"], ["p.3", "p.4", "p.5"], ["p.6", "p.7"]]
    for own in crowded[:2]:
        groups = [own.schedule.groups[operation.group].key.ranks for operation in own.schedule.operations]
        assert {(0, 1), (0, 1, 2)} <= set(groups)
        assert [names for names, ranks in zip(names_sent(own), groups, strict=True) if ranks == (0, 1)] == expected
    for low, high in ((0, 1), (0, 2), (1, 2)):
        first, second = (
            [content_of(own, operation) for operation in own.schedule.operations
             if {low, high} <= set(own.schedule.groups[operation.group].key.ranks)]
            for own in (crowded[low], crowded[high])
        )  # fmt: skip
        assert first == second


def test_element_types_readers_and_communicators_have_batches_of_their_own() -> None:
    wants = [
        whole("a", 20, number=1), whole("b", 20, number=2, target="bool"), whole("c", 20, number=3, kind="nccl"),
        whole("d", 20, number=4), whole("e", 20, number=5, kind="nccl"), whole("f", 20, number=6, target="bool"),
    ]  # fmt: skip
    plans = read_by_rank_0(wants)
    assert names_sent(plans[0]) == [["a", "d"], ["b", "f"], ["c", "e"]]
    kinds = [plans[0].schedule.groups[op.group].key.kind for op in plans[0].schedule.operations]
    assert kinds == ["gloo", "gloo", "nccl"]
    assert [op.dtype for op in plans[0].schedule.operations][:2] == [BY_NAME["uint8"].code, BY_NAME["bool"].code]


def test_without_batches_everything_is_sent_by_itself() -> None:
    wants = [whole(f"w.{n}", 3, number=n) for n in range(5)]
    plans = planned([wants] * 2, replace(LIMITS, batch_bytes=0))
    assert names_sent(plans[0]) == [[f"w.{n}"] for n in range(5)]


def test_sizes_are_those_of_the_targets_elements() -> None:
    wants = [whole(f"w.{n}", 10, number=n, dtype="float32", target="bfloat16") for n in range(5)]
    plans = read_by_rank_0(wants)
    assert [op.nbytes for op in plans[0].schedule.operations] == [100]


# -- blocks -----------------------------------------------------------------------------------------------------------


def test_large_buffers_travel_in_blocks_at_their_place() -> None:
    wants = [whole("a", 10, number=1), whole("b", 10, 100, number=2), whole("c", 10, number=3)]
    plans = read_by_rank_0(wants)
    assert names_sent(plans[0]) == names_sent(plans[1]) == [["b"], ["b"], ["b"], ["a", "c"]]
    parts = plans[0].schedule.parts
    of_b = [(int(parts.first[op.parts[0]]), int(parts.last[op.parts[0]])) for op in plans[0].schedule.operations[:3]]
    assert of_b == [(0, 400), (400, 800), (800, 1000)]


BOXES = st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple)


@settings(deadline=None)
@given(BOXES, st.integers(1, 40), st.data())
def test_blocks_tile_a_piece_in_order_and_each_is_a_box_of_bounded_size(
    sizes: tuple[int, ...], block: int, data: st.DataObject
) -> None:
    (slabs,), (slab,) = slabs_of(np.array([sizes], np.int64).reshape(1, -1), np.array([4]))
    numel = int(np.prod(sizes))
    first = data.draw(st.integers(0, int(slabs) - 1)) * int(slab)
    last = min(data.draw(st.integers(first // int(slab) + 1, int(slabs))) * int(slab), numel)
    starts = block_starts(first, last, sizes, int(slab), block).tolist()
    assert starts[0] == first and starts == sorted(set(starts))
    for low, high in zip(starts, [*starts[1:], last], strict=True):
        assert 0 < high - low <= block
        box = box_of_run(low, high, sizes)
        inside = np.zeros(sizes, dtype=bool)
        inside[tuple(slice(a, a + b) for a, b in zip(box.offsets, box.sizes, strict=True))] = True
        assert np.flatnonzero(inside).tolist() == list(range(low, high))


@given(BOXES, st.sampled_from([1, 2, 4, 8]), st.integers(0, 6))
def test_slabs_are_whole_rows_and_cover_the_buffer(sizes: tuple[int, ...], itemsize: int, factor: int) -> None:
    extent = tuple(size << factor if index == 0 else size for index, size in enumerate(sizes))
    (count,), (numel,) = slabs_of(np.array([extent], np.int64).reshape(1, -1), np.array([itemsize]))
    total = int(np.prod(extent))
    assert (count - 1) * numel < total <= count * numel
    for slab in range(min(int(count), 5)):
        run_of = (slab * int(numel), min((slab + 1) * int(numel), total))
        assert box_of_run(*run_of, extent).numel == run_of[1] - run_of[0]


def test_rows_are_put_together_so_that_cuts_fall_on_checksum_blocks_where_there_are_enough_of_them() -> None:
    sizes = np.array([[32000, 4096], [64, 4096], [5001, 700], [1, 1 << 24]])
    count, numel = slabs_of(sizes, np.array([2, 2, 4, 4]))
    assert count.tolist() == [250, 64, 5001, 64]
    assert (numel * [2, 2, 4, 4])[[0, 3]].tolist() == [ALIGNMENT, ALIGNMENT]


def test_boxes_of_runs_are_found_for_many_at_once() -> None:
    offsets, sizes = boxes_of(np.array([0, 6, 7]), np.array([12, 9, 8]), np.array([[4, 3]] * 3))
    assert offsets.tolist() == [[0, 0], [2, 0], [2, 1]]
    assert sizes.tolist() == [[4, 3], [1, 3], [1, 1]]


def test_the_examples_in_the_docs_of_parts_are_true() -> None:
    found = doctest.testmod(buffer_parts)
    assert found.attempted and not found.failed


# -- bounds -----------------------------------------------------------------------------------------------------------


def waits(plans: RankPlans) -> list[int]:
    return [operation.after for operation in plans.schedule.operations]


def test_a_number_of_operations_is_under_way_at_most() -> None:
    wants = [whole(f"w.{n}", 100, number=n) for n in range(6)]
    assert waits(planned([wants] * 2, replace(LIMITS, in_flight=2))[0]) == [0, 0, 1, 2, 3, 4]
    assert waits(planned([wants] * 2, replace(LIMITS, in_flight=8))[0]) == [0] * 6


def test_bytes_under_way_are_bounded_and_one_that_is_larger_goes_alone() -> None:
    sizes = [100, 100, 300, 100, 100, 100]
    wants = [whole(f"w.{n}", size, number=n) for n, size in enumerate(sizes)]
    assert waits(planned([wants] * 2, replace(LIMITS, in_flight_bytes=200))[0]) == [0, 0, 2, 3, 3, 4]


def test_one_communicator_at_a_time_waits_for_all_of_another_group() -> None:
    common = [whole(f"{name}.c", 100, number=n) for n, name in enumerate("ace")]
    pair = [whole(f"{name}.p", 100, number=9 + n) for n, name in enumerate("ab")]
    wants = [[*common, *pair], [*common, *pair], common]
    plans = planned(wants, replace(LIMITS, one_group_at_a_time=True))
    assert names_sent(plans[0]) == [["a.c"], ["a.p"], ["b.p"], ["c.c"], ["e.c"]]
    assert waits(plans[0]) == [0, 1, 1, 3, 3]
    assert waits(planned(wants)[0]) == [0] * 5


@pytest.mark.parametrize("bad", [{"batch_bytes": -1}, {"block_bytes": 15}, {"in_flight": 0}])
def test_limits_with_which_nothing_could_be_sent_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="batches of 0 bytes or more"):
        ScheduleLimits(**{"batch_bytes": 1, **bad})  # type: ignore[arg-type]  # all of these are numbers


# -- what a rank reads itself -----------------------------------------------------------------------------------------


def test_what_others_wait_for_is_read_first_and_in_the_order_of_sending() -> None:
    shared = [whole(f"w.{n}", 200, number=7 * n % 5) for n in range(10)]
    alone = [whole(f"{name}.own", 200, number=20 + n) for n, name in enumerate("az")]
    plans = planned([[*shared, *alone], shared])
    for own in plans:
        boxes, spans = own.plan.wanted, own.reads.spans
        names = [boxes.stored_names[row] for row in spans.wanted.tolist()]
        mine = names[: own.reads.shared]
        assert mine == sorted(mine) and all(name.startswith("w") for name in mine)
        assert sorted(names[own.reads.shared :]) == (["a.own", "z.own"] if own.rank == 0 else [])
        for part, ready in enumerate(own.reads.ready.tolist()):
            name = boxes.stored_names[own.schedule.parts.row[part]]
            assert ready == (names.index(name) + 1 if name in mine else 0)


def test_what_a_rank_reads_alone_goes_file_after_file() -> None:
    plans = planned([[whole(f"w.{n}", 9, number=n) for n in range(9)], []])
    columns = plans[0].reads.spans.columns
    places = list(zip(columns.file.tolist(), columns.byte_offset.tolist(), strict=True))
    assert plans[0].reads.shared == 0 and places == sorted(places)


def test_items_name_their_reader_and_regions_are_cut_where_readers_change() -> None:
    rows = [Box((0, 0), (3, 10)), Box((3, 0), (5, 10))]
    stored = stored_tensor("w", (8, 10), "uint8", rows)
    want = stored, Box.whole((8, 10)), "uint8", "gloo"
    plans = planned([[want]] * 2, smallest_piece=1, alignment=1)
    for own in plans:
        items = own.reads.plan.items
        assert [(item.dest_offsets, item.lengths, item.source) for item in items] == [
            ((0, 0), (3, 10), 0), ((3, 0), (1, 10), 0), ((4, 0), (4, 10), 1),
        ]  # fmt: skip
        assert [item.storage_offsets for item in items] == [(0, 0), (0, 0), (1, 0)]
        assert {item.source for item in own.reads.own.items} == {own.rank}
        assert own.reads.own.wanted is own.plan.wanted


def test_nothing_shared_leaves_the_plan_as_it_was() -> None:
    (own,) = planned([[whole("a", 4), whole("b", 5, number=1)]])
    for column in ("wanted", "chunk", "offsets", "sizes", "source"):
        before, after = (getattr(plan.reads, column) for plan in (own.plan, own.reads.own))
        np.testing.assert_array_equal(before, after)
    assert isinstance(own.reads.own.reads, ReadColumns) and own.schedule.operations == ()


def test_large_pieces_are_read_block_by_block_where_blocks_are_those_of_checksums() -> None:
    aligned = whole("a", 64 * 16, MEBI // 16)
    odd = whole("b", 64 * 16, MEBI // 16 + 1, number=1)
    limits = ScheduleLimits(batch_bytes=6 * MEBI)
    plans = planned([[aligned, odd]] * 2, limits, alignment=MEBI)
    for own in plans:
        reads, parts = own.schedule.reads, own.schedule.parts
        of_a, of_b = (int((reads.row == row).sum()) for row in (0, 1))
        assert (of_a, of_b) == (8, 1)
        assert ((reads.last - reads.first)[reads.row == 0] == 8 * MEBI).all()
        assert int((parts.row == 1).sum()) >= 8
        assert ((parts.last - parts.first) * ITEMSIZE[own.plan.wanted.dtype[parts.row]] <= 8 * MEBI).all()
        assert (reads.first[own.schedule.read_of] <= parts.first).all()
        assert (reads.last[own.schedule.read_of] >= parts.last).all()


def test_a_block_is_sent_before_the_rest_of_its_piece_is_read() -> None:
    limits = ScheduleLimits(batch_bytes=6 * MEBI)
    plans = planned([[whole("a", 64 * 16, MEBI // 16)]] * 2, limits, alignment=MEBI)
    reader = next(own for own in plans if own.reads.shared)
    assert reader.reads.ready.tolist() == list(range(1, 9))
    sent: tuple[Broadcast, ...] = reader.schedule.operations
    assert [op.nbytes for op in sent] == [8 * MEBI] * 8
