"""When sharing reads repays itself: one pure function, case by case, and what must hold for all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.planning.worth_sharing import GIB, GroupWork, Measured, Verdict, worth_sharing

BATCH = 6 << 20


def group(
    members: int, hosts: int, gib: float, *, buffers: int = 100, exists: bool = False, kind: str = "gloo"
) -> GroupWork:
    return GroupWork(
        members=np.array([members]),
        hosts=np.array([hosts]),
        nbytes=np.array([int(gib * GIB)]),
        buffers=np.array([buffers]),
        exists=np.array([exists]),
        kind=[kind],
    )


def together(*works: GroupWork) -> GroupWork:
    return GroupWork(
        members=np.concatenate([work.members for work in works]),
        hosts=np.concatenate([work.hosts for work in works]),
        nbytes=np.concatenate([work.nbytes for work in works]),
        buffers=np.concatenate([work.buffers for work in works]),
        exists=np.concatenate([work.exists for work in works]),
        kind=[work.kind[0] for work in works],
    )


def is_shared(work: GroupWork, measured: Measured | None = None, batch_bytes: int = BATCH) -> bool:
    return bool(worth_sharing(work, measured or Measured(), batch_bytes).shared[0])


def test_on_one_host_nothing_is_shared_however_fast_the_broadcast() -> None:
    assert not is_shared(group(8, 1, 100, exists=True, kind="nccl"))


def test_on_one_host_a_page_cache_is_seen_by_what_all_read_coming_faster_than_what_one_reads() -> None:
    cold_disk, warm = Measured(same_rate=2 * GIB, own_rate=0.25 * GIB), Measured(4 * GIB, 4 * GIB)
    assert not is_shared(group(4, 1, 1), cold_disk)
    assert not is_shared(group(4, 1, 1), warm)


def test_storage_that_limits_every_reader_is_shared_on_one_host_too() -> None:
    assert is_shared(group(4, 1, 1), Measured(0.1 * GIB, 0.1 * GIB))
    assert is_shared(group(2, 1, 1), Measured(0.1 * GIB, 0.1 * GIB))


@pytest.mark.parametrize(("hosts", "expected"), [(2, False), (4, True), (16, True), (32, True)])
def test_gloo_loses_with_two_replicas_and_wins_with_four_as_published(hosts: int, expected: bool) -> None:
    assert is_shared(group(hosts, hosts, 10)) is expected


def test_ranks_on_one_host_read_what_the_host_has_read_already() -> None:
    assert not is_shared(group(16, 2, 10))


def test_an_accelerators_communicator_wins_with_two_hosts() -> None:
    assert is_shared(group(2, 2, 10, kind="nccl"))
    assert is_shared(group(2, 2, 10, kind="hccl"))


def test_the_communicator_of_mindspore_on_the_cpu_is_for_correctness_only() -> None:
    assert not is_shared(group(64, 64, 10, kind="mccl"))


def test_a_group_is_made_only_where_what_it_shares_repays_it() -> None:
    least = next(size for size in np.geomspace(1e-5, 10, 200) if is_shared(group(8, 8, size, buffers=1)))
    assert not is_shared(group(8, 8, least / 2, buffers=1))
    assert is_shared(group(8, 8, least / 2, buffers=1, exists=True))
    assert 0.001 < least < 0.1  # GiB: what 10 ms are worth at about 1 GiB/s


def test_many_small_buffers_cost_what_their_batches_cost() -> None:
    small = group(8, 8, 0.1, buffers=20_000, exists=True)
    assert is_shared(small)
    assert not is_shared(small, batch_bytes=0)


def test_measured_rates_replace_the_usual_ones() -> None:
    assert is_shared(group(4, 4, 10)) and not is_shared(group(2, 2, 10))
    assert not is_shared(group(4, 4, 10), Measured(20 * GIB, 20 * GIB))
    assert is_shared(group(2, 2, 10), Measured(0.1 * GIB, 0.1 * GIB))
    assert is_shared(group(4, 4, 10), Measured(same_rate=20 * GIB)), "half of them is not enough"


def test_the_reason_names_what_was_decided_and_from_what() -> None:
    work = together(group(8, 8, 12), group(8, 1, 3), group(8, 8, 0.02, buffers=1), group(2, 2, 1))
    verdict = worth_sharing(work, Measured(), BATCH)
    assert verdict.shared.tolist() == [True, False, False, False]
    for text in (
        "1 of 4 groups of ranks share reads (12.00 GiB)",
        "1 on one host, whose page cache reads once (3.00 GiB)",
        "1 where making the group costs more than it saves (0.02 GiB)",
        "1 where broadcasting takes longer than reading (1.00 GiB)",
        "reading at 1.00 GiB/s (assumed), broadcasting at 1.60 GiB/s (assumed)",
    ):
        assert text in verdict.reason
    assert "\n" not in verdict.reason
    known = worth_sharing(work, Measured(0.9 * GIB, 0.8 * GIB), BATCH).reason
    assert "reading the same at 0.90 GiB/s, parts at 0.80 GiB/s, broadcasting" in known
    assert "page cache" not in known


def test_without_groups_the_reason_says_so() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    verdict = worth_sharing(
        GroupWork(nothing, nothing, nothing, nothing, nothing.astype(np.bool_), []), Measured(), BATCH
    )
    assert isinstance(verdict, Verdict) and len(verdict.shared) == 0
    assert verdict.reason == "nothing is wanted by more than one rank"


def test_several_communicators_show_their_range_of_rates() -> None:
    work = together(group(8, 8, 1), group(8, 8, 1, kind="nccl"))
    assert "broadcasting at 1.60 to 16.00 GiB/s" in worth_sharing(work, Measured(), BATCH).reason


HOSTS = st.integers(2, 64)
SIZES = st.floats(1e-4, 100)


RATES = st.floats(0.01, 20).map(lambda gib: gib * GIB)


@given(HOSTS, SIZES, st.integers(1, 1000), st.sampled_from(["gloo", "nccl"]), RATES, RATES)
def test_what_makes_sharing_cheaper_never_ends_it(
    hosts: int, gib: float, buffers: int, kind: str, same_rate: float, own_rate: float
) -> None:
    work, measured = group(hosts, hosts, gib, buffers=buffers, kind=kind), Measured(same_rate, own_rate)
    if is_shared(work):
        assert is_shared(replace(work, exists=np.array([True])))
        assert is_shared(replace(work, hosts=work.hosts + 1, members=work.members))
    if is_shared(work, measured):
        assert is_shared(replace(work, exists=np.array([True])), measured)
        assert is_shared(work, replace(measured, same_rate=same_rate / 2))
        assert is_shared(work, replace(measured, own_rate=2 * own_rate))
