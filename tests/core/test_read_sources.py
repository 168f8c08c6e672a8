"""Who reads what for whom, against a plain model of all offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.box import Box
from dcp_core.errors import ArgumentError, CoordinationError
from dcp_core.planning import shared_sets
from dcp_core.planning.buffer_parts import ALIGNMENT
from dcp_core.planning.load_plan import LoadPlan
from dcp_core.planning.rank_groups import GroupKey, Origin, decode_group, encode_group
from dcp_core.planning.read_sources import MOST_READERS, ReadSources, SharingOptions, assign_sources
from dcp_core.planning.shared_offers import (
    Buffers,
    HeldGroup,
    Offer,
    decode_wants,
    encode_offer,
    find_buffers,
    parse_offer,
)
from dcp_core.planning.source_answers import SharedBuffers, decode_sources
from tests.core.schedule_simulator import Want, offer_of, plan_of, random_layout, small_constants, stored_tensor

SEEDS = st.integers(0, 2**32)
MEBI = 1 << 20
EVERYTHING = SharingOptions(batch_bytes=6 * MEBI)


def whole(name: str, *shape: int, dtype: str = "bfloat16", number: int = 0, kind: str = "gloo") -> Want:
    """A whole tensor that is stored as one chunk."""
    return stored_tensor(name, shape, dtype, [Box.whole(shape)], number), Box.whole(shape), dtype, kind


def as_type(want: Want, dtype: str) -> Want:
    return want[0], want[1], dtype, want[3]


def on(want: Want, kind: str | None) -> Want:
    return want[0], want[1], want[2], kind


def shared_by(
    wants: Sequence[Sequence[Want]], options: SharingOptions = EVERYTHING, ranks: Sequence[int] = (), **more: Any
) -> tuple[list[SharedBuffers], list[LoadPlan]]:
    """What each rank is told, and its load plan."""
    offered = [offer_of(rank, own, **more) for rank, own in zip(ranks or range(len(wants)), wants, strict=True)]
    sources = assign_sources([encode_offer(offer) for _, offer in offered], options)
    told = [decode_sources(answer, offer) for answer, (_, offer) in zip(sources.answers, offered, strict=True)]
    return told, [plan for plan, _ in offered]


def names_of(told: SharedBuffers, plan: LoadPlan) -> list[str]:
    return [plan.wanted.stored_names[row] for row in told.row.tolist()]


def pieces_of(told: SharedBuffers) -> list[list[tuple[int, int]]]:
    """For each buffer its pieces: reader, and where they end."""
    pairs = list(zip(told.reader.tolist(), told.stop.tolist(), strict=True))
    ends = np.cumsum(told.pieces).tolist()
    return [pairs[end - count : end] for end, count in zip(ends, told.pieces.tolist(), strict=True)]


def bytes_read(told: Sequence[SharedBuffers], plans: Sequence[LoadPlan], ranks: Sequence[int] = ()) -> dict[int, float]:
    """What each rank reads, shared and alone, with pieces by their share of slabs."""
    read: dict[int, float] = {}
    for rank, own, plan in zip(ranks or range(len(told)), told, plans, strict=True):
        boxes = plan.wanted
        nbytes = [box.numel * int(plan.wanted.stored(row).dtype.itemsize) for row, box in enumerate(boxes.boxes)]
        read[rank] = sum(nbytes[row] for row in set(range(len(boxes))) - set(own.row.tolist()))
        for row, pieces in zip(own.row.tolist(), pieces_of(own), strict=True):
            first = 0
            for reader, stop in pieces:
                read[rank] += nbytes[row] * (stop - first) / pieces[-1][1] if reader == rank else 0
                first = stop
    return read


# -- which buffers are the same ---------------------------------------------------------------------------------------


def test_ranks_that_want_the_same_box_share_it_and_one_of_them_reads_it() -> None:
    told, plans = shared_by([[whole("w", 4, 4), whole(f"own.{rank}", 2, number=rank + 1)] for rank in range(3)])
    for own, plan in zip(told, plans, strict=True):
        assert names_of(own, plan) == ["w"]
        assert [group.key for group in own.groups] == [GroupKey((0, 1, 2), "gloo")]
        assert pieces_of(own) == pieces_of(told[0])
        assert own.reader[0] in (0, 1, 2)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(as_type(whole("w", 4, 4), "float32"), id="element type"),
        pytest.param(on(whole("w", 4, 4), "nccl"), id="communicator"),
        pytest.param(on(whole("w", 4, 4), None), id="no communicator"),
        pytest.param(whole("v", 4, 4), id="name"),
        pytest.param((whole("w", 4, 4)[0], Box((0, 0), (4, 2)), "bfloat16", "gloo"), id="sizes"),
        pytest.param(whole("w", 4, 4, number=7), id="another rank's tensor of that name"),
    ],
)
def test_what_differs_is_not_shared(other: Want) -> None:
    told, _ = shared_by([[whole("w", 4, 4)], [other]])
    assert [len(own) for own in told] == [0, 0]
    again, _ = shared_by([[other], [other]])
    assert [len(own) for own in again] == ([0, 0] if other[3] is None else [1, 1])


def test_boxes_that_start_elsewhere_are_not_shared() -> None:
    stored = whole("w", 4, 4)[0]
    told, _ = shared_by([[(stored, Box((row, 0), (1, 4)), "bfloat16", "gloo")] for row in (0, 1, 1)])
    assert [len(own) for own in told] == [0, 1, 1]


def test_equal_buffers_of_one_rank_are_shared_one_by_one() -> None:
    want = whole("w", 4, 4)
    told, _ = shared_by([[want, want], [want], [want, want, want]])
    assert [len(own) for own in told] == [2, 1, 2]
    assert [group.key.ranks for group in told[0].groups] == [(0, 1, 2), (0, 2)]


def test_boxes_without_elements_and_boxes_that_are_not_filled_are_not_shared() -> None:
    plan = plan_of([whole("a", 4, 2), whole("b", 4, 2, number=1), whole("e", 0, 2, number=2)])
    half = plan.with_items([replace(item, lengths=(2, 2)) if index else item for index, item in enumerate(plan.items)])
    buffers, alone = find_buffers(half, ["gloo"] * 3)
    assert buffers.row.tolist() == [0]
    assert (buffers.nbytes.tolist(), alone) == ([16], 8)


def test_nothing_is_shared_of_a_plan_whose_targets_share_memory() -> None:
    plan = plan_of([whole("a", 4, 2)])
    tied = LoadPlan(plan.wanted, (), plan.reads, share_memory=True)
    buffers, alone = find_buffers(tied, ["gloo"])
    assert (len(buffers), alone) == (0, 16)


def test_buffers_come_in_the_order_of_names_offsets_and_sizes_whatever_the_order_of_leaves() -> None:
    stored = stored_tensor("m", (6, 2), "bfloat16", [Box.whole((6, 2))], 3)
    boxes = [Box((0, 0), (2, 2)), Box((0, 0), (3, 2)), Box((2, 0), (1, 1)), Box((2, 1), (1, 1)), Box((4, 0), (2, 2))]
    wants = [whole("a", 3, number=1), *((stored, box, "bfloat16", "gloo") for box in boxes), whole("z", 3, number=2)]
    for seed in range(20):
        mixed = Random(seed).sample(wants, len(wants))
        plan, offer = offer_of(0, mixed)
        walked = [(plan.wanted.stored_names[row], plan.wanted.boxes[row]) for row in offer.buffers.row.tolist()]
        assert walked == [("a", Box((0,), (3,))), *(("m", box) for box in boxes), ("z", Box((0,), (3,)))]
        assert encode_offer(offer) == encode_offer(offer_of(0, wants)[1])


def test_names_sort_by_code_points_and_may_hold_any_character() -> None:
    names = ["a", "b\0", "Ω", "\ud800", "\U0001f600", "B"]
    wants = [whole(name, 2, number=number) for number, name in enumerate(names)]
    told, plans = shared_by([wants, wants[::-1]])
    assert names_of(told[0], plans[0]) == names_of(told[1], plans[1]) == sorted(names)


# -- who reads --------------------------------------------------------------------------------------------------------


def test_what_one_rank_reads_alone_is_booked_first() -> None:
    alone = whole("only.0", 1000, 1000, number=9)
    small = [whole(f"w.{number}", 200, 1000, number=number) for number in range(5)]
    told, plans = shared_by([[*small, alone], small])
    assert set(told[0].reader.tolist()) == {1}
    assert bytes_read(told, plans) == {0: 2_000_000, 1: 2_000_000}


def test_bytes_that_cannot_be_shared_count_too() -> None:
    alone = on(whole("only.0", 1000, 1000, number=9), None)
    small = [whole(f"w.{number}", 200, 1000, number=number) for number in range(5)]
    told, _ = shared_by([[*small, alone], small])
    assert set(told[0].reader.tolist()) == {1}


def test_buffers_go_largest_first_to_the_member_with_the_fewest_bytes() -> None:
    sizes = [900, 800, 700, 600, 500, 400]
    wants = [whole(f"w.{number}", size, 1000, number=number) for number, size in enumerate(sizes)]
    told, plans = shared_by([wants] * 3)
    readers = dict(zip(names_of(told[0], plans[0]), (pieces[0][0] for pieces in pieces_of(told[0])), strict=True))
    assert [readers[f"w.{number}"] for number in range(6)] == [0, 1, 2, 2, 1, 0]


def test_readers_of_equal_buffers_take_turns_in_the_order_in_which_buffers_are_sent() -> None:
    wants = [whole(f"w.{number:02}", 1000, 1000, number=number) for number in range(12)]
    told, _ = shared_by([wants] * 3)
    assert told[0].reader.tolist() == [0, 1, 2] * 4


def test_a_buffer_larger_than_a_share_is_cut_by_rows_between_its_members() -> None:
    told, plans = shared_by([[whole("big", 64000, 1024), *(whole(f"s.{n}", 64, number=n + 1) for n in range(3))]] * 4)
    big = pieces_of(told[0])[0]
    assert sorted(reader for reader, _ in big) == [0, 1, 2, 3]
    assert [pieces_of(own) for own in told] == [pieces_of(told[0])] * 4
    read = bytes_read(told, plans)
    assert max(read.values()) <= sum(read.values()) / 4 + ALIGNMENT
    stops = [stop for _, stop in big]
    assert stops == sorted(set(stops)) and stops[-1] == 125  # slabs of 1 MiB: 512 rows


def test_one_group_with_more_bytes_than_others_is_no_reason_to_cut() -> None:
    heavy = [whole(f"h.{number}", 4000, 1000, number=number) for number in range(40)]
    light = [whole(f"l.{number}", 10, 1000, number=50 + number) for number in range(40)]
    told, plans = shared_by([heavy, heavy, *([light] * 6)])
    assert all((own.pieces == 1).all() for own in told)
    read = bytes_read(told, plans)
    assert read[0] == read[1] == 160_000_000


def test_a_buffer_has_no_more_readers_than_are_worth_naming_and_no_piece_is_too_small() -> None:
    big = whole("big", 1 << 16, 1024)
    told, _ = shared_by([[big]] * (MOST_READERS + 9))
    assert told[0].pieces.tolist() == [MOST_READERS]
    few, _ = shared_by([[whole("w", 5 * MEBI // 2)]] * 8)
    assert few[0].pieces.tolist() == [5]
    least = replace(EVERYTHING, smallest_piece=2 * MEBI)
    fewer, _ = shared_by([[whole("w", 5 * MEBI // 2)]] * 8, least)
    assert fewer[0].pieces.tolist() == [2]


def test_tiny_buffers_go_to_their_lowest_member() -> None:
    tiny = [whole(f"t.{number}", 100, number=number) for number in range(20)]
    big = [whole(f"w.{number}", 1000, 1000, number=50 + number) for number in range(8)]
    told, plans = shared_by([[*tiny, *big]] * 4)
    named = zip(names_of(told[0], plans[0]), pieces_of(told[0]), strict=True)
    assert {pieces[0][0] for name, pieces in named if name.startswith("t")} == {0}


# -- groups -----------------------------------------------------------------------------------------------------------


def test_parameters_tied_between_the_first_and_the_last_stage_are_one_set_of_four_ranks() -> None:
    tied = whole("embedding", 64, 8)
    stages: list[list[Want]] = [[whole(f"layer.{stage}", 8, 8, number=stage + 1)] for stage in range(4)]
    wants = [[*stages[rank // 2], *([tied] if rank in (0, 1, 6, 7) else [])] for rank in range(8)]
    told, plans = shared_by(wants)
    for rank, (own, plan) in enumerate(zip(told, plans, strict=True)):
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        expected = {pair} | ({(0, 1, 6, 7)} if rank in (0, 1, 6, 7) else set())
        assert [group.key.ranks for group in own.groups] == sorted(expected)
        assert len(own) == len(plan.wanted)


def test_a_stage_with_nothing_to_share_gets_an_empty_answer() -> None:
    pair = [whole("w", 8, 8)]
    wants = [pair, pair, [whole("x", 8, 8, number=1)], [whole("y", 8, 8, number=2)], []]
    told, _ = shared_by(wants)
    assert [len(own) for own in told] == [1, 1, 0, 0, 0]
    offers = [encode_offer(offer_of(rank, own)[1]) for rank, own in enumerate(wants)]
    assert assign_sources(offers, EVERYTHING).answers[2:] == (b"", b"", b"")


def held(ranks: Sequence[int], kind: str = "gloo", name: str = "") -> HeldGroup:
    return HeldGroup(GroupKey(tuple(ranks), kind), name)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[held([0, 1, 2])]] * 3, (Origin.GIVEN, "")),
        ([[held([0, 1, 2])], [held([0, 1, 2])], []], (Origin.MADE, "")),
        ([[held([0, 1, 2], name="dp")]] * 3, (Origin.EXISTING, "dp")),
        ([[held([0, 1, 2], name="dp")], [held([0, 1, 2], name="dp")], [held([0, 1, 2], name="pd")]], (Origin.MADE, "")),
        ([[held([0, 1, 2], name="dp"), held([0, 1, 2])]] * 3, (Origin.GIVEN, "")),
        ([[held([0, 1, 2], name="dp"), held([0, 1, 2])]] * 2 + [[held([0, 1, 2], name="dp")]], (Origin.EXISTING, "dp")),
        ([[held([0, 1, 2], kind="nccl")]] * 3, (Origin.MADE, "")),
        ([[held([0, 1]), held([1, 2])]] * 3, (Origin.MADE, "")),
        ([[held([0, 1, 2]), held([0, 1, 2])], [held([0, 1, 2])], []], (Origin.MADE, "")),
    ],
)
def test_a_group_is_taken_as_given_or_existing_only_where_all_its_ranks_have_it(
    groups: list[list[HeldGroup]], expected: tuple[Origin, str]
) -> None:
    offered = [offer_of(rank, [whole("w", 8)], groups=tuple(groups[rank])) for rank in range(3)]
    sources = assign_sources([encode_offer(offer) for _, offer in offered], EVERYTHING)
    for answer, (_, offer) in zip(sources.answers, offered, strict=True):
        (group,) = decode_sources(answer, offer).groups
        assert (group.origin, group.name) == expected


def test_a_rank_that_speaks_for_a_group_it_is_not_in_counts_for_nothing() -> None:
    offered = [offer_of(rank, [whole("w", 8)] if rank < 2 else [], groups=(held([0, 1]),)) for rank in (0, 2, 1)]
    lying = [offered[0], offered[1], (offered[2][0], replace(offered[2][1], groups=()))]
    sources = assign_sources([encode_offer(offer) for _, offer in lying], EVERYTHING)
    assert decode_sources(sources.answers[0], lying[0][1]).groups[0].origin is Origin.MADE


@given(st.sets(st.integers(0, 60), min_size=1, max_size=14))
def test_the_bytes_of_a_group_give_the_group_back(ranks: set[int]) -> None:
    key = GroupKey(tuple(sorted(ranks)), "gloo")
    assert decode_group(b"?" + encode_group(key), 1) == (key, 1 + len(encode_group(key)))


def test_the_bytes_of_a_regular_group_are_few() -> None:
    assert len(encode_group(GroupKey(tuple(range(3, 3 + 8 * 4096, 8)), "gloo"))) < 32


@pytest.mark.parametrize(("ranks", "kind"), [((1, 0), "gloo"), ((1, 1), "gloo"), ((0, 1), ""), ((0, 1), "a\0b")])
def test_a_group_has_ascending_ranks_and_a_communicator(ranks: tuple[int, ...], kind: str) -> None:
    with pytest.raises(ArgumentError, match="sorted|short name"):
        GroupKey(ranks, kind)


# -- against a plain model --------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["digests as they are", "digests with equal first halves"])
def digests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        decode = decode_wants

        def halved(wants: bytes) -> Buffers:
            found = decode(wants)
            digest = found.digest.copy()
            digest[:, 0] &= np.uint64(1)
            return replace(found, digest=digest)

        monkeypatch.setattr(shared_sets, "decode_wants", halved)


@pytest.mark.usefixtures("digests")
def test_sets_and_groups_are_those_of_a_plain_model() -> None:
    for seed in range(60):
        rng = Random(seed)
        layout = random_layout(rng)
        with small_constants(layout):
            told, plans = shared_by(layout.wants, replace(EVERYTHING, smallest_piece=1), layout.ranks)
        expected = model_of(layout.ranks, layout.wants)
        for rank, own, plan in zip(layout.ranks, told, plans, strict=True):
            found = [
                (plan.wanted.stored_names[row], plan.wanted.boxes[row], own.groups[group].key)
                for row, group in zip(own.row.tolist(), own.group.tolist(), strict=True)
            ]
            assert sorted(found, key=repr) == sorted(expected[rank], key=repr)
            for row, pieces in zip(own.row.tolist(), pieces_of(own), strict=True):
                assert len({reader for reader, _ in pieces}) == len(pieces)
                assert [stop for _, stop in pieces] == sorted({stop for _, stop in pieces})
                assert plan.wanted.boxes[row].numel >= pieces[-1][1] >= 1


def model_of(ranks: Sequence[int], wants: Sequence[Sequence[Want]]) -> dict[int, list[tuple[str, Box, GroupKey]]]:
    """For each rank what it shares, and with whom: by comparing everything with everything."""
    seen: dict[Any, list[int]] = {}
    for rank, own in zip(ranks, wants, strict=True):
        times: dict[Any, int] = {}
        for stored, box, dtype, kind in own:
            if kind is not None and box.numel:
                identity = id(stored), box, dtype, kind
                times[identity] = times.get(identity, 0) + 1
                seen.setdefault((stored.name, box, kind, identity, times[identity]), []).append(rank)
    found: dict[int, list[tuple[str, Box, GroupKey]]] = {rank: [] for rank in ranks}
    for (name, box, kind, *_), holders in seen.items():
        for rank in holders if len(holders) > 1 else ():
            found[rank].append((name, box, GroupKey(tuple(sorted(holders)), kind)))
    return found


@settings(deadline=None, max_examples=40)
@given(SEEDS)
def test_readers_do_not_depend_on_the_order_in_which_offers_come(seed: int) -> None:
    rng = Random(seed)
    layout = random_layout(rng)
    with small_constants(layout):
        offers = [encode_offer(offer_of(rank, own)[1]) for rank, own in zip(layout.ranks, layout.wants, strict=True)]
        answers = assign_sources(offers, replace(EVERYTHING, smallest_piece=1)).answers
        order = rng.sample(range(len(offers)), len(offers))
        again = assign_sources([offers[index] for index in order], replace(EVERYTHING, smallest_piece=1)).answers
    assert [answers[index] for index in order] == list(again)


@settings(deadline=None, max_examples=40)
@given(SEEDS)
def test_no_rank_reads_much_more_than_an_even_share_where_all_want_the_same(seed: int) -> None:
    rng = Random(seed)
    ranks = rng.randint(2, 9)
    wants = [whole(f"w.{n}", rng.randint(1, 3000), 2048, number=n) for n in range(rng.randint(1, 30))]
    told, plans = shared_by([wants] * ranks)
    read = bytes_read(told, plans)
    assert max(read.values()) <= 1.02 * sum(read.values()) / ranks + 2 * ALIGNMENT


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_an_offer_takes_at_most_24_bytes_a_buffer_and_ranks_that_want_the_same_say_the_same() -> None:
    rng = Random(1)
    for count in (1, 30, 300, 3000):
        wants = [whole(f"w.{n}", rng.randint(1, 60000), rng.randint(1, 20000), number=n) for n in range(count)]
        first, second = (parse_offer(encode_offer(offer_of(rank, wants)[1])) for rank in (3, 4))
        empty = parse_offer(encode_offer(offer_of(3, [])[1]))
        assert len(first.wants) - len(empty.wants) <= 24 * count + 8
        assert first.wants == second.wants and first.rank != second.rank


def test_communicators_of_what_is_not_shared_are_not_in_the_offer() -> None:
    wants = [whole("w", 4, number=0), on(whole("e", 0, 3, number=1), "nccl")]
    first, second = (parse_offer(encode_offer(offer_of(0, own)[1])) for own in (wants, wants[:1]))
    assert first.wants == second.wants


def test_answers_for_ranks_that_want_the_same_are_one_object() -> None:
    wants = [whole(f"w.{n}", 100, 100, number=n) for n in range(9)]
    offers = [encode_offer(offer_of(rank, wants)[1]) for rank in range(4)]
    answers = assign_sources(offers, EVERYTHING).answers
    assert len({id(answer) for answer in answers}) == 1


def test_offers_that_are_no_offers_are_refused() -> None:
    good = encode_offer(offer_of(0, [whole("w", 8), whole("v", 8, number=1)], groups=(held([0, 1]),))[1])
    assign_sources([good], EVERYTHING)
    for bad in (b"", b"x" * 200, good[:40], good[:-3], b"OFR0" + good[4:]):
        with pytest.raises(CoordinationError, match="offers to share|plan column"):
            assign_sources([bad], EVERYTHING)


def test_two_ranks_of_one_number_are_refused() -> None:
    offer = encode_offer(offer_of(5, [whole("w", 8)])[1])
    with pytest.raises(CoordinationError, match="rank 5 of the job"):
        assign_sources([offer, offer], EVERYTHING)


def test_an_answer_that_is_none_or_is_somebody_elses_is_refused() -> None:
    offered = [offer_of(rank, [whole("w", 8), whole("v", 8, number=1)])[1] for rank in (0, 1)]
    (answer, _) = assign_sources([encode_offer(offer) for offer in offered], EVERYTHING).answers
    other: Offer = offer_of(0, [whole("w", 8)])[1]
    more: Offer = offer_of(0, [whole(name, 8, number=number) for number, name in enumerate("wvu")])[1]
    stranger = replace(offered[0], rank=7)
    for bad, offer in (
        (answer, other),
        (answer, more),
        (answer, stranger),
        (answer[:-2], offered[0]),
        (b"?" * 99, offered[0]),
    ):
        with pytest.raises(CoordinationError, match="readers from the coordinator|plan column"):
            decode_sources(bad, offer)


# -- auto -------------------------------------------------------------------------------------------------------------


def auto(hosts: Sequence[str], size: int, **more: Any) -> ReadSources:
    offers = []
    for rank, host in enumerate(hosts):
        _, offer = offer_of(rank, [whole("w", size, 1 << 20), whole(f"own.{rank}", 8, number=rank + 1)], **more)
        offers.append(encode_offer(replace(offer, host=host)))
    return assign_sources(offers, replace(EVERYTHING, auto=True))


def test_auto_shares_nothing_on_one_host_and_says_why() -> None:
    sources = auto(["a"] * 8, 4096)
    assert set(sources.answers) == {b""}
    assert "page cache" in sources.reason


def test_auto_shares_large_buffers_between_many_hosts() -> None:
    sources = auto(list("abcdefgh"), 4096)
    assert b"" not in sources.answers
    assert "1 of 1 groups" in sources.reason and "8.00 GiB" in sources.reason


def test_auto_makes_no_group_for_little_but_uses_one_that_exists() -> None:
    assert set(auto(list("abcdefgh"), 4).answers) == {b""}
    given = auto(list("abcdefgh"), 4, groups=(held(range(8)),))
    assert b"" not in given.answers


def test_auto_believes_what_ranks_have_measured() -> None:
    slow_storage = auto(["a", "b"], 4096, same_rate=1e8, own_rate=1e8)
    assert b"" not in slow_storage.answers and "reading the same at 0.09 GiB/s" in slow_storage.reason
    assert b"" not in auto(["a", "a"], 4096, same_rate=1e8, own_rate=1e8).answers
    assert set(auto(["a", "b"], 4096, same_rate=1e10, own_rate=1e10).answers) == {b""}
    assert set(auto(["a", "b"], 4096).answers) == {b""}


def test_what_auto_does_not_share_is_booked_on_every_member() -> None:
    """Ranks 0 and 1, on one host, read `big` for themselves; so `far` is read by those on other hosts."""
    big, far = whole("big", 4096, 1 << 20, kind="nccl"), whole("far", 2048, 1 << 20, number=1, kind="nccl")
    wants = [[big, far], [big, far], [far], [far, whole("own", 512, 1 << 20, number=2)]]
    offered = [offer_of(rank, own) for rank, own in enumerate(wants)]
    hosts = "aabc"
    offers = [encode_offer(replace(offer, host=hosts[rank])) for rank, (_, offer) in enumerate(offered)]
    sources = assign_sources(offers, replace(EVERYTHING, auto=True))
    told = [decode_sources(answer, offer) for answer, (_, offer) in zip(sources.answers, offered, strict=True)]
    assert [len(own) for own in told] == [1, 1, 1, 1]
    assert {reader for own in told for reader in own.reader.tolist()} == {2}  # rank 3 reads something else


def test_an_answer_for_300_buffers_stays_below_64_kibibytes_however_finely_they_are_cut() -> None:
    rng = Random(3)
    wants = [whole(f"w.{n}", rng.randint(200, 400), rng.randint(1, 2) * MEBI, number=n) for n in range(300)]
    _, offer = offer_of(0, wants)
    offers = [encode_offer(replace(offer, rank=3 * rank + rank % 2)) for rank in range(2048)]
    answers = assign_sources(offers, EVERYTHING).answers
    told = decode_sources(answers[0], offer)
    assert told.pieces.sum() > 1500
    assert len(answers[0]) <= 64 << 10
