"""Broadcasts between numpy ranks: what arrives, and that what would hang or go wrong on a real backend does so here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dcp_core.adapter import BroadcastGroup, Broadcasts, BroadcastWork
from dcp_core.coordination.directory import DirectoryChannel
from dcp_core.dtype import DTYPES
from dcp_core.errors import ArgumentError, CoordinationError, CoordinationTimeoutError
from dcp_core.testing.numpy_broadcasts import NumpyBroadcasts
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from dcp_core.testing.ranks import RankContext, run_ranks

pytestmark = pytest.mark.timeout(60)
SECONDS = 20.0
SOON = 10.0


def own_broadcasts(group: Sequence[int] | None = None) -> Broadcasts:
    found = NumpyRankAdapter().process_group(group).broadcasts
    assert found is not None
    return found


def pair_on(directory: Path, timeout_seconds: float = SECONDS, token: str = "t") -> list[BroadcastGroup]:
    """The group of ranks 0 and 1, seen by both, in this process."""
    channel = DirectoryChannel(directory)
    return [NumpyBroadcasts(channel, rank).open((0, 1), None, timeout_seconds, token=token) for rank in (0, 1)]


def error_of(work: BroadcastWork) -> CoordinationError:
    with pytest.raises(CoordinationError) as caught:
        work.wait()
    return caught.value


def layouts(seed: int) -> Iterator[tuple[npt.NDArray[Any], bool]]:
    """Arrays of raw bits, of all types and many layouts; whether each is plain bytes in memory."""
    random = np.random.default_rng(seed)
    for bits in sorted({dtype.bits for dtype in DTYPES}, key=str):
        most = 2 if bits.kind == "b" else 256

        def make(*shape: int, bits: np.dtype[Any] = bits, most: int = most) -> npt.NDArray[Any]:
            nbytes = bits.itemsize * int(np.prod(shape))
            return random.integers(0, most, nbytes, np.uint8).view(bits).reshape(shape)

        yield make(4, 3), True
        yield make(), True
        yield make(0, 3), True
        yield make(5, 3)[1:4], True
        yield make(4, 5)[:, 1:3], False
        yield make(4, 3).T, False
        yield make(6)[::2], False
        if bits.itemsize > 1 and bits.kind != "V":
            yield make(4).astype(bits.newbyteorder(">")), False


def bits_of(array: npt.NDArray[Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


# -- what arrives ----------------------------------------------------------------------------------------------------


def send_every_layout(context: RankContext) -> list[int]:
    group = own_broadcasts().open((0, 1), None, SECONDS, token="layouts")
    wrong = []
    pairs = zip(layouts(context.rank), layouts(1), strict=True)
    for number, ((view, is_plain), (sent, _)) in enumerate(pairs):
        wire = group.wire(view)
        if (wire is not None) != is_plain:
            wrong.append(number)
        if wire is None:
            wire = group.temporary(view.nbytes, view)
            if context.rank == 1:
                group.pack([view], wire)
        group.broadcast(wire, 1).wait()
        if not is_plain and context.rank == 0:
            group.unpack(wire, [view])
        if bits_of(view) != bits_of(sent):
            wrong.append(number)
    group.close()
    return wrong


def test_every_dtype_and_layout_arrives_bit_for_bit() -> None:
    assert run_ranks(send_every_layout, 2) == [[], []]


def test_a_batch_is_packed_in_order_and_unpacked(tmp_path: Path) -> None:
    group, _ = pair_on(tmp_path)
    whole = np.arange(12, dtype=np.int32).reshape(3, 4)
    sources = [whole[:, 1], whole[0], np.int32(7).reshape(())]
    wire = group.temporary(32, whole)
    group.pack(sources, wire)
    assert wire.view(np.int32).tolist() == [1, 5, 9, 0, 1, 2, 3, 7]
    targets = [np.zeros((6, 2), np.int32)[::2, 0], np.zeros(4, np.int32), np.zeros((), np.int32)]
    group.unpack(wire, targets)
    assert [target.tolist() for target in targets] == [[1, 5, 9], [0, 1, 2, 3], 7]
    with pytest.raises(CoordinationError, match="32 bytes of arrays do not fit a wire of 36 bytes"):
        group.pack(sources, np.zeros(36, np.uint8))


def exchange_in_many_groups(context: RankContext) -> int:
    groups = [(0, 1), (0, 1, 2), (1, 2, 3), (0, 3), (0, 1, 2, 3)]
    found = own_broadcasts()
    started: list[tuple[int, npt.NDArray[Any], BroadcastWork]] = []
    opened = {ranks: found.open(ranks, None, SECONDS, token="many") for ranks in groups if context.rank in ranks}
    for turn in range(2):
        for ranks, group in opened.items():
            for source in ranks:
                array = np.full(1000, 100 * turn + source if source == context.rank else -1)
                work = group.broadcast(group.wire(array), source)
                started.append((100 * turn + source, array, work))
    for expected, array, work in reversed(started):
        work.wait()
        assert (array == expected).all()
    for group in opened.values():
        group.close()
    return len(started)


def test_many_broadcasts_are_in_flight_in_several_groups_at_once() -> None:
    assert run_ranks(exchange_in_many_groups, 4) == [22, 24, 20, 18]


def exchange_in_a_part(context: RankContext) -> list[int]:
    if context.rank == 0:
        return []
    group = own_broadcasts((1, 2)).open((1, 2), None, SECONDS, token="part")
    array = np.array([context.rank])
    group.broadcast(group.wire(array), 2).wait()
    return [int(array[0])]


def test_sources_within_a_part_of_the_job_are_ranks_of_the_job() -> None:
    assert run_ranks(exchange_in_a_part, 3) == [[], [2], [2]]


def load_twice(context: RankContext) -> list[list[str]]:
    channel = NumpyRankAdapter().process_group().channel
    assert channel is not None
    left = []
    for token in ("first", "second"):
        group = own_broadcasts().open((0, 1), None, SECONDS, token=token)
        for source in (0, 1, 1):
            array = np.array([context.rank])
            group.broadcast(group.wire(array), source).wait()
            assert array == [source]
        group.close()
        channel.put(f"{token}-{context.rank}", b"")
        assert channel.wait(f"{token}-{1 - context.rank}", SECONDS) is not None
        left.append(sorted(name for name in os.listdir(context.channel_directory) if name.startswith("broadcast")))
        channel.put(f"{token}-seen-{context.rank}", b"")
        assert channel.wait(f"{token}-seen-{1 - context.rank}", SECONDS) is not None
    return left


def test_broadcasts_leave_nothing_on_the_board() -> None:
    assert run_ranks(load_twice, 2) == [[[], []], [[], []]]


# -- what does not arrive --------------------------------------------------------------------------------------------


def test_a_broadcast_is_done_on_the_source_only_when_all_have_taken_it(tmp_path: Path) -> None:
    source, target = pair_on(tmp_path)
    sent = source.broadcast(np.arange(4, dtype=np.uint8), 0)
    assert not sent.is_done()
    wire = np.zeros(4, np.uint8)
    got = target.broadcast(wire, 0)
    assert not sent.is_done()
    assert got.is_done() and wire.tolist() == [0, 1, 2, 3]
    assert sent.is_done()
    sent.wait()
    sent.wait()
    assert os.listdir(tmp_path) == []


def test_broadcasts_of_a_group_end_in_the_order_in_which_they_were_started(tmp_path: Path) -> None:
    first, second = pair_on(tmp_path)
    waiting = second.broadcast(np.zeros(1, np.uint8), 0)
    sent = second.broadcast(np.zeros(1, np.uint8), 1)
    late = first.broadcast(np.zeros(1, np.uint8), 0)
    assert first.broadcast(np.zeros(1, np.uint8), 1).is_done() is False
    assert not sent.is_done()
    assert waiting.is_done() and late.is_done()


@pytest.mark.parametrize(
    ("number", "nbytes", "expected"), [(0, 5, "(0, 0, 5) here and (0, 0, 4)"), (1, 4, "(0, 1, 4) here and (0, 0, 4)")]
)
def test_members_that_start_different_broadcasts_are_told(
    number: int, nbytes: int, expected: str, tmp_path: Path
) -> None:
    channel = DirectoryChannel(tmp_path)
    ranks = (0, 1, 2)
    first, last = (NumpyBroadcasts(channel, rank).open(ranks, None, SECONDS, token="t") for rank in (0, 2))
    first.broadcast(np.zeros(4, np.uint8), 0)
    work, later = (last.broadcast(np.zeros(nbytes, np.uint8), number) for _ in range(2))
    assert expected in str(error_of(work))
    assert later.is_done() and error_of(later)


@pytest.mark.parametrize(
    ("source", "expected"), [(0, "could not get from rank 0 3 bytes"), (1, "could not send to ranks [0] 3 bytes")]
)
def test_a_broadcast_that_does_not_come_names_its_source_in_time(source: int, expected: str, tmp_path: Path) -> None:
    _, second = pair_on(tmp_path, timeout_seconds=0.3)
    started = time.monotonic()
    works = [second.broadcast(np.zeros(3, np.uint8), source) for _ in range(2)]
    error = error_of(works[1])
    assert 0.25 < time.monotonic() - started < SOON
    assert isinstance(error, CoordinationTimeoutError)
    assert expected in str(error) and "within the group of ranks (0, 1)" in str(error)
    assert error_of(works[0]) is error
    later = second.broadcast(np.zeros(3, np.uint8), 0)
    assert later.is_done() and error_of(later) is error


def never_send(context: RankContext) -> str:
    group = own_broadcasts().open((0, 1, 2), None, 1.0, token="never")
    text = ""
    if context.rank != 1:
        text = str(error_of(group.broadcast(np.zeros(3, np.uint8), 1)))
    group.close()
    return text


def test_ranks_that_wait_for_one_which_never_sends_name_it() -> None:
    texts = run_ranks(never_send, 3)
    assert ["rank 1" in text for text in texts] == [True, False, True]


def test_a_group_with_broadcasts_under_way_can_be_closed(tmp_path: Path) -> None:
    _, second = pair_on(tmp_path)
    work = second.broadcast(np.zeros(3, np.uint8), 0)
    second.close()
    second.close()
    assert work.is_done() and "closed before" in str(error_of(work))


def test_a_member_that_gives_up_is_heard_by_the_others_at_once(tmp_path: Path) -> None:
    first, second = pair_on(tmp_path)
    received, sent = second.broadcast(np.zeros(3, np.uint8), 0), second.broadcast(np.zeros(3, np.uint8), 1)
    began = time.monotonic()
    first.fail(CoordinationError("it is out of paper"))
    for work in (received, sent):
        error = error_of(work)
        assert "rank 0 had failed before: it is out of paper" in str(error)
        assert not isinstance(error, CoordinationTimeoutError)
    assert time.monotonic() - began < SOON
    assert "out of paper" in str(error_of(first.broadcast(np.zeros(3, np.uint8), 0)))


def test_what_nobody_took_is_removed_by_the_next_load(tmp_path: Path) -> None:
    found = NumpyBroadcasts(DirectoryChannel(tmp_path), 0)
    group = found.open((0, 1), None, SECONDS, token="one")
    group.broadcast(np.zeros(3, np.uint8), 0)
    group.close()
    found.open((0, 2), None, SECONDS, token="one")
    assert len(os.listdir(tmp_path)) == 2  # the bytes, and that the group was given up
    found.open((0, 1), None, SECONDS, token="two")
    assert os.listdir(tmp_path) == []


# -- groups ----------------------------------------------------------------------------------------------------------


def test_given_groups_are_tuples_of_ranks_in_any_order(tmp_path: Path) -> None:
    found = NumpyBroadcasts(DirectoryChannel(tmp_path), 1)
    assert found.given_groups({(2, 1): (1, 2), (0, 2): (0, 2)}) == {(1, 2): (1, 2)}
    assert found.existing_groups([np.zeros(3)]) == {}
    assert [found.kind(device) for device in ("cpu", "cuda")] == ["channel", None]


@pytest.mark.parametrize("wrong", [{(0, 1): (0, 2)}, {(0, 1): "x"}, {(1, 1): (1, 1)}, {"ab": ("a", "b")}])
def test_wrong_given_groups_are_refused(wrong: Any, tmp_path: Path) -> None:
    found = NumpyBroadcasts(DirectoryChannel(tmp_path), 1)
    with pytest.raises(ArgumentError, match="broadcast_groups has"):
        found.given_groups(wrong)


def test_a_source_outside_the_group_is_refused(tmp_path: Path) -> None:
    _, second = pair_on(tmp_path)
    with pytest.raises(ArgumentError, match="rank 2 is not in the group"):
        second.broadcast(np.zeros(3, np.uint8), 2)


def test_outside_of_ranks_there_are_no_broadcasts() -> None:
    assert NumpyRankAdapter().process_group().broadcasts is None


def conforms(found: NumpyBroadcasts) -> tuple[Broadcasts, Callable[..., Any]]:
    return found, found.open
