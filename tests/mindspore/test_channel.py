"""How MindSpore ranks talk: which group a call is of, messages of any size, ranks and stores that are gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

import dcp_mindspore as dcp
from dcp_core.errors import ArgumentError, CoordinationError
from dcp_mindspore import channel
from dcp_mindspore.adapter import MindSporeAdapter
from dcp_mindspore.channel import StoreGroup, process_group, use_store
from tests.mindspore.ms_ranks import MindSporeRank, run_mindspore

pytestmark = pytest.mark.timeout(120)


def test_a_process_without_a_job_is_a_group_of_one() -> None:
    group = MindSporeAdapter().process_group()
    assert (group.rank, group.world_size, group.channel, group.remote) == (0, 1, None, None)
    with pytest.raises(ArgumentError, match="not initialised"):
        process_group("some_group")
    with pytest.raises(ArgumentError, match="StoreGroup"):
        process_group(3)
    with pytest.raises(ArgumentError, match="TCPStore"):
        StoreGroup("127.0.0.1:1", 0, 2)


def look_at_groups(rank: MindSporeRank) -> None:
    here = process_group()
    assert (here.rank, here.world_size, here.global_rank) == (rank.rank, rank.world_size, rank.rank)
    assert process_group() is here and process_group(with_channel=False).channel is None
    last = rank.world_size - 1
    if rank.rank in (0, last):
        pair = process_group(StoreGroup(rank.store, min(rank.rank, 1), 2, ranks=(0, last)))
        assert pair.global_rank == rank.rank and pair.key != here.key
    with pytest.raises(ArgumentError, match="counted from 0"):
        use_store(rank.store, rank.world_size, rank.world_size)


def test_a_group_is_made_once_and_knows_its_ranks() -> None:
    run_mindspore(look_at_groups, 3)


def pass_messages(rank: MindSporeRank) -> None:
    board: Any = process_group().channel
    large = bytes(range(256)) * (40_000)  # 10 MB
    for number, message in enumerate([b"", b"a\0b\xff", large]):
        name = f"message.{number}"
        if rank.rank == 0:
            board.put(name, message)
        assert board.wait(name, 20) == message
    assert board.wait("never", 0) is None
    began = time.monotonic()
    assert board.wait("never", 0.2) is None and time.monotonic() - began < 5
    rank.store.add("done", 1)
    while rank.store.add("done", 0) < rank.world_size:
        time.sleep(0.01)
    if rank.rank == 0:
        board.delete("message.2")
        assert board.wait("message.2", 0) is None
        board.delete("message.2")


def test_messages_of_any_bytes_and_size_arrive_whole() -> None:
    run_mindspore(pass_messages, 2)


def meet_in_two_lives(rank: MindSporeRank) -> list[str]:
    keys = []
    for _ in range(3):
        keys.append(process_group().key)
        channel._jobs.clear()
        use_store(rank.store, rank.rank, rank.world_size)
    return keys


def test_each_life_of_a_job_has_a_name_of_its_own_that_all_ranks_know() -> None:
    first, second = run_mindspore(meet_in_two_lives, 2)
    assert first == second and len(set(first)) == 3


def host_a_store(word: Any) -> None:
    store = channel.host_store("127.0.0.1")
    word.send(store.port)
    time.sleep(60)


def save_through_a_store_that_ends(rank: MindSporeRank) -> str:
    """Save through a store whose process is killed before."""
    from mindspore.mint.distributed import TCPStore

    here, there = multiprocessing.Pipe()
    host = multiprocessing.get_context("fork").Process(target=host_a_store, args=(there,), daemon=True)
    host.start()
    assert here.poll(30)
    group = StoreGroup(TCPStore("127.0.0.1", here.recv(), is_master=False), 0, 2)
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)
    host.join()
    try:
        dcp.save({"a": 1}, checkpoint_id="/nowhere", process_group=group, timeout_seconds=20)
    except CoordinationError as error:
        return str(error)
    return "no error"


def test_a_store_that_is_gone_is_an_error_that_names_it() -> None:
    (text,) = run_mindspore(save_through_a_store_that_ends, 1, start="alone")
    assert "the store at 127.0.0.1" in text


def join_from_another_process(rank: MindSporeRank) -> list[str]:
    group = process_group()
    assert group.remote is not None
    board: Any = group.remote.open()
    if rank.rank == 0:
        board.put("save1.hello", b"x" * 5_000_000)
    assert len(board.wait("save1.hello", 20)) == 5_000_000
    assert process_group().channel.wait("save1.hello", 0) is None  # type: ignore[union-attr]  # a world of its own
    board.drain(5)
    wrong = {**group.remote.arguments, "prefix": "another/job"}
    with pytest.raises(CoordinationError, match="no word"):
        type(group.remote)(group.remote.module, group.remote.function, wrong).open()
    nobody = {**group.remote.arguments, "port": 1}
    with pytest.raises(CoordinationError, match="nobody listens"):
        type(group.remote)(group.remote.module, group.remote.function, nobody).open()
    return [group.remote.module, group.remote.function]


def test_background_processes_meet_beside_the_job() -> None:
    assert run_mindspore(join_from_another_process, 2) == [["dcp_mindspore.remote_channel", "join_store"]] * 2
